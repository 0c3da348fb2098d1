"""The proof itself: what it compares, and that it sees the smallest difference."""

import math
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from mhar.conversion.verify import (
    NUM_TOKENS,
    available_bytes,
    compare_logits,
    load_and_check,
    verification_text,
    verification_tokens,
)
from mhar.errors import CheckpointError
from mhar.models import MharConfig


def test_a_difference_of_one_bit_is_seen():
    logits, input_ids = torch.randn(1, 6, 9), torch.randint(9, (1, 6))
    same = compare_logits(logits, logits.clone(), input_ids)
    assert (same.identical, same.max_abs_difference, same.same_top_token) == (True, 0.0, 1.0)
    assert same.base_loss == pytest.approx(
        float(torch.nn.functional.cross_entropy(logits[0, :-1], input_ids[0, 1:])), rel=1e-6
    )
    changed = logits.clone()
    changed[0, 3, 4] = torch.nextafter(changed[0, 3, 4], torch.tensor(9.0))
    other = compare_logits(logits, changed, input_ids)
    assert not other.identical
    assert 0 < other.max_abs_difference < 1e-6


def test_other_logits_are_described():
    logits, input_ids = torch.zeros(1, 4, 5), torch.zeros(1, 4, dtype=torch.long)
    logits[..., 0] = 1.0
    changed = logits.clone()
    changed[0, 0, 3] = 2.5
    comparison = compare_logits(logits, changed, input_ids)
    assert comparison.max_abs_difference == 2.5
    assert comparison.same_top_token == 0.75
    assert comparison.converted_loss > comparison.base_loss


def test_logits_that_are_not_finite_never_pass():
    logits = torch.full((1, 3, 4), float("nan"))
    comparison = compare_logits(logits, logits, torch.zeros(1, 3, dtype=torch.long))
    assert not comparison.identical
    assert math.isnan(comparison.max_abs_difference)


def test_real_text_goes_through_the_bases_tokenizer(make_base, tmp_path: Path):
    tokenizer = Tokenizer(models.WordLevel(unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator([verification_text()], trainers.WordLevelTrainer(special_tokens=["?"]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    config = MharConfig.from_base(make_base(vocab_size=2000, max_position_embeddings=4096).config, "delta_block_mhar")
    ids, described = verification_tokens(tmp_path, config)
    assert described == "English prose (Jane Austen)"
    assert ids.shape == (1, NUM_TOKENS)
    assert tokenizer.decode(ids[0].tolist()).startswith("It is a truth universally acknowledged , that a single man")
    # A tokenizer larger than the model, and no tokenizer, give seeded ids within the vocabulary and the positions.
    small = MharConfig.from_base(make_base().config, "delta_block_mhar")
    for folder in (tmp_path, tmp_path / "none"):
        ids, described = verification_tokens(folder, small)
        assert "random token ids" in described
        assert ids.shape == (1, 64)
        assert int(ids.max()) < 96


def test_an_incomplete_folder_is_refused(make_folder, tmp_path: Path):
    folder = make_folder()
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"num_hidden_layers": 4', '"num_hidden_layers": 5'))
    with pytest.raises(CheckpointError, match=r"missing keys: model\.layers\.4\."):
        load_and_check(LlamaForCausalLM, folder, torch.float32)


def test_free_memory_is_a_plausible_number():
    assert 2**26 < available_bytes("cpu") < 2**46
