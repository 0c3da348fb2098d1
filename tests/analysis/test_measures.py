"""Measures on inputs whose answers are known."""

import math

import pytest
import torch

from mhar.analysis import measures
from mhar.ops.reference import routing_logits


def logits_of(sources, query, gain, num_slices, eps=1e-6):
    """[N, S, 1, T] for sources [N, T, D] and one query [D]."""
    keys = measures.slice_keys(query[None, None], gain[None], num_slices)
    return torch.stack([measures.slice_logits(s, s.square().sum(-1), keys, eps)[:, :, 0] for s in sources])


def test_slice_logits_are_the_reads_own():
    torch.manual_seed(0)
    sources, query, gain = torch.randn(5, 7, 12), torch.randn(12), torch.rand(12) + 0.5
    logits = logits_of(sources, query, gain, num_slices=3)[:, :, 0]
    expected = routing_logits(sources, query, gain, 3, 1e-6)
    torch.testing.assert_close(logits, expected.permute(0, 2, 1))
    whole = routing_logits(sources, query, gain, 1, 1e-6)[..., 0]
    torch.testing.assert_close(logits.sum(dim=1), whole)


def test_slices_that_agree_have_no_rescaled_disagreement():
    torch.manual_seed(1)
    piece, query_piece = torch.randn(6, 9, 4), torch.randn(4)
    sources, query = piece.repeat(1, 1, 3), query_piece.repeat(3)  # three identical slices
    plain, rescaled = measures.width_disagreement(logits_of(sources, query, torch.ones(12), 3))[:, 0]
    assert rescaled.abs() < 1e-6
    # By the paper's definition agreeing slices still differ from the whole, which is three times as sharp.
    logits = routing_logits(sources, query, torch.ones(12), 3, 1e-6)[..., 0]
    sharp, soft = (3 * logits).log_softmax(0), logits.log_softmax(0)
    assert plain == pytest.approx(float((soft.exp() * (soft - sharp)).sum(0).mean()), rel=1e-5)


@pytest.mark.parametrize("case", ["zero query", "identical sources"])
def test_uniform_routing_has_no_disagreement(case):
    torch.manual_seed(2)
    sources = torch.randn(1, 5, 8).expand(4, 5, 8) if case == "identical sources" else torch.randn(4, 5, 8)
    query = torch.zeros(8) if case == "zero query" else torch.randn(8)
    assert measures.width_disagreement(logits_of(sources, query, torch.ones(8), 4)).abs().max() < 1e-6


def test_a_planted_query_has_the_known_divergence():
    # Two sources, two slices: slice 0 prefers source 0 by x, slice 1 prefers source 1 by x, the whole is undecided.
    x = 1.5
    sources = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    scale = math.sqrt(2) / x  # the key norm makes unit vectors sqrt(2) long
    logits = logits_of(sources, torch.ones(2) / scale, torch.ones(2), 2, eps=0.0)
    assert logits[:, :, 0, 0].tolist() == [pytest.approx([x, 0.0]), pytest.approx([0.0, x])]
    p = 1 / (1 + math.exp(-x))
    expected = p * math.log(2 * p) + (1 - p) * math.log(2 * (1 - p))
    assert float(measures.width_disagreement(logits)[0, 0]) == pytest.approx(expected, rel=1e-5)
    q = 1 / (1 + math.exp(-2 * x))
    expected = q * math.log(2 * q) + (1 - q) * math.log(2 * (1 - q))
    assert float(measures.width_disagreement(logits)[1, 0]) == pytest.approx(expected, rel=1e-5)


def cosine(sources):
    squares = [source.square().sum(-1) for source in sources]
    units = [measures.unit(source, square) for source, square in zip(sources, squares, strict=True)]
    return float(measures.mean_pairwise_cosine(sum(units), sum((s > 0).float() for s in squares), len(units)))


def test_collinearity_of_known_sources():
    identity = torch.eye(4)[:, None]
    assert cosine(3.0 * identity) == pytest.approx(0.0, abs=1e-6)
    assert cosine(identity[[0, 0, 0]] * torch.tensor([1.0, 5.0, 0.1])[:, None, None]) == pytest.approx(1.0)
    assert cosine([identity[0], -identity[0]]) == pytest.approx(-1.0)
    assert cosine([identity[0], identity[0] + identity[1]]) == pytest.approx(math.sqrt(0.5))
    assert cosine([identity[0], torch.zeros(1, 4)]) == pytest.approx(0.0)


def test_collinearity_is_the_mean_over_pairs():
    torch.manual_seed(3)
    sources = torch.randn(6, 10, 16)
    pairs = [torch.cosine_similarity(sources[i], sources[j], dim=-1).mean() for i in range(6) for j in range(i)]
    assert cosine(sources) == pytest.approx(float(torch.stack(pairs).mean()), rel=1e-4, abs=1e-6)


def test_entropy_and_head_disagreement_of_known_weights():
    one_hot = torch.eye(3)[:, None, :]  # head h reads source h alone
    assert measures.mean_entropy(one_hot).abs().max() == 0
    assert float(measures.head_disagreement(one_hot, measures.mean_entropy(one_hot))) == pytest.approx(math.log(3))
    equal = torch.rand(5, 4, 1).softmax(0).expand(5, 4, 3)
    assert float(measures.head_disagreement(equal, measures.mean_entropy(equal))) == pytest.approx(0.0, abs=1e-6)
    assert measures.mean_entropy(torch.full((5, 2, 3), 0.2))[0] == pytest.approx(math.log(5))


def test_top_sources_are_counted_once_each():
    weights = torch.tensor([[[0.6, 0.1], [0.2, 0.5]], [[0.4, 0.9], [0.8, 0.5]]])  # [N=2, T=2, H=2]; one tie
    counts = measures.top_source_counts(weights)
    assert counts[:, 0].tolist() == [1, 1]
    assert counts.sum(dim=0).tolist() == [2, 2]


def test_random_queries_have_the_lengths_of_the_trained_heads():
    torch.manual_seed(4)
    query = torch.randn(5, 12)
    random = measures.matched_random_queries(query, 3, seed=7, num_heads=4)
    assert random.shape == (3, 5, 12)
    expected = query.unflatten(-1, (4, -1)).norm(dim=-1).expand(3, 5, 4)
    torch.testing.assert_close(random.unflatten(-1, (4, -1)).norm(dim=-1), expected)
    assert torch.equal(random, measures.matched_random_queries(query, 3, seed=7, num_heads=4))
    assert not torch.equal(random, measures.matched_random_queries(query, 3, seed=8, num_heads=4))
    assert measures.matched_random_queries(torch.zeros(2, 8), 1, 0, 2).eq(0).all()
