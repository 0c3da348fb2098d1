"""What a probe computes at one site, as functions of tensors. Definitions: docs/probe.md.

Shapes: N sources, T tokens, S contiguous slices of the width, H routing heads, R random queries.
"""

import torch
from torch import Tensor


def slice_keys(queries: Tensor, norm_weight: Tensor, num_slices: int) -> Tensor:
    """Queries with the key norm's gain folded in, cut in slices: [S, R, P, K] from [R, P, D] and [P, D]."""
    return (queries * norm_weight).float().unflatten(-1, (num_slices, -1)).permute(2, 0, 1, 3).contiguous()


def slice_logits(source: Tensor, squares: Tensor, keys: Tensor, eps: float) -> Tensor:
    """<q_[s], key_[s]> of one source for many queries: [S, R, P, T] from [T, D] and [S, R, P, K].

    `squares` [T] are the sources' squared lengths, which callers need for cosines as well. The keys are normalised over
    the full width, as in the read; summing over S gives the logit of a single head.
    """
    num_slices, sets, rows, width = keys.shape
    values = source.unflatten(-1, (num_slices, -1)).permute(1, 2, 0)
    r = torch.rsqrt(squares / source.shape[-1] + eps)
    return ((keys.view(num_slices, sets * rows, width) @ values) * r).view(num_slices, sets, rows, -1)


def width_disagreement(logits: Tensor) -> Tensor:
    """Mean over slices and tokens of KL(a_s || w), in nats: [2, R] from slice logits [N, S, R, T].

    w is the routing of the whole query, whose logits are the sum over slices. In row 0, a_s is the softmax of slice s's
    own logits (the paper's definition: slices that agree still differ from w, which is S times as sharp); in row 1
    that of S times its logits, which is w itself where all slices agree.
    """
    log_whole = logits.sum(dim=1, keepdim=True).log_softmax(dim=0)
    rows: list[Tensor] = []
    for sharpness in (1, logits.shape[1]):
        log_slice = (sharpness * logits).log_softmax(dim=0)
        rows.append((log_slice.exp() * (log_slice - log_whole)).sum(dim=0).mean(dim=(0, 2)))
    return torch.stack(rows)


def mean_entropy(weights: Tensor) -> Tensor:
    """Entropy over sources, mean over tokens, in nats: [H] from [N, T, H]; 0 log 0 = 0."""
    return torch.xlogy(weights, weights).sum(dim=(0, 1)) / -weights.shape[1]


def head_disagreement(weights: Tensor, entropies: Tensor) -> Tensor:
    """Generalised Jensen-Shannon divergence of the heads, mean over tokens, in nats.

    It is H(mean over heads of w_h) - mean over heads of H(w_h): 0 when all heads route alike, log H at most.

    Args:
        weights: [N, T, H]; entropies: of its heads, as `mean_entropy` gives them, [H].
    """
    return mean_entropy(weights.mean(dim=-1, keepdim=True))[0] - entropies.mean()


def top_source_counts(weights: Tensor) -> Tensor:
    """How often each source has the largest weight: [N, H] from [N, T, H]."""
    num_sources, _, num_heads = weights.shape
    # `max` along a leading dimension is vectorised where `argmax` is not.
    winners = weights.max(dim=0).indices * num_heads + torch.arange(num_heads, device=weights.device)
    return torch.bincount(winners.flatten(), minlength=num_sources * num_heads).view(num_sources, num_heads)


def unit(source: Tensor, squares: Tensor) -> Tensor:
    """Rows of length one, [T, D], from rows and their squared lengths [T]; rows of zeros stay zeros."""
    return source * torch.rsqrt(squares.clamp_min(torch.finfo(source.dtype).tiny)).unsqueeze(-1)


def mean_pairwise_cosine(total: Tensor, selves: Tensor, count: int) -> Tensor:
    """Mean over tokens and over pairs of sources of their cosine.

    Args:
        total: sum of the sources' unit vectors [T, D]; the square of its length is the sum of all cosines.
        selves: the sources that are not zero, [T] (the pairs of a source with itself).
        count: number of sources, at least two.
    """
    return ((total.square().sum(dim=-1) - selves) / (count * (count - 1))).mean()


def matched_random_queries(query: Tensor, num_queries: int, seed: int, num_heads: int) -> Tensor:
    """Random directions with the lengths of the trained queries, head by head: [R, P, D] from [P, D]."""
    generator = torch.Generator().manual_seed(seed)
    heads = query.detach().float().cpu().unflatten(-1, (num_heads, -1))
    directions = torch.randn(num_queries, *heads.shape, generator=generator)
    directions = directions / directions.norm(dim=-1, keepdim=True)
    return (directions * heads.norm(dim=-1, keepdim=True)).flatten(-2).to(query.device)
