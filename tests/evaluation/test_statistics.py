"""Paired statistics against closed forms, SciPy and the paper's published p-values."""

import numpy as np
import pytest

from mhar.errors import InputError
from mhar.evaluation.statistics import (
    holm,
    mcnemar_exact,
    normal_quantile,
    paired_accuracy,
    paired_bootstrap,
    sign_flip,
)


@pytest.mark.parametrize(
    "only_second, only_first, published",
    [
        pytest.param(123, 81, 0.004, id="GSM8K"),
        pytest.param(27, 13, 0.038, id="GPQA"),
    ],
)
def test_mcnemar_reproduces_the_papers_p_values(only_second, only_first, published):
    assert round(mcnemar_exact(only_first, only_second), 3) == published


def test_mcnemar_is_the_two_sided_binomial_test():
    stats = pytest.importorskip("scipy.stats")
    for first, second in [(1, 0), (0, 7), (3, 3), (10, 4), (81, 123), (1000, 1100), (2500, 2400)]:
        expected = stats.binomtest(first, first + second, 0.5).pvalue
        assert mcnemar_exact(first, second) == pytest.approx(expected, rel=1e-9), (first, second)


def test_mcnemar_without_discordant_items_says_nothing():
    assert mcnemar_exact(0, 0) == 1.0


def test_mcnemar_refuses_negative_counts():
    with pytest.raises(InputError, match="only_first must be a count of items, got -1"):
        mcnemar_exact(-1, 3)


@pytest.mark.parametrize("probability, expected", [(0.5, 0.0), (0.975, 1.959963985), (0.995, 2.575829304)])
def test_normal_quantile(probability, expected):
    assert normal_quantile(probability) == pytest.approx(expected, abs=1e-9)


def test_paired_accuracy_counts_and_difference():
    first = [1, 1, 0, 0, 1, 0, 1, 0]
    second = [1, 0, 1, 1, 1, 0, 1, 1]
    found = paired_accuracy(first, second)
    assert (found.only_first, found.only_second, found.n) == (1, 3, 8)
    assert found.difference == pytest.approx(2 / 8)
    assert found.p_value == pytest.approx(10 / 16)  # 2 * (C(4,0) + C(4,1)) / 2^4


def test_paired_accuracy_interval_by_hand():
    # Agresti and Min: half a count more in each of the four cells.
    found = paired_accuracy([1] * 10 + [0] * 20 + [1] * 70, [0] * 10 + [1] * 20 + [1] * 70)
    centre = 10 / 102
    half = 1.959963985 * np.sqrt(10.5 + 20.5 - (20.5 - 10.5) ** 2 / 102) / 102
    assert (found.low, found.high) == (pytest.approx(centre - half), pytest.approx(centre + half))


def test_paired_accuracy_interval_keeps_its_level():
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        both = generator.random((2, 60)) < np.array([[0.6], [0.7]])
        found = paired_accuracy(both[0].astype(float), both[1].astype(float))
        covered += found.low <= 0.1 <= found.high
    assert 0.92 <= covered / 400 <= 0.99


def test_paired_accuracy_refuses_scores_that_are_no_accuracies():
    with pytest.raises(InputError, match="scores of 0 or 1"):
        paired_accuracy([0.0, 0.5], [1.0, 0.0])


def test_bootstrap_agrees_with_the_normal_interval():
    generator = np.random.default_rng(1)
    first = generator.normal(size=2000)
    second = first + 0.1 + generator.normal(scale=0.5, size=2000)
    found = paired_bootstrap(first, second, num_resamples=4000)
    change = second - first
    error = change.std(ddof=1) / np.sqrt(2000)
    assert found.difference == pytest.approx(change.mean())
    assert found.low == pytest.approx(change.mean() - 1.96 * error, abs=0.1 * error)
    assert found.high == pytest.approx(change.mean() + 1.96 * error, abs=0.1 * error)
    assert found.p_value == pytest.approx(1 / 4001)  # nine standard errors: no sign pattern reaches it


