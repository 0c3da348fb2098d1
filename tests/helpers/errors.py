"""The one table of error bounds of the fused paths, and the comparison that applies it.

A fused result may be at most RATIOS[name] times as far from float64 as the reference is on the same stored inputs, with
float32 inside and each gradient rounded once. Where the reference's own error is at the level of float32 arithmetic
(FLOAT32_FLOOR), the ratio of two such errors is noise, and the floor is the bound.
"""

import torch
from torch import Tensor

from helpers.compare import relative_error

RATIOS = {"out": 1.1, "weights": 1.1, "query": 1.1, "norm_weight": 1.1, "null_source": 1.1, "gate": 1.1, "sources": 1.2}
FLOAT32_FLOOR = 1e-6


def assert_as_accurate(
    name: str, actual: Tensor, reference: Tensor, exact: Tensor, floor: float = FLOAT32_FLOOR
) -> None:
    """`actual` keeps the bound of `RATIOS[name]`; `reference` is the same in float32, `exact` in float64."""
    assert actual.shape == exact.shape, f"{name}: shape {list(actual.shape)} != {list(exact.shape)}"
    assert actual.dtype == reference.dtype, f"{name}: dtype {actual.dtype} != {reference.dtype}"
    assert torch.isfinite(actual).all(), f"{name}: not finite"
    error, own = relative_error(actual, exact), relative_error(reference, exact)
    bound = max(RATIOS[name] * own, floor)
    assert error <= bound, f"{name}: error {error:.3e} > {bound:.3e} (the reference's own is {own:.3e})"
