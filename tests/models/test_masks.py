"""Attention masks exist only where they are needed: without padding or packing, attention is called with none."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mhar.models import MharConfig, decoder

SHAPE = {"vocab_size": 11, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}


def test_only_given_positions_make_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Default positions must not reach the mask builder, which would look for packed sequences in them."""
    config = MharConfig.from_base(AutoConfig.for_model("qwen3", **SHAPE), "mhar")
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    positions: list[object] = []
    masks: list[object] = []
    build = decoder.MASKS["full_attention"]

    def recorded(**arguments: object) -> object:
        positions.append(arguments["position_ids"])
        masks.append(build(**arguments))
        return masks[-1]

    monkeypatch.setitem(decoder.MASKS, "full_attention", recorded)
    ids = torch.arange(12).reshape(2, 6) % 11
    model(input_ids=ids, labels=ids)
    assert (positions, masks) == ([None], [None])
    packed = torch.tensor([[0, 1, 2, 0, 1, 2]])
    model(input_ids=ids, position_ids=packed, use_cache=False)
    assert positions[1] is packed
    assert masks[1] is not None
