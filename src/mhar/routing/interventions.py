"""Ready-made interventions on routing weights, for `router.intervene(...)`.

Each maps (site, weights [N, ..., H]) to new weights; none changes the model.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mhar.errors import InputError
from mhar.routing.hooks import Intervention
from mhar.routing.plan import SitePlan


def only_at(sites: Sequence[int | str], intervention: Intervention) -> Intervention:
    """`intervention` at the named sites (indices or names), nothing elsewhere."""
    chosen = set(sites)

    def apply(site: SitePlan, weights: Tensor) -> Tensor:
        return intervention(site, weights) if {site.index, site.name} & chosen else weights

    return apply


def uniform() -> Intervention:
    """Every source with the same weight: what a zero query gives."""
    return lambda site, weights: torch.full_like(weights, 1.0 / weights.shape[0])


def one_hot(source: str) -> Intervention:
    """All weight on one source, at the sites that have it."""

    def apply(site: SitePlan, weights: Tensor) -> Tensor:
        if source not in site.source_names:
            return weights
        chosen = torch.zeros_like(weights)
        chosen[site.source_names.index(source)] = 1.0
        return chosen

    return apply


def remove_source(source: str) -> Intervention:
    """Mask one source out of the softmax, at the sites that have another one."""

    def apply(site: SitePlan, weights: Tensor) -> Tensor:
        if source not in site.source_names or len(site.source_names) == 1:
            return weights
        kept = weights.clone()
        kept[site.source_names.index(source)] = 0.0
        return kept / kept.sum(dim=0, keepdim=True).clamp_min(torch.finfo(kept.dtype).tiny)

    return apply


def swap_heads(first: int, second: int) -> Intervention:
    """Exchange the weights of two routing heads."""

    def apply(site: SitePlan, weights: Tensor) -> Tensor:
        _check_head(first, weights)
        _check_head(second, weights)
        order = list(range(weights.shape[-1]))
        order[first], order[second] = second, first
        return weights[..., order]

    return apply


def _check_head(head: int, weights: Tensor) -> None:
    if not 0 <= head < weights.shape[-1]:
        raise InputError(f"a routing head must be an index below {weights.shape[-1]}, got {head}")
