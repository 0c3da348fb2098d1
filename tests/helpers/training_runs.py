"""Tiny training runs for tests: configurations, comparisons, and processes that are killed on the way."""

import hashlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from mhar import runfile
from mhar.training.config import RunConfig
from mhar.training.metrics import read_metrics

SHAPE = {
    "vocab_size": 22,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": True,
}
TIMINGS = ("tokens_per_s", "step_ms", "seconds")


def tiny_settings(data: Path, out: Path) -> dict[str, Any]:
    """A run of ten steps on the CPU in float32; a plain mapping that tests change."""
    return {
        "out": str(out),
        "steps": 10,
        "batch_size": 4,
        "micro_batch_size": 2,
        "model": {"family": "qwen3", "shape": dict(SHAPE)},
        "data": {"train": [str(data)], "sequence_length": 24, "workers": 0},
        "optimizer": {"lr": 1e-2},
        "schedule": {"warmup_steps": 2},
        "eval": {"every": 4, "max_tokens": 240},
        "checkpoint": {"every": 3},
        "logging": {"every": 1, "progress": False, "tensorboard": False},
        "parallel": {"dtype": "float32", "device": "cpu"},
    }


def tiny_config(data: Path, out: Path, /, **sections: Any) -> RunConfig:
    """`tiny_settings` with sections updated: `tiny_config(data, out, steps=3, model={"variant": "baseline"})`."""
    settings = tiny_settings(data, out)
    for name, value in sections.items():
        settings[name] = {**settings[name], **value} if isinstance(settings.get(name), dict) else value
    return runfile.from_mapping(RunConfig, settings)


def numbers(out: Path, *kinds: str) -> list[dict[str, Any]]:
    """The metric lines of a run without what the clock decides."""
    lines = read_metrics(out / "metrics.jsonl")
    wanted = [line for line in lines if not kinds or line["kind"] in kinds]
    return [{name: value for name, value in line.items() if name not in TIMINGS} for line in wanted]


def weights_digest(out: Path, name: str = "final") -> str:
    return hashlib.sha256((out / name / "model.safetensors").read_bytes()).hexdigest()


def launch(config: RunConfig, processes: int = 1, kill: str = "never:0") -> int:
    """Run `mhar train` in `processes` processes as torchrun would; returns 0, or what the first failure returned.

    kill: "step:N" sends SIGKILL to every process in its Nth optimizer step, "save:N" while its Nth checkpoint is
    being written.
    """
    run_file = config.out.parent / f"{config.out.name}.yaml"
    runfile.save(config, run_file)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    shared["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, str(Path(__file__).with_name("killed_run.py")), kill, str(run_file)]
    started = [
        subprocess.Popen(command, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(processes)
    ]
    try:
        codes = [process.wait(timeout=120) for process in started]
    finally:
        for process in started:
            process.kill()
    return next((code for code in codes if code), 0)


KILLED = -signal.SIGKILL
