"""A run's folder, its reproducibility, and how it continues."""

import json
import math
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mhar.demo.checkpoints import newest_checkpoint
from mhar.demo.data import load_data
from mhar.demo.interrupt import StopRequest
from mhar.demo.metrics import read_metrics
from mhar.demo.outputs import write_outputs
from mhar.demo.session import make_trainers, run_demo, train_in_rounds
from mhar.demo.settings import VARIANTS
from mhar.errors import MharError

ROUTED = ("attention_residuals", "mhar")


def metrics_of(run, variant):
    return read_metrics(run.folder / variant / "metrics.jsonl")


def losses_of(run):
    """Every training and held-out loss of a run, exactly."""
    return {
        variant: [(line["kind"], line["step"], line.get("loss"), line.get("window_losses")) for line in lines]
        for variant in VARIANTS
        if (lines := metrics_of(run, variant))
    }


@pytest.mark.parametrize("variant", VARIANTS)
def test_metrics_hold_every_step_and_evaluation(finished, variant):
    lines = metrics_of(finished, variant)
    assert [line["step"] for line in lines if line["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
    evaluations = [line for line in lines if line["kind"] == "eval"]
    assert [line["step"] for line in evaluations] == [3, 6]
    assert all(line["tokens"] == line["step"] * finished.settings.tokens_per_step for line in lines)
    assert all(
        line["heldout_loss"] == pytest.approx(torch.tensor(line["window_losses"]).mean()) for line in evaluations
    )


def test_training_lowers_the_held_out_loss(finished):
    for variant in VARIANTS:
        first, last = (line["heldout_loss"] for line in metrics_of(finished, variant) if line["kind"] == "eval")
        assert last < first < math.log(finished.settings.vocab_size) + 0.1


@pytest.mark.parametrize("variant", VARIANTS)
def test_checkpoints_load_and_give_the_recorded_loss(finished, variant):
    checkpoint = newest_checkpoint(finished.folder / variant)
    assert checkpoint is not None
    assert checkpoint.name == "checkpoint-6"
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    data = load_data(finished.settings, finished.folder)
    assert AutoTokenizer.from_pretrained(checkpoint).get_vocab() == data.tokenizer.get_vocab()
    with torch.no_grad():
        loss = model(input_ids=data.held_out, labels=data.held_out).loss.item()
    assert loss == pytest.approx(metrics_of(finished, variant)[-1]["heldout_loss"], abs=1e-5)


def test_summaries_agree_with_the_metrics(finished):
    for variant in VARIANTS:
        summary = json.loads((finished.folder / variant / "summary.json").read_text())
        assert summary["variant"] == variant
        assert summary["steps"] == 6
        assert summary["heldout_loss"] == pytest.approx(metrics_of(finished, variant)[-1]["heldout_loss"])
        assert summary["peak_memory_mib"] > 0.5
        assert ("difference_to_baseline" in summary) == (variant in ROUTED)


def test_routing_weights_are_written_by_site_source_and_head(finished):
    assert not (finished.folder / "baseline" / "routing.json").exists()
    for variant in ROUTED:
        sites = json.loads((finished.folder / variant / "routing.json").read_text())["sites"]
        weights = torch.tensor(sites[-1]["weights"])
        assert sites[-1]["name"] == "final"
        assert len(sites) == 2 * finished.settings.num_layers + 1
        assert weights.shape == (5, 1 if variant == "attention_residuals" else finished.settings.num_kv_heads)
        assert torch.allclose(weights.sum(dim=0), torch.ones(weights.shape[1]))
        assert (weights - 0.2).abs().max() > 1e-6  # training moved the queries off zero


def test_the_report_is_one_file_with_every_variant(finished):
    page = (finished.folder / "report.html").read_text()
    assert all(variant in page for variant in VARIANTS)
    assert "http://" not in page
    assert "https://" not in page


def test_table_and_samples_are_printed_and_kept(finished):
    assert (finished.folder / "table.txt").read_text() == finished.outcome.table + "\n"
    for variant in VARIANTS:
        sample = finished.outcome.samples[variant]
        assert sample.startswith(finished.settings.prompt)
        assert len(sample) > len(finished.settings.prompt)
        assert (finished.folder / variant / "sample.txt").read_text() == sample + "\n"


def test_the_same_seed_gives_identical_losses(finished, tiny_run, tmp_path):
    assert losses_of(tiny_run(tmp_path / "again")) == losses_of(finished)


def test_another_seed_gives_other_losses(finished, tiny_run, tmp_path):
    other = losses_of(tiny_run(tmp_path / "other", seed=1))
    assert all(other[variant][0] != losses_of(finished)[variant][0] for variant in VARIANTS)


def test_all_variants_train_on_the_same_tokens(finished, tmp_path, monkeypatch):
    data = load_data(finished.settings, tmp_path)
    seen: dict[str, list[torch.Tensor]] = {}
    for trainer in make_trainers(finished.settings, data, tmp_path):
        batches = seen.setdefault(trainer.name, [])
        trainer.model.register_forward_pre_hook(
            lambda module, args, kwargs, batches=batches: batches.append(kwargs["input_ids"]), with_kwargs=True
        )
        for _ in range(3):
            trainer.train_step()
    assert torch.equal(torch.stack(seen["mhar"]), torch.stack(seen["baseline"]))
    assert torch.equal(torch.stack(seen["attention_residuals"]), torch.stack(seen["baseline"]))


def stopped_run(finished, folder, num_steps):
    """A run of the same settings that is asked to stop once `num_steps` steps were made in all."""
    shutil.copytree(finished.folder, folder, ignore=lambda directory, names: [n for n in names if n in VARIANTS])
    data = load_data(finished.settings, folder)
    trainers = make_trainers(finished.settings, data, folder)
    stop = StopRequest()
    for trainer in trainers:
        make_step = trainer.train_step

        def train_step(make_step=make_step):
            loss = make_step()
            stop.requested = sum(trainer.step for trainer in trainers) >= num_steps
            return loss

        trainer.train_step = train_step
    train_in_rounds(trainers, finished.settings, stop, lambda line: None)
    return write_outputs(trainers, finished.settings, data.bytes_per_token, folder)


@pytest.mark.parametrize("num_steps", [1, 5, 9, 14], ids=["first-step", "mid-round", "end-of-round", "second-round"])
def test_a_stopped_run_is_usable_and_resumes_exactly(finished, tmp_path, num_steps):
    folder = tmp_path / "stopped"
    outcome = stopped_run(finished, folder, num_steps)
    assert not outcome.finished
    assert (folder / "report.html").exists()
    assert all(newest_checkpoint(folder / variant) for variant in VARIANTS)
    resumed = run_demo(finished.settings, folder, say=lambda line: None)
    assert resumed.finished
    assert resumed.samples == finished.outcome.samples
    assert losses_of(finished._replace(folder=folder)) == losses_of(finished)


def test_resuming_a_finished_run_changes_no_loss(finished, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(finished.folder, folder)
    assert run_demo(finished.settings, folder, say=lambda line: None).finished
    assert losses_of(finished._replace(folder=folder)) == losses_of(finished)


def test_lines_after_the_checkpoint_are_dropped_on_resume(finished, tmp_path):
    """A kill between checkpoints leaves metrics that training will write again, perhaps half a line."""
    folder = tmp_path / "killed"
    stopped_run(finished, folder, 9)
    with (folder / "mhar" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 4, "loss": 99.0}\n{"kind": "tra')
    run_demo(finished.settings, folder, say=lambda line: None)
    assert losses_of(finished._replace(folder=folder)) == losses_of(finished)


def test_a_damaged_checkpoint_is_an_error_that_names_it(finished, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(finished.folder, folder)
    (folder / "mhar" / "checkpoint-6" / "model.safetensors").unlink()
    with pytest.raises(MharError, match="checkpoint-6"):
        run_demo(finished.settings, folder, say=lambda line: None)
