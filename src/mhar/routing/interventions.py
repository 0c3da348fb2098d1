"""Ready-made interventions on routing weights, for `router.intervene(...)`.

Each is a function of (site, weights [N, ..., H]) that returns new weights; none changes the model. Names and indices
are checked against the router when the context is entered.

    with router.intervene(remove_source("embedding"), only_at(["layers.3.mlp"], uniform())):
        model(input_ids)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mhar.errors import InputError, nearest, unknown
from mhar.routing.hooks import Intervention
from mhar.routing.plan import SitePlan


@dataclass(frozen=True, slots=True)
class Change:
    """An intervention that knows what it refers to.

    Attributes:
        name: for tables, such as "remove_source:embedding@final".
        function: (site, weights [N, ..., H]) -> weights.
        sources, heads: what it names; each must exist in the router.
        sites: names or indices where it applies; None: everywhere.
    """

    name: str
    function: Intervention
    sources: tuple[str, ...] = ()
    heads: tuple[int, ...] = ()
    sites: tuple[int | str, ...] | None = None

    def __call__(self, site: SitePlan, weights: Tensor) -> Tensor:
        return self.function(site, weights) if self.sites is None or self._names(site) else weights

    def _names(self, site: SitePlan) -> bool:
        return self.sites is not None and (site.index in self.sites or site.name in self.sites)

    def check(self, plan: Sequence[SitePlan], num_heads: int) -> None:
        """Raise InputError for a site, source or head that the router does not have.

        A source must also be visible at every site that is named, where the change would do nothing otherwise.
        """
        names = [site.name for site in plan if site.source_names]
        for site in self.sites or ():
            known = site in names if isinstance(site, str) else 0 <= site < len(plan) and bool(plan[site].source_names)
            if not known:
                raise InputError(f"{self.name}: no routed site {site!r}{nearest(site, names)}")
        every = {source for site in plan for source in site.source_names}
        for source in self.sources:
            if source not in every:
                raise InputError(f"{self.name}: no source {source!r}{nearest(source, every)}")
            for site in plan:
                if self._names(site) and source not in site.source_names:
                    raise InputError(
                        f"{self.name}: site {site.name} does not see the source {source!r};"
                        f" it sees {', '.join(site.source_names)}"
                    )
        for head in self.heads:
            if not 0 <= head < num_heads:
                raise InputError(f"{self.name}: a routing head must be an index below {num_heads}, got {head}")


def only_at(sites: Sequence[int | str], intervention: Intervention) -> Change:
    """`intervention` at the named sites (indices or names), nothing elsewhere; a restriction it already has stays."""
    if isinstance(intervention, Change):
        change = intervention if intervention.sites is None else replace(intervention, function=intervention)
    else:
        change = Change(getattr(intervention, "__name__", "custom"), intervention)
    return replace(change, name=f"{change.name}@{','.join(map(str, sites))}", sites=tuple(sites))


def uniform() -> Change:
    """Every source with the same weight: what a zero query gives."""
    return Change("uniform", lambda site, weights: torch.full_like(weights, 1.0 / weights.shape[0]))


def one_hot(source: str) -> Change:
    """All weight on one source, at the sites that have it."""

    def function(site: SitePlan, weights: Tensor) -> Tensor:
        if source not in site.source_names:
            return weights
        chosen = torch.zeros_like(weights)
        chosen[site.source_names.index(source)] = 1.0
        return chosen

    return Change(f"one_hot:{source}", function, sources=(source,))


def remove_source(source: str) -> Change:
    """Mask one source out of the softmax, at the sites that have another one.

    Where the source had all the weight (the others' underflowed), the others share it evenly.
    """

    def function(site: SitePlan, weights: Tensor) -> Tensor:
        if source not in site.source_names or len(site.source_names) == 1:
            return weights
        others = torch.ones_like(weights)
        others[site.source_names.index(source)] = 0.0
        kept = weights * others
        kept = torch.where(kept.sum(dim=0) > 0, kept, others)
        return kept / kept.sum(dim=0)

    return Change(f"remove_source:{source}", function, sources=(source,))


def remove_head(head: int) -> Change:
    """Weights of zero for one head: its channels of every read are zero."""

    def function(site: SitePlan, weights: Tensor) -> Tensor:
        kept = weights.clone()
        kept[..., head] = 0.0
        return kept

    return Change(f"remove_head:{head}", function, heads=(head,))


def remove_site(site: int | str) -> Change:
    """Weights of zero at one site: an add read becomes the plain stream, a replace read gives the sublayer zeros."""
    zero = Change("remove_site", lambda site, weights: torch.zeros_like(weights))
    return only_at([site], zero)


def swap_heads(first: int, second: int) -> Change:
    """Exchange the weights of two routing heads."""

    def function(site: SitePlan, weights: Tensor) -> Tensor:
        order = list(range(weights.shape[-1]))
        order[first], order[second] = second, first
        return weights[..., order]

    return Change(f"swap_heads:{first},{second}", function, heads=(first, second))


def freeze(recorded: Mapping[str, Tensor]) -> Change:
    """Recorded weights instead of those that the input gives.

    Args:
        recorded: by site name, [N, H] (the same weights for every token, such as `RoutingMap.mean`) or the full
            [N, ..., H] of one earlier forward pass. Sites that it does not name are left alone.
    """

    def function(site: SitePlan, weights: Tensor) -> Tensor:
        if site.name not in recorded:
            return weights
        kept = recorded[site.name].to(device=weights.device, dtype=weights.dtype)
        if kept.ndim == 2:
            kept = kept.view(kept.shape[0], *(1,) * (weights.ndim - 2), kept.shape[1]).expand_as(weights)
        if kept.shape != weights.shape:
            raise InputError(
                f"the routing recorded at {site.name} has shape {list(kept.shape)}, this read {list(weights.shape)}"
            )
        return kept

    return only_at(tuple(recorded), Change("freeze", function))


def _index(text: str, name: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise InputError(f"{name} needs an index, got {text!r}") from error


def _pair(text: str, name: str) -> tuple[int, int]:
    parts = text.split(",")
    if len(parts) != 2:
        raise InputError(f"{name} needs two heads such as 0,1, got {text!r}")
    return _index(parts[0], name), _index(parts[1], name)


def _site(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def parse_sites(text: str) -> tuple[int | str, ...]:
    """`SITE[,SITE...]`: names, or indices where a site is a number."""
    return tuple(_site(site) for site in text.split(","))


PARSERS: dict[str, Callable[[str], Change]] = {
    "uniform": lambda argument: uniform(),
    "one_hot": one_hot,
    "remove_source": remove_source,
    "remove_head": lambda argument: remove_head(_index(argument, "remove_head")),
    "remove_site": lambda argument: remove_site(_site(argument)),
    "swap_heads": lambda argument: swap_heads(*_pair(argument, "swap_heads")),
}


def parse(text: str) -> Change:
    """An intervention from its name in tables: `NAME[:ARGUMENT][@SITE[,SITE...]]`, sites by name or index.

    >>> parse("remove_source:embedding@layers.3.mlp,final").name
    'remove_source:embedding@layers.3.mlp,final'

    Raises:
        ConfigurationError: an unknown name (the nearest one is suggested).
        InputError: an argument that is missing or no index.
    """
    call, at, sites = text.partition("@")
    name, _, argument = call.partition(":")
    if name not in PARSERS:
        raise unknown("intervention", name, PARSERS)
    if bool(argument) == (name == "uniform"):
        raise InputError(f"{name} takes {'no' if name == 'uniform' else 'an'} argument, got {text!r}")
    change = PARSERS[name](argument)
    if not at:
        return change
    if name == "remove_site":
        raise InputError(f"remove_site names its site as its argument, got {text!r}")
    return only_at(parse_sites(sites), change)
