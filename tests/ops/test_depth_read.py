"""`depth_read` against the equation written out with loops, its gradients, and its refusals."""

import math

import pytest
import torch

from helpers.compare import assert_close
from mhar.errors import ConfigurationError, InputError
from mhar.ops import depth_read, depth_read_reference


def loops(sources, query, gain, num_heads, eps):
    """The equation of docs/method.md, one scalar at a time: an independent oracle for tiny inputs."""
    count, tokens, width = sources.shape
    size = width // num_heads
    out = torch.zeros(tokens, width, dtype=torch.float64)
    weights = torch.zeros(count, tokens, num_heads, dtype=torch.float64)
    for t in range(tokens):
        for h in range(num_heads):
            channels = range(h * size, (h + 1) * size)
            logits = []
            for n in range(count):
                r = 1 / math.sqrt(sum(float(x) ** 2 for x in sources[n, t]) / width + eps)
                logits.append(sum(float(query[d] * r * sources[n, t, d] * gain[d]) for d in channels))
            exponentials = [math.exp(x - max(logits)) for x in logits]
            for n in range(count):
                weights[n, t, h] = exponentials[n] / sum(exponentials)
                for d in channels:
                    out[t, d] += weights[n, t, h] * sources[n, t, d]
    return out, weights


CASES = [
    pytest.param(1, 3, 12, 4, id="one source: the identity"),
    pytest.param(3, 2, 10, 1, id="one head: attention residuals"),
    pytest.param(5, 3, 15, 5, id="odd sizes"),
    pytest.param(2, 1, 8, 8, id="one channel a head"),
]


def draw(count, tokens, width, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    sources = torch.randn(count, tokens, width, generator=generator, dtype=dtype)
    query = torch.randn(width, generator=generator, dtype=dtype)
    gain = 1 + 0.2 * torch.randn(width, generator=generator, dtype=dtype)
    return sources, query, gain


@pytest.mark.parametrize("count, tokens, width, heads", CASES)
def test_equals_the_equation(count, tokens, width, heads):
    sources, query, gain = draw(count, tokens, width)
    out, weights = depth_read(list(sources), query, gain, num_heads=heads, eps=1e-3, return_weights=True)
    expected_out, expected_weights = loops(sources, query, gain, heads, 1e-3)
    assert_close("out", out, expected_out, 1e-13)
    assert_close("weights", weights, expected_weights, 1e-13)


@pytest.mark.parametrize("count, tokens, width, heads", CASES)
def test_gradcheck(count, tokens, width, heads):
    inputs = [x.requires_grad_() for x in draw(count, tokens, width)]
    assert torch.autograd.gradcheck(lambda *a: depth_read_reference(*a, heads, 1e-6), inputs)


def test_sequence_equals_stacked_and_keeps_leading_shape():
    sources, query, gain = draw(4, 6, 12)
    stacked = depth_read(sources.view(4, 2, 3, 12), query, gain, num_heads=3)
    listed = depth_read([s.view(2, 3, 12) for s in sources], query, gain, num_heads=3)
    assert stacked.shape == (2, 3, 12)
    assert torch.equal(stacked, listed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_dtypes(dtype):
    sources, query, gain = draw(5, 7, 24)
    stored = sources.to(dtype)
    out, weights = depth_read(stored, query, gain, num_heads=4, return_weights=True)
    assert out.dtype == dtype
    assert weights.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    expected, _ = depth_read_reference(stored.double(), query, gain, 4, 1e-6)
    # Statistics and sums are float32 whatever the storage: only the last rounding, half a unit, remains.
    assert_close("out", out, expected, {torch.float64: 1e-15, torch.float32: 2e-7}.get(dtype, torch.finfo(dtype).eps))


def test_zero_query_gives_the_mean():
    sources, query, gain = draw(6, 4, 8)
    out = depth_read(sources, torch.zeros_like(query), gain, num_heads=2)
    assert_close("out", out, sources.mean(0), 1e-15)


def test_statistic_spans_the_full_width():
    """Trap 1 of docs/method.md: normalising after the head split is another function."""
    sources, query, gain = draw(3, 2, 8)
    whole = depth_read(sources, query, gain, num_heads=2)
    per_head = torch.cat(
        [depth_read(sources[..., s], query[s], gain[s], num_heads=1) for s in (slice(0, 4), slice(4, 8))], dim=-1
    )
    assert not torch.allclose(whole, per_head, atol=1e-3)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(num_heads=5), "num_heads 5 for width 12.*near it: 4, 6"),
        (dict(num_heads=0), "num_heads 0 for width 12"),
        (dict(num_heads="4"), "num_heads must be an integer.*'4'"),
        (dict(num_heads=True), "num_heads must be an integer.*True"),
        (dict(eps=-1.0), "eps must be a finite number >= 0, got -1.0"),
        (dict(eps=float("nan")), "eps must be a finite number >= 0, got nan"),
        (dict(sources=torch.tensor(1.0)), r"stacked sources must have the shape \[N, ..., D\], got \[\]"),
        (dict(sources=[]), "at least one source"),
        (dict(query=torch.zeros(11)), r"query must have shape \[12\].*\[11\]"),
        (dict(norm_weight=torch.zeros(12, 1)), r"norm_weight must have shape \[12\].*\[12, 1\]"),
        (dict(sources=[torch.zeros(2, 12), torch.zeros(3, 12)]), r"one shape: source 0 has .*\[2, 12\].*\[3, 12\]"),
        (dict(sources=[torch.zeros(2, 12), torch.zeros(2, 12).half()]), "one dtype: source 0 has .*float32.*float16"),
        (dict(sources=[torch.zeros(2, 12), torch.zeros(2, 12, device="meta")]), "one device: source 0 has .*cpu.*meta"),
        (dict(sources=torch.zeros(2, 12, dtype=torch.int64)), "floating-point.*int64"),
    ],
)
def test_refusals(change, message):
    arguments = {"sources": torch.zeros(2, 3, 12), "query": torch.zeros(12), "norm_weight": torch.ones(12)}
    arguments |= {"num_heads": 4} | change
    with pytest.raises(InputError, match=message):
        depth_read(**arguments)


def test_unknown_backend_suggests_the_nearest():
    with pytest.raises(ConfigurationError, match="'refrence'; did you mean 'reference'"):
        depth_read(torch.zeros(2, 4), torch.zeros(4), torch.ones(4), num_heads=1, backend="refrence")  # type: ignore
