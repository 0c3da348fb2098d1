"""The recipe as a whole, in one process on the CPU: what it computes, writes, continues and refuses."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from helpers.corpora import prepared_counting, prepared_text, save_tokenizer
from helpers.training_runs import SHAPE, numbers, tiny_config, weights_digest
from mhar.cli import main
from mhar.data.loader import TrainingSamples
from mhar.data.packing import PackedWindows
from mhar.data.shards import PreparedSplit
from mhar.errors import CheckpointError, ConfigurationError, InputError
from mhar.training.checkpoint import Checkpoints, steps_in
from mhar.training.config import ModelSection, RunConfig
from mhar.training.model import build_model
from mhar.training.recipe import DivergenceError, Run, train
from mhar.training.validation import Validation


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared_text(tmp_path_factory.mktemp("recipe") / "data")


def losses(config: RunConfig, kind: str = "train", key: str = "loss") -> list[float]:
    return [line[key] for line in numbers(config.out, kind)]


def test_a_run_leaves_what_others_read(data: Path, tmp_path: Path, capsys: Any) -> None:
    config = tiny_config(data, tmp_path / "run", ema=0.5, steps=40)
    summary = train(config)
    assert summary == json.loads((config.out / "summary.json").read_text())
    assert (summary["variant"], summary["seed"], summary["steps"], summary["stopped"]) == ("mhar", 0, 40, "finished")
    assert summary["tokens"] == 40 * 4 * 24
    assert summary["routing_parameters"] == 2 * 5 * 16
    assert summary["peak_memory_gib"] > 0
    heldout = losses(config, "eval", "heldout_loss")
    assert summary["heldout_loss"] == pytest.approx(np.mean(heldout[-11:]))
    assert heldout[-1] < heldout[0] - 0.15
    for folder in ("final", "final_ema"):
        model = AutoModelForCausalLM.from_pretrained(config.out / folder)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert (config.out / folder / "tokenizer.json").is_file()
    assert weights_digest(config.out) != weights_digest(config.out, "final_ema")
    assert steps_in(config.out / "checkpoints") == [39, 40]
    before = {name: (config.out / name).read_bytes() for name in ("summary.json", "metrics.jsonl", "run.yaml")}
    assert main(["train", str(config.out / "run.yaml")]) == 0  # already finished: nothing changes
    assert "finished before" in capsys.readouterr().out
    assert {name: (config.out / name).read_bytes() for name in before} == before


def test_the_exported_model_has_the_reported_held_out_loss(data: Path, tmp_path: Path) -> None:
    config = tiny_config(data, tmp_path / "run", ema=0.5, eval={"max_tokens": None})
    train(config)
    windows = PackedWindows(PreparedSplit(data, "val"), 24)
    for folder, key in (("final", "heldout_loss"), ("final_ema", "ema_heldout_loss")):
        model = AutoModelForCausalLM.from_pretrained(config.out / folder).eval()
        total, count = 0.0, 0
        for index in range(len(windows)):
            labels = torch.from_numpy(windows[index]["labels"])
            with torch.no_grad():
                logits = model(torch.from_numpy(windows[index]["input_ids"])[None]).logits[0, :-1].double()
            kept = labels[1:] >= 0
            total -= float(logits.log_softmax(-1)[kept].gather(1, labels[1:][kept, None]).sum())
            count += int(kept.sum())
        assert count == len(windows.data) - 1
        assert losses(config, "eval", key)[-1] == pytest.approx(total / count, rel=1e-6)


@pytest.mark.parametrize("variant", ["stock", "baseline", "attention_residuals", "delta_mhar"])
def test_any_variant_and_any_causal_model_trains(data: Path, tmp_path: Path, variant: str) -> None:
    config = tiny_config(data, tmp_path / variant, steps=30, model={"variant": variant})
    assert train(config)["variant"] == variant
    assert losses(config)[-1] < losses(config)[0] - 0.05


def test_the_baseline_is_the_stock_model(data: Path, tmp_path: Path) -> None:
    runs = [tiny_config(data, tmp_path / name, model={"variant": name}) for name in ("stock", "baseline")]
    for config in runs:
        train(config)
    assert losses(runs[0]) == pytest.approx(losses(runs[1]), rel=1e-5)


def test_accumulation_and_chunked_loss_change_nothing(data: Path, tmp_path: Path) -> None:
    configs = [
        tiny_config(data, tmp_path / f"{micro}-{chunk}", micro_batch_size=micro, model={"loss_chunk_size": chunk})
        for micro, chunk in ((4, None), (1, None), (2, 7))
    ]
    for config in configs:
        train(config)
    for config in configs[1:]:
        assert losses(config) == pytest.approx(losses(configs[0]), rel=1e-5)
        assert losses(config, "train", "grad_norm") == pytest.approx(losses(configs[0], "train", "grad_norm"), rel=1e-4)


def test_z_loss_is_reported_apart_and_excluded(data: Path, tmp_path: Path) -> None:
    plain, with_z = (tiny_config(data, tmp_path / f"z{z}", steps=3, model={"z_loss": z}) for z in (0.0, 0.5))
    train(plain)
    train(with_z)
    assert losses(with_z)[0] == pytest.approx(losses(plain)[0], rel=1e-6)
    assert losses(with_z, "eval", "heldout_loss")[0] == losses(plain, "eval", "heldout_loss")[0]
    assert losses(with_z, "train", "z_loss")[0] > 1.0
    assert losses(plain, "train", "z_loss") == [0.0, 0.0, 0.0]
    assert losses(with_z)[1:] != losses(plain)[1:]


def test_what_only_costs_time_or_memory_changes_no_number(data: Path, tmp_path: Path) -> None:
    plain = tiny_config(data, tmp_path / "plain", steps=4)
    train(plain)
    for name, sections in {
        "checkpointing": {"model": {"activation_checkpointing": True}},
        "deterministic": {"parallel": {"deterministic": True}},
        "workers": {"data": {"workers": 2}},
        "synchronous": {"checkpoint": {"asynchronous": False}},
    }.items():
        config = tiny_config(data, tmp_path / name, steps=4, **sections)
        train(config)
        assert losses(config) == losses(plain)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.slow
@pytest.mark.parametrize("scope, variant", [("sublayer", "mhar"), ("sublayer", "stock"), ("model", "mhar")])
def test_compiled_training_agrees(data: Path, tmp_path: Path, scope: str, variant: str) -> None:
    model = {"variant": variant}
    plain = tiny_config(data, tmp_path / "plain", steps=4, model=model)
    compiled = tiny_config(data, tmp_path / "compiled", steps=4, model=model, parallel={"compile": scope})
    train(plain)
    train(compiled)
    assert losses(compiled) == pytest.approx(losses(plain), rel=1e-4)


def test_bfloat16_compute_keeps_float32_state(data: Path, tmp_path: Path) -> None:
    config = tiny_config(data, tmp_path / "bf16", ema=0.9, steps=8, parallel={"dtype": "bfloat16"})
    with started(config) as run:
        run.train()
        for parameter in run.model.parameters():
            assert parameter.dtype == torch.float32
            assert all(v.dtype == torch.float32 for v in run.optimizer.state[parameter].values())
        assert run.average is not None
        assert all(average.dtype == torch.float32 for average in run.average.averages.values())
        gains = run.inner.model.norm.weight
    assert not torch.equal(gains, torch.ones_like(gains))  # in bfloat16 they would still be 1
    reference = tiny_config(data, tmp_path / "fp32", steps=8)
    train(reference)
    assert losses(config) == pytest.approx(losses(reference), rel=1e-2)
    assert losses(config) != losses(reference)


class started:  # noqa: N801 (a context manager)
    """A `Run` in a world of one process, so that a test can look inside."""

    def __init__(self, config: RunConfig) -> None:
        from mhar.training.distributed import start_world

        self.config, self.world = config, start_world(config.parallel)

    def __enter__(self) -> Run:
        self.config.out.mkdir(parents=True, exist_ok=True)
        return Run(self.config, self.world.__enter__(), 0.0)

    def __exit__(self, *exception: Any) -> None:
        self.world.__exit__(None, None, None)


def test_transformers_trainer_trains_the_same_thing(data: Path, tmp_path: Path) -> None:
    """Loss, z-loss and routing live in the model: equal losses over 20 steps."""
    model = {"z_loss": 1e-2}
    ours = tiny_config(
        data, tmp_path / "ours", steps=20, model=model, schedule={"kind": "linear", "warmup_steps": 0, "min_ratio": 1.0}
    )
    train(ours)
    samples = TrainingSamples([PackedWindows(PreparedSplit(data, "train"), 24)], seed=0)

    class InOrder(Trainer):
        def _get_train_sampler(self, *arguments: Any) -> SequentialSampler:
            return SequentialSampler(samples)

    arguments = TrainingArguments(
        output_dir=str(tmp_path / "theirs"),
        max_steps=20,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        weight_decay=0.1,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        logging_steps=1,
        logging_nan_inf_filter=False,
        remove_unused_columns=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    theirs = InOrder(model=build_model(ours.model, 0), args=arguments, train_dataset=samples)
    theirs.create_optimizer = lambda *_: setattr(theirs, "optimizer", decayed(theirs.model)) or theirs.optimizer
    theirs.train()
    logged = [line["loss"] for line in theirs.state.log_history if "loss" in line]
    total = [line["loss"] + line["z_loss"] for line in numbers(ours.out, "train")]
    assert len(logged) == 20
    assert logged == pytest.approx(total, rel=1e-4)


def decayed(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-2, (0.9, 0.95), 1e-8, 0.1)


def test_held_out_loss_is_the_same_for_any_batch_size(data: Path, tmp_path: Path) -> None:
    results = []
    for size in (1, 3, 64):
        config = tiny_config(data, tmp_path / str(size), eval={"batch_size": size, "max_tokens": None})
        with started(config) as run:
            assert isinstance(run.validation, Validation)
            results.append(run.validation.run(run.model))
    assert len({result.tokens for result in results}) == 1
    for result in results[1:]:
        assert result.loss == pytest.approx(results[0].loss, rel=1e-6)
    split = PreparedSplit(data, "val")
    nats = results[0].loss * len(split)
    assert results[0].bits_per_byte == pytest.approx(nats / np.log(2) / split.manifest.text_bytes("val"))


def test_interrupt_saves_and_continues(data: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    whole, config = (tiny_config(data, tmp_path / name) for name in ("whole", "run"))
    train(whole)
    step = torch.optim.AdamW.step
    calls: list[int] = []

    def interrupted(self: Any, **arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, **arguments)

    monkeypatch.setattr(torch.optim.AdamW, "step", interrupted)
    from mhar import runfile

    runfile.save(config, tmp_path / "run.yaml")
    before = signal.getsignal(signal.SIGINT)
    assert main(["train", str(tmp_path / "run.yaml")]) == 130
    assert "the same command continues" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGINT) is before
    assert steps_in(config.out / "checkpoints")[-1] in (5, 6)
    assert json.loads((config.out / "summary.json").read_text())["stopped"] == "interrupted"
    assert main(["train", str(tmp_path / "run.yaml")]) == 0
    assert numbers(config.out) == numbers(whole.out)


def test_a_time_limit_ends_the_run_with_a_model(data: Path, tmp_path: Path) -> None:
    config = tiny_config(data, tmp_path / "run", max_seconds=1e-6)
    summary = train(config)
    assert (summary["stopped"], summary["steps"]) == ("time limit", 1)
    assert summary["heldout_loss_last"] == losses(config, "eval", "heldout_loss")[-1]
    assert (config.out / "final" / "model.safetensors").is_file()


def test_divergence_stops_with_the_batch_and_a_saved_state(data: Path, tmp_path: Path) -> None:
    config = tiny_config(data, tmp_path / "run", max_loss=3.0)
    with pytest.raises(DivergenceError, match=r"failed in batch 0 \(samples 0 to 3\): loss 3\.\d+ \(max_loss 3\)"):
        train(config)
    failure = json.loads((config.out / "failure.json").read_text())
    assert (failure["step"], failure["samples"]) == (0, [0, 3])
    assert (config.out / "checkpoints/failed-0/.metadata").is_file()
    assert steps_in(config.out / "checkpoints") == []
    saved = config.out / "checkpoints/failed-0/state.json"
    saved.write_text("stale")
    with pytest.raises(DivergenceError):
        train(config)
    assert json.loads(saved.read_text())["step"] == 0
    train(replace(config, max_loss=30.0))
    assert not (config.out / "failure.json").exists()
    assert not saved.parent.exists()


def test_a_nan_stops_before_it_reaches_the_weights(data: Path, tmp_path: Path, monkeypatch: Any) -> None:
    config = tiny_config(data, tmp_path / "run")
    with started(config) as run, run.metrics, run.checkpoints:
        run.config = config
        gradients = run._gradients

        def poisoned(batches: Any) -> Any:
            result = gradients(batches)
            if run.step == 2:
                run.inner.model.norm.weight.grad[0] = float("nan")
            return result

        monkeypatch.setattr(run, "_gradients", poisoned)
        with pytest.raises(DivergenceError, match=r"failed in batch 2 \(samples 8 to 11\).* gradient norm nan"):
            run.train()
        assert all(torch.isfinite(parameter).all() for parameter in run.model.parameters())
    assert (config.out / "checkpoints/failed-2/.metadata").is_file()
    failure = json.loads((config.out / "failure.json").read_text(), parse_constant=pytest.fail)
    assert failure["grad_norm"] == "nan"


@pytest.mark.parametrize(
    "sections, name",
    [
        ({"model": {"variant": "baseline"}}, "model.variant"),
        ({"model": {"shape": {**SHAPE, "hidden_size": 32}}}, "model.shape.hidden_size"),
        ({"optimizer": {"lr": 2e-2}}, "optimizer.lr"),
        ({"seed": 1}, "seed"),
        ({"steps": 11}, "steps"),
        ({"data": {"sequence_length": 16}}, "data.sequence_length"),
        ({"parallel": {"dtype": "bfloat16"}}, "parallel.dtype"),
        ({"eval": {"every": 4, "max_tokens": 480}}, "eval.max_tokens"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(data: Path, tmp_path: Path, sections: Any, name: str) -> None:
    train(tiny_config(data, tmp_path / "run", steps=3, eval={"every": None}))
    changed = tiny_config(data, tmp_path / "run", **{"steps": 3, "eval": {"every": None}, **sections})
    with pytest.raises(CheckpointError, match=f"step-3 belongs to another run: it differs in .*{name}"):
        train(changed)


def test_data_is_known_by_its_content(tmp_path: Path, monkeypatch: Any) -> None:
    for name, count in (("data", 200), ("other", 300)):
        (tmp_path / name).mkdir()
        prepared_text(tmp_path / name / "prepared", count)
    folder = tmp_path / "data/prepared"
    config = tiny_config(folder, tmp_path / "run", steps=3)
    train(config)
    (config.out / "summary.json").unlink()
    monkeypatch.chdir(tmp_path)
    assert train(tiny_config(Path("data/prepared"), config.out, steps=3))["steps"] == 3
    validated = tiny_config(folder, config.out, steps=3, data={"val": "other/prepared"})
    with pytest.raises(CheckpointError, match=r"differs in data\.val"):
        train(validated)
    folder.rename(tmp_path / "before")
    (tmp_path / "other/prepared").rename(folder)
    with pytest.raises(CheckpointError, match=r"differs in data\.train"):
        train(config)


def test_a_checkpoint_to_start_from_is_known_by_its_content(data: Path, tmp_path: Path) -> None:
    for seed in (0, 1):
        train(tiny_config(data, tmp_path / f"base{seed}", steps=3, seed=seed))
    start = tmp_path / "base0/final"
    config = tiny_config(data, tmp_path / "run", steps=3)
    config = replace(config, model=ModelSection(init_from=str(start)))
    train(config)
    start.rename(tmp_path / "moved")
    (tmp_path / "base1/final").rename(start)
    with pytest.raises(CheckpointError, match=r"differs in model\.init_from"):
        train(config)
    moved = replace(config, model=ModelSection(init_from=str(tmp_path / "moved")))
    assert train(moved)["stopped"] == "finished"


def test_what_does_not_decide_the_numbers_may_change(data: Path, tmp_path: Path) -> None:
    train(tiny_config(data, tmp_path / "run", max_seconds=1e-6))
    config = tiny_config(data, tmp_path / "run", micro_batch_size=1, data={"workers": 2}, logging={"every": 2})
    assert train(config)["steps"] == 10


def test_a_damaged_checkpoint_is_named(data: Path, tmp_path: Path) -> None:
    config = tiny_config(data, tmp_path / "run", steps=3)
    train(config)
    part = next((config.out / "checkpoints/step-3").glob("*.distcp"))
    part.write_bytes(part.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="step-3 cannot be loaded"):
        train(config)
    (config.out / "checkpoints/step-3/state.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"step-3 cannot be loaded: state\.json cannot be read.* to begin anew"):
        train(config)


def test_a_full_disk_keeps_the_last_good_checkpoint(data: Path, tmp_path: Path, monkeypatch: Any) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    write, calls = FileSystemWriter.write_data, []

    def full(self: Any, *arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return write(self, *arguments)

    whole, config = (tiny_config(data, tmp_path / name) for name in ("whole", "run"))
    train(whole)
    monkeypatch.setattr(FileSystemWriter, "write_data", full)
    with pytest.raises(CheckpointError, match=r"step-6 could not be saved .*No space left.*; .* step-3"):
        train(config)
    assert steps_in(config.out / "checkpoints") == [3]
    train(config)
    assert numbers(config.out) == numbers(whole.out)
    assert weights_digest(config.out) == weights_digest(whole.out)


def test_flipped_bytes_of_a_checkpoint_are_noticed(data: Path, tmp_path: Path) -> None:
    config = tiny_config(data, tmp_path / "run", steps=6)
    train(config)
    (config.out / "summary.json").unlink()
    part = next((config.out / "checkpoints/step-6").glob("*.distcp"))
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    message = rf"step-6 .*{part.name} is not what was written; remove .*step-6 to continue from step-3"
    with pytest.raises(CheckpointError, match=message):
        train(config)
    shutil.rmtree(part.parent)
    assert train(config)["stopped"] == "finished"


def test_an_unwritable_folder_is_named(data: Path, tmp_path: Path) -> None:
    config = tiny_config(data, tmp_path / "run")
    with started(config) as run, run.metrics, run.checkpoints:
        (config.out / "checkpoints").rmdir()
        (config.out / "checkpoints").write_text("a file in the way")
        with pytest.raises(CheckpointError, match="could not be saved"):
            run.train()


def test_a_folder_in_use_is_refused_and_free_after_a_kill(data: Path, tmp_path: Path) -> None:
    config = tiny_config(data, tmp_path / "run", steps=3)
    config.out.mkdir()
    hold = (
        "import sys, pathlib; from mhar.training.lock import folder_lock\nwith folder_lock(pathlib.Path(sys.argv[1])): "
    )
    command = [sys.executable, "-c", hold + "print('held', flush=True); sys.stdin.read()", str(config.out)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(InputError, match=f"run is in use by process {holder.pid}"):
            train(config)
        assert not (config.out / "metrics.jsonl").exists()
        holder.kill()
    assert train(config)["steps"] == 3


def test_a_file_in_place_of_the_folder_is_named(data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be a folder"):
        train(tiny_config(data, tmp_path / "file/run"))


def test_leftovers_of_a_kill_are_removed_and_not_loaded(data: Path, tmp_path: Path) -> None:
    config = tiny_config(data, tmp_path / "run")
    train(replace(config, max_seconds=1e-6))
    folder = config.out / "checkpoints"
    for name in ("step-7.partial", "step-0.deleting"):
        (folder / name).mkdir()
    assert steps_in(folder) == [1]
    with started(config) as run:
        assert isinstance(run.checkpoints, Checkpoints)
        assert run.step == 1
    assert sorted(path.name for path in folder.iterdir()) == ["step-1"]


def test_data_that_does_not_fit_is_refused(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(InputError, match="has 22 ids, the model's vocabulary 21"):
        train(tiny_config(data, out, model={"shape": {**SHAPE, "vocab_size": 21}}))
    other = prepared_counting(tmp_path / "counting", [60])
    with pytest.raises(InputError, match="prepared with another tokenizer"):
        train(tiny_config(data, out, data={"train": [str(data), str(other)], "val": str(data)}))
    tokenizer = save_tokenizer(tmp_path / "tokenizer", ["other", "words"])
    with pytest.raises(InputError, match="is not the one the data was prepared with"):
        train(tiny_config(data, out, data={"tokenizer": str(tokenizer)}))
    with pytest.raises(ConfigurationError, match=r"unknown split .* 'val'"):
        train(tiny_config(other, out))
    with pytest.raises(InputError, match="fewer than one window"):
        train(tiny_config(data, out, data={"sequence_length": 100_000}))
    with pytest.raises(ConfigurationError, match="batch_size 4 does not divide into micro-batches of 3 on 1 ranks"):
        train(tiny_config(data, out, micro_batch_size=3))
    with pytest.raises(InputError, match="no finished prepared folder"):
        train(tiny_config(tmp_path / "nowhere", out))


def test_an_altered_shard_stops_a_run_before_it_starts(tmp_path: Path) -> None:
    folder = prepared_text(tmp_path / "data")
    shard = folder / "train-00000.bin"
    shard.write_bytes(b"\x03" + shard.read_bytes()[1:])
    with pytest.raises(InputError, match=r"train-00000\.bin was altered"):
        train(tiny_config(folder, tmp_path / "run"))


def test_a_mixture_trains_and_isolated_documents_too(data: Path, tmp_path: Path) -> None:
    second = prepared_text(tmp_path / "second", count=200)
    mixture = {"train": [str(data), str(second)], "weights": [1, 3], "isolate_documents": True}
    config = tiny_config(data, tmp_path / "run", steps=30, data=mixture)
    train(config)
    assert losses(config)[-1] < losses(config)[0] - 0.05


def test_help_lists_every_setting(capsys: Any) -> None:
    for arguments in (["--help"], ["run.yaml", "--help"]):
        assert main(["train", *arguments]) == 0
        assert "schedule.warmup_steps: int = 1000" in capsys.readouterr().out


def test_a_misspelt_key_is_answered_with_the_nearest(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "run.yaml").write_text("out: x\nsteps: 2\nbatch_size: 1\nmicro_batchsize: 1\n")
    assert main(["train", str(tmp_path / "run.yaml")]) == 2
    assert "did you mean 'micro_batch_size'" in capsys.readouterr().err
