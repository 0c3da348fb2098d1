"""The public function for one depth read."""

from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from mhar.ops.backend import Backend, resolve_backend
from mhar.ops.checks import check_heads, check_read
from mhar.ops.operators import depth_read_operator
from mhar.ops.reference import depth_read_reference

__all__ = ["Backend", "check_heads", "depth_read", "resolve_backend"]


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

    The Triton kernels read each source once, without stacking a sequence (sources that are not contiguous are copied),
    and keep for backward only `out` in float32 and two numbers per token and head; under no_grad, nothing. Their
    results are equal bit for bit from run to run.

    Args:
        sources: N tensors [..., D], or one tensor [N, ..., D]. All of one shape, dtype and device.
        query: [D]; head h owns the contiguous channels h*D/H to (h+1)*D/H.
        norm_weight: [D], the gain of the keys' RMSNorm, which is taken over the full width D.
        num_heads: H, a divisor of D. H = 1 is "Attention Residuals" (arXiv 2603.15031).
        eps: added to the mean square of each source; the model's `rms_norm_eps`.
        return_weights: also return the routing weights, from the same pass; they are differentiable.
        backend: "reference" (plain PyTorch), "triton" (float32, float16 or bfloat16 of width up to 12288 on a GPU; no
            second derivative) or "auto" ("triton" for GPU tensors that it can take, else "reference").

    Returns:
        The mixture [..., D] in the sources' dtype; with `return_weights` also the weights [N, ..., H], float32
        (float64 for float64 sources), which sum to one over N.

    Raises:
        InputError: no sources, sources that differ in shape, dtype or device, a query or norm weight that is not [D],
            a number of heads that does not divide D, or an eps that is not a finite number >= 0.
        ConfigurationError: an unknown backend.
        BackendError: backend="triton" where it cannot run (the message says why), or a second derivative through it.
    """
    check_read(sources, query, norm_weight, num_heads, eps)
    if resolve_backend(backend, sources[0]) == "reference":
        out, weights = depth_read_reference(sources, query, norm_weight, num_heads, eps)
    else:
        out, weights = _depth_read_triton(sources, query, norm_weight, num_heads, eps, return_weights)
    return (out, weights) if return_weights else out


def _depth_read_triton(
    sources: Sequence[Tensor] | Tensor,
    query: Tensor,
    norm_weight: Tensor,
    num_heads: int,
    eps: float,
    return_weights: bool,
) -> tuple[Tensor, Tensor]:
    stacked = isinstance(sources, Tensor)
    rows = [sources] if stacked else list(sources)
    save = torch.is_grad_enabled() and any(t.requires_grad for t in (*rows, query, norm_weight))
    out, _, _, weights = depth_read_operator(
        rows, query, norm_weight, num_heads, float(eps), stacked, save, return_weights
    )
    return out, weights.view(-1, *out.shape[:-1], num_heads) if return_weights else weights
