"""`MharConfig`: a base model's configuration, flat, plus what is routed."""

import difflib
import math
from collections.abc import Iterable
from typing import Any, ClassVar, Self

from transformers import AutoConfig, PreTrainedConfig

from mhar.errors import CheckpointError, ConfigurationError, unknown
from mhar.models.compat import CACHE_NAME
from mhar.models.families import Family, family_of
from mhar.ops.functional import check_heads, resolve_backend
from mhar.ops.schedule import check_schedule
from mhar.routing import RoutingConfig, routing_plan
from mhar.routing.config import check_count, check_eps

# Fields of a base config that describe its checkpoint, not its architecture.
NOT_INHERITED = ("model_type", "architectures", "transformers_version", "auto_map", "quantization_config")


class MharConfig(PreTrainedConfig):
    """A routed model: the base fields stand at the top level, where caches and servers read them; routing comes on top.

    Args:
        base_model_type: `model_type` of the base family, such as "qwen3"; its fields are given as further keywords
            and checked by its own configuration class.
        routing: what is routed: a RoutingConfig, the name of a variant, or `RoutingConfig.to_dict()`, which it is
            stored as; the variant "mhar" by default.
        routing_backend: "auto", "triton" or "reference" (see :func:`mhar.ops.depth_read`).
        routing_schedule: which sites share a pass over the history in the Triton backend (see
            :class:`mhar.routing.DepthRouter`).
        z_loss: coefficient of mean(logsumexp(logits)^2), added to the loss in training only (1e-4 in the paper's
            mid-training).
        loss_chunk_size: tokens whose logits are held at once when labels are given; logits are then not returned.
            None computes all logits.

    Raises:
        ConfigurationError: unknown family, routing that does not fit the model, NaN or infinite numbers.
        InputError: routing heads that do not divide the width.
    """

    model_type: ClassVar[str] = "mhar"
    keys_to_ignore_at_inference: ClassVar[list[str]] = [CACHE_NAME]
    attribute_map: ClassVar[dict[str, str]] = {"num_experts": "num_local_experts"}
    # The decoder loop calls sublayers, never layers: they are the units that can be sharded.
    base_model_fsdp_plan: ClassVar[dict[Any, str]] = {
        "embed_tokens": "free_full_weight",
        "layers.*.self_attn": "free_full_weight",
        "layers.*.mlp": "free_full_weight",
        "norm": "keep_full_weight",
    }

    base_model_type: str = "llama"
    routing: Any = None
    routing_backend: str = "auto"
    routing_schedule: str | int = "auto"
    z_loss: float = 0.0
    loss_chunk_size: int | None = None
    use_cache: bool = True  # a base field, declared because transformers drops undeclared generation settings

    def __post_init__(self, **kwargs: Any) -> None:
        self.routing = as_routing(self.routing).to_dict()
        self._check_names(kwargs)
        common = {name: getattr(self, name) for name in ("dtype", "output_hidden_states", "use_cache")}
        base = base_config(self.base_model_type, {**kwargs, **common})
        declared = type(self).__dataclass_fields__
        super().__post_init__(**kwargs | {k: v for k, v in inherited_fields(base).items() if k not in declared})
        # Not serialised by transformers. Sublayers return whole tensors, so routing needs no plan of its own.
        self.base_model_tp_plan = base.base_model_tp_plan  # pyright: ignore[reportAttributeAccessIssue]
        self._check()

    def _check_names(self, names: Iterable[str]) -> None:
        """Raise ConfigurationError for a misspelt field of this class: transformers stores any name."""
        theirs = type(base_config(self.base_model_type, {})).__dataclass_fields__
        for name in set(names) - set(theirs) - set(NOT_INHERITED):
            if difflib.get_close_matches(name, own_fields(), n=1, cutoff=0.85):
                raise unknown("field", name, own_fields())

    def _check(self) -> None:
        for name, value in self.__dict__.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigurationError(f"{name} must be a finite number, got {value!r}")
        if isinstance(self.z_loss, bool) or not isinstance(self.z_loss, (int, float)) or self.z_loss < 0:
            raise ConfigurationError(f"z_loss must be a number >= 0, got {self.z_loss!r}")
        if self.loss_chunk_size is not None:
            check_count("loss_chunk_size", self.loss_chunk_size)
        check_eps(self.rms_norm_eps)
        resolve_backend(self.routing_backend)
        check_schedule(self.routing_schedule)
        self.family.check(self)
        routing = self.routing_config
        if routing.read != "none":
            check_heads(self.hidden_size, routing.num_heads)  # pyright: ignore[reportArgumentType]
        routing_plan(routing, self.num_sites)

    @classmethod
    def from_base(
        cls, base: PreTrainedConfig, routing: RoutingConfig | str | dict[str, Any] | None = None, **fields: Any
    ) -> Self:
        """The configuration of a routed model with the architecture of `base`.

        Args:
            base: configuration of a supported family.
            routing: what is routed: a RoutingConfig, the name of a variant, the fields of one as a dict, or None
                for "mhar".
            fields: further fields of this class, or overrides of the base's.
        """
        if not isinstance(base, PreTrainedConfig):
            raise ConfigurationError(
                f"base must be a configuration of transformers (AutoConfig.from_pretrained reads one), got {base!r}"
            )
        family_of(base.model_type)
        values: dict[str, Any] = {**inherited_fields(base), **fields, "base_model_type": base.model_type}
        return cls(routing=as_routing(routing).to_dict(), **values)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in transformers, but the configuration of another kind of model is refused, not read as a Llama's."""
        model_type = config_dict.get("model_type", cls.model_type)
        if model_type != cls.model_type:
            raise CheckpointError(
                f"this is the configuration of a {model_type!r} model, not of a routed one: convert it (mhar.convert),"
                " or give MharConfig.from_base(...) as `config`"
            )
        return super().from_dict(config_dict, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; `auto_map` is left to folders that hold the code (export.py)."""
        values = super().to_dict()
        if self._auto_class is None:
            values.pop("auto_map", None)
        return values

    @property
    def family(self) -> Family:
        """How the base family runs its sublayers."""
        return family_of(self.base_model_type)

    @property
    def routing_config(self) -> RoutingConfig:
        """What is routed, with `num_heads="kv"` resolved to the number of key-value heads."""
        return RoutingConfig.from_dict(self.routing).with_num_heads(self.num_key_value_heads)

    @property
    def num_sites(self) -> int:
        """Reads of one forward pass: one before each sublayer and the final one."""
        return 2 * self.num_hidden_layers + 1

    def to_base(self) -> PreTrainedConfig:
        """The base model's own configuration."""
        own = own_fields()
        return base_config(self.base_model_type, {k: v for k, v in inherited_fields(self).items() if k not in own})


def own_fields() -> set[str]:
    """Names of the fields that `MharConfig` adds to those of any model."""
    return set(MharConfig.__dataclass_fields__) - set(PreTrainedConfig.__dataclass_fields__)  # pyright: ignore


def as_routing(routing: object) -> RoutingConfig:
    """What is routed, from any of its forms: a RoutingConfig, a variant's name, its fields, or None for "mhar"."""
    match routing:
        case RoutingConfig():
            return routing
        case None | str():
            return RoutingConfig.named("mhar" if routing is None else routing)
        case dict():
            return RoutingConfig.from_dict(routing)
        case _:
            raise ConfigurationError(
                f"routing must be a RoutingConfig, the name of a variant or a dict of its fields, got {routing!r}"
            )


def base_config(base_model_type: str, fields: dict[str, Any]) -> PreTrainedConfig:
    """The family's own configuration class applied to `fields`: defaults, legacy spellings and its checks."""
    family_of(base_model_type)
    return AutoConfig.for_model(base_model_type, **{k: v for k, v in fields.items() if k not in NOT_INHERITED})


def inherited_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """Fields of `config` that describe the architecture."""
    return {name: value for name, value in config.to_dict().items() if name not in NOT_INHERITED}
