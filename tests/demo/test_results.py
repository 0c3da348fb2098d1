"""Paired differences and the table, on numbers that can be checked by hand."""

import math

import pytest

from mhar.demo.results import VariantResult, comparison_rows, format_difference, paired_difference, result_table


def result(name, losses, **fields):
    values = dict(num_parameters=1000, num_routing_parameters=0, step=20, tokens_per_s=200.0, peak_bytes=3 * 2**20)
    return VariantResult(name, window_losses=losses, **{**values, **fields})


BASELINE = result("baseline", {10: [4.0, 5.0, 6.0], 20: [3.0, 4.0, 5.0]})
MHAR = result(
    "mhar",
    {10: [3.9, 4.8, 5.7]},
    num_parameters=1064,
    num_routing_parameters=64,
    tokens_per_s=100.0,
    step=15,
    peak_bytes=6 * 2**20,
)


def test_the_difference_is_paired():
    difference = paired_difference([3.9, 4.8, 5.7], [4.0, 5.0, 6.0])
    assert difference.mean == pytest.approx(-0.2)
    assert difference.stderr == pytest.approx(0.1 / math.sqrt(3))  # changes -0.1, -0.2, -0.3
    assert difference.interval == pytest.approx((-0.2 - 0.196 / math.sqrt(3), -0.2 + 0.196 / math.sqrt(3)))


def test_one_window_has_no_spread():
    assert math.isnan(paired_difference([1.0], [2.0]).stderr)


def test_the_table_shows_losses_differences_speed_and_memory():
    lines = result_table([BASELINE, MHAR], [10, 20]).splitlines()
    assert [" ".join(line.split()) for line in lines if "---" not in line] == [
        "baseline mhar",
        "parameters 1,000 1,064 (+64)",
        "held-out loss, step 10 5.000 4.800 (-0.200 ±0.058)",
        "held-out loss, step 20 4.000 –",
        "tokens/s 200 100 (0.50x)",
        "peak memory, MiB 3.0 6.0 (2.00x)",
    ]
    assert len({len(line) for line in lines}) == 1


def test_a_run_stopped_before_the_first_evaluation_has_a_table():
    lines = result_table([result("baseline", {}, tokens_per_s=0.0, peak_bytes=None), result("mhar", {})], [10])
    assert [line.split()[-2:] for line in lines.splitlines()[3:]] == [["–", "–"], ["0", "200"], ["–", "3.0"]]


def test_the_comparison_is_at_one_step_for_all():
    (row,) = comparison_rows([BASELINE, MHAR], 10)
    assert (row["a"], row["b"], row["n"]) == ("baseline", "mhar", 3)
    assert row["difference"] == pytest.approx(-0.2)
    assert comparison_rows([BASELINE, MHAR], 20) == []
    assert format_difference(MHAR.difference(BASELINE, 20)) == ""
