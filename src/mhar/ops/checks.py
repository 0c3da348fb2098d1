"""What the arguments of one read must satisfy."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mhar.errors import InputError


def check_heads(width: int, num_heads: int) -> None:
    """Raise InputError unless `num_heads` is a positive divisor of `width`."""
    if not isinstance(num_heads, int) or isinstance(num_heads, bool):
        raise InputError(f"num_heads must be an integer that divides the width {width}, got {num_heads!r}")
    if num_heads < 1 or width % num_heads:
        raise InputError(
            f"num_heads must divide the width: got num_heads {num_heads!r} for width {width}"
            f" (divisors near it: {', '.join(map(str, nearest_divisors(width, num_heads)))})"
        )


def nearest_divisors(width: int, num_heads: int) -> list[int]:
    """The closest divisors of `width` below and above `num_heads`."""
    divisors = [d for d in range(1, width + 1) if width % d == 0]
    below = [d for d in divisors if d <= num_heads][-1:]
    above = [d for d in divisors if d > num_heads][:1]
    return below + above


def check_read(
    sources: Sequence[Tensor] | Tensor, query: Tensor, norm_weight: Tensor, num_heads: int, eps: float
) -> None:
    """Raise InputError unless the arguments of one read fit together."""
    if not isinstance(eps, (int, float)) or not 0 <= eps < math.inf:
        raise InputError(f"eps must be a finite number >= 0, got {eps!r}")
    if isinstance(sources, Tensor) and sources.ndim < 2:
        raise InputError(f"stacked sources must have the shape [N, ..., D], got {list(sources.shape)}")
    if len(sources) == 0:
        raise InputError("a read needs at least one source, got none")
    first = sources[0]
    if first.ndim == 0 or not first.is_floating_point():
        raise InputError(f"sources must be floating-point tensors [..., D], got {first.dtype} {list(first.shape)}")
    if not isinstance(sources, Tensor):
        check_alike(sources)
    width = first.shape[-1]
    for name, parameter in (("query", query), ("norm_weight", norm_weight)):
        if parameter.shape != (width,):
            raise InputError(f"{name} must have shape [{width}] like the sources' width, got {list(parameter.shape)}")
        if parameter.device != first.device:
            raise InputError(f"{name} must be on the sources' device {first.device}, got {parameter.device}")
    check_heads(width, num_heads)


def check_alike(sources: Sequence[Tensor]) -> None:
    """Raise InputError unless all sources share one shape, dtype and device."""
    first = sources[0]
    for index, source in enumerate(sources):
        for what in ("shape", "dtype", "device"):
            expected, received = getattr(first, what), getattr(source, what)
            if expected != received:
                a, b = (list(x) if isinstance(x, torch.Size) else x for x in (expected, received))
                raise InputError(
                    f"all sources of a read must have one {what}: source 0 has {a}, source {index} has {b}"
                )
