"""Held-out loss: every token but the first scored once, equal to a brute-force computation, whatever the batches."""

import math

import numpy as np
import pytest
import torch

from helpers.corpora import prepared_counting, prepared_text
from helpers.tiny_lm import save_checkpoint, tiny_llama, tiny_routed
from mhar.cli import main
from mhar.data.shards import PreparedSplit
from mhar.errors import InputError
from mhar.evaluation import records
from mhar.evaluation.heldout import HeldoutSettings, evaluate_heldout, windows


@pytest.fixture(scope="module")
def counting(tmp_path_factory):
    """99 tokens in five documents and two shards."""
    return prepared_counting(tmp_path_factory.mktemp("data") / "counting", [20, 1, 30, 18, 30], shards=2)


@pytest.fixture(scope="module")
def model():
    return tiny_llama(vocab_size=101)


def brute_force(model, ids, context, stride):
    """Loss of each target from its own forward pass over exactly the tokens that it may see."""
    losses = []
    for target in range(1, len(ids)):
        # The first window that reaches the target: window k predicts targets k*stride + 1 .. k*stride + context.
        window = max(0, math.ceil((target - context) / stride))
        inputs = torch.tensor(ids[window * stride : target])[None]
        with torch.no_grad():
            logits = model(inputs).logits[0, -1].double()
        losses.append(float(torch.logsumexp(logits, 0) - logits[ids[target]]))
    return losses


@pytest.mark.parametrize("context, stride", [(16, None), (16, 4), (16, 1), (98, None), (50, 33)])
def test_loss_equals_brute_force(model, counting, context, stride):
    split = PreparedSplit(counting, "train")
    expected = np.mean(brute_force(model, split.read(0, len(split)), context, stride or context))
    settings = HeldoutSettings(context=context, stride=stride, batch_size=3)
    _, _, results = evaluate_heldout(model, counting, settings, split="train", show_progress=False)
    values = {result.metric: result.value for result in results}
    assert values["loss"] == pytest.approx(expected, rel=1e-5)
    assert values["perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)


@pytest.mark.parametrize("context, stride", [(7, 7), (7, 3), (7, 1), (98, 98), (40, 39)])
def test_every_token_but_the_first_is_scored_once(counting, context, stride):
    split = PreparedSplit(counting, "train")
    scored = []
    for window in windows(split, HeldoutSettings(context=context, stride=stride)):
        scored += list(window.ids[-window.num_scored :])
        assert len(window.ids) <= context + 1
    assert scored == list(range(2, 100))  # token p of this stream is p + 1


def test_the_loss_does_not_depend_on_the_batch_size(model, counting):
    values = [
        evaluate_heldout(
            model, counting, HeldoutSettings(context=10, batch_size=size), split="train", show_progress=False
        )[2][0].value
        for size in (1, 4, 100)
    ]
    assert values == pytest.approx([values[0]] * 3, rel=1e-6)


def test_bits_per_byte_count_the_bytes_of_the_texts(tmp_path):
    folder = prepared_text(tmp_path / "text", held_out=0.3)
    data = PreparedSplit(folder, "val")
    model = tiny_llama(vocab_size=30)
    _, _, results = evaluate_heldout(model, folder, HeldoutSettings(context=32), show_progress=False)
    values = {result.metric: result.value for result in results}
    nats = values["loss"] * (len(data) - 1)
    assert values["bits_per_byte"] == pytest.approx(nats / math.log(2) / data.manifest.text_bytes("val"))


def test_a_partial_run_is_marked_and_scores_the_first_tokens(model, counting):
    settings = HeldoutSettings(context=10, max_tokens=25)
    _, items, results = evaluate_heldout(model, counting, settings, split="train", show_progress=False)
    assert (results[0].n, results[0].available, results[0].is_partial) == (25, 98, True)
    assert [item.weights["loss"] for item in items] == [10, 10, 5]
    assert "25 of 98 tokens" in results[0].note


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"context": 0}, "context must be a positive integer, got 0"),
        ({"context": 8, "stride": 9}, "stride must not exceed the context of 8 tokens, got 9"),
        ({"batch_size": -1}, "batch_size must be a positive integer, got -1"),
    ],
)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(InputError, match=message):
        HeldoutSettings(**settings)


def test_a_set_shorter_than_a_window_is_refused(model, counting):
    with pytest.raises(InputError, match=r"must fill one window of 100 tokens, .* has 99"):
        evaluate_heldout(model, counting, HeldoutSettings(context=99), split="train", show_progress=False)


def test_a_missing_set_or_a_larger_vocabulary_is_refused(model, counting, tmp_path):
    with pytest.raises(InputError, match="no finished prepared folder"):
        evaluate_heldout(model, tmp_path, HeldoutSettings(), show_progress=False)
    with pytest.raises(InputError, match="vocabulary of 100 tokens, the model has 50"):
        evaluate_heldout(tiny_llama(vocab_size=50), counting, HeldoutSettings(context=8), split="train")


def test_two_models_on_one_set_are_compared_by_window(tmp_path, capsys):
    folder = prepared_text(tmp_path / "text", held_out=0.3)
    for name, checkpoint in (("base", tiny_llama(vocab_size=30)), ("routed", tiny_routed(vocab_size=30))):
        save_checkpoint(checkpoint, tmp_path / name, tokenizer=False)
        command = ["evaluate", str(tmp_path / name), "--heldout", str(folder), "--context", "32", "--device", "cpu"]
        assert main([*command, "--output", str(tmp_path / f"{name}-evaluation")]) == 0
    assert main(["compare", str(tmp_path / "base-evaluation"), str(tmp_path / "routed-evaluation")]) == 0
    out = capsys.readouterr().out
    assert "| heldout:text/val | loss | routed − base |" in out
    assert "PARTIAL" not in out
    first, second = (records.load(tmp_path / f"{name}-evaluation") for name in ("base", "routed"))
    assert first.results[0].value != second.results[0].value


def test_other_context_handling_is_not_comparable(tmp_path, capsys):
    folder = prepared_text(tmp_path / "text", held_out=0.3)
    save_checkpoint(tiny_llama(vocab_size=30), tmp_path / "model", tokenizer=False)
    for stride in ("16", "32"):
        command = ["evaluate", str(tmp_path / "model"), "--heldout", str(folder), "--context", "32", "--stride", stride]
        assert main([*command, "--output", str(tmp_path / stride)]) == 0
    assert main(["compare", str(tmp_path / "16"), str(tmp_path / "32")]) == 2
    assert "different" in capsys.readouterr().err
