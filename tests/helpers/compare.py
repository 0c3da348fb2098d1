"""Comparison of tensors that names the one that differs."""

import torch
from torch import Tensor


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected| in the Frobenius norm, in float64; the plain norm where expected is zero."""
    actual, expected = actual.detach().double(), expected.detach().double()
    difference, scale = (actual - expected).norm(), expected.norm()
    return float(difference / scale) if scale > 0 else float(difference)


def assert_close(name: str, actual: Tensor, expected: Tensor, bound: float) -> None:
    """Relative error at most `bound`; the failure names the tensor, its relative and its largest error."""
    assert actual.shape == expected.shape, f"{name}: shape {list(actual.shape)} != {list(expected.shape)}"
    assert torch.isfinite(actual).all(), f"{name}: not finite"
    error = relative_error(actual, expected)
    largest = float((actual.detach().double() - expected.detach().double()).abs().max()) if actual.numel() else 0.0
    assert error <= bound, f"{name}: relative error {error:.2e} > {bound:.2e} (largest difference {largest:.2e})"
