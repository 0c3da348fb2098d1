"""The one-read Triton kernels against float64: output, weights and every gradient, on CPU (interpreter) or GPU."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from helpers.compare import relative_error
from helpers.errors import FLOAT32_FLOOR, assert_as_accurate
from helpers.reads import ReadInputs, draw_read, read_results
from mhar.ops import depth_read, depth_read_reference
from mhar.ops.triton.single import Tiling, steps_per_program

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def triton_read(sources, query, norm_weight, num_heads, eps):
    return depth_read(sources, query, norm_weight, num_heads=num_heads, eps=eps, return_weights=True, backend="triton")


def check(inputs: ReadInputs, *, stacked=False, weights=False, floor=FLOAT32_FLOOR):
    """Every result of the Triton read keeps the table's bound; returns them."""
    results = read_results(triton_read, inputs, stacked=stacked, weights=weights)
    reference = read_results(depth_read_reference, inputs, stacked=stacked, weights=weights)
    exact = read_results(depth_read_reference, inputs.double(), stacked=stacked, weights=weights)
    for name, tensor in results.items():
        assert_as_accurate(name, tensor, reference[name], exact[name], floor)
    return results


CASES = [
    pytest.param(5, (2, 3), 48, 4, F32, id="float32"),
    pytest.param(5, (2, 3), 48, 4, F16, id="float16"),
    pytest.param(5, (2, 3), 48, 4, BF16, id="bfloat16"),
    pytest.param(1, (3,), 40, 5, BF16, id="one source"),
    pytest.param(3, (), 24, 3, BF16, id="no leading dimension"),
    pytest.param(3, (1, 1), 8, 1, BF16, id="smallest width, one token"),
    pytest.param(2, (5,), 320, 2, BF16, id="K=160: five tiles"),
    pytest.param(2, (63,), 24, 2, BF16, id="63 tokens: the last program is not full"),
    pytest.param(4, (5,), 216, 3, BF16, id="K=72, three heads: padded both ways"),
    pytest.param(4, (7,), 60, 3, F32, id="K=20, rows not aligned to 16 bytes"),
    pytest.param(3, (2,), 1000, 1, BF16, id="D=1000, one head"),
    pytest.param(3, (4,), 31, 31, F32, id="one channel a head, prime width"),
    pytest.param(2, (2,), 8192, 64, BF16, id="D=8192"),
    pytest.param(3, (2,), 12288, 8, BF16, id="the widest row"),
    pytest.param(2, (4097,), 8, 2, BF16, id="4097 tokens"),
    pytest.param(200, (2,), 16, 2, BF16, id="200 sources: seven pieces of the address table"),
    pytest.param(32, (2,), 16, 2, F32, id="32 sources: exactly one piece"),
]


@pytest.mark.parametrize("count, shape, width, heads, dtype", CASES)
def test_errors_against_float64(count, shape, width, heads, dtype, device):
    check(draw_read(count, shape, width, heads, dtype, device=device))


@pytest.mark.parametrize("parameter_dtype", [BF16, F16])
def test_parameters_of_another_dtype(parameter_dtype, device):
    check(draw_read(4, (6,), 48, 2, BF16, parameter_dtype=parameter_dtype, device=device))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_weights_are_differentiable(dtype, device):
    check(draw_read(6, (3, 2), 40, 4, dtype, device=device), weights=True)


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_similar_sources_need_an_exact_coupling_term(dtype, device):
    """dl = w (dw - c) cancels where sources are alike: <dout, out> from a rounded out misses by orders of magnitude."""
    inputs = draw_read(9, (16,), 64, 2, dtype, spread=0.1, device=device)
    exact = read_results(depth_read_reference, inputs.double())
    rounded = coupling_error(inputs, exact, exact["out"].to(dtype).double())
    # The cancellation multiplies float32's own rounding too: the floor is 16 units of it in the coupling term's sum.
    floor = 16 * coupling_error(inputs, exact, exact["out"].float().double())
    results = check(inputs, floor=max(floor, FLOAT32_FLOOR))
    assert relative_error(results["query"], exact["query"]) < rounded / 100


def coupling_error(inputs: ReadInputs, exact: dict, out: torch.Tensor) -> float:
    """Relative error of dquery in float64 when the coupling term is taken from this `out`."""
    x = inputs.double()
    v = torch.stack(x.sources).unflatten(-1, (x.num_heads, -1))
    dout = x.dout.unflatten(-1, (x.num_heads, -1))
    dw = (v * dout).sum(-1)
    c = (dout * out.unflatten(-1, (x.num_heads, -1))).sum(-1)
    dl = exact["weights"] * (dw - c)
    r = torch.rsqrt(torch.stack(x.sources).square().mean(-1) + x.eps)
    dkey = ((r.unsqueeze(-1) * dl).unsqueeze(-1) * v).flatten(-2).sum((0, 1))
    return relative_error(dkey * x.norm_weight, exact["query"])


def test_stacked_equals_sequence(device):
    inputs = draw_read(5, (2, 3), 48, 4, BF16, device=device)
    listed, stacked = check(inputs), check(inputs, stacked=True)
    for name, tensor in listed.items():
        assert torch.equal(tensor, stacked[name]), name


