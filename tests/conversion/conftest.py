"""Tiny pretrained bases of every family."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from mhar.models.families import causal_lm_class

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,  # logits that depend on every layer
}

# What each family does beyond Llama must be switched on, or the tests would not see it.
EXTRAS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 8},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "phi3": {"sliding_window": 8},
    "granite": {"residual_multiplier": 0.5, "embedding_multiplier": 3.0, "logits_scaling": 2.0},
    "gemma3_text": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2},
}

MakeBase = Callable[..., PreTrainedModel]


@pytest.fixture
def make_base() -> MakeBase:
    """`make_base(family, **fields)`: a random model of the family's stock class, in evaluation mode."""

    def make(family: str = "llama", dtype: torch.dtype = torch.float32, **fields: Any) -> PreTrainedModel:
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **{**SIZES, **EXTRAS.get(family, {}), **fields})
        return causal_lm_class(family)(config).eval().to(dtype)

    return make


@pytest.fixture
def make_folder(make_base: MakeBase, tmp_path: Path) -> Callable[..., Path]:
    """`make_folder(family, shards="20KB", **fields)`: such a model saved by transformers."""

    def make(family: str = "llama", shards: str = "5GB", **fields: Any) -> Path:
        folder = tmp_path / "base"
        make_base(family, **fields).save_pretrained(folder, max_shard_size=shards)
        return folder

    return make


@pytest.fixture
def input_ids() -> torch.Tensor:
    """Two rows of token ids."""
    return torch.randint(96, (2, 20), generator=torch.Generator().manual_seed(1))
