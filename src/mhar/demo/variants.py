"""The compared models: one backbone, initialised once, under each routing variant."""

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from mhar.demo.settings import DemoSettings
from mhar.demo.tokenizer import END_OF_TEXT
from mhar.models import MharConfig, MharForCausalLM
from mhar.routing import RoutingConfig


def backbone(settings: DemoSettings, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """The stock Qwen3 model that every variant starts from; its weights depend on the seed alone."""
    end_of_text = tokenizer.get_vocab()[END_OF_TEXT]
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_kv_heads,
        head_dim=settings.head_dim,
        intermediate_size=settings.intermediate_size,
        max_position_embeddings=max(1024, settings.sequence_length),
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        initializer_range=settings.initializer_range,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end_of_text,
        pad_token_id=end_of_text,
    )
    with torch.random.fork_rng():
        torch.manual_seed(settings.seed)
        return Qwen3ForCausalLM(config)


def build_variant(name: str, base: Qwen3ForCausalLM) -> MharForCausalLM:
    """`base` under the named routing variant: the same weights, plus a router at its initial state."""
    model = MharForCausalLM(MharConfig.from_base(base.config, RoutingConfig.named(name)))
    missing, unexpected = model.load_state_dict(base.state_dict(), strict=False)
    strays = [key for key in missing if not key.startswith("model.router.")] + list(unexpected)
    assert not strays, strays
    return model
