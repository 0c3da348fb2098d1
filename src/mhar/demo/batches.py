"""The token order: which windows of the text make up the batch of a step, the same for every variant."""

import torch
from torch import Tensor

from mhar.errors import InputError


def windows(ids: Tensor, length: int) -> Tensor:
    """Consecutive windows [count, length + 1] of ids [tokens]; neighbours share one token, so that each of the
    `length` targets of a window is predicted once. A remainder is left out."""
    count = (len(ids) - 1) // length
    if count < 1:
        raise InputError(f"a text must have more than {length} tokens to make a window, got {len(ids)}")
    return ids.unfold(0, length + 1, length)


class TokenOrder:
    """Training batches as a pure function of (seed, step): each epoch visits every window once, in its own order.

    Args:
        ids: the training text, int64 [tokens].
        length: targets per sequence; batch_size: sequences per step.
    """

    def __init__(self, ids: Tensor, length: int, batch_size: int, seed: int) -> None:
        self._windows = windows(ids, length)
        self._batch_size, self._seed = batch_size, seed
        self._epoch, self._permutation = -1, torch.empty(0, dtype=torch.long)

    def batch(self, step: int) -> Tensor:
        """Ids [batch_size, length + 1] of `step`, counted from 0."""
        first = step * self._batch_size
        places = range(first, first + self._batch_size)
        return torch.stack([self._windows[self._window(place)] for place in places])

    def _window(self, place: int) -> int:
        epoch, index = divmod(place, len(self._windows))
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._epoch, self._permutation = epoch, torch.randperm(len(self._windows), generator=generator)
        return int(self._permutation[index])