def test_bootstrap_weights_are_units_of_the_items():
    found = paired_bootstrap([1.0, 2.0], [2.0, 2.0], weights=[3.0, 1.0])
    assert found.difference == pytest.approx(0.75)
    # The three possible resamples: twice the first item, one of each, twice the second.
    assert (found.low, found.high) == (0.0, 1.0)


def test_bootstrap_is_a_function_of_its_seed():
    scores = np.random.default_rng(2).normal(size=(2, 50))
    runs = [paired_bootstrap(*scores, seed=seed) for seed in (7, 7, 8)]
    assert runs[0] == runs[1] != runs[2]


def test_bootstrap_of_equal_models_finds_nothing():
    scores = np.arange(20.0)
    found = paired_bootstrap(scores, scores)
    assert (found.difference, found.low, found.high, found.p_value) == (0.0, 0.0, 0.0, 1.0)


@pytest.mark.parametrize("n", [2, 5, 10, 40])
def test_no_effect_is_rarely_significant_however_few_the_items(n):
    generator = np.random.default_rng(3)
    p_values = [paired_bootstrap(*generator.normal(size=(2, n)), num_resamples=500, seed=i).p_value for i in range(300)]
    assert np.mean(np.array(p_values) < 0.05) < 0.08


def test_a_single_item_has_neither_interval_nor_p_value():
    found = paired_bootstrap([1.0], [0.0])
    assert (found.difference, found.low, found.high, found.p_value) == (-1.0, None, None, None)


def test_intervals_of_few_items_are_marked():
    scores = np.random.default_rng(4).normal(size=(2, 30))
    assert paired_bootstrap(*scores[:, :29], num_resamples=50).is_narrow
    assert not paired_bootstrap(*scores, num_resamples=50).is_narrow


def test_sign_flip_by_hand():
    # Of the eight sums, those of +++ and --- are as far from zero as 6; of 1+2-3 = 0, all are.
    assert sign_flip([1.0, 2.0, 3.0]) == 2 / 8
    assert sign_flip([1.0, 2.0, -3.0]) == 1.0
    assert sign_flip([0.0, 1.0, 0.0, 2.0, 3.0]) == 2 / 8
    assert sign_flip([0.1] * 3 + [-0.1] * 3) == 1.0
    assert sign_flip([0.0, 0.0]) == 1.0


@pytest.mark.parametrize("n", [8, 40])
def test_sign_flip_is_scipys_permutation_test(n):
    stats = pytest.importorskip("scipy.stats")
    values = np.random.default_rng(5).normal(size=n)
    values += 2 / np.sqrt(n) - values.mean()
    expected = stats.permutation_test(
        (values,), np.sum, permutation_type="samples", n_resamples=10_000, rng=np.random.default_rng(6)
    ).pvalue
    assert sign_flip(values) == pytest.approx(expected, abs=1e-12 if n == 8 else 0.01)


def test_a_negative_seed_is_refused():
    with pytest.raises(InputError, match="seed must not be negative, got -1"):
        paired_bootstrap([1.0, 2.0], [2.0, 2.0], seed=-1)


@pytest.mark.parametrize(
    "first, second, weights, message",
    [
        pytest.param([], [], None, "non-empty", id="empty"),
        pytest.param([1.0], [1.0, 2.0], None, "equally long", id="lengths"),
        pytest.param([1.0, float("nan")], [1.0, 2.0], None, "finite", id="nan"),
        pytest.param([1.0, 2.0], [1.0, 2.0], [1.0, 0.0], "positive", id="weight-zero"),
    ],
)
def test_bootstrap_refuses(first, second, weights, message):
    with pytest.raises(InputError, match=message):
        paired_bootstrap(first, second, weights)


def test_holm_on_a_textbook_case():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.9]) == [1.0, 1.0]
    assert holm([]) == []
