"""What is routed: two independent choices (`read`, `sources`) and their options make every variant."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, Self

from mhar.errors import ConfigurationError, nearest, unknown

FORMAT_VERSION = 1

READS = ("none", "replace", "add")
SOURCES = ("sublayer", "block")
GATES = ("none", "scalar")

VARIANTS: dict[str, dict[str, Any]] = {
    "baseline": {"read": "none", "num_heads": 1},
    "attention_residuals": {"read": "replace", "sources": "sublayer", "num_heads": 1},
    "mhar": {"read": "replace", "sources": "sublayer"},
    "block_mhar": {"read": "replace", "sources": "block"},
    "delta_mhar": {"read": "add", "sources": "sublayer", "gate": "scalar"},
    "delta_block_mhar": {"read": "add", "sources": "block", "gate": "scalar", "null_source": True},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingConfig:
    """Depth routing of one model. Impossible combinations raise ConfigurationError.

    Attributes:
        read: "none" (the additive baseline), "replace" (a sublayer reads the mixture alone) or "add" (it reads the
            residual stream plus the gated mixture: the delta forms).
        sources: "sublayer" (every sublayer output) or "block" (sums over blocks of layers).
        block_size: layers per block; used by block sources only. The last block may be shorter.
        num_heads: routing heads H, a divisor of the width, or "kv": the model's number of key-value heads.
        gate: "none" or "scalar" (one per site, initialised to zero); add reads only.
        null_source: a learned source per site, shared by all tokens, initialised to zero; add reads only.
        legacy_delta_recursion: block deltas as the first public code computed them (src_i = c_i - src_(i-1)); only to
            load checkpoints that were trained that way.
        keep_empty_sites: give parameters to sites that can never train (no source but the null source); only to keep
            those that a released checkpoint brings.
    """

    read: Literal["none", "replace", "add"] = "replace"
    sources: Literal["sublayer", "block"] = "sublayer"
    block_size: int = 4
    num_heads: int | Literal["kv"] = "kv"
    gate: Literal["none", "scalar"] = "none"
    null_source: bool = False
    legacy_delta_recursion: bool = False
    keep_empty_sites: bool = False

    def __post_init__(self) -> None:
        for field, value, options in (
            ("read", self.read, READS),
            ("sources", self.sources, SOURCES),
            ("gate", self.gate, GATES),
        ):
            if value not in options:
                raise unknown(field, value, options)
        check_count("block_size", self.block_size)
        if self.num_heads != "kv":
            check_count("num_heads", self.num_heads, 'or "kv"')
        for field in ("null_source", "legacy_delta_recursion", "keep_empty_sites"):
            if not isinstance(getattr(self, field), bool):
                raise ConfigurationError(f"{field} must be true or false, got {getattr(self, field)!r}")
        self._check_combination()

    def _check_combination(self) -> None:
        if self.read != "add":
            if self.gate != "none":
                raise ConfigurationError(
                    f'a gate needs read "add": with read {self.read!r} a zero gate would leave no residual path;'
                    f" got gate {self.gate!r}"
                )
            if self.null_source:
                raise ConfigurationError(f'a null source needs read "add", got null_source with read {self.read!r}')
            if self.keep_empty_sites:
                raise ConfigurationError(f'keep_empty_sites needs read "add", got read {self.read!r}')
        if self.legacy_delta_recursion and not (self.read == "add" and self.sources == "block"):
            raise ConfigurationError(
                'legacy_delta_recursion needs read "add" and sources "block",'
                f" got read {self.read!r} and sources {self.sources!r}"
            )

    @classmethod
    def named(cls, name: str, **overrides: Any) -> Self:
        """A named variant of the paper, with fields overridden: `RoutingConfig.named("mhar", num_heads=8)`."""
        if name not in VARIANTS:
            raise unknown("variant", name, VARIANTS)
        return cls.from_dict({**VARIANTS[name], **overrides})

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Inverse of `to_dict`; an unknown field is an error that suggests the nearest one."""
        values = dict(values)
        version = values.pop("format_version", FORMAT_VERSION)
        if version != FORMAT_VERSION:
            raise ConfigurationError(
                f"this version of mhar reads routing configurations of format {FORMAT_VERSION}, got format {version!r}"
            )
        known = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            if name not in known:
                raise ConfigurationError(f"unknown routing option {name!r}{nearest(name, known)}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain values plus `format_version`, for JSON."""
        return {"format_version": FORMAT_VERSION, **dataclasses.asdict(self)}

    def with_num_heads(self, num_key_value_heads: int) -> Self:
        """The same configuration with "kv" resolved to a number."""
        return dataclasses.replace(self, num_heads=num_key_value_heads) if self.num_heads == "kv" else self

    @property
    def name(self) -> str:
        """The variant's name, "custom" when the fields match none of the named ones (sizes do not count)."""
        for name, fields in VARIANTS.items():
            if name == "attention_residuals" and self.num_heads != 1:
                continue
            if self.from_dict({**fields, "num_heads": self.num_heads, "block_size": self.block_size}) == self:
                return name
        return "custom"


def check_count(field: str, value: object, alternative: str = "") -> None:
    """Raise ConfigurationError unless `value` is a positive integer."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        rule = " ".join(filter(None, ("a positive integer", alternative)))
        raise ConfigurationError(f"{field} must be {rule}, got {value!r}")


def check_eps(eps: object) -> float:
    """`eps` as a float; raises ConfigurationError unless it is finite and not negative."""
    if not isinstance(eps, (int, float)) or not math.isfinite(eps) or eps < 0:
        raise ConfigurationError(f"eps must be a finite number >= 0, got {eps!r}")
    return float(eps)
