"""Exact held-out loss over a prepared set: every token but the first is predicted once, and the mean is over tokens.

With a context of W tokens and a stride of S <= W, window k reads tokens [k*S, k*S + W] and scores those of its
predictions that no earlier window scored. S = W gives blocks (the first prediction of a block has one token of
context); S < W slides, and every prediction but those of the first window has at least W - S tokens of context.
Documents are one stream with end-of-text tokens between them, as in training; attention crosses them.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from mhar.data.shards import PreparedSplit
from mhar.errors import InputError
from mhar.evaluation.records import Record, Result, hash_text
from mhar.evaluation.scoring import weighted_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldoutSettings:
    """Context handling, in tokens; `max_tokens` limits the scored tokens (a partial run)."""

    context: int = 1024
    stride: int | None = None
    batch_size: int = 8
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("context", "stride", "batch_size", "max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} must be a positive integer, got {value}")
        if self.step > self.context:
            raise InputError(f"stride must not exceed the context of {self.context} tokens, got {self.step}")

    @property
    def step(self) -> int:
        return self.context if self.stride is None else self.stride

    def describe(self) -> str:
        """For results tables and prompt hashes."""
        kind = "blocks" if self.step == self.context else f"sliding, stride {self.step}"
        return f"context {self.context}, {kind}"


@dataclass(frozen=True, slots=True)
class Window:
    """Input tokens [start, start + len(ids) - 1); the last `num_scored` of its predictions count."""

    start: int
    ids: NDArray[np.int64]
    num_scored: int


def windows(split: PreparedSplit, settings: HeldoutSettings) -> Iterator[Window]:
    """Windows over the whole split, the last one shorter.

    Raises:
        InputError: a split shorter than one window.
    """
    total = len(split)
    if total < settings.context + 1:
        raise InputError(
            f"the held-out set must fill one window of {settings.context + 1} tokens, {split.folder} has {total}"
        )
    scored, start, limit = 0, 0, min(total - 1, settings.max_tokens or total)
    while scored < limit:
        stop = min(start + settings.context, limit)
        yield Window(start, split.read(start, stop + 1), stop - scored)
        scored, start = stop, start + settings.step


@torch.inference_mode()
def window_losses(model: Any, batch: list[Window], device: torch.device) -> list[Tensor]:
    """Per window its scored predictions' negative log-likelihoods in nats, [num_scored] float32."""
    ids = torch.from_numpy(np.stack([window.ids for window in batch])).to(device)
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    losses: list[Tensor] = []
    for window, row, targets in zip(batch, logits, ids[:, 1:], strict=True):
        # One window at a time: float32 logits of a large vocabulary are the peak of the memory.
        nats = F.cross_entropy(row[-window.num_scored :].float(), targets[-window.num_scored :], reduction="none")
        losses.append(nats.cpu())
    return losses


def evaluate_heldout(
    model: Any, folder: Path | str, settings: HeldoutSettings, *, split: str = "val", show_progress: bool = True
) -> tuple[str, list[Record], list[Result]]:
    """Held-out loss, perplexity and bits per byte of `split` of a prepared folder: (task name, records, results).

    Raises:
        InputError: an empty set or one shorter than a window, or a vocabulary larger than the model's.
    """
    data = PreparedSplit(folder, split)
    _check_vocabulary(model, data)
    task = f"heldout:{Path(folder).resolve().name}/{split}"
    context = hash_text(settings.describe())
    records: list[Record] = []
    total = min(len(data) - 1, settings.max_tokens or len(data))
    with tqdm(total=total, desc=task, unit="tok", unit_scale=True, disable=not show_progress) as bar:
        for batch in _batches(windows(data, settings), settings.batch_size):
            for window, nats in zip(batch, window_losses(model, batch, model.device), strict=True):
                records.append(_record(len(records), window, nats, context))
                bar.update(window.num_scored)
    return task, records, _results(task, records, data, settings)


def _check_vocabulary(model: Any, data: PreparedSplit) -> None:
    needed, have = data.manifest.tokenizer.vocab_size, model.config.vocab_size
    if needed > have:
        raise InputError(f"{data.folder} was prepared with a vocabulary of {needed} tokens, the model has {have}")


def _batches(stream: Iterator[Window], size: int) -> Iterator[list[Window]]:
    """Groups of equally long windows."""
    batch: list[Window] = []
    for window in stream:
        if batch and (len(batch) == size or len(batch[0].ids) != len(window.ids)):
            yield batch
            batch = []
        batch.append(window)
    if batch:
        yield batch


def _record(index: int, window: Window, nats: Tensor, context: str) -> Record:
    return Record(
        doc_id=index,
        doc_hash=hashlib.sha256(window.ids.astype("<i8").tobytes() + window.start.to_bytes(8, "little")).hexdigest(),
        prompt_hash=context,
        target=f"tokens {window.start + len(window.ids) - window.num_scored}-{window.start + len(window.ids) - 1}",
        scores={"loss": float(nats.double().mean())},
        weights={"loss": float(window.num_scored)},
    )


def _results(task: str, records: list[Record], data: PreparedSplit, settings: HeldoutSettings) -> list[Result]:
    loss, stderr = weighted_mean([r.scores["loss"] for r in records], [r.weights["loss"] for r in records])
    scored = sum(int(record.weights["loss"]) for record in records)
    available = len(data) - 1
    # Bytes of the texts alone: end-of-text tokens cost nats but stand for no byte. A partial run takes its share.
    num_bytes = data.manifest.text_bytes(data.split) * scored / available
    note = f"{settings.describe()}; {scored} of {available} tokens in {len(records)} windows"
    values: dict[str, tuple[float, float | None]] = {
        "loss": (loss, stderr),
        "perplexity": (math.exp(loss), None if stderr is None else stderr * math.exp(loss)),
    }
    if num_bytes:
        values["bits_per_byte"] = (loss * scored / math.log(2) / num_bytes, None)
    return [
        Result(
            task=task,
            metric=metric,
            value=value,
            stderr=error,
            n=scored,
            available=available,
            higher_is_better=False,
            is_accuracy=False,
            is_primary=metric == "loss",
            note=note,
        )
        for metric, (value, error) in values.items()
    ]
