"""`mhar compare`: joins, tests and refusals."""

import io
import json
from dataclasses import replace

import pytest

from helpers.evaluations import evaluation, records
from mhar.cli import main
from mhar.commands.compare import main as compare_command
from mhar.errors import InputError
from mhar.evaluation.compare import compare, markdown
from mhar.evaluation.records import file_name, save


def discordant(only_first, only_second, both=40, neither=30):
    """Scores of two models with the given counts."""
    first = [1] * only_first + [0] * only_second + [1] * both + [0] * neither
    second = [0] * only_first + [1] * only_second + [1] * both + [0] * neither
    return first, second


def test_the_papers_counts_through_the_whole_comparison():
    gsm, gpqa = discordant(81, 123), discordant(13, 27)
    first, second = (
        evaluation(
            name,
            {
                "gsm8k": records(gsm[i], metric="exact_match,strict-match"),
                "gpqa_main_zeroshot": records(gpqa[i], metric="acc_norm"),
            },
        )
        for i, name in enumerate(("control", "converted"))
    )
    rows = {row.task: row for row in compare([first, second]).rows}
    assert (rows["gsm8k"].only_a, rows["gsm8k"].only_b) == (81, 123)
    assert round(rows["gsm8k"].p_value, 3) == 0.004
    assert round(rows["gpqa_main_zeroshot"].p_value, 3) == 0.038
    assert rows["gsm8k"].p_holm == pytest.approx(2 * rows["gsm8k"].p_value)
    assert rows["gpqa_main_zeroshot"].p_holm == pytest.approx(rows["gpqa_main_zeroshot"].p_value)
    assert rows["gsm8k"].difference == pytest.approx(42 / 274)


def test_items_are_joined_by_hash_not_by_position():
    items = records([1, 0, 1, 1])
    other = records([1, 1, 0, 1])
    first, second = evaluation("a", {"piqa": items}), evaluation("b", {"piqa": other[::-1]})
    row = compare([first, second]).rows[0]
    assert (row.only_a, row.only_b, row.n) == (1, 1, 4)


def test_equal_documents_are_joined_in_order():
    items = records([1, 0], document="the same", prompt="the same")
    other = records([1, 1], document="the same", prompt="the same")
    row = compare([evaluation("a", {"piqa": items}), evaluation("b", {"piqa": other})]).rows[0]
    assert (row.only_a, row.only_b, row.n) == (0, 1, 2)


def test_likelihoods_are_compared_per_unit_by_bootstrap():
    weights = [10, 30]
    first = evaluation("a", {"wikitext": records([3.0, 2.0], metric="word_perplexity", weights=weights)})
    second = evaluation("b", {"wikitext": records([2.0, 2.0], metric="word_perplexity", weights=weights)})
    row = compare([first, second]).rows[0]
    assert row.difference == pytest.approx(-0.25)
    assert "bootstrap" in row.test
    assert row.only_a is None
    assert not row.higher_is_better


def test_a_single_item_is_listed_but_not_tested_and_few_are_marked():
    scores = {"wikitext": [3.0], "heldout:x/val": [3.0, 2.0, 1.0]}
    first, second = (
        evaluation(
            name,
            {
                task: records([s + change * i for i, s in enumerate(values, 1)], metric="word_perplexity")
                for task, values in scores.items()
            },
        )
        for name, change in (("a", 0.0), ("b", 0.5))
    )
    comparison = compare([first, second])
    single, few = comparison.rows
    assert (single.low, single.high, single.p_value, single.p_holm) == (None,) * 4
    assert few.p_value == few.p_holm == 2 / 8  # the untested row does not count in Holm's correction
    table = markdown(comparison)
    assert "| +0.5000 | – | – | – | – | 1 |" in table
    assert "]* | – | 0.25 | 0.25 | 3 |" in table
    assert "fewer than 30 items" in table
    json.dumps(comparison.to_dict(), allow_nan=False)


def test_every_model_is_compared_with_the_first_and_holm_covers_all_rows():
    a = evaluation("a", {"piqa": records([0] * 20)})
    b = evaluation("b", {"piqa": records([1] * 8 + [0] * 12)})
    c = evaluation("c", {"piqa": records([1] * 6 + [0] * 14)})
    rows = compare([a, b, c]).rows
    assert [(row.a, row.b) for row in rows] == [("a", "b"), ("a", "c")]
    assert rows[0].p_holm == pytest.approx(2 * rows[0].p_value)


