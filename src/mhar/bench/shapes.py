"""The shapes that are measured: those of the paper, and tiny ones for a rehearsal on a CPU."""

from dataclasses import dataclass
from typing import TypeVar

from mhar.errors import unknown
from mhar.routing import RoutingConfig


@dataclass(frozen=True, slots=True)
class RoutingShape:
    """All sites of one micro-batch.

    Attributes:
        name: "100m", "350m", "1b", "8b-delta"; "-h1" marks one head, which is what most other implementations do.
        num_sites: reads M, the last included. width: D. num_heads: H. tokens: of the micro-batch (batch x length).
        variant: "mhar" (replace, sublayer sources), "block_mhar" (replace, block sources) or "delta_block_mhar" (add,
            block sources, null, gate).
        block_size: layers per block, of the block variants.
    """

    name: str
    num_sites: int
    width: int
    num_heads: int
    tokens: int
    variant: str = "mhar"
    block_size: int = 4

    @property
    def key(self) -> str:
        """How the command line and the tables name it: "1b:4096"."""
        return f"{self.name}:{self.tokens}"

    @property
    def config(self) -> RoutingConfig:
        """What is routed."""
        sizes = {"block_size": self.block_size} if "block" in self.variant else {}
        return RoutingConfig.named(self.variant, num_heads=self.num_heads, **sizes)


@dataclass(frozen=True, slots=True)
class StepShape:
    """One training step of a Qwen3-like model: batch sequences of length tokens each, embeddings tied.

    `eager`: measure plain calls, which show the host's cost of launching, instead of compiled and replayed steps.
    """

    name: str
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn: int
    vocab_size: int
    batch: int
    length: int
    head_dim: int = 64
    eager: bool = False

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def key(self) -> str:
        return f"{self.name}:{self.tokens}"


Shape = TypeVar("Shape", RoutingShape, StepShape)

QWEN3_VOCABULARY = 151_936

ROUTING_SHAPES = {
    "paper": (
        RoutingShape("100m", 25, 512, 4, 4096),
        RoutingShape("350m", 49, 1024, 8, 1024),
        RoutingShape("350m", 49, 1024, 8, 4096),
        RoutingShape("1b", 73, 1280, 8, 1024),
        RoutingShape("1b", 73, 1280, 8, 4096),
        RoutingShape("8b-delta", 65, 4096, 8, 8192, "delta_block_mhar"),
        RoutingShape("100m-h1", 25, 512, 1, 4096),
        RoutingShape("100m-block-h1", 25, 512, 1, 4096, "block_mhar"),
    ),
    "tiny": (
        RoutingShape("tiny", 7, 64, 4, 6),
        RoutingShape("tiny-delta", 9, 64, 4, 6, "delta_block_mhar", 1),
        RoutingShape("tiny-h1", 5, 64, 1, 6),
        RoutingShape("tiny-block-h1", 7, 64, 1, 6, "block_mhar", 2),
    ),
}

STEP_SHAPES = {
    "paper": (
        StepShape("100m", 512, 12, 8, 4, 1536, QWEN3_VOCABULARY, batch=8, length=2048),
        StepShape("350m", 1024, 24, 16, 8, 4096, QWEN3_VOCABULARY, batch=4, length=1024),
        StepShape("1b", 1280, 36, 16, 8, 5120, QWEN3_VOCABULARY, batch=4, length=1024, head_dim=80),
        StepShape("1b", 1280, 36, 16, 8, 5120, QWEN3_VOCABULARY, batch=1, length=1024, head_dim=80, eager=True),
    ),
    "tiny": (
        StepShape("tiny", 64, 2, 4, 2, 128, 97, batch=2, length=8, head_dim=16),
        StepShape("tiny-eager", 64, 2, 4, 2, 128, 97, batch=1, length=8, head_dim=16, eager=True),
    ),
}


def select(shapes: tuple[Shape, ...], keys: list[str] | None) -> tuple[Shape, ...]:
    """The shapes named by `keys` ("1b" or "1b:4096"), all without; an unknown one is an error that lists them."""
    if keys is None:
        return shapes
    known = {key for shape in shapes for key in (shape.name, shape.key)}
    for key in keys:
        if key not in known:
            raise unknown("shape", key, known)
    return tuple(shape for shape in shapes if shape.name in keys or shape.key in keys)
