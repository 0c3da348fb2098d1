"""Contiguous packing: a stream of tokens cut into windows so that every token is predicted exactly once an epoch."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mhar.data.shards import PreparedSplit
from mhar.errors import ConfigurationError, InputError

IGNORED = -100  # label that the losses of transformers skip


class PackedWindows:
    """Windows of `length` tokens; window i covers tokens i*(length-1) to i*(length-1)+length-1 of the stream.

    A causal model predicts tokens 1.. of a window from those before, so consecutive windows share one token: the last
    of one (predicted there) is the first of the next (context there). The last window is padded with ignored labels.

    isolate_documents: adds `position_ids` that restart after every end-of-text; transformers builds from them a mask
    under which a document attends to itself alone.
    """

    def __init__(self, data: PreparedSplit, length: int, *, isolate_documents: bool = False) -> None:
        if length < 2:
            raise ConfigurationError(f"a window needs at least 2 tokens, received sequence_length={length}")
        if len(data) < length:
            raise InputError(
                f"the split {data.split!r} of {data.folder} holds {len(data)} tokens, fewer than one window of {length}"
            )
        self.data, self.length, self.isolate_documents = data, length, isolate_documents
        self.eos_id = data.manifest.tokenizer.eos_id

    def __len__(self) -> int:
        return -(-(len(self.data) - 1) // (self.length - 1))

    def num_targets(self, index: int) -> int:
        """Predicted tokens of window `index`: length - 1, fewer in the last."""
        return min(self.length - 1, len(self.data) - 1 - index * (self.length - 1))

    def __getitem__(self, index: int) -> dict[str, NDArray[np.int64]]:
        """`input_ids` and `labels` [length], and `position_ids` [length] if documents are isolated; int64."""
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * (self.length - 1)
        tokens = self.data.read(start, min(start + self.length, len(self.data)))
        padding = self.length - len(tokens)
        window: dict[str, NDArray[np.int64]] = {
            "input_ids": np.pad(tokens, (0, padding), constant_values=self.eos_id),
            "labels": np.pad(tokens, (0, padding), constant_values=IGNORED),
        }
        if self.isolate_documents:
            window["position_ids"] = positions_in_documents(window["input_ids"], self.eos_id)
        return window


def positions_in_documents(tokens: NDArray[Any], eos_id: int) -> NDArray[np.int64]:
    """Positions [length] that start again from 0 behind every `eos_id`."""
    indices = np.arange(len(tokens))
    starts = np.zeros(len(tokens), np.int64)
    starts[1:] = np.where(tokens[:-1] == eos_id, indices[1:], 0)
    return indices - np.maximum.accumulate(starts)
