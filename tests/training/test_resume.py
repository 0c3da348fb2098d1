"""Kill -9 and continue: every number, bit for bit on the CPU, with one and two processes under FSDP2."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.corpora import prepared_text
from helpers.training_runs import KILLED, launch, numbers, tiny_config, weights_digest
from mhar.training.checkpoint import steps_in
from mhar.training.config import RunConfig
from mhar.training.recipe import train

pytestmark = pytest.mark.resume


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared_text(tmp_path_factory.mktemp("resume") / "data")


def settings(data: Path, out: Path, /, **sections: Any) -> RunConfig:
    """With dropout, so that random numbers matter, and an average of the weights."""
    model = {"shape": {**tiny_config(data, out).model.shape, "attention_dropout": 0.1}, "z_loss": 1e-4}
    return tiny_config(data, out, ema=0.9, model=model, **sections)


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process that nothing interrupts. All runs of a comparison have the same number of threads."""
    config = settings(data, tmp_path_factory.mktemp("whole") / "run")
    assert launch(config) == 0
    return config.out


@pytest.fixture(scope="module")
def killed_pair(data: Path, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A run of two processes under FSDP2, killed while they write their second checkpoint."""
    config = tiny_config(
        data, tmp_path_factory.mktemp("pair") / "run", ema=0.9, micro_batch_size=1, data={"workers": 2}
    )
    assert launch(config, 2, "save:2") == KILLED
    assert steps_in(config.out / "checkpoints") == [3]
    assert (config.out / "checkpoints/step-6.partial").is_dir()
    return config


def copy_of(config: RunConfig, out: Path) -> RunConfig:
    shutil.copytree(config.out, out)
    return replace(config, out=out, data=replace(config.data, workers=0))


def assert_same(out: Path, reference: Path) -> None:
    assert numbers(out) == numbers(reference)
    for name in ("final", "final_ema"):
        assert weights_digest(out, name) == weights_digest(reference, name)


@pytest.mark.parametrize("kill, workers", [("step:8", 2), ("save:2", 0)])
def test_a_killed_process_continues_bit_for_bit(
    data: Path, tmp_path: Path, whole: Path, kill: str, workers: int
) -> None:
    config = settings(data, tmp_path / "run", data={"workers": workers})
    assert launch(config, kill=kill) == KILLED
    assert steps_in(config.out / "checkpoints") in ([3], [3, 6])  # at step 8 the sixth may still be on its way
    assert not (config.out / "final").exists()
    assert launch(config) == 0
    assert_same(config.out, whole)


def test_two_killed_processes_continue_bit_for_bit_under_fsdp(tmp_path: Path, killed_pair: RunConfig) -> None:
    config, uninterrupted = copy_of(killed_pair, tmp_path / "run"), replace(killed_pair, out=tmp_path / "whole")
    assert launch(uninterrupted, 2) == 0
    assert launch(config, 2) == 0
    assert_same(config.out, uninterrupted.out)


def test_another_number_of_ranks_continues_with_the_same_tokens(
    data: Path, tmp_path: Path, killed_pair: RunConfig
) -> None:
    """Two processes are killed, one continues: its losses are those of a run of one process, up to rounding."""
    reference = tiny_config(data, tmp_path / "reference", ema=0.9)
    train(reference)
    config = copy_of(killed_pair, tmp_path / "run")
    train(config)
    for name in ("loss", "heldout_loss", "ema_heldout_loss", "grad_norm"):
        found, expected = ([line[name] for line in numbers(out) if name in line] for out in (config.out, reference.out))
        assert len(found) >= 4
        assert found == pytest.approx(expected, rel=2e-4)
