"""What one demo run is: its presets and every number that decides its result."""

import math
from dataclasses import dataclass, replace
from typing import Any

from mhar.errors import ConfigurationError, unknown
from mhar.routing.config import check_count

VARIANTS = ("baseline", "attention_residuals", "mhar")
BASELINE = VARIANTS[0]
MAX_SEED = 2**32 - 1  # the token order multiplies it within 64 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """The resolved configuration of a run (`run.yaml`). A value without meaning raises ConfigurationError.

    Attributes:
        steps: optimizer steps of each variant.
        seed: of the backbone's initial weights, the token order and the generated samples.
        num_evaluations: held-out evaluations, evenly spaced, the last one at the last step.
        num_held_out_windows: windows of the held-out novel, from its start, that every evaluation uses.
        max_characters: cut each novel to this length; None reads all of it.
        initializer_range: standard deviation of the initial weights; the paper's 0.02 at width 512, scaled by
            1 / sqrt(width).
        warmup: share of the steps over which the learning rate rises linearly; a cosine to a tenth of the peak follows.
    """

    preset: str = "small"
    steps: int = 300
    seed: int = 0
    device: str = "cpu"
    hidden_size: int = 128
    num_layers: int = 8
    num_heads: int = 4
    num_kv_heads: int = 4
    head_dim: int = 32
    intermediate_size: int = 384
    vocab_size: int = 1024
    sequence_length: int = 128
    batch_size: int = 8
    initializer_range: float = 0.04
    learning_rate: float = 4e-3
    warmup: float = 0.1
    weight_decay: float = 0.1
    gradient_clip: float = 1.0
    held_out: str = "northangerabbey"
    max_characters: int | None = None
    num_evaluations: int = 5
    num_held_out_windows: int = 64
    prompt: str = "She had always"
    sample_tokens: int = 60
    temperature: float = 0.8

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "sequence_length", "num_evaluations", "num_held_out_windows"):
            check_count(name, getattr(self, name))
        if not math.isfinite(self.learning_rate) or self.learning_rate <= 0:
            raise ConfigurationError(f"learning_rate must be a positive number, got {self.learning_rate!r}")
        if not isinstance(self.seed, int) or not 0 <= self.seed <= MAX_SEED:
            raise ConfigurationError(f"seed must be an integer from 0 to {MAX_SEED}, got {self.seed!r}")

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.sequence_length

    def evaluation_steps(self) -> tuple[int, ...]:
        """The steps after which every variant is evaluated; fewer than `num_evaluations` when there are fewer steps."""
        goals = {round(self.steps * (i + 1) / self.num_evaluations) for i in range(self.num_evaluations)}
        return tuple(sorted(goals - {0}))

    def learning_rate_at(self, step: int) -> float:
        """Learning rate of `step`, counted from 0: linear warm-up, then a cosine to a tenth of the peak."""
        warmup_steps = max(1, round(self.warmup * self.steps))
        if step < warmup_steps:
            return self.learning_rate * (step + 1) / warmup_steps
        progress = (step - warmup_steps) / max(1, self.steps - warmup_steps)
        return self.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "steps": 20,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
        "vocab_size": 320,
        "sequence_length": 32,
        "batch_size": 4,
        "max_characters": 30_000,
        "num_held_out_windows": 8,
        "sample_tokens": 12,
    },
    "small": {},
    "large": {
        "steps": 4000,
        "hidden_size": 256,
        "num_layers": 12,
        "num_heads": 8,
        "num_kv_heads": 4,
        "intermediate_size": 768,
        "vocab_size": 2048,
        "sequence_length": 256,
        "batch_size": 16,
        "initializer_range": 0.028,
        "learning_rate": 2e-3,
        "num_evaluations": 10,
    },
}


def preset(name: str, **overrides: Any) -> DemoSettings:
    """A preset with fields overridden (None keeps the preset's value); an unknown name suggests the nearest."""
    if name not in PRESETS:
        raise unknown("preset", name, PRESETS)
    chosen = {field: value for field, value in overrides.items() if value is not None}
    return replace(DemoSettings(preset=name), **{**PRESETS[name], **chosen})
