"""`mhar probe` from a checkpoint to tables, maps, interventions and a report; and what it refuses."""

import csv
import json

import numpy as np
import pytest
import torch

from helpers.corpora import prepared_text
from helpers.tiny_lm import byte_tokenizer, save_checkpoint, tiny_llama, tiny_routed
from mhar.analysis import intervention
from mhar.analysis.probe import find_router
from mhar.analysis.probe_data import token_batches
from mhar.analysis.probe_result import COLUMNS
from mhar.cli import main
from mhar.errors import InputError
from mhar.routing.interventions import remove_head, uniform

TEXT = "It is a truth universally acknowledged, that a single man must be in want of a wife. " * 20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_checkpoint(tiny_routed("mhar", scale=1.0), tmp_path_factory.mktemp("model") / "routed")


@pytest.fixture(scope="module")
def novel(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "novel.txt"
    path.write_text(TEXT)
    return path


def probe(model, data, output, *options):
    shape = ["--context", "32", "--sequences", "8", "--batch-size", "2", "--device", "cpu"]
    return main(["probe", str(model), "--data", str(data), "--output", str(output), *shape, *options])


def test_the_command_writes_table_values_and_map(checkpoint, novel, tmp_path, capsys):
    assert probe(checkpoint, novel, tmp_path) == 0
    content = json.loads((tmp_path / "probe.json").read_text())
    assert content["settings"]["variant"] == "mhar"
    assert content["data"]["sequences"] == 8
    assert content["totals"]["num_tokens"] == 256
    assert content["model"]["revision"].startswith("sha256:")
    with (tmp_path / "probe.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    by_read = {}
    for row in rows:
        key = row["site"], row["head"]
        by_read[key] = by_read.get(key, 0.0) + float(row["weight"])
    assert list(by_read.values()) == pytest.approx([1.0] * len(by_read))
    assert len(json.loads((tmp_path / "routing.json").read_text())["sites"]) == 5
    out = capsys.readouterr().out
    assert "head disagreement" in out
    assert "split half correlation" in out
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "report.html")]) == 0


def test_a_folder_holds_one_probe(checkpoint, novel, tmp_path, capsys):
    assert probe(checkpoint, novel, tmp_path, "--intervene=uniform", "--table=first.csv") == 0
    before = (tmp_path / "probe.json").read_bytes()
    (tmp_path / "notes.txt").write_text("not the probe's")
    assert probe(checkpoint, novel, tmp_path) == 2
    assert "already holds probe.json, routing.json, interventions.json: choose --overwrite" in capsys.readouterr().err
    assert (tmp_path / "probe.json").read_bytes() == before
    assert probe(checkpoint, novel, tmp_path, "--overwrite", "--seed=1") == 0
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["notes.txt", "probe.csv", "probe.json", "routing.json"]


def test_a_probes_output_is_checked_before_the_model_is_loaded(novel, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert probe(tmp_path / "no-model", novel, tmp_path / "file" / "out") == 2
    assert f"cannot be made: {tmp_path / 'file'} is a file" in capsys.readouterr().err


def test_the_table_as_parquet(checkpoint, novel, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    assert probe(checkpoint, novel, tmp_path, "--table", "probe.parquet") == 0
    table = parquet.read_table(tmp_path / "probe.parquet")
    assert tuple(table.column_names) == COLUMNS
    assert set(table["site"].to_pylist()) >= {"layers.0.attn", "final"}


def test_prepared_data_and_text_give_the_same_kind_of_batches(tmp_path, novel):
    folder = prepared_text(tmp_path / "prepared", held_out=0.3)
    for data in (folder, novel):
        batches = list(token_batches(data, byte_tokenizer(), context=16, batch_size=4, num_sequences=10))
        assert [tuple(batch.shape) for batch in batches] == [(4, 16), (4, 16), (2, 16)]
    text = byte_tokenizer().decode(torch.cat([batch.flatten() for batch in batches]))
    assert TEXT.startswith(text)


def test_interventions_from_the_command_line(checkpoint, novel, tmp_path, capsys):
    options = [
        f"--intervene={text}" for text in ("uniform", "remove_source:embedding@final", "swap_heads:0,1", "freeze")
    ]
    assert probe(checkpoint, novel, tmp_path, *options) == 0
    rows = json.loads((tmp_path / "interventions.json").read_text())["rows"]
    assert [row["intervention"] for row in rows] == [
        "uniform",
        "remove_source:embedding@final",
        "swap_heads:0,1",
        "freeze",
    ]
    for row in rows:
        assert row["n"] == 8
        assert row["low"] <= row["loss_change"] <= row["high"]
        assert row["changed_loss"] - row["loss"] == pytest.approx(row["loss_change"], abs=1e-9)
    assert "| uniform |" in capsys.readouterr().out


def test_one_sequence_gives_an_effect_without_an_interval(checkpoint, novel, tmp_path, capsys):
    assert probe(checkpoint, novel, tmp_path, "--intervene=uniform", "--sequences=1") == 0
    [row] = json.loads((tmp_path / "interventions.json").read_text())["rows"]
    assert (row["low"], row["high"], row["p_value"], row["n"]) == (None, None, None, 1)
    assert "| – | 1 |" in capsys.readouterr().out
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "report.html")]) == 0
    assert "<td>–</td><td>1</td>" in (tmp_path / "report.html").read_text()


