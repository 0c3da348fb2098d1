"""benchmarks/midtrain_8b_step.py at toy size: the same function and the same fixed memory on both sides."""

import importlib.util
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "midtrain_8b_step.py"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("midtrain_8b_step", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_converted_and_plain_start_equal_and_train(benchmark):
    plain, converted = (benchmark.measure(kind, benchmark.SHAPES["tiny"], "cpu", 1, 2) for kind in benchmark.KINDS)
    # Blocks of 4 in 8 layers, 8 heads: 15 sites with query, gain and null source of 64 and a gate.
    assert converted["num_parameters"] - plain["num_parameters"] == 15 * (3 * 64 + 1)
    assert converted["losses"][0] == plain["losses"][0]
    assert converted["losses"][2] != plain["losses"][2]
    result = benchmark.compare(plain, converted)
    assert result["first_loss_difference"] == 0
    assert 0 < result["largest_loss_difference"] < 0.01
    ratio = result["converted_over_plain"]["tokens_per_s"]
    assert ratio == pytest.approx(plain["step_s"] / converted["step_s"])
    assert "converted" in benchmark.table({"plain": plain, "converted": converted})


def test_the_8b_shape_fits_as_the_docstring_says(benchmark):
    shape = benchmark.SHAPES["8b"]
    kv_width = shape.width // shape.num_heads * shape.num_key_value_heads
    layer = 2 * shape.width * (shape.width + kv_width) + 3 * shape.width * shape.mlp_width + 2 * shape.width
    count = shape.num_layers * layer + 2 * shape.vocab_size * shape.width + shape.width
    assert count == 8_030_261_248
    assert 16 * count / 2**30 == pytest.approx(119.7, abs=0.05)
