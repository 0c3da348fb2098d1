"""The public function for one depth read, and the choice of backend."""

from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from mhar.errors import InputError, unknown
from mhar.ops.reference import depth_read_reference

Backend = Literal["auto", "triton", "reference"]
BACKENDS = ("auto", "triton", "reference")


@overload
def depth_read(
    sources: Sequence[Tensor] | Tensor,
    query: Tensor,
    norm_weight: Tensor,
    *,
    num_heads: int,
    eps: float = ...,
    return_weights: Literal[False] = ...,
    backend: Backend = ...,
) -> Tensor: ...
@overload
def depth_read(
    sources: Sequence[Tensor] | Tensor,
    query: Tensor,
    norm_weight: Tensor,
    *,
    num_heads: int,
    eps: float = ...,
    return_weights: Literal[True],
    backend: Backend = ...,
) -> tuple[Tensor, Tensor]: ...
def depth_read(
    sources: Sequence[Tensor] | Tensor,
    query: Tensor,
    norm_weight: Tensor,
    *,
    num_heads: int,
    eps: float = 1e-6,
    return_weights: bool = False,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Multi-head attention over depth: each head mixes the sources with its own softmax (equations in reference.py).

    Args:
        sources: N tensors [..., D], or one tensor [N, ..., D]. All of one shape, dtype and device.
        query: [D]; head h owns the contiguous channels h*D/H to (h+1)*D/H.
        norm_weight: [D], the gain of the keys' RMSNorm, which is taken over the full width D.
        num_heads: H, a divisor of D. H = 1 is "Attention Residuals" (arXiv 2603.15031).
        eps: added to the mean square of each source; the model's `rms_norm_eps`.
        return_weights: also return the routing weights.
        backend: "reference" (plain PyTorch) or "auto" (the fastest usable one).

    Returns:
        The mixture [..., D] in the sources' dtype; with `return_weights` also the weights [N, ..., H], float32
        (float64 for float64 sources), which sum to one over N.

    Raises:
        InputError: no sources, sources that differ in shape, dtype or device, a query or norm weight that is not [D],
            or a number of heads that does not divide D.
        ConfigurationError: an unknown backend.
    """
    check_read(sources, query, norm_weight, num_heads)
    resolve_backend(backend)
    out, weights = depth_read_reference(sources, query, norm_weight, num_heads, eps)
    return (out, weights) if return_weights else out


def resolve_backend(backend: str) -> Backend:
    """ "auto" or a named backend -> the backend to use; raises ConfigurationError for a name that does not exist."""
    if backend not in BACKENDS:
        raise unknown("backend", backend, BACKENDS)
    return "reference"


def check_heads(width: int, num_heads: int) -> None:
    """Raise InputError unless `num_heads` is a positive divisor of `width`."""
    if not isinstance(num_heads, int) or num_heads < 1 or width % num_heads:
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


def check_read(sources: Sequence[Tensor] | Tensor, query: Tensor, norm_weight: Tensor, num_heads: int) -> None:
    """Raise InputError unless the arguments of one read fit together."""
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
