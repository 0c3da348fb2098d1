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
# Sign patterns are enumerated up to this many items with a difference, and drawn at random beyond.
MAX_EXACT_ITEMS = 14
# Percentile intervals of fewer items are too narrow to be read without a warning.
FEW_ITEMS = 30


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """Second model minus first.

    Attributes:
        difference: of the (weighted) mean scores.
        low, high: confidence interval of the difference; None where the items do not allow one.
        p_value: two-sided; None where there is nothing to test with.
        n: number of items.
        only_first, only_second: items that only one model has right (accuracies alone, else None).
        test: the name of the test and of the interval.
        is_narrow: the interval comes from so few items that it covers less than it says.
    """

    difference: float
    low: float | None
    high: float | None
    p_value: float | None
    n: int
    test: str
    only_first: int | None = None
    only_second: int | None = None
    is_narrow: bool = False


def format_interval(low: float | None, high: float | None, is_narrow: bool = False) -> str:
    """An interval for tables: a dash where there is none, a star where it is too narrow."""
    if low is None or high is None:
        return "–"
    return f"[{low:+.4f}, {high:+.4f}]{'*' if is_narrow else ''}"


NARROW_NOTE = f"\\* fewer than {FEW_ITEMS} items: the interval covers less than it says."


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
    """Difference of two (weighted) mean scores: percentile bootstrap interval (Efron 1979), sign-flip test.

    `weights` are the units of each item, such as its tokens: the difference is then that of scores per unit. A single
    item has neither interval nor p-value. Percentile intervals of few items are too narrow (`is_narrow`), so the
    p-value does not come from the resamples: see `sign_flip`.
    """
    a, b = _aligned(first, second)
    units = np.ones_like(a) if weights is None else np.asarray(weights, np.float64)
    if units.shape != a.shape or not (units > 0).all():
        raise InputError(f"weights must be {len(a)} positive numbers, got {units.size} with minimum {units.min():g}")
    if seed < 0:
        raise InputError(f"seed must not be negative, got {seed}")
    totals, n = (b - a) * units, len(a)
    difference = float(totals.sum() / units.sum())
    if n == 1:
        return PairedDifference(difference, None, None, None, n, "none for a single item")
    differences = _resampled(totals, units, num_resamples, np.random.default_rng(seed))
    low, high = np.quantile(differences, [(1 - confidence) / 2, (1 + confidence) / 2])
    return PairedDifference(
        difference=difference,
        low=float(low),
        high=float(high),
        p_value=sign_flip(totals, num_samples=num_resamples, seed=seed),
        n=n,
        test=f"sign-flip test; paired bootstrap interval, {num_resamples} resamples",
        is_narrow=n < FEW_ITEMS,
    )


def sign_flip(differences: Sequence[float] | Floats, *, num_samples: int = NUM_RESAMPLES, seed: int = 0) -> float:
    """Two-sided p-value of the paired permutation test (Fisher 1935) on per-item differences.

    When two models are equally good, the sign of each difference is a fair coin flip; p is the share of sign patterns
    whose sum is at least as far from zero. Exact for up to 14 differences other than zero, else by `num_samples`
    random patterns, the observed one included. With n items no p-value is below 2 / 2^n.
    """
    values = np.asarray(differences, np.float64)
    values = values[values != 0]
    if not values.size:
        return 1.0
    # Sums that are equal on paper differ in their last bits.
    least = abs(values.sum()) - 1e-12 * np.abs(values).sum()
    if len(values) <= MAX_EXACT_ITEMS:
        patterns = np.arange(2 ** len(values))[:, None] >> np.arange(len(values)) & 1
        return float(np.mean(_is_extreme(patterns, values, least)))
    generator, extreme = np.random.default_rng((seed, 1)), 1
    step = max(1, CHUNK_ELEMENTS // len(values))
    for start in range(0, num_samples, step):
        shape = min(step, num_samples - start), len(values)
        extreme += int(_is_extreme(generator.integers(0, 2, size=shape, dtype=np.int8), values, least).sum())
    return extreme / (num_samples + 1)


def _is_extreme(patterns: NDArray[np.signedinteger], values: Floats, least: float) -> NDArray[np.bool_]:
    """Of each row of 0 and 1 (1: flipped), whether its sum is at least `least` from zero."""
    return np.abs(values.sum() - 2 * (patterns.astype(np.float64) @ values)) >= least


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
