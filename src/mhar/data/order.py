"""Which window is sample g of a run: a pure function of (seed, g), in constant time and memory.

No list of indices exists anywhere, so the state of a data loader is one integer and nothing depends on the number of
ranks or workers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mhar.errors import ConfigurationError

PERIOD = 1000  # samples over which a mixture holds its weights exactly
_MASK = 2**64 - 1
_ROUNDS = 6


def mix(*values: int) -> int:
    """A 64-bit hash of integers (the finaliser of SplitMix64, chained)."""
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = (state + value * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def permute(index: int, size: int, key: int) -> int:
    """The image of `index` under the pseudo-random permutation of range(size) that `key` names.

    A balanced Feistel network on the next even number of bits, walked until the value falls into the range
    (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002); below four steps on average.
    """
    assert 0 <= index < size
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    while True:
        left, right = index >> half, index & low
        for round_number in range(_ROUNDS):
            left, right = right, left ^ (mix(key, round_number, right) & low)
        index = left << half | right
        if index < size:
            return index


@dataclass(frozen=True, slots=True)
class Sample:
    """Window `window` of data set `source`, read in that set's epoch `epoch`."""

    source: int
    epoch: int
    window: int


class SampleOrder:
    """The order of samples over one or several data sets.

    sizes: windows in each set. weights: relative shares of samples (None: one set, or in proportion to the sizes).
    Every `PERIOD` samples hold each set's share exactly (rounded to 1/PERIOD), in an order drawn from the seed; each
    set is walked through its own permutation, drawn anew for each of its epochs, so that every window comes exactly
    once an epoch.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float] | None = None, seed: int = 0) -> None:
        if not sizes or min(sizes) < 1:
            raise ConfigurationError(f"every data set needs at least one window, received sizes {list(sizes)}")
        self.sizes, self.seed = tuple(sizes), seed
        self.quotas = _quotas(self.sizes if weights is None else weights, len(sizes))

    def __getitem__(self, index: int) -> Sample:
        source, position = self._source(index)
        epoch, offset = divmod(position, self.sizes[source])
        return Sample(source, epoch, permute(offset, self.sizes[source], mix(self.seed, 1, source, epoch)))

    def _source(self, index: int) -> tuple[int, int]:
        if len(self.sizes) == 1:
            return 0, index
        period, offset = divmod(index, PERIOD)
        slot = permute(offset, PERIOD, mix(self.seed, 2, period))
        for source, quota in enumerate(self.quotas):
            if slot < quota:
                return source, period * quota + slot
            slot -= quota
        raise AssertionError("the quotas add up to the period")


def _quotas(weights: Sequence[float], count: int) -> tuple[int, ...]:
    """Largest-remainder shares of PERIOD; every set gets at least one sample."""
    if len(weights) != count or min(weights) <= 0:
        raise ConfigurationError(
            f"weights: one positive number for each of {count} data sets, received {list(weights)}"
        )
    exact = [PERIOD * weight / sum(weights) for weight in weights]
    quotas = [max(1, int(share)) for share in exact]
    by_remainder = sorted(range(count), key=lambda k: quotas[k] - exact[k])
    while (missing := PERIOD - sum(quotas)) > 0:
        for source in by_remainder[:missing]:
            quotas[source] += 1
    while sum(quotas) > PERIOD:  # many tiny sets were raised to one sample
        quotas[quotas.index(max(quotas))] -= 1
    return tuple(quotas)
