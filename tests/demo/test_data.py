"""Novels, tokenizer and token order."""

import pytest
import torch

from mhar.demo.batches import TokenOrder, windows
from mhar.demo.corpus import NOVELS, load_corpus, read_novel
from mhar.demo.data import load_data
from mhar.demo.settings import preset
from mhar.demo.tokenizer import END_OF_TEXT, encode, tokenizer_of_run, train_tokenizer
from mhar.errors import ConfigurationError, InputError


def test_all_six_novels_are_bundled_whole():
    sizes = {name: len(read_novel(name)) for name in NOVELS}
    assert len(sizes) == 6
    assert all(size > 400_000 for size in sizes.values()), sizes
    assert "universally acknowledged" in read_novel("prideprejudice")


def test_the_held_out_novel_is_not_trained_on():
    corpus = load_corpus("northangerabbey")
    assert corpus.held_out == read_novel("northangerabbey")
    assert len(corpus.training) == 5
    assert not any("Catherine Morland" in text for text in corpus.training)


def test_an_unknown_novel_is_an_error_with_a_suggestion():
    with pytest.raises(ConfigurationError, match=r"unknown novel 'emmma'; did you mean 'emma'"):
        read_novel("emmma")


def test_the_tokenizer_gives_back_any_text():
    tokenizer = train_tokenizer(load_corpus("emma", 20_000).training, 400)
    for text in ("It is a truth universally acknowledged,\n\nthat", "  Façade, 数学, \t🙂 ", ""):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_tokenizer_is_trained_once_per_folder(tmp_path):
    first = tokenizer_of_run(tmp_path, ["aaab aaab aaab"], 300)
    again = tokenizer_of_run(tmp_path, ["other words altogether"], 300)
    assert again.get_vocab() == first.get_vocab()


def test_texts_are_encoded_with_an_end_after_each():
    tokenizer = train_tokenizer(["one two three"], 300)
    ids = encode(tokenizer, ["one", "two"])
    assert tokenizer.decode(ids) == f"one{END_OF_TEXT}two{END_OF_TEXT}"


def test_windows_predict_every_token_once():
    ids = torch.arange(11)
    cut = windows(ids, 3)
    assert cut.tolist() == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    assert windows(torch.arange(10), 3)[:, 1:].flatten().tolist() == list(range(1, 10))


def test_a_text_shorter_than_a_window_is_an_error():
    with pytest.raises(InputError, match="more than 8 tokens to make a window, got 8"):
        windows(torch.arange(8), 8)


def test_every_epoch_visits_every_window_once_in_a_new_order():
    order = TokenOrder(torch.arange(4 * 12 + 1), length=4, batch_size=3, seed=0)
    epochs = [torch.cat([order.batch(step)[:, 0] for step in range(4 * e, 4 * e + 4)]).tolist() for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(0, 48, 4))
    assert epochs[0] != epochs[1]


def test_batches_depend_on_seed_and_step_alone():
    ids = torch.arange(4 * 10 + 1)
    forward = TokenOrder(ids, 4, 3, seed=1)
    straight = [forward.batch(step) for step in range(8)]
    backward = TokenOrder(ids, 4, 3, seed=1)
    assert all(torch.equal(backward.batch(step), straight[step]) for step in reversed(range(8)))
    assert not torch.equal(TokenOrder(ids, 4, 3, seed=2).batch(0), straight[0])


def test_held_out_windows_start_the_held_out_novel(tmp_path):
    data = load_data(preset("tiny"), tmp_path)
    start = data.tokenizer.decode(data.held_out[0])
    assert len(data.held_out) == preset("tiny").num_held_out_windows
    assert read_novel("northangerabbey").startswith(start)
    assert 1.0 < data.bytes_per_token < 4.0
