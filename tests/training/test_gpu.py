"""The recipe on a GPU: bfloat16 against float32, compiled, on CUDA graphs, sharded alone, and resumed."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from helpers.corpora import prepared_text
from helpers.training_runs import SHAPE, numbers, tiny_config
from mhar.training.config import RunConfig
from mhar.training.recipe import train

pytestmark = pytest.mark.gpu
WIDER = {**SHAPE, "hidden_size": 64, "intermediate_size": 128, "head_dim": 32}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared_text(tmp_path_factory.mktemp("gpu") / "data")


def run(data: Path, out: Path, **parallel: Any) -> RunConfig:
    settings = {"device": "cuda", "dtype": "bfloat16", **parallel}
    return tiny_config(data, out, ema=0.9, model={"shape": WIDER, "z_loss": 1e-4}, parallel=settings)


def losses(config: RunConfig) -> list[float]:
    return [line["loss"] for line in numbers(config.out, "train")]


@pytest.mark.parametrize(
    "parallel",
    [
        {},
        {"mode": "fsdp"},
        {"compile": "sublayer"},
        {"compile": "model"},
        {"compile": "model", "compile_mode": "reduce-overhead"},
    ],
    ids=str,
)
def test_bfloat16_training_follows_float32(data: Path, tmp_path: Path, parallel: dict[str, str]) -> None:
    exact = run(data, tmp_path / "exact", device="cpu", dtype="float32")
    fast = run(data, tmp_path / "fast", **parallel)
    train(exact)
    summary = train(fast)
    assert losses(fast) == pytest.approx(losses(exact), abs=0.03)
    assert summary["peak_memory_gib"] > 0
    assert summary["device"] != "cpu"


def test_a_resumed_run_repeats_the_numbers(data: Path, tmp_path: Path) -> None:
    whole, resumed = (run(data, tmp_path / name, deterministic=True) for name in ("whole", "resumed"))
    train(whole)
    train(resumed)
    shutil.rmtree(resumed.out / "checkpoints/step-10")
    train(resumed)
    assert numbers(resumed.out) == numbers(whole.out)
