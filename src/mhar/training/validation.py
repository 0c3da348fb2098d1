"""Held-out loss during training: always the same windows, summed over tokens."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mhar.data.packing import IGNORED, PackedWindows
from mhar.data.shards import PreparedSplit
from mhar.training.config import RunConfig
from mhar.training.distributed import World, autocast


@dataclass(frozen=True, slots=True)
class HeldOutLoss:
    """Mean cross-entropy in nats per predicted token, z-loss excluded, and what it is a mean over."""

    loss: float
    tokens: int
    bits_per_byte: float


class Validation:
    """The fixed held-out windows of a run: the same for every method, number of ranks and batch size."""

    def __init__(self, config: RunConfig, world: World) -> None:
        self.config, self.world = config, world
        split = PreparedSplit(config.data.val or config.data.train[0], "val")
        self.windows = PackedWindows(
            split, config.data.sequence_length, isolate_documents=config.data.isolate_documents
        )
        limit = config.eval.max_tokens
        self.count = (
            len(self.windows) if limit is None else min(len(self.windows), max(1, limit // self.windows.length))
        )
        self.tokens_per_byte = len(split) / max(split.manifest.text_bytes("val"), 1)

    @torch.no_grad()
    def run(self, model: nn.Module) -> HeldOutLoss:
        """Evaluate `model`; every rank must call it, and every rank gets the same result."""
        model.eval()
        size = self.config.eval.batch_size
        starts = list(range(0, self.count, size))
        total, tokens = 0.0, 0
        # Sharded models need equally many calls on every rank: one without a batch repeats the first, uncounted.
        for turn in range(-(-len(starts) // self.world.size)):
            mine = turn * self.world.size + self.world.rank
            start = starts[mine] if mine < len(starts) else 0
            chosen = range(start, min(start + size, self.count))
            loss = self._sum(model, chosen)
            if mine < len(starts):
                total += loss
                tokens += sum(self.windows.num_targets(index) for index in chosen)
        total, tokens_seen = self.world.sum(total, tokens)
        model.train()
        mean = total / tokens_seen
        return HeldOutLoss(mean, int(tokens_seen), mean / math.log(2) * self.tokens_per_byte)

    def _sum(self, model: Any, chosen: range) -> float:
        device = self.world.device
        rows = [self.windows[index] for index in chosen]
        # Filled up with windows that do not count: one shape, so that nothing is compiled twice.
        filler = {**rows[0], "labels": np.full_like(rows[0]["labels"], IGNORED)}
        rows += [filler] * (min(self.config.eval.batch_size, self.count) - len(rows))
        columns = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        batch: dict[str, Any] = {name: torch.from_numpy(column).to(device) for name, column in columns.items()}
        with autocast(self.config.parallel, self.world):
            outputs: Any = model(**batch, use_cache=False, num_items_in_batch=torch.ones((), device=device))
        return float(cross_entropy(outputs, getattr(model, "module", model).config))


def cross_entropy(outputs: Any, config: Any) -> Tensor:
    """The loss of a model's outputs without its z-loss and its experts' load-balancing loss."""
    loss = outputs.loss
    if getattr(outputs, "z_loss", None) is not None:
        loss = loss - outputs.z_loss
    if getattr(outputs, "aux_loss", None) is not None:
        loss = loss - config.router_aux_loss_coef * outputs.aux_loss
    return loss
