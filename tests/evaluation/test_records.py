"""Evaluation folders: what is written is read back, and damage is named."""

import json
from dataclasses import replace

import pytest

from helpers.evaluations import evaluation, records
from mhar.errors import InputError
from mhar.evaluation.records import EVALUATION, file_name, load, markdown, model_revision, save


@pytest.fixture
def folder(tmp_path):
    save(evaluation("a", {"piqa": records([1, 0, 1]), "heldout:x/val": records([2.5], metric="loss")}), tmp_path)
    return tmp_path


def test_round_trip(tmp_path):
    before = evaluation("modèle", {"piqa": records([1, 0, 1]), "arc_easy": records([0.0] * 4, weights=[1, 2, 3, 4])})
    save(before, tmp_path)
    assert load(tmp_path) == before


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085", "\x1c", "\r", "\n"])
def test_texts_may_hold_any_line_separator(tmp_path, separator):
    [item] = records([1])
    before = evaluation("a", {"gsm8k": [replace(item, target=f"a{separator}b", answer=f"{separator}c")]})
    save(before, tmp_path)
    assert load(tmp_path) == before


def test_a_truncated_record_file_is_named_with_its_count(folder):
    path = folder / file_name("piqa")
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(InputError, match=r"records-piqa\.jsonl is truncated or was altered: 3 lines where 3 were"):
        load(folder)
    path.write_text(path.read_text().splitlines()[0] + "\n")
    with pytest.raises(InputError, match=r"1 lines where 3 were written"):
        load(folder)


def test_an_altered_score_is_found(folder):
    path = folder / file_name("piqa")
    path.write_text(path.read_text().replace('"acc": 0.0', '"acc": 1.0'))
    with pytest.raises(InputError, match="truncated or was altered"):
        load(folder)


def test_a_missing_record_file_is_named(folder):
    (folder / file_name("heldout:x/val")).unlink()
    with pytest.raises(InputError, match="records of task 'heldout:x/val' are missing"):
        load(folder)


def test_what_is_no_evaluation_is_refused(folder, tmp_path):
    with pytest.raises(InputError, match="no evaluation folder"):
        load(tmp_path / "nowhere")
    content = json.loads((folder / EVALUATION).read_text())
    (folder / EVALUATION).write_text(json.dumps({**content, "format_version": 99}))
    with pytest.raises(InputError, match="format 99; this version reads 1"):
        load(folder)
    (folder / EVALUATION).write_text(json.dumps(content)[:50])
    with pytest.raises(InputError, match=r"not valid JSON .* truncated"):
        load(folder)


def test_partial_runs_are_marked_in_the_table():
    table = markdown(
        [evaluation("a", {"piqa": records([1, 0])}, available=1838), evaluation("b", {"piqa": records([1])})]
    )
    first, second = table.splitlines()[2:]
    assert "PARTIAL: 2 of 1838" in first
    assert "PARTIAL" not in second
    assert "| yes |" in second


def test_a_model_revision_follows_its_weights_and_config(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "config.json").write_text("{}")
    first = model_revision(tmp_path)
    (tmp_path / "notes.txt").write_text("not part of the model")
    assert model_revision(tmp_path) == first
    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    assert model_revision(tmp_path) != first
