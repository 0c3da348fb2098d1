"""The probe: what the routing of a trained model does, in one pass over some text and constant memory.

Definitions are those of "Multi-Head Attention Residuals" (arXiv 2607.27230), written out in docs/probe.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mhar.analysis import measures
from mhar.analysis.routing_map import RoutingMap
from mhar.errors import InputError
from mhar.routing.hooks import SiteRead
from mhar.routing.plan import NULL, PARTIAL
from mhar.routing.router import DepthRouter

DEFAULT_SLICES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSettings:
    """What is measured.

    Attributes:
        num_slices: S, contiguous slices of a single-head query.
        num_null_queries: R, random queries of matched norm, averaged.
        token_stride: mean weights use all tokens, everything else every `token_stride`-th, which keeps the cost of a
            probe within a tenth or so of a forward pass.
        seed: of the random queries.
    """

    num_slices: int = DEFAULT_SLICES
    num_null_queries: int = 1
    token_stride: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_slices", "num_null_queries", "token_stride"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be a positive integer, got {getattr(self, name)}")
        if self.seed < 0:
            raise InputError(f"seed must not be negative, got {self.seed}")


@dataclass(slots=True)
class SiteSums:
    """Running sums of one site over the sampled tokens; tensors stay on the model's device until they are read."""

    num_tokens: int = 0
    entropy: Tensor | float = 0.0
    top_counts: Tensor | float = 0.0
    head_disagreement: Tensor | float = 0.0
    disagreement: Tensor | float = 0.0
    collinearity: Tensor | float = 0.0
    null_weights: Tensor | float = 0.0
    null_head_disagreement: Tensor | float = 0.0


@dataclass(slots=True)
class _Pass:
    """What one forward pass has computed so far; dropped when the next one starts."""

    last_site: int = -1
    logits: dict[str, tuple[int, Tensor]] = field(default_factory=dict[str, tuple[int, Tensor]])
    units: Tensor | float = 0.0
    selves: Tensor | float = 0.0

    def add_unit(self, unit: Tensor, is_nonzero: Tensor) -> None:
        self.units = self.units + unit
        self.selves = self.selves + is_nonzero.float()


def find_router(model: nn.Module) -> DepthRouter:
    """The depth router of a model.

    Raises:
        InputError: no router, one that routes nothing (the additive baseline), or several.
    """
    routers = [module for module in model.modules() if isinstance(module, DepthRouter)]
    if len(routers) != 1:
        raise InputError(f"a probe needs a model with one depth router, {type(model).__name__} has {len(routers)}")
    if routers[0].query is None:
        raise InputError(f"the model has no depth routing to probe: its variant is {routers[0].config.name!r}")
    return routers[0]


