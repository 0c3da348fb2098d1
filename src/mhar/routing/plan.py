"""Which sources each routing site sees, and which sites own parameters. Pure Python: no tensors."""

from dataclasses import dataclass

from mhar.errors import ConfigurationError
from mhar.routing.config import RoutingConfig, check_count

NULL = "null"
PARTIAL = "partial"
EMBEDDING = "embedding"


@dataclass(frozen=True, slots=True)
class SitePlan:
    """One read.

    Attributes:
        index: number of sublayer outputs that exist when the site reads.
        name: "layers.0.attn", "layers.0.mlp", ..., "final".
        source_names: what the site mixes, in order; "null" comes first and "partial" last.
        row: the site's row in the router's parameters, None where it owns none.
    """

    index: int
    name: str
    source_names: tuple[str, ...]
    row: int | None

    @property
    def has_null(self) -> bool:
        return NULL in self.source_names[:1]

    @property
    def has_partial(self) -> bool:
        return PARTIAL in self.source_names[-1:]

    @property
    def num_rows(self) -> int:
        """Sources that come from the shared history: neither the null source nor the running partial sum."""
        return len(self.source_names) - self.has_null - self.has_partial


def site_name(index: int, num_sites: int) -> str:
    """The site that reads after `index` sublayers; two sublayers make a layer, the last site is "final"."""
    if index == num_sites - 1:
        return "final"
    return f"layers.{index // 2}.{('attn', 'mlp')[index % 2]}"


def routing_plan(config: RoutingConfig, num_sites: int) -> tuple[SitePlan, ...]:
    """The sites of a model with `num_sites` reads: one before each sublayer and one at the end (docs/method.md).

    Raises:
        ConfigurationError: a count that is not positive, or blocks larger than the model.
    """
    check_count("num_sites", num_sites)
    num_layers = num_sites // 2
    if config.read != "none" and config.sources == "block" and config.block_size > max(num_layers, 1):
        raise ConfigurationError(
            f"block_size must not exceed the number of layers ({num_layers}), got {config.block_size}"
        )
    plans: list[SitePlan] = []
    row = 0
    for index in range(num_sites):
        names = _visible(config, index, num_sites)
        owns = config.read != "none" and _owns_parameters(config, names, index == num_sites - 1)
        plans.append(SitePlan(index, site_name(index, num_sites), names, row if owns else None))
        row += owns
    return tuple(plans)


def _owns_parameters(config: RoutingConfig, names: tuple[str, ...], is_last: bool) -> bool:
    if config.read == "replace":
        return True
    return not is_last and (config.keep_empty_sites or names not in ((), (NULL,)))


def _visible(config: RoutingConfig, index: int, num_sites: int) -> tuple[str, ...]:
    """Source names of the site that reads after `index` sublayers."""
    if config.read == "none":
        return ()
    sublayers = tuple(site_name(i, num_sites) for i in range(index))
    per_block = 2 * config.block_size
    if config.read == "replace":
        if config.sources == "sublayer":
            return (EMBEDDING, *sublayers)
        blocks = tuple(f"block.{i}" for i in range(index // per_block))
        return (EMBEDDING, *blocks, *((PARTIAL,) if index % per_block else ()))
    if index == num_sites - 1:
        return ()
    null = (NULL,) if config.null_source and (index > 0 or config.keep_empty_sites) else ()
    if index == 0:
        # The embedding is the stream itself there: it becomes a source from the next site on.
        return null
    if config.sources == "sublayer":
        return (*null, EMBEDDING, *sublayers)
    # The delta of block i-1 is visible from the second site of block i on, as in the released code.
    return (*null, EMBEDDING, *(f"delta.{i}" for i in range(1, (index - 1) // per_block + 1)))
