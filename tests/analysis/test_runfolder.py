"""Run folders: discovery, groups of seeds, curves, and files that a run has not finished writing."""

import json

import pytest

from helpers.runs import write_experiment, write_run
from mhar.analysis.curves import HELDOUT_KEYS, gate_series, grouped_series, thin
from mhar.analysis.runfolder import curve, discover, find_key, read_json_lines
from mhar.errors import InputError


def test_runs_are_found_below_a_folder_in_order(tmp_path):
    write_experiment(tmp_path)
    (tmp_path / "multi" / "checkpoint-50").mkdir()
    (tmp_path / "multi" / "checkpoint-50" / "summary.json").write_text("{}")
    assert [run.name for run in discover([tmp_path])] == ["baseline", "multi", "single"]
    assert [run.variant for run in discover([tmp_path])] == ["baseline", "mhar", "attention_residuals"]


def test_equal_names_gain_their_parents(tmp_path):
    for group in ("a", "b"):
        write_run(tmp_path / group / "mhar")
    assert [run.name for run in discover([tmp_path / "a", tmp_path / "b"])] == ["a/mhar", "b/mhar"]
    assert len(discover([tmp_path, tmp_path / "a"])) == 2


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(InputError, match=r"no run folder .*nowhere"):
        discover([tmp_path / "nowhere"])
    with pytest.raises(InputError, match=r"holds none of run\.yaml, metrics\.jsonl"):
        discover([tmp_path])


def test_a_line_that_is_still_being_written_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    assert read_json_lines(path) == [{"step": 1, "loss": 2.0}]
    path.write_text('{"step": 1}\n{"step": 2, "lo\n{"step": 3}\n')
    with pytest.raises(InputError, match=r"metrics\.jsonl:2 is not valid JSON"):
        read_json_lines(path)
    path.write_text("[1]\n")
    with pytest.raises(InputError, match=r"metrics\.jsonl:1 must hold a JSON object"):
        read_json_lines(path)


def test_a_truncated_summary_is_named(tmp_path):
    write_run(tmp_path / "run")
    (tmp_path / "run" / "summary.json").write_text('{"name": "ru')
    with pytest.raises(InputError, match=r"summary\.json is not valid JSON .* truncated"):
        discover([tmp_path])


def test_a_curve_keeps_the_last_value_of_a_step_and_drops_what_is_no_number():
    lines = [{"step": 2, "loss": 1.0}, {"step": 1, "loss": 3}, {"step": 2, "loss": 0.5}, {"step": 3, "loss": None}]
    lines += [{"step": 4, "loss": float("nan")}, {"loss": 9.0}, {"step": 5, "other": 1.0}]
    assert curve(lines, "loss") == ([1, 2], [3.0, 0.5])


def test_seeds_of_one_variant_become_a_mean_with_their_range(tmp_path):
    for seed, offset in ((0, 0.0), (1, 0.3)):
        write_run(tmp_path / f"mhar-{seed}", seed=seed, offset=offset)
    write_run(tmp_path / "other", variant="baseline")
    first, second = grouped_series(discover([tmp_path]), HELDOUT_KEYS)
    assert first.name == "mhar (2 seeds)"
    assert first.y[-1] - first.low[-1] == pytest.approx(0.15)
    assert first.high[-1] - first.y[-1] == pytest.approx(0.15)
    assert (second.name, second.low) == ("other", ())


def test_runs_that_share_a_seed_are_not_averaged(tmp_path):
    for name in ("slow", "fast"):
        write_run(tmp_path / name, seed=3)
    assert [series.name for series in grouped_series(discover([tmp_path]), HELDOUT_KEYS)] == ["fast", "slow"]


def test_gates_over_training(tmp_path):
    [run] = discover([write_run(tmp_path / "run", gates=True)])
    series = {curve.name: curve for curve in gate_series(run)}
    assert series["layers.0.mlp"].y[-1] == 0.5
    assert series["layers.1.attn"].y[-1] == -0.25


def test_thinning_averages_consecutive_points():
    x, y = thin(list(range(10)), [float(i) for i in range(10)], limit=5)
    assert (x, y) == ([1, 3, 5, 7, 9], [0.5, 2.5, 4.5, 6.5, 8.5])
    assert thin([1, 2], [3.0, 4.0], limit=5) == ([1, 2], [3.0, 4.0])


def test_find_key():
    assert find_key("a:\n  variant: 'mhar'\nvariant: other\n", "variant") == "mhar"
    assert find_key(json.dumps({}), "variant") is None
