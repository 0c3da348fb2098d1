"""The golden operator vectors: the read and its three gradients against long-double numbers."""

import pytest
import torch

from helpers.golden import OPERATORS, largest, operator
from mhar import depth_read

# tests/golden/README.md: bounds relative to each tensor's maximum. Where logits reach 80 the softmax is nearly one-hot
# and float32 gradients are differences of nearly equal numbers.
FLOAT64 = 1e-11
FLOAT32 = 5e-6


def bound(name: str, tensor: str, dtype: torch.dtype) -> float:
    if dtype == torch.float64:
        return FLOAT64
    if name.startswith("ext_logits80") and tensor.startswith("d_"):
        return 1e-3 if name.endswith("_h1") and tensor != "d_sources" else 1e-5
    return FLOAT32


def test_all_vectors_are_here():
    assert len(OPERATORS) == 21


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", OPERATORS)
def test_operator_vector(name, dtype):
    golden, num_heads, eps = operator(name)
    sources, query, gain = (golden[k].to(dtype).requires_grad_() for k in ("sources", "query", "gain"))
    out, weights = depth_read(sources, query, gain, num_heads=num_heads, eps=eps, return_weights=True)
    out.backward(golden["dout"].to(dtype))
    measured = {
        "out": out,
        "weights": weights,
        "d_sources": sources.grad,
        "d_query": query.grad,
        "d_gain": gain.grad,
    }
    for tensor, actual in measured.items():
        expected = golden[tensor]
        scale = float(expected.abs().max()) or 1.0
        error = largest(actual, expected) / scale
        assert error <= bound(name, tensor, dtype), f"{tensor}: {error:.1e} of its maximum"
