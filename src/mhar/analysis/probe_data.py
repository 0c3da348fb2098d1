"""Token ids for a probe: windows of a prepared set, or of text files through the model's tokenizer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mhar.data.shards import MANIFEST, PreparedSplit
from mhar.data.sources import documents, expand
from mhar.errors import InputError


def token_batches(
    data: Path, tokenizer: Any, *, context: int, batch_size: int, num_sequences: int, split: str = "val"
) -> Iterator[Tensor]:
    """Batches [batch_size, context] of consecutive, disjoint windows; the last batch may be smaller.

    Args:
        data: a folder that `mhar prepare` wrote, or text (plain, JSON lines, compressed): a file or a folder.
        num_sequences: windows at most.

    Raises:
        InputError: an empty data set, one shorter than a window, or text for a model without a tokenizer.
    """
    if context < 2:
        raise InputError(f"context must be at least 2 tokens, the last of which is predicted, got {context}")
    for name, value in (("batch_size", batch_size), ("num_sequences", num_sequences)):
        if value < 1:
            raise InputError(f"{name} must be a positive integer, got {value}")
    stream = _prepared(data, split) if (data / MANIFEST).is_file() else _text(data, tokenizer, context * num_sequences)
    count = min(len(stream) // context, num_sequences)
    if not count:
        raise InputError(f"{data} must fill one window of {context} tokens, it has {len(stream)}")
    return _windows(stream, count, context, batch_size)


def _windows(stream: Any, count: int, context: int, batch_size: int) -> Iterator[Tensor]:
    for start in range(0, count, batch_size):
        stop = min(start + batch_size, count)
        ids: NDArray[np.int64] = stream.read(start * context, stop * context)
        yield torch.from_numpy(ids).view(stop - start, context)


class _Tokens:
    """Token ids in memory, with the interface of a prepared split."""

    def __init__(self, ids: NDArray[np.int64]) -> None:
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        return self.ids[start:stop]


def _prepared(data: Path, split: str) -> PreparedSplit:
    return PreparedSplit(data, split)


def _text(data: Path, tokenizer: Any, needed: int) -> _Tokens:
    """The first `needed` tokens of the documents, an end-of-text after each."""
    if tokenizer is None:
        raise InputError(f"{data} is text and the model has no tokenizer: give a prepared folder")
    ids: list[int] = []
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for document in documents(expand([str(data)]), "text", (0, 0)):
        ids += tokenizer(document.text, add_special_tokens=False).input_ids + end
        if len(ids) >= needed:
            break
    return _Tokens(np.asarray(ids, np.int64))