def test_effects_are_those_of_a_changed_model():
    model = tiny_routed("mhar", scale=1.0)
    batches = [torch.randint(1, 300, (3, 12)), torch.randint(1, 300, (2, 12))]
    before = intervention.sequence_losses(model, batches)
    [effect] = intervention.effects(model, batches, [uniform()])
    after = intervention.sequence_losses(model, batches)
    assert np.array_equal(before, after)
    with torch.no_grad():
        find_router(model).query.zero_()
    changed = intervention.sequence_losses(model, batches)
    assert effect.loss_change == pytest.approx((changed - before).mean(), rel=1e-3)
    assert effect.n == 5


def test_freezing_some_sites_is_freezing_them_alone():
    model = tiny_routed("mhar", scale=1.0)
    batches = [torch.randint(1, 300, (4, 12))]
    names = ["freeze", "freeze@final", "freeze@4", "freeze@0,layers.0.mlp,layers.1.attn,3,final"]
    assert intervention.parse_all(model, names) == names
    whole, final, by_index, every = intervention.effects(model, batches, names)
    assert final.intervention == "freeze@final"
    assert final.loss_change == by_index.loss_change != whole.loss_change == every.loss_change


def test_freezing_costs_nothing_where_routing_does_not_depend_on_the_input():
    model = tiny_routed("mhar", scale=0.0)
    [effect] = intervention.effects(model, [torch.randint(1, 300, (4, 12))], ["freeze"])
    assert effect.loss_change == pytest.approx(0.0, abs=1e-6)


def test_sequence_losses_are_the_models_own():
    model = tiny_routed("delta_mhar")
    batch = torch.randint(1, 300, (3, 12))
    with torch.no_grad():
        expected = model(input_ids=batch, labels=batch).loss
    assert intervention.sequence_losses(model, [batch]).mean() == pytest.approx(float(expected), rel=1e-5)


def test_a_loss_needs_sequences():
    with pytest.raises(InputError, match="no sequence"):
        intervention.effects(tiny_routed("mhar"), [], [remove_head(0)])


@pytest.mark.parametrize(
    "options, message",
    [
        (["--intervene=uniform@layers.7.mlp"], "no routed site 'layers.7.mlp'"),
        (["--intervene=remove_source:block.3"], "no source 'block.3'"),
        (["--intervene=remove_head:2"], "an index below 2, got 2"),
        (["--intervene=freeze@layers.7.mlp"], "no routed site 'layers.7.mlp'"),
        (["--intervene=freeze@9"], "no routed site 9"),
        (["--intervene=one_hot:layers.1.mlp@layers.0.mlp"], "layers.0.mlp does not see the source 'layers.1.mlp'"),
        (["--intervene=unifrom"], "did you mean 'uniform'"),
        (["--context=4096"], "must fill one window of 4096 tokens"),
        (["--context=1"], "context must be at least 2 tokens, the last of which is predicted, got 1"),
        (["--slices=3"], "--slices cuts the query of a single routing head, this model has 2 heads"),
        (["--seed=-1"], "seed must not be negative, got -1"),
        (["--table=sub/probe.csv"], "must be .csv or .parquet, got sub/probe.csv"),
        (["--sequences=0"], "num_sequences must be a positive integer, got 0"),
        (["--table=probe.xlsx"], "must be .csv or .parquet, got probe.xlsx"),
        (["--device=cuda:77"], "device 'cuda:77' cannot be used"),
    ],
)
def test_bad_options(checkpoint, novel, tmp_path, options, message, capsys):
    assert probe(checkpoint, novel, tmp_path, *options) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "probe.json").exists()


@pytest.mark.parametrize(
    "model, message", [(tiny_llama, "LlamaForCausalLM has 0"), ("baseline", "variant is 'baseline'")]
)
def test_models_without_routing(model, message, novel, tmp_path, capsys):
    folder = save_checkpoint(model() if callable(model) else tiny_routed(model), tmp_path / "model")
    assert probe(folder, novel, tmp_path / "out") == 2
    assert message in capsys.readouterr().err


def test_data_that_cannot_be_probed(checkpoint, tmp_path, capsys):
    (tmp_path / "empty.txt").write_text("")
    assert probe(checkpoint, tmp_path / "empty.txt", tmp_path / "out") == 2
    assert "must fill one window of 32 tokens, it has 0" in capsys.readouterr().err
    assert probe(checkpoint, tmp_path / "nowhere.txt", tmp_path / "out") == 2
    assert "nowhere.txt" in capsys.readouterr().err
    bare = save_checkpoint(tiny_routed("mhar"), tmp_path / "bare", tokenizer=False)
    (tmp_path / "some.txt").write_text(TEXT)
    assert probe(bare, tmp_path / "some.txt", tmp_path / "out") == 2
    assert "has no tokenizer: give a prepared folder" in capsys.readouterr().err
