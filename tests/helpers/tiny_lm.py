"""Tiny random language models and a byte tokenizer, saved as checkpoints."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from mhar import RoutingConfig
from mhar.models import MharConfig, MharForCausalLM


def llama_config(vocab_size=300, layers=2, width=16, kv_heads=2) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )


def tiny_llama(seed=0, **config) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(llama_config(**config)).eval()


def tiny_routed(variant="mhar", seed=0, scale=0.5, routing=None, **config) -> MharForCausalLM:
    """A routed model whose routing parameters are away from their initial values."""
    torch.manual_seed(seed)
    model = MharForCausalLM(
        MharConfig.from_base(llama_config(**config), RoutingConfig.named(variant, **(routing or {})))
    )
    with torch.no_grad():
        for parameter in model.model.router.parameters():
            parameter.add_(scale * torch.randn_like(parameter))
    return model.eval()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte; `<eos>` is 0."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<eos>": 0, **{letter: index + 1 for index, letter in enumerate(alphabet)}}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<eos>", eos_token="<eos>", pad_token="<eos>")


def save_checkpoint(model, folder: Path, tokenizer=True) -> Path:
    model.save_pretrained(folder)
    if tokenizer:
        byte_tokenizer().save_pretrained(folder)
    return folder
