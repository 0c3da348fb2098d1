"""The depth read as the paper writes it. Every faster path is checked against this file.

Luo, Cai, Hu, "Multi-Head Attention Residuals" (arXiv 2607.27230). With N sources v_n [..., D], one query q [D], one
key-norm weight g [D] and H heads that own K = D / H contiguous channels each:

    r_n      = rsqrt(mean over all D of v_n^2 + eps)      one statistic per source row, over the full width
    l[n,h]   = < q_h, (r_n * v_n * g)_h >                 no 1/sqrt(K), no bias
    w[:,h]   = softmax over n
    out_h    = sum over n of w[n,h] * v_n,h               values are not normalised
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def routing_logits(sources: Tensor, query: Tensor, norm_weight: Tensor, num_heads: int, eps: float) -> Tensor:
    """l: [N, ..., H] from sources [N, ..., D], query [D] and norm_weight [D], in the sources' dtype."""
    r = torch.rsqrt(sources.square().mean(dim=-1, keepdim=True) + eps)
    keys = r * sources * norm_weight
    return (keys * query).unflatten(-1, (num_heads, -1)).sum(dim=-1)


def mix(sources: Tensor, weights: Tensor) -> Tensor:
    """out: [..., D] from sources [N, ..., D] and weights [N, ..., H]."""
    values = sources.unflatten(-1, (weights.shape[-1], -1))
    return (weights.unsqueeze(-1) * values).sum(dim=0).flatten(-2)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics, logits, softmax and sums: float64 for float64 sources, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def depth_read_reference(
    sources: Sequence[Tensor] | Tensor, query: Tensor, norm_weight: Tensor, num_heads: int, eps: float
) -> tuple[Tensor, Tensor]:
    """One read: (out [..., D] in the sources' dtype, weights [N, ..., H] in float32, or float64 for float64 sources).

    Shapes are those of :func:`mhar.ops.depth_read`, which checks them; this function does not.
    """
    stacked = sources if isinstance(sources, Tensor) else torch.stack(tuple(sources))
    dtype = compute_dtype(stacked.dtype)
    v, q, g = stacked.to(dtype), query.to(dtype), norm_weight.to(dtype)
    weights = routing_logits(v, q, g, num_heads, eps).softmax(dim=0)
    return mix(v, weights).to(stacked.dtype), weights
