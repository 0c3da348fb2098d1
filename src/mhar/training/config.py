"""What a run file of `mhar train` may hold. Defaults are the paper's pretraining recipe (method.md)."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mhar.errors import ConfigurationError, unknown

GROUPS = ("routing", "embeddings", "norms", "biases", "matrices")
STOCK = "stock"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
    """The model: from scratch (`family` and `shape`), or from a checkpoint (`init_from`).

    variant, routing: a named variant and fields of `RoutingConfig` that override it. "stock" is the family's own
    class of transformers. With `init_from` they are the checkpoint's.
    control: train the base of a converted checkpoint instead, without its routing: the same data order and recipe.
    frozen_base: train the routing parameters only.
    z_loss: coefficient of mean(logsumexp^2). loss_chunk_size: tokens whose logits exist at once (None: all).
    """

    init_from: str | None = None
    family: str | None = None
    shape: dict[str, Any] = field(default_factory=dict[str, Any])
    variant: str = "mhar"
    routing: dict[str, Any] = field(default_factory=dict[str, Any])
    control: bool = False
    frozen_base: bool = False
    z_loss: float = 0.0
    loss_chunk_size: int | None = None
    backend: str = "auto"
    attention: str = "sdpa"
    activation_checkpointing: bool = False

    def __post_init__(self) -> None:
        if (self.init_from is None) == (self.family is None):
            raise ConfigurationError(
                "model: give `family` (from scratch) or `init_from` (a checkpoint), one of the two"
            )
        if self.control and self.init_from is None:
            raise ConfigurationError("model.control continues a pretrained base: give model.init_from")
        if self.control and self.frozen_base:
            raise ConfigurationError("model.control has no routing to train: it cannot have frozen_base")
        if self.variant == STOCK and (self.z_loss or self.loss_chunk_size or self.routing):
            raise ConfigurationError("model.variant stock takes no z_loss, loss_chunk_size or routing")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSection:
    """Prepared folders. weights: shares of the mixture. val: whose `val` split is evaluated (default: the first)."""

    train: tuple[str, ...]
    weights: tuple[float, ...] | None = None
    val: str | None = None
    sequence_length: int = 2048
    isolate_documents: bool = False
    workers: int = 1
    verify: bool = True
    tokenizer: str | None = None  # checked against the data; the data's own is exported with the model

    def __post_init__(self) -> None:
        if not self.train:
            raise ConfigurationError("data.train: give at least one prepared folder")
        if self.weights is not None and not all(0 <= weight < math.inf for weight in self.weights):
            raise ConfigurationError(f"data.weights are finite and not negative, received {list(self.weights)}")
        if self.workers < 0:
            raise ConfigurationError(f"data.workers must not be negative, received {self.workers}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSection:
    """What one group of parameters does differently."""

    lr_scale: float = 1.0
    weight_decay: float | None = None

    def __post_init__(self) -> None:
        for name in ("lr_scale", "weight_decay"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ConfigurationError(f"a group's {name} must be finite and not negative, received {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSection:
    """AdamW. groups: overrides for "routing", "embeddings", "norms", "biases" and "matrices" (the rest)."""

    lr: float = 1e-3
    betas: tuple[float, ...] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    groups: dict[str, GroupSection] = field(default_factory=dict[str, GroupSection])

    def __post_init__(self) -> None:
        for name in self.groups:
            if name not in GROUPS:
                raise unknown("parameter group", name, GROUPS)
        for name in ("lr", "eps", "clip"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ConfigurationError(f"optimizer.{name} must be positive, received {getattr(self, name)}")
        if self.lr > 1:
            raise ConfigurationError(f"optimizer.lr above 1 makes no sense for AdamW, received {self.lr}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigurationError(f"optimizer.betas are two numbers in [0, 1), received {list(self.betas)}")
        if not 0 <= self.weight_decay < math.inf:
            raise ConfigurationError(
                f"optimizer.weight_decay must not be negative or infinite, received {self.weight_decay}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSection:
    """The learning rate over steps; see `schedule.py`. decay_fraction: part of the steps that "wsd" and
    "one_minus_sqrt" decay over. min_ratio: the floor as a part of the peak."""

    kind: Literal["cosine", "linear", "wsd", "one_minus_sqrt"] = "cosine"
    warmup_steps: int = 1000
    min_ratio: float = 0.1
    decay_fraction: float = 0.2

    def __post_init__(self) -> None:
        if self.warmup_steps < 0 or not 0 <= self.min_ratio <= 1 or not 0 < self.decay_fraction <= 1:
            raise ConfigurationError(
                "schedule: warmup_steps >= 0, min_ratio in [0, 1], decay_fraction in (0, 1]; received "
                f"{self.warmup_steps}, {self.min_ratio}, {self.decay_fraction}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSection:
    """How the processes of torchrun share the work.

    mode: "auto" is "none" for one process and "fsdp" for more; "hsdp" shards over `shard` ranks and replicates over
    the rest. reshard: free gathered weights after each sublayer's forward. compile: "sublayer" (what lies between two
    reads, and the loss) or "model". compile_mode: as torch.compile ("reduce-overhead" uses CUDA graphs). dtype: of
    compute; weights, moments and averages are float32.
    """

    mode: Literal["auto", "none", "ddp", "fsdp", "hsdp"] = "auto"
    shard: int | None = None
    reshard: bool = True
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    compile: Literal["none", "sublayer", "model"] = "none"
    compile_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    deterministic: bool = False

    def __post_init__(self) -> None:
        if (self.shard is not None) != (self.mode == "hsdp"):
            raise ConfigurationError(f"parallel.shard belongs to mode hsdp, received {self.shard} with {self.mode!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSection:
    """Held-out loss every `every` steps (None: never) over the whole `val` split or its first `max_tokens`; the
    headline is the mean of the last `tail` evaluations."""

    every: int | None = 250
    tail: int = 11
    max_tokens: int | None = None
    batch_size: int = 8

    def __post_init__(self) -> None:
        for name in ("every", "tail", "max_tokens", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigurationError(f"eval.{name} must be positive, received {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSection:
    """Saved every `every` steps; the last `keep` stay, and those at multiples of `keep_every`."""

    every: int = 1000
    keep: int = 2
    keep_every: int | None = None
    asynchronous: bool = True
    export_dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        if self.every < 1 or self.keep < 1 or (self.keep_every is not None and self.keep_every < 1):
            raise ConfigurationError(
                f"checkpoint: every, keep and keep_every are positive, received {self.every}, {self.keep}, "
                f"{self.keep_every}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggingSection:
    """A line every `every` steps in metrics.jsonl and TensorBoard; `trackio` and `wandb` name a project."""

    every: int = 10
    progress: bool = True
    tensorboard: bool = True
    trackio: str | None = None
    wandb: str | None = None

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigurationError(f"logging.every must be positive, received {self.every}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One training run.

    batch_size: sequences in a step, over all ranks. micro_batch_size: sequences in one forward pass on one rank.
    ema: decay of a float32 average of the weights. max_seconds: ends the run early, but orderly. max_loss: a training
    loss above it counts as divergence.
    """

    out: Path
    steps: int
    batch_size: int
    micro_batch_size: int
    model: ModelSection
    data: DataSection
    seed: int = 0
    ema: float | None = None
    max_seconds: float | None = None
    max_loss: float = 30.0
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    schedule: ScheduleSection = field(default_factory=ScheduleSection)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    eval: EvalSection = field(default_factory=EvalSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    logging: LoggingSection = field(default_factory=LoggingSection)

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigurationError(f"steps must be positive, received {self.steps}")
        if self.schedule.warmup_steps >= self.steps:
            raise ConfigurationError(
                f"schedule.warmup_steps must be below steps, received {self.schedule.warmup_steps} of {self.steps}"
            )
        if self.ema is not None and not 0 < self.ema < 1:
            raise ConfigurationError(f"ema is a decay between 0 and 1, received {self.ema}")
        if not 0 <= self.seed < 2**63:
            raise ConfigurationError(f"seed must be from 0 to below 2**63, received {self.seed}")
        if not self.max_loss > 0:
            raise ConfigurationError(f"max_loss must be positive, received {self.max_loss}")
        if self.max_seconds is not None and not self.max_seconds > 0:
            raise ConfigurationError(f"max_seconds must be positive, received {self.max_seconds}")