def test_only_the_primary_metric_is_tested_unless_asked():
    items = [
        type(r)(**{**{k: getattr(r, k) for k in r.__slots__}, "scores": {"acc": 1.0, "acc_norm": 0.0}})
        for r in records([1, 1, 1])
    ]
    pair = [evaluation(name, {"hellaswag": items}) for name in "ab"]
    assert [row.metric for row in compare(pair).rows] == ["acc_norm"]
    assert [row.metric for row in compare(pair, all_metrics=True).rows] == ["acc", "acc_norm"]


@pytest.mark.parametrize(
    "second, message",
    [
        pytest.param({"tasks": {"piqa": records([1, 1])}}, "different items: 1 only for a, 0 only for b", id="fewer"),
        pytest.param(
            {"tasks": {"piqa": records([1, 1, 1], document="other {}")}},
            "3 only for a, 3 only for b, 0 for both",
            id="other-items",
        ),
        pytest.param(
            {"tasks": {"piqa": records([1, 1, 1], prompt="other {}")}}, "3 of 3 items have different", id="prompts"
        ),
        pytest.param(
            {"tasks": {"piqa": records([1, 1, 1])}, "harness": "0.4.9"}, "lm_eval 0.4.13 for a, 0.4.9", id="harness"
        ),
        pytest.param({"tasks": {"piqa": records([1, 1, 1])}, "num_fewshot": 5}, "0 for a, 5 for b", id="shots"),
        pytest.param({"tasks": {"arc_easy": records([1])}}, "no task in common", id="tasks"),
    ],
)
def test_what_is_not_comparable_is_refused(second, message):
    first = evaluation("a", {"piqa": records([1, 0, 1])})
    with pytest.raises(InputError, match=message):
        compare([first, evaluation("b", **second)])


def test_dtypes_are_shown_where_they_differ_and_equal_names_are_numbered():
    def named(*models):
        evaluations = [
            replace(evaluation(name, {"piqa": records([1, 0])}), model={"dtype": dtype}) for name, dtype in models
        ]
        row = compare(evaluations).rows[0]
        return row.a, row.b

    assert named(("m", "float32"), ("m", "bfloat16")) == ("m (float32)", "m (bfloat16)")
    assert named(("a", "float32"), ("b", "bfloat16")) == ("a (float32)", "b (bfloat16)")
    assert named(("m", "float32"), ("m", "float32")) == ("m (1)", "m (2)")
    assert named(("a", "float32"), ("b", "float32")) == ("a", "b")


def test_one_evaluation_is_no_comparison():
    with pytest.raises(InputError, match="at least two evaluations, got 1"):
        compare([evaluation("a", {"piqa": records([1])})])


def test_tasks_that_one_model_lacks_are_listed_and_partial_runs_marked():
    first = evaluation("a", {"piqa": records([1, 0]), "arc_easy": records([1])}, available=1838)
    second = evaluation("b", {"piqa": records([1, 1])}, available=1838)
    table = markdown(compare([first, second]))
    assert "Not compared: arc_easy (missing for b)." in table
    assert "2 (PARTIAL: 2 of 1838)" in table


def test_the_command_prints_and_stores_the_comparison(tmp_path, capsys):
    for name, scores in (("a", [1, 0, 0, 0]), ("b", [1, 1, 1, 0])):
        save(evaluation(name, {"piqa": records(scores)}), tmp_path / name)
    code = main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--output", str(tmp_path / "out")])
    assert code == 0
    assert "| piqa | acc | b − a | +0.5000" in capsys.readouterr().out
    stored = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert stored["rows"][0]["only_b"] == 2


def test_a_reader_that_stops_early_costs_no_file(tmp_path, monkeypatch):
    class ClosedPipe(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    for name in "ab":
        save(evaluation(name, {"piqa": records([1, 0])}), tmp_path / name)
    monkeypatch.setattr("sys.stdout", ClosedPipe())
    with pytest.raises(BrokenPipeError):
        compare_command([str(tmp_path / "a"), str(tmp_path / "b"), "--output", str(tmp_path / "out")])
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"comparison.json", "comparison.md"}


def test_the_command_refuses_a_truncated_record_file(tmp_path, capsys):
    for name in "ab":
        save(evaluation(name, {"piqa": records([1, 0])}), tmp_path / name)
    path = tmp_path / "b" / file_name("piqa")
    path.write_bytes(path.read_bytes()[:20])
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert "truncated" in capsys.readouterr().err
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "a"), "--confidence", "95"]) == 2
    assert "between 0 and 1, got 95" in capsys.readouterr().err
