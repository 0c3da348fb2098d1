"""Paired statistics: two models scored on the same items.

Everything here is a function of per-item scores, needs only NumPy, and draws random numbers from a seeded generator.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mhar.errors import InputError

Floats = NDArray[np.float64]
NUM_RESAMPLES = 10_000
# Resamples times items held at once; bounds the memory of a bootstrap at some 64 MB.
CHUNK_ELEMENTS = 2**22


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """Second model minus first.

    Attributes:
        difference: of the (weighted) mean scores.
        low, high: confidence interval of the difference.
        p_value: two-sided.
        n: number of items.
        only_first, only_second: items that only one model has right (accuracies alone, else None).
        test: the name of the test and of the interval.
    """

    difference: float
    low: float
    high: float
    p_value: float
    n: int
    test: str
    only_first: int | None = None
    only_second: int | None = None


def mcnemar_exact(only_first: int, only_second: int) -> float:
    """Two-sided exact McNemar test: the discordant items are fair coin flips when the models are equally good.

    McNemar 1947; the exact form is the binomial test of `only_first` out of all discordant items at 1/2.
    """
    for name, count in (("only_first", only_first), ("only_second", only_second)):
        if count < 0:
            raise InputError(f"{name} must be a count of items, got {count}")
    discordant = only_first + only_second
    tail = sum(math.comb(discordant, k) for k in range(min(only_first, only_second) + 1))
    return min(1.0, 2 * tail / 2**discordant)  # Python's integers: exact for any count


def normal_quantile(probability: float) -> float:
    """Inverse of the standard normal distribution function, by bisection to double precision."""
    low, high = -40.0, 40.0
    for _ in range(200):
        middle = (low + high) / 2
        below = 0.5 * math.erfc(-middle / math.sqrt(2)) < probability
        low, high = (middle, high) if below else (low, middle)
    return (low + high) / 2


def paired_accuracy(
    first: Sequence[float] | Floats, second: Sequence[float] | Floats, confidence: float = 0.95
) -> PairedDifference:
    """Difference of two accuracies on the same items: exact McNemar, Agresti and Min's interval.

    The interval (Agresti, Min 2005, "Simple improved confidence intervals for comparing matched proportions") adds 1/2
    to each of the four cells; it keeps its level for small n and few discordant items, where Wald's does not.
    """
    a, b = _aligned(first, second)
    if not np.isin(np.concatenate((a, b)), (0.0, 1.0)).all():
        raise InputError("an accuracy needs scores of 0 or 1")
    only_first, only_second, n = int(np.sum(a > b)), int(np.sum(b > a)), len(a)
    x, y, m = only_first + 0.5, only_second + 0.5, n + 2
    half = normal_quantile((1 + confidence) / 2) * math.sqrt(x + y - (y - x) ** 2 / m) / m
    return PairedDifference(
        difference=(only_second - only_first) / n,
        low=max(-1.0, (y - x) / m - half),
        high=min(1.0, (y - x) / m + half),
        p_value=mcnemar_exact(only_first, only_second),
        n=n,
        test="exact McNemar; Agresti-Min interval",
        only_first=only_first,
        only_second=only_second,
    )


def paired_bootstrap(
    first: Sequence[float] | Floats,
    second: Sequence[float] | Floats,
    weights: Sequence[float] | Floats | None = None,
    *,
    confidence: float = 0.95,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> PairedDifference:
    """Difference of two (weighted) mean scores by resampling items with replacement (Efron 1979).

    `weights` are the units of each item, such as its tokens: the difference is then that of scores per unit. The
    interval is the percentile interval, the p-value twice the smaller share of resamples beyond zero, both ends
    counted, so it is never 0: at least 2 / (num_resamples + 1).
    """
    a, b = _aligned(first, second)
    units = np.ones_like(a) if weights is None else np.asarray(weights, np.float64)
    if units.shape != a.shape or not (units > 0).all():
        raise InputError(f"weights must be {len(a)} positive numbers, got {units.size} with minimum {units.min():g}")
    differences = _resampled((b - a) * units, units, num_resamples, np.random.default_rng(seed))
    low, high = np.quantile(differences, [(1 - confidence) / 2, (1 + confidence) / 2])
    beyond = min(int(np.sum(differences <= 0)), int(np.sum(differences >= 0)))
    return PairedDifference(
        difference=float(((b - a) * units).sum() / units.sum()),
        low=float(low),
        high=float(high),
        p_value=min(1.0, 2 * (beyond + 1) / (num_resamples + 1)),
        n=len(a),
        test=f"paired bootstrap, {num_resamples} resamples",
    )


def _resampled(totals: Floats, units: Floats, count: int, generator: np.random.Generator) -> Floats:
    """`count` resampled values of sum(totals) / sum(units)."""
    n, means = len(totals), np.empty(count)
    step = max(1, CHUNK_ELEMENTS // n)
    for start in range(0, count, step):
        chosen = generator.integers(0, n, size=(min(step, count - start), n))
        means[start : start + step] = totals[chosen].sum(axis=1) / units[chosen].sum(axis=1)
    return means


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjusted p-values (Holm 1979), in the order given: controls the family-wise error rate."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def _aligned(first: Sequence[float] | Floats, second: Sequence[float] | Floats) -> tuple[Floats, Floats]:
    a, b = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if a.ndim != 1 or a.shape != b.shape or not a.size:
        raise InputError(f"paired scores must be two equally long, non-empty lists, got {a.shape} and {b.shape}")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise InputError("paired scores must be finite numbers")
    return a, b
