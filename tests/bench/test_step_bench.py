"""The training-step benchmark."""

from dataclasses import replace

import pytest
import torch

from mhar.bench import step as module
from mhar.bench.shapes import STEP_SHAPES, StepShape
from mhar.bench.step import StepOptions, TrainingStep, bench_step, build, comparison, gate, head_loss
from mhar.bench.tables import step_table

TINY = StepShape("tiny", 32, 1, 2, 1, 48, 31, batch=1, length=4, head_dim=16)


def quiet(_line):
    pass


@pytest.mark.parametrize("variant", ["baseline", "mhar"])
def test_a_step_trains(variant):
    """Steps on one micro-batch lower its loss, and bfloat16 parameters follow their float32 masters."""
    step = TrainingStep(build(TINY, variant, torch.bfloat16, "cpu", "reference"), TINY, "cpu", compiled=False)
    step.optimizer.param_groups[0]["lr"] = 1e-2
    losses = [float(step()) for _ in range(8)]
    assert losses[-1] < losses[0] - 0.5
    for parameter, master in zip(step.parameters, step.masters, strict=True):
        assert parameter.dtype == torch.bfloat16
        assert parameter.grad is None
        assert torch.equal(parameter, master.to(torch.bfloat16))


def test_both_sides_differ_by_routing_only():
    baseline, mhar = (build(TINY, variant, torch.float32, "cpu", "reference") for variant in ("baseline", "mhar"))
    names = {name for name, _ in mhar.named_parameters()} - {name for name, _ in baseline.named_parameters()}
    assert names == {"model.router.query", "model.router.norm_weight"}


def test_loss_is_that_of_the_model():
    model = build(TINY, "baseline", torch.float32, "cpu")
    step = TrainingStep(model, TINY, "cpu", compiled=False)
    hidden = model.model(input_ids=step.tokens).last_hidden_state
    logits = model(input_ids=step.tokens).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), step.targets.flatten())
    torch.testing.assert_close(head_loss(hidden, model.lm_head.weight, step.targets), expected)
    torch.testing.assert_close(step.forward(), expected)


def test_gate_compares_kernels_with_the_reference(monkeypatch):
    assert gate(TINY, "cpu") is None
    real = module.build

    def wrong(shape, variant, dtype, device, backend="triton"):
        model = real(shape, variant, dtype, device, "reference")
        if backend == "triton":
            with torch.no_grad():
                model.model.router.norm_weight.mul_(1.5)
        return model

    monkeypatch.setattr(module, "build", wrong)
    assert "correctness gate red" in gate(TINY, "cpu")


def test_a_red_gate_has_no_rows(monkeypatch):
    monkeypatch.setattr(module, "gate", lambda *_: "correctness gate red: loss differs")
    result = bench_step((TINY,), StepOptions("cpu"), quiet)
    assert result["rows"] == result["relative"] == []
    assert "loss differs" in step_table(result)


@pytest.mark.parametrize("eager", [False, True])
def test_rows_and_ratios(monkeypatch, eager):
    """The schema, with the reference backend in the kernels' place: what is timed is not under test here."""
    real = module.build
    monkeypatch.setattr(module, "build", lambda *a, **k: real(*a[:4], backend="reference"))
    monkeypatch.setattr(module, "compile_parts", lambda *_: None)
    monkeypatch.setattr(torch, "compile", lambda function: function)
    saved = []
    result = bench_step((replace(TINY, eager=eager),), StepOptions("cpu", repeats=1), quiet, saved.append)
    assert saved == [result]
    rows = [(row["variant"], row["compiled"], row["cuda_graph"]) for row in result["rows"]]
    assert rows == [("baseline", not eager, False), ("mhar", not eager, False)]
    keys = {"shape", "variant", "backend", "tokens", "tokens_per_s", "peak_gib", "compiled", "cuda_graph"}
    assert all(keys <= set(row) for row in result["rows"])
    assert f"| tiny | 4 | mhar | {'eager' if eager else 'compiled'} |" in step_table(result)


def test_comparison():
    row = {"shape": "1b", "tokens": 4096, "compiled": True, "cuda_graph": True}
    baseline = {**row, "ms": 60.0, "tokens_per_s": 100.0, "peak_gib": 20.0}
    mhar = {**row, "ms": 66.0, "tokens_per_s": 91.0, "peak_gib": 21.0}
    assert comparison(baseline, mhar) == {**row, "throughput": 0.91, "added_ms": 6.0, "peak_memory": 1.05}


def test_the_papers_shapes():
    found = {shape.key: shape for shape in STEP_SHAPES["paper"]}
    assert set(found) == {"100m:16384", "350m:4096", "1b:4096", "1b:1024"}
    assert found["1b:1024"].eager
    parameters = {"100m": 0.116e9, "350m": 0.533e9, "1b": 1.079e9}
    for shape in found.values():
        with torch.device("meta"):
            model = build(shape, "baseline", torch.float32, "meta")
        count = sum(p.numel() for p in model.parameters())
        assert count == pytest.approx(parameters[shape.name], rel=0.03), (shape.key, count)
