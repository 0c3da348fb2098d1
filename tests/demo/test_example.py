"""The GPT from scratch: its two forms are what the method says, and it trains on the bundled text."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt_from_scratch.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("gpt_from_scratch", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make(example, routing_heads):
    torch.manual_seed(0)
    return example.GPT(width=32, num_layers=2, num_heads=4, context=64, routing_heads=routing_heads)


def test_a_one_hot_route_is_a_chain_of_sublayers(example):
    """With all weight on the newest source the model must be the plain composition of its sublayers."""
    model = make(example, 4)
    ids = torch.randint(256, (2, 16))

    def newest(site, weights):
        chosen = torch.zeros_like(weights)
        chosen[-1] = 1.0
        return chosen

    with torch.no_grad(), model.router.intervene(newest):
        routed = model(ids)
        x = model.embedding(ids) + model.position(torch.arange(16))
        for norm, sublayer in zip(model.norms, model.sublayers, strict=True):
            x = sublayer(norm(x))
        assert torch.allclose(routed, model.head(model.final_norm(x)), atol=1e-6)


def test_it_is_causal(example):
    model = make(example, 4)
    ids = torch.randint(256, (1, 16))
    changed = ids.clone()
    changed[0, 10:] += 1
    with torch.no_grad():
        before, after = model(ids), model(changed % 256)
    assert torch.allclose(before[:, :10], after[:, :10], atol=1e-6)
    assert not torch.allclose(before[:, 10:], after[:, 10:], atol=1e-3)


@pytest.mark.parametrize("routing_heads", [None, 1, 4])
def test_it_learns_the_bundled_text(example, routing_heads):
    losses = example.train(make(example, routing_heads), steps=30)
    assert sum(losses[-5:]) / 5 < losses[0] - 1.5


def test_the_file_runs(tmp_path):
    result = subprocess.run(
        [sys.executable, str(EXAMPLE), "--steps", "2"], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert "routing heads 4" in result.stdout
    assert "layers.3.mlp" in result.stdout
