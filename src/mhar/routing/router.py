"""`DepthRouter`: the routing parameters of a whole model, and the start of a forward pass."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from mhar.errors import ConfigurationError, InputError
from mhar.ops.functional import Backend, check_heads, resolve_backend
from mhar.ops.kernel_cache import KernelCache
from mhar.ops.schedule import Schedule, check_schedule
from mhar.routing.config import RoutingConfig, check_count, check_eps
from mhar.routing.history import DepthHistory
from mhar.routing.hooks import Hooks, Intervention, Observer
from mhar.routing.interventions import Change
from mhar.routing.plan import SitePlan, routing_plan


class DepthRouter(nn.Module):
    """Multi-head depth routing for any model (docs/method.md; Luo, Cai, Hu, arXiv 2607.27230).

    Args:
        num_sites: reads of one forward pass: one before each sublayer plus the final one (2L + 1 for L layers).
        width: D, channels of a source.
        num_heads: routing heads H, a divisor of D; the paper's default is the number of key-value heads. None takes
            the number in `config`.
        eps: of the keys' RMSNorm; the model's `rms_norm_eps`.
        config: what is routed, or the name of a variant; "mhar" by default. The baseline has no heads: `num_heads` does
            not matter there.
        backend: "auto", "triton" or "reference", as in :func:`mhar.ops.depth_read`.
        schedule: which sites share a pass over the history in the Triton backend: "auto", "dense" (none) or the length
            of a block of sites, 1 to 16. The function is the same.

    Parameters (P counts the sites that own parameters, `site_rows` maps a site to its row or None):
        query [P, D]: zeros, so that every site starts as the mean of its sources.
        norm_weight [P, D]: ones.
        gate [P]: zeros (with `gate="scalar"`), so that a converted model starts as it was.
        null_source [P, D]: zeros (with `null_source=True`).
    """

    query: nn.Parameter | None
    norm_weight: nn.Parameter | None
    gate: nn.Parameter | None
    null_source: nn.Parameter | None

    def __init__(
        self,
        num_sites: int,
        width: int,
        num_heads: int | None = None,
        *,
        eps: float = 1e-6,
        config: RoutingConfig | str | None = None,
        backend: Backend = "auto",
        schedule: Schedule = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_count("width", width)
        config = "mhar" if config is None else config
        self.config = RoutingConfig.named(config) if isinstance(config, str) else config
        self.num_heads = _resolve_heads(num_heads, self.config)
        check_heads(width, self.num_heads)
        resolve_backend(backend)
        self.num_sites, self.width, self.eps = num_sites, width, check_eps(eps)
        self.backend: Backend = backend
        check_schedule(schedule)
        self.schedule: Schedule = schedule
        self.kernels = KernelCache()
        self.tuning: Any = None  # ops.triton.tuning.Tuning; None takes the table's
        self.plan: tuple[SitePlan, ...] = routing_plan(self.config, num_sites)
        self.site_rows: tuple[int | None, ...] = tuple(site.row for site in self.plan)
        rows = sum(row is not None for row in self.site_rows)
        shapes: dict[str, tuple[int, ...]] = {"query": (rows, width), "norm_weight": (rows, width)} if rows else {}
        if rows and self.config.gate == "scalar":
            shapes["gate"] = (rows,)
        if rows and self.config.null_source:
            shapes["null_source"] = (rows, width)
        for name in ("query", "norm_weight", "gate", "null_source"):
            tensor = torch.empty(shapes[name], device=device, dtype=dtype) if name in shapes else None
            self.register_parameter(name, None if tensor is None else nn.Parameter(tensor))
        self.hooks = Hooks()
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Zero queries, gates and null sources; gains of one."""
        for name, parameter in self.named_parameters(recurse=False):
            parameter.fill_(1.0 if name == "norm_weight" else 0.0)

    def start(self, embedding: Tensor) -> DepthHistory:
        """Begin one forward pass from source 0, the embedding [..., D]. Each pass has a history of its own."""
        if embedding.ndim == 0 or embedding.shape[-1] != self.width or not embedding.is_floating_point():
            raise InputError(
                f"the embedding must be a floating-point tensor [..., {self.width}],"
                f" got {embedding.dtype} {list(embedding.shape)}"
            )
        if self.query is not None and self.query.device != embedding.device:
            raise InputError(
                f"the embedding must be on the router's device {self.query.device}, got {embedding.device}"
            )
        return DepthHistory(self, embedding)

    @contextmanager
    def observe(self, callback: Observer) -> Generator[Self]:
        """Call `callback(SiteRead)` at every read of the histories that this thread starts inside the context."""
        with self.hooks.registered(observers=(callback,)):
            yield self

    @contextmanager
    def intervene(self, *interventions: Intervention) -> Generator[Self]:
        """Change the routing weights of the histories that this thread starts inside the context.

        Each intervention maps (SitePlan, weights [N, ..., H]) to new weights of the same shape; several apply in
        order. Ready-made ones are in :mod:`mhar.routing.interventions`; they raise InputError here for a site, source
        or head that this router does not have. Observers see the changed weights.
        """
        for intervention in interventions:
            if isinstance(intervention, Change):
                intervention.check(self.plan, self.num_heads)
        with self.hooks.registered(interventions=interventions):
            yield self

    def site_index(self, site: int | str) -> int:
        """A site's index from its index or name; raises InputError for one that does not exist."""
        return site_index(self.plan, site)

    def extra_repr(self) -> str:
        return (
            f"num_sites={self.num_sites}, width={self.width}, num_heads={self.num_heads}, eps={self.eps},"
            f" variant={self.config.name!r}, backend={self.backend!r}"
        )


def _resolve_heads(num_heads: int | None, config: RoutingConfig) -> int:
    if config.read == "none":
        return 1
    heads = config.num_heads if num_heads is None else num_heads
    if heads == "kv":
        raise ConfigurationError(
            'num_heads "kv" can only be resolved by a model; give DepthRouter the number of key-value heads'
        )
    return heads


def site_index(plan: Sequence[SitePlan], site: int | str) -> int:
    """Index of `site` (an index from 0, or a name such as "layers.0.mlp") in `plan`."""
    names = [p.name for p in plan]
    if isinstance(site, str) and site in names:
        return names.index(site)
    if isinstance(site, int) and 0 <= site < len(plan):
        return site
    raise InputError(f"a site must be an index below {len(plan)} or one of {', '.join(names)}; got {site!r}")
