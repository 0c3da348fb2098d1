"""Processes on the CPU over gloo: DDP, FSDP2 and HSDP compute what one process computes."""

from pathlib import Path

import pytest

from helpers.corpora import prepared_text
from helpers.training_runs import launch, numbers, tiny_config, weights_digest
from mhar.training.recipe import train

KEYS = ("loss", "z_loss", "grad_norm", "heldout_loss", "ema_heldout_loss")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared_text(tmp_path_factory.mktemp("parallel") / "data")


@pytest.mark.parametrize(
    "mode, shard, processes, variant",
    [
        ("ddp", None, 2, "mhar"),
        ("fsdp", None, 2, "delta_mhar"),
        ("hsdp", 2, 4, "mhar"),
        ("fsdp", None, 2, "stock"),
        ("fsdp", None, 1, "mhar"),
    ],
    ids=lambda value: str(value),
)
def test_spread_training_agrees_with_one_process(
    data: Path, tmp_path: Path, mode: str, shard: int | None, processes: int, variant: str
) -> None:
    model = {"variant": variant} if variant == "stock" else {"variant": variant, "z_loss": 1e-3}
    alone = tiny_config(data, tmp_path / "alone", ema=0.9, steps=6, model=model)
    train(alone)
    parallel = {"mode": mode, "shard": shard}
    spread = tiny_config(
        data, tmp_path / "spread", ema=0.9, steps=6, micro_batch_size=1, model=model, parallel=parallel
    )
    assert launch(spread, processes) == 0
    for key in KEYS:
        found, expected = ([line[key] for line in numbers(c.out) if key in line] for c in (spread, alone))
        assert found == pytest.approx(expected, rel=3e-4)
    assert (spread.out / "final_ema/model.safetensors").is_file()


def test_two_processes_repeat_themselves_bit_for_bit(data: Path, tmp_path: Path) -> None:
    runs = [tiny_config(data, tmp_path / name, steps=4, parallel={"mode": "ddp"}) for name in "ab"]
    for config in runs:
        assert launch(config, 2) == 0
    assert numbers(runs[0].out) == numbers(runs[1].out)
    assert weights_digest(runs[0].out) == weights_digest(runs[1].out)
