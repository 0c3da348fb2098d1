"""Batches for a training loop: each rank's part of each step, in an order that only (seed, step) decide."""

import signal
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from mhar.data.order import SampleOrder
from mhar.data.packing import PackedWindows
from mhar.errors import ConfigurationError


class TrainingSamples(Dataset[dict[str, Tensor]]):
    """Map-style data set: item g is sample g of the run, for any g >= 0 (epochs follow each other without a gap).

    `len()` is one epoch (of all sets together), so that `transformers.Trainer` and plain samplers work too.
    """

    def __init__(self, sets: Sequence[PackedWindows], weights: Sequence[float] | None = None, seed: int = 0) -> None:
        self.sets = list(sets)
        self.order = SampleOrder([len(windows) for windows in sets], weights, seed)

    def __len__(self) -> int:
        return sum(map(len, self.sets))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = self.order[index]
        return {name: torch.from_numpy(row) for name, row in self.sets[sample.source][sample.window].items()}

    def num_targets(self, indices: range) -> int:
        """Predicted tokens in the samples `indices`, without reading them."""
        samples = (self.order[index] for index in indices)
        return sum(self.sets[sample.source].num_targets(sample.window) for sample in samples)


class StepBatches(Sampler[list[int]]):
    """Micro-batches of sample indices for steps `start` to `stop`.

    Step s takes samples s*batch_size to (s+1)*batch_size - 1; rank r the r-th of `ranks` equal parts of them, in
    micro-batches of `micro_batch_size`. The state of the loader is `start`.
    """

    def __init__(
        self, start: int, stop: int, batch_size: int, micro_batch_size: int, rank: int = 0, ranks: int = 1
    ) -> None:
        check_batch(batch_size, micro_batch_size, ranks)
        self.start, self.stop, self.batch_size, self.micro_batch_size = start, stop, batch_size, micro_batch_size
        self.rank, self.per_rank = rank, batch_size // ranks

    def __len__(self) -> int:
        return (self.stop - self.start) * self.per_rank // self.micro_batch_size

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.start, self.stop):
            first = step * self.batch_size + self.rank * self.per_rank
            for micro in range(first, first + self.per_rank, self.micro_batch_size):
                yield list(range(micro, micro + self.micro_batch_size))


def check_batch(batch_size: int, micro_batch_size: int, ranks: int) -> None:
    """ConfigurationError unless `batch_size` sequences divide into equal micro-batches over the ranks."""
    if batch_size < 1 or micro_batch_size < 1:
        raise ConfigurationError(f"batch sizes are positive, received {batch_size} and {micro_batch_size} (micro)")
    unit = micro_batch_size * ranks
    if batch_size % unit:
        below, above = batch_size // unit * unit, -(-batch_size // unit) * unit
        raise ConfigurationError(
            f"batch_size {batch_size} does not divide into micro-batches of {micro_batch_size} on {ranks} ranks; "
            f"nearest: {' or '.join(str(size) for size in (below, above) if size)}"
        )


def leave_interrupts_to_parent(worker: int = 0) -> None:
    """Called in a worker process: Ctrl-C reaches the whole group, and the parent still wants this worker's work."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def training_loader(
    samples: TrainingSamples, batches: StepBatches, *, workers: int = 0, pin_memory: bool = False
) -> "DataLoader[dict[str, Tensor]]":
    """A plain DataLoader; `workers` processes only fetch ahead, they change nothing."""
    options: dict[str, Any] = {"prefetch_factor": 4, "worker_init_fn": leave_interrupts_to_parent} if workers else {}
    options["generator"] = torch.Generator()  # else the loader's start would draw from the run's own generator
    return DataLoader(samples, batch_sampler=batches, num_workers=workers, pin_memory=pin_memory, **options)
