"""Packing and order: every token exactly once an epoch, whatever the ranks, workers and batch sizes."""

import os
import pickle
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.corpora import prepared_counting, prepared_text
from mhar.data.loader import StepBatches, TrainingSamples, check_batch, training_loader
from mhar.data.order import PERIOD, SampleOrder, permute
from mhar.data.packing import IGNORED, PackedWindows, positions_in_documents
from mhar.data.shards import PreparedSplit
from mhar.errors import ConfigurationError, InputError

per_test = settings(max_examples=25, deadline=None)


def targets(windows: list[dict[str, np.ndarray]]) -> Counter[int]:
    """What the windows predict: label t from the tokens before t, the first label of each window excluded."""
    counted: Counter[int] = Counter()
    for window in windows:
        labels = window["labels"][1:]
        assert (labels[labels != IGNORED] - 1 == window["input_ids"][:-1][labels != IGNORED]).all()
        counted.update(int(label) for label in labels[labels != IGNORED])
    return counted


@per_test
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    length=st.integers(2, 9),
    shards=st.integers(1, 4),
    ranks=st.integers(1, 4),
    micro=st.integers(1, 3),
    accumulation=st.integers(1, 2),
    seed=st.integers(0, 2**40),
)
def test_every_token_is_predicted_once_an_epoch(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    length: int,
    shards: int,
    ranks: int,
    micro: int,
    accumulation: int,
    seed: int,
) -> None:
    lengths[0] += length
    folder = prepared_counting(tmp_path_factory.mktemp("counting"), lengths, shards)
    windows = PackedWindows(PreparedSplit(folder), length)
    samples = TrainingSamples([windows], seed=seed)
    batch = ranks * micro * accumulation
    steps = 2 * len(windows)  # batch epochs and more
    parts = [list(StepBatches(0, steps, batch, micro, rank, ranks)) for rank in range(ranks)]
    order: list[int] = []
    for step in range(steps):
        for rank in range(ranks):
            order += [g for part in parts[rank][step * accumulation : (step + 1) * accumulation] for g in part]
    assert order == list(range(steps * batch))  # the global order knows nothing of ranks
    epoch = [{name: row.numpy() for name, row in samples[g].items()} for g in order[len(windows) : 2 * len(windows)]]
    assert targets(epoch) == Counter(range(2, sum(lengths) + 1))  # all but the first token, which nothing precedes
    assert samples.num_targets(range(len(windows))) == sum(lengths) - 1


@per_test
@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_permutations_are_bijections(size: int, key: int) -> None:
    assert sorted(permute(index, size, key) for index in range(size)) == list(range(size))


def test_permutations_look_random_and_differ_between_epochs() -> None:
    order = SampleOrder([5000], seed=3)
    first, second = ([order[epoch * 5000 + i].window for i in range(5000)] for epoch in (0, 1))
    assert abs(np.corrcoef(first, range(5000))[0, 1]) < 0.05
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05
    assert np.mean(np.diff(first) == 1) < 0.005
    assert sum(map(int.__eq__, first, second)) < 10


def test_the_order_never_changes() -> None:
    """A later version must continue the runs of an earlier one: these numbers are part of the format."""
    order = SampleOrder([1000], seed=7)
    assert [order[g].window for g in (0, 1, 2, 999, 1000)] == [141, 296, 263, 446, 608]
    mixture = SampleOrder([10, 100], weights=[1, 3], seed=7)
    assert [(s.source, s.epoch, s.window) for s in (mixture[g] for g in (0, 1, 5000))] == [
        (1, 5, 87),
        (1, 2, 14),
        (1, 44, 43),
    ]


