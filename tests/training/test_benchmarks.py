"""The training benchmarks at toy size: they run, compare like with like, and bundle what they measured."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from helpers.corpora import prepared_text
from helpers.training_runs import SHAPE

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).parents[2]
TOY = ["data.sequence_length=32", "batch_size=4", "micro_batch_size=2", "parallel.dtype=float32", "eval.every=5"]
TOY += ["eval.batch_size=4", "logging.progress=false", "data.workers=0"]


def run(script: str, tmp_path: Path, *arguments: str) -> str:
    command = [sys.executable, str(REPOSITORY / "benchmarks" / script), "--out", str(tmp_path / "out")]
    command += ["--runs", str(tmp_path / "runs"), "--compile", "none", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY / "src")}
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=300).stdout


def test_pretraining_compares_three_variants(tmp_path: Path) -> None:
    data = prepared_text(tmp_path / "data")
    shape = [f"model.shape.{name}={str(value).lower()}" for name, value in SHAPE.items()]
    printed = run("pretrain_100m.py", tmp_path, "--corpus", str(data), "--steps", "15", *TOY, *shape)
    assert "| mhar |" in printed
    with tarfile.open(tmp_path / "out/pretrain-100m.tar.gz") as archive:
        names = archive.getnames()
    for variant in ("baseline", "attention_residuals", "mhar"):
        assert f"pretrain-100m/{variant}/metrics.jsonl" in names
        assert json.loads((tmp_path / "runs" / variant / "summary.json").read_text())["stopped"] == "finished"
    assert "pretrain-100m/report.html" in names


def test_mid_training_compares_with_its_control(tmp_path: Path) -> None:
    data = prepared_text(tmp_path / "data")
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=22, num_hidden_layers=4, **shape)).save_pretrained(tmp_path / "base")
    arguments = ["--corpus", str(data), "--base", str(tmp_path / "base"), "--steps", "12", "--max-seconds", "100"]
    printed = run("midtrain_smollm2.py", tmp_path, *arguments, *TOY)
    assert "Gap between the training losses: 0.00e+00 at step 1" in printed
    assert "Widest gates at the end: layers." in printed
    with tarfile.open(tmp_path / "out/midtrain-smollm2.tar.gz") as archive:
        assert {f"midtrain-smollm2/{name}/metrics.jsonl" for name in ("routed", "control")} <= set(archive.getnames())
