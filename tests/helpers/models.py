"""Tiny random models of every family and variant."""

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from mhar import MharConfig, MharForCausalLM, RoutingConfig
from mhar.models.families import FAMILIES, causal_lm_class
from mhar.routing.config import VARIANTS

VOCABULARY = 48
PADDING = 0

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": PADDING,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,  # large enough that a mistake shows in the logits
}
# What makes each family differ from Llama, turned on. Windows are shorter than the tests' sequences.
SPECIFIC: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "qwen3": {"head_dim": 12},
    "qwen3_moe": {
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "mlp_only_layers": [1],
        "output_router_logits": True,
    },
    "smollm3": {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 4},
    "phi3": {"resid_pdrop": 0.1, "sliding_window": 4},
    "granite": {
        "residual_multiplier": 0.3,
        "embedding_multiplier": 5.0,
        "logits_scaling": 3.0,
        "attention_multiplier": 0.2,
    },
    "olmo2": {},
    "gemma3_text": {
        "head_dim": 8,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "final_logit_softcapping": 5.0,
        "query_pre_attn_scalar": 8,
    },
}
FAMILY_NAMES = sorted(FAMILIES)
VARIANT_NAMES = sorted(VARIANTS)


def base_config(family: str, **overrides: Any) -> PreTrainedConfig:
    """A tiny configuration of the stock family."""
    return AutoConfig.for_model(family, **{**COMMON, **SPECIFIC[family], **overrides})


def routing(variant: str, **overrides: Any) -> RoutingConfig:
    """A named variant whose blocks fit three layers; the last block is the shorter one."""
    return RoutingConfig.named(variant, **{"block_size": 2, **overrides})


def routed_model(family: str, variant: str = "mhar", *, attention: str = "sdpa", **overrides: Any) -> MharForCausalLM:
    """A tiny routed model in evaluation mode, the same for the same arguments; no routing parameter is at its start."""
    torch.manual_seed(0)
    own = {name: overrides.pop(name) for name in ("routing_backend", "z_loss") if name in overrides}
    config = MharConfig.from_base(base_config(family, **overrides), routing(variant), **own)
    config._attn_implementation = attention
    model = MharForCausalLM(config).eval()
    with torch.no_grad():
        # Norm gains away from one, so that a norm left out or misplaced shows.
        for name, parameter in model.named_parameters():
            if "norm" in name and "router" not in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            if ".router." in name:
                parameter.add_(0.5 * torch.randn_like(parameter))
    return model


def stock_model(model: MharForCausalLM) -> PreTrainedModel:
    """The stock model with the weights that `model` shares with it."""
    stock = causal_lm_class(model.config.base_model_type)(model.config.to_base()).eval()
    stock.set_attn_implementation(model.config._attn_implementation)
    state = {name: tensor for name, tensor in model.state_dict().items() if ".router." not in name}
    stock.load_state_dict(state)
    return stock


def tokens(*shape: int, seed: int = 0) -> Tensor:
    """Token ids that are never special."""
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """Gradients by parameter name (those that have one)."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