class Probe:
    """An observer that measures a router's reads; `result()` may be asked for at any time.

    >>> probe = Probe(router)
    >>> with router.observe(probe):
    ...     for input_ids in batches:
    ...         model(input_ids)

    Queries are read once, at the start: the model must not be trained meanwhile.
    """

    def __init__(self, router: DepthRouter, settings: ProbeSettings | None = None) -> None:
        self.router = router
        self.settings = settings or ProbeSettings()
        self.num_heads = router.num_heads
        self.num_slices = self.settings.num_slices if self.num_heads == 1 else self.num_heads
        if router.width % self.num_slices:
            raise InputError(f"num_slices must divide the width {router.width}, got {self.num_slices}")
        self.halves = (RoutingMap(), RoutingMap())
        self.sums: dict[str, SiteSums] = {}
        self.num_batches = 0
        self._pass = _Pass()
        self._keys = self._make_keys()

    def _make_keys(self) -> Tensor:
        """[S, sets, P, K]: the trained query first where slices are compared with it, then the random ones."""
        query, gain = self.router.query, self.router.norm_weight
        assert query is not None
        assert gain is not None
        queries = measures.matched_random_queries(
            query, self.settings.num_null_queries, self.settings.seed, self.num_heads
        )
        if self.num_heads == 1:
            queries = torch.cat((query.detach().float()[None], queries))
        return measures.slice_keys(queries, gain.detach().float(), self.num_slices)

    @torch.no_grad()
    def __call__(self, read: SiteRead) -> None:
        """Measure one read."""
        if read.site <= self._pass.last_site or not self.num_batches:
            self._pass = _Pass()
            self.num_batches += 1
        self._pass.last_site = read.site
        self.halves[self.num_batches % 2](read)
        sums = self.sums.setdefault(read.name, SiteSums())
        self._add_sources(read)
        if len(read.source_names) > 1:
            self._add_weights(read, sums)
            self._add_logits(read, sums)
            self._add_collinearity(read, sums)

    def _sample(self, tensor: Tensor, lead: int) -> Tensor:
        """Every `token_stride`-th token of [*lead, ..., C], tokens flattened."""
        flat = tensor.flatten(lead, -2)
        stride = min(self.settings.token_stride, flat.shape[lead])
        return flat if stride == 1 else flat[(slice(None),) * lead + (slice(self.num_batches % stride, None, stride),)]

    def _add_sources(self, read: SiteRead) -> None:
        """Logits of every later site for the sources that are new in this pass: one product per source."""
        for name, source in zip(read.source_names, read.sources, strict=True):
            if name in (NULL, PARTIAL) or name in self._pass.logits:
                continue
            values = self._sample(source, 0).float()
            squares = values.square().sum(dim=-1)
            first_row = self._row(read)
            logits = measures.slice_logits(values, squares, self._keys[:, :, first_row:].contiguous(), self.router.eps)
            self._pass.logits[name] = (first_row, logits)
            self._pass.add_unit(measures.unit(values, squares), squares > 0)

    def _row(self, read: SiteRead) -> int:
        row = self.router.site_rows[read.site]
        assert row is not None
        return row

    def _logits(self, read: SiteRead) -> Tensor:
        """[N, S, sets, T] of this site's queries."""
        row = self._row(read)
        parts: list[Tensor] = []
        for name, source in zip(read.source_names, read.sources, strict=True):
            if name in self._pass.logits:
                first, logits = self._pass.logits[name]
                parts.append(logits[:, :, row - first])
            else:
                values = self._sample(source, 0).float()
                keys = self._keys[:, :, row : row + 1].contiguous()
                squares = values.square().sum(dim=-1)
                parts.append(measures.slice_logits(values, squares, keys, self.router.eps)[:, :, 0])
        return torch.stack(parts)

    def _add_logits(self, read: SiteRead, sums: SiteSums) -> None:
        logits = self._logits(read)
        num_tokens = logits.shape[-1]
        if self.num_heads == 1:
            sums.disagreement = sums.disagreement + num_tokens * measures.width_disagreement(logits)
            return
        # [N, S = H, R, T] -> the weights that random queries of the same norms would give.
        weights = logits.softmax(dim=0)
        sums.null_weights = sums.null_weights + weights.sum(dim=-1).mean(dim=-1)
        by_head = weights.flatten(2).transpose(1, 2)
        null = measures.head_disagreement(by_head, measures.mean_entropy(by_head))
        sums.null_head_disagreement = sums.null_head_disagreement + num_tokens * null

    def _add_weights(self, read: SiteRead, sums: SiteSums) -> None:
        weights = self._sample(read.weights, 1)
        entropies = measures.mean_entropy(weights)
        sums.num_tokens += weights.shape[1]
        sums.entropy = sums.entropy + weights.shape[1] * entropies
        sums.top_counts = sums.top_counts + measures.top_source_counts(weights)
        if self.num_heads > 1:
            disagreement = measures.head_disagreement(weights, entropies)
            sums.head_disagreement = sums.head_disagreement + weights.shape[1] * disagreement

    def _add_collinearity(self, read: SiteRead, sums: SiteSums) -> None:
        total, selves = self._pass.units, self._pass.selves
        count = sum(name != NULL for name in read.source_names)
        if read.source_names[-1] == PARTIAL:
            values = self._sample(read.sources[-1], 0).float()
            squares = values.square().sum(dim=-1)
            total, selves = total + measures.unit(values, squares), selves + (squares > 0).float()
        if count > 1:
            assert isinstance(total, Tensor)
            assert isinstance(selves, Tensor)
            sums.collinearity = sums.collinearity + len(selves) * measures.mean_pairwise_cosine(total, selves, count)

    def result(self) -> "dict[str, Any]":
        """Everything measured, as plain values; see `mhar.analysis.probe_result`."""
        from mhar.analysis.probe_result import summarise

        return summarise(self)


def observe_all(model: nn.Module, observers: Sequence[Any], batches: Any) -> None:
    """Run `batches` of token ids [B, T] through `model`, once, under the observers of its router."""
    router = find_router(model)
    with torch.inference_mode(), router.hooks.registered(observers=tuple(observers)):
        for input_ids in batches:
            model(input_ids=input_ids, use_cache=False)
