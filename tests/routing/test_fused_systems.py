"""The fused path under torch.compile, DDP, FSDP2 and the Hugging Face model; property-based shapes; other GPUs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._dynamo.testing
import torch.multiprocessing as mp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from helpers.compare import assert_close
from helpers.routed import Case, device, inputs, run
from helpers.routed_ranks import D, Stack, gradients, train_one_step
from mhar.models import MharConfig, MharForCausalLM
from mhar.routing import RoutingConfig


def test_a_compiled_loop_is_one_graph_for_every_number_of_tokens() -> None:
    net, reference = Stack("triton"), Stack("reference")
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(net, fullgraph=True, dynamic=True, backend=counter)
    graphs: list[int] = []
    for tokens in (3, 4, 6):
        x = torch.randn(tokens, D, device=device())
        net.zero_grad()
        reference.zero_grad()
        compiled(x).sin().sum().backward()
        reference(x).sin().sum().backward()
        for name, expected in gradients(reference).items():
            assert_close(name, gradients(net)[name], expected, 1e-5)
        graphs.append(counter.frame_count)
    assert len(set(graphs)) == 1  # no compilation after the first call


def test_compiled_sublayers_around_the_fused_path() -> None:
    net, reference = Stack("triton"), Stack("reference")
    torch._dynamo.reset()
    for layer in net.layers:
        layer.compile(backend="aot_eager", dynamic=True)
    for tokens in (3, 5):
        x = torch.randn(tokens, D, device=device())
        for module in (net, reference):
            module.zero_grad()
            module(x).sin().sum().backward()
        for name, expected in gradients(reference).items():
            assert_close(name, gradients(net)[name], expected, 1e-5)


@pytest.mark.parametrize("variant", ["mhar", "delta_block_mhar"])
def test_the_hugging_face_model(variant: str) -> None:
    from transformers import Qwen3Config

    base = Qwen3Config(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=4, vocab_size=32, tie_word_embeddings=True,
    )  # fmt: skip
    options = {"block_size": 1} if "block" in variant else {}
    config = MharConfig.from_base(base, RoutingConfig.named(variant, **options))
    found = []
    for backend in ("triton", "reference"):
        torch.manual_seed(0)
        config.routing_backend = backend
        model = MharForCausalLM(config).to(device())
        for parameter in model.model.router.parameters():
            nn.init.normal_(parameter, std=0.5)
        ids = torch.arange(6, device=device()).view(2, 3)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        found.append((loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    (loss, grads), (expected_loss, expected) = found
    assert_close("loss", loss, expected_loss, 1e-5)
    for name, value in expected.items():
        if value.norm() > 1e-6:
            assert_close(name, grads[name], value, 1e-4)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_gradients_of_two_processes(kind: str, tmp_path: Path) -> None:
    mp.spawn(train_one_step, (kind, str(tmp_path)), nprocs=2)
    found = torch.load(tmp_path / "gradients.pt")
    reference = Stack("reference").cpu()
    for batch in torch.randn(2, 2, D, generator=torch.Generator().manual_seed(1)):
        (reference(batch).sin().sum() / 2).backward()
    for name, expected in gradients(reference).items():
        assert_close(name, found[name], expected, 1e-5)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    variant = draw(st.sampled_from(["mhar", "delta_mhar", "block_mhar", "delta_block_mhar"]))
    num_sites = draw(st.integers(3, 6))
    options: dict[str, object] = {}
    if "block" in variant:
        options["block_size"] = draw(st.integers(1, num_sites // 2))
    if variant.startswith("delta"):
        options["null_source"] = draw(st.booleans())
        options["gate"] = draw(st.sampled_from(["none", "scalar"]))
    heads = draw(st.integers(1, 3))
    return Case(
        variant=variant,
        options=options,
        num_sites=num_sites,
        num_heads=heads,
        width=heads * draw(st.integers(1, 20)),
        tokens=(draw(st.integers(1, 2)),),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        schedule=draw(st.sampled_from(["dense", 1, 2, 3])),
        norm=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(cases())
def test_any_shape_and_variant(case: Case) -> None:
    given = inputs(case)
    fused, exact = run(case, "fused", given), run(case, "exact", given)
    bound = {torch.float32: 2e-5, torch.bfloat16: 0.15}[case.dtype]
    for name, expected in exact.items():
        scale = expected.norm() if expected.norm() > 1e-3 else 1.0
        error = (fused[name].double() - expected).norm() / scale
        assert error <= bound, f"{name}: {error:.2e}"


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cuda:80", "cuda:90", "cuda:100", "cuda:120", "hip:gfx942"])
def test_kernels_compile_for_other_gpus(target: str) -> None:
    script = Path(__file__).parents[1] / "helpers" / "compile_kernels.py"
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    result = subprocess.run([sys.executable, str(script), target], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    assert int(result.stdout.split()[0]) > 20