def test_bitwise_equal_run_to_run(device):
    inputs = draw_read(4, (67,), 24, 3, BF16, device=device)
    first, second = (read_results(triton_read, inputs, weights=True) for _ in range(2))
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def test_not_contiguous_sources(device):
    inputs = draw_read(3, (4, 5), 24, 2, BF16, device=device)
    expected = read_results(triton_read, inputs)
    strided = [s.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for s in inputs.sources]
    assert not strided[0].is_contiguous()
    query = inputs.query.repeat_interleave(2)[::2]
    out, _ = triton_read(strided, query, inputs.norm_weight, 2, 1e-6)
    out.backward(inputs.dout.transpose(0, 1).contiguous().transpose(0, 1))
    assert torch.equal(out, expected["out"])
    assert torch.equal(torch.stack([s.grad for s in strided]), expected["sources"])


def test_sources_at_odd_addresses(device):
    """Rows that start off a 16-byte boundary take the unaligned path."""
    inputs = draw_read(3, (4,), 32, 2, BF16, device=device)
    buffer = torch.zeros(4 * 32 + 1, dtype=BF16, device=device)
    shifted = buffer[1:].view(4, 32)
    shifted.copy_(inputs.sources[1])
    out, _ = triton_read([inputs.sources[0], shifted, inputs.sources[2]], inputs.query, inputs.norm_weight, 2, 1e-6)
    assert torch.equal(out, triton_read(inputs.sources, inputs.query, inputs.norm_weight, 2, 1e-6)[0])


def test_same_tensor_twice_and_expanded_source(device):
    """A tensor that is two sources gets both gradients; an expanded one (a null source) the sum over its tokens."""
    inputs = draw_read(2, (6,), 24, 2, F32, device=device)
    grads = []
    for backend in ("triton", "reference"):
        x = inputs.sources[0].clone().requires_grad_()
        null = inputs.sources[1][0].clone().requires_grad_()
        sources = [null.expand(6, 24), x, x]
        out = depth_read(sources, inputs.query, inputs.norm_weight, num_heads=2, backend=backend)
        out.backward(inputs.dout)
        grads.append((x.grad, null.grad))
    for ours, reference in zip(*grads, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-6)


def test_eps_of_zero(device):
    """Positions past the last token, whose mean square is zero, must not reach the query's gradient."""
    check(replace(draw_read(3, (5,), 8, 2, F32, device=device), eps=0.0))


def test_zero_tokens(device):
    sources = [torch.empty(0, 16, device=device, dtype=BF16, requires_grad=True) for _ in range(3)]
    query = torch.zeros(16, device=device, requires_grad=True)
    out = depth_read(sources, query, torch.ones(16, device=device), num_heads=2, backend="triton")
    out.sum().backward()
    assert out.shape == (0, 16)
    assert torch.equal(query.grad, torch.zeros_like(query))


def golden_cases(folder):
    return json.loads((folder / "golden" / "ops" / "index.json").read_text())


def test_golden_operator_vectors(shared_data, device):
    folder = shared_data / "golden" / "ops"
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) >= 21
    for file in files:
        with safe_open(file, "pt") as data:
            case = {name: data.get_tensor(name) for name in data.keys()}  # noqa: SIM118 (not a dict)
            heads, eps = int(data.metadata()["num_heads"]), float(data.metadata()["eps"])
        inputs = ReadInputs(
            tuple(case["sources"].float().to(device)), *(case[n].float().to(device) for n in ("query", "gain", "dout")),
            dweights=torch.zeros(()), num_heads=heads, eps=eps,
        )  # fmt: skip
        results = read_results(triton_read, inputs)
        extreme = file.stem.startswith("ext_logits80")
        for name, key, bound in (
            ("out", "out", 5e-6),
            ("weights", "weights", 5e-6),
            ("sources", "d_sources", 1e-5 if extreme else 5e-6),
            ("query", "d_query", 1e-3 if extreme else 5e-6),
            ("norm_weight", "d_gain", 1e-3 if extreme else 5e-6),
        ):
            difference = (results[name].double().cpu() - case[key]).abs().max()
            assert difference <= bound * case[key].abs().max() + 1e-12, f"{file.stem}: {name} is {difference:.2e} off"


@st.composite
def reads(draw):
    heads = draw(st.integers(1, 9))
    size = draw(st.integers(max(1, -(-8 // heads)), 40))
    return {
        "count": draw(st.integers(1, 12)),
        "shape": tuple(draw(st.lists(st.integers(1, 5), min_size=0, max_size=2))),
        "width": heads * size,
        "num_heads": heads,
        "dtype": draw(st.sampled_from([F32, F16, BF16])),
        "parameter_dtype": draw(st.sampled_from([F32, BF16])),
        "seed": draw(st.integers(0, 1000)),
    }


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(reads(), st.booleans(), st.booleans())
def test_any_shape(device, case, stacked, weights):
    # A rounded 16-bit result of few elements may lie on either side of a tie: one such flip is within the floor.
    check(draw_read(**case, device=device), stacked=stacked, weights=weights, floor=2e-6)


@pytest.mark.parametrize("width, heads", [(w, h) for w in (8, 20, 72, 512, 1000, 1280, 4096, 12288) for h in (1, 4)])
def test_tiling_covers_the_row(width, heads):
    t = Tiling.of(width, heads)
    assert t.H2 >= t.H
    assert t.KT * t.NT >= t.K
    assert t.KT * t.NT <= 1.25 * t.K or t.KT <= 8, "padding wastes registers"
    assert 1 <= t.num_warps <= 16


def test_programs_keep_partial_sums_short():
    assert steps_per_program(1) == 1
    assert steps_per_program(4096) == 4
    assert steps_per_program(1 << 20) == 16