@per_test
@given(
    weights=st.lists(st.floats(0.01, 100), min_size=2, max_size=5),
    sizes=st.lists(st.integers(1, 700), min_size=5, max_size=5),
    seed=st.integers(0, 9),
)
def test_mixtures_hold_their_weights_and_use_every_window_once_an_epoch(
    weights: list[float], sizes: list[int], seed: int
) -> None:
    order = SampleOrder(sizes[: len(weights)], weights, seed)
    drawn = [order[g] for g in range(2 * PERIOD)]
    for period in (drawn[:PERIOD], drawn[PERIOD:]):
        shares = Counter(sample.source for sample in period)
        for source, weight in enumerate(weights):
            assert abs(shares[source] - PERIOD * weight / sum(weights)) <= max(1, len(weights))
    assert max(Counter((s.source, s.epoch, s.window) for s in drawn).values()) == 1
    drawn_epochs = Counter((sample.source, sample.epoch) for sample in drawn)
    for source, size in enumerate(sizes[: len(weights)]):
        for epoch in range(2 * order.quotas[source] // size):
            assert drawn_epochs[source, epoch] == size


def test_loader_workers_change_nothing(tmp_path: Path) -> None:
    windows = PackedWindows(PreparedSplit(prepared_text(tmp_path / "data")), 16, isolate_documents=True)
    samples = TrainingSamples([windows], seed=1)
    batches = StepBatches(3, 9, 4, 2)
    plain, parallel = (list(training_loader(samples, batches, workers=workers)) for workers in (0, 2))
    assert len(plain) == len(batches) == 12
    for one, two in zip(plain, parallel, strict=True):
        assert one.keys() == two.keys() == {"input_ids", "labels", "position_ids"}
        assert all(torch.equal(one[name], two[name]) for name in one)
    again = list(training_loader(samples, StepBatches(5, 6, 4, 2)))
    assert all(torch.equal(again[i][name], plain[4 + i][name]) for i in (0, 1) for name in again[i])


def test_an_interrupt_does_not_take_the_workers(tmp_path: Path) -> None:
    samples = TrainingSamples([PackedWindows(PreparedSplit(prepared_text(tmp_path / "data")), 16)])
    batches = StepBatches(0, 40, 2, 1)
    expected = [batch["input_ids"] for batch in training_loader(samples, batches)]
    iterator: Any = iter(training_loader(samples, batches, workers=2))
    found = [next(iterator)["input_ids"] for _ in range(2)]  # one of each worker: both have started
    for worker in iterator._workers:
        os.kill(worker.pid, signal.SIGINT)
    found += [batch["input_ids"] for batch in iterator]
    assert all(map(torch.equal, found, expected))
    assert len(found) == len(expected)


def test_pickling_a_split_carries_no_data(tmp_path: Path) -> None:
    data = PreparedSplit(prepared_text(tmp_path / "data"))
    before = data.read(5, 50)
    assert len(pickle.dumps(data)) < 5000
    assert (pickle.loads(pickle.dumps(data)).read(5, 50) == before).all()


def test_reading_across_shards(tmp_path: Path) -> None:
    data = PreparedSplit(prepared_counting(tmp_path, [3, 4, 5, 6], shards=4))
    assert len(data.shards) == 4
    assert data.read(2, 13).tolist() == list(range(3, 14))
    assert data.read(17, 18).tolist() == [18]


def test_positions_restart_after_an_end_of_text() -> None:
    tokens = np.array([5, 0, 6, 7, 0, 0, 8])
    assert positions_in_documents(tokens, 0).tolist() == [0, 1, 0, 1, 2, 0, 0]


def test_isolated_documents_do_not_see_each_other(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=22, num_key_value_heads=1, **shape)).eval()
    tokens = np.array([[5, 6, 0, 7, 8, 9], [9, 3, 0, 7, 8, 9]])
    positions = torch.from_numpy(np.stack([positions_in_documents(row, 0) for row in tokens]))
    ids = torch.from_numpy(tokens)
    with torch.no_grad():
        isolated = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        alone = model(input_ids=ids[:1, 3:], use_cache=False).logits
        plain = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(isolated[:, 3:], alone.expand(2, -1, -1))
    assert not torch.allclose(plain[0, 3:], plain[1, 3:])


@pytest.mark.parametrize(
    "sizes, message", [((10, 2, 2), "nearest: 8 or 12"), ((3, 2, 2), "nearest: 4"), ((0, 1, 1), "are positive")]
)
def test_a_batch_that_does_not_divide_is_refused(sizes: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_batch(*sizes)


def test_too_little_data_is_refused(tmp_path: Path) -> None:
    data = PreparedSplit(prepared_counting(tmp_path, [5]))
    with pytest.raises(InputError, match="holds 5 tokens, fewer than one window of 6"):
        PackedWindows(data, 6)
    with pytest.raises(ConfigurationError, match="at least 2 tokens"):
        PackedWindows(data, 1)
    with pytest.raises(IndexError, match="window 1 of 1"):
        PackedWindows(data, 5)[1]


@pytest.mark.parametrize("weights", [[1.0], [1.0, 0.0], [1.0, -1.0]])
def test_senseless_weights_are_refused(weights: list[float]) -> None:
    with pytest.raises(ConfigurationError, match="one positive number for each of 2 data sets"):
        SampleOrder([3, 3], weights)
