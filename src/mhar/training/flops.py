"""Model FLOPs of a training step, and the peak of the hardware, for model FLOPs utilisation."""

from typing import Any

import torch
from torch import nn

# Dense bfloat16 FLOP/s without sparsity, by a part of the name that CUDA reports (vendors' data sheets).
PEAK_FLOPS = {
    "B200": 2.25e15,
    "H200": 989e12,
    "GH200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
}


def flops_per_token(model: nn.Module, config: Any, sequence_length: int) -> float:
    """Forward and backward FLOPs of a token: 6 per weight that multiplies it, plus causal attention.

    The rule of PaLM (Chowdhery et al. 2022, appendix B) with attention counted causally (half). Weights: all but an
    untied input embedding and the routing parameters; of experts the active part. Routing itself and recomputation
    are not counted, so that utilisation compares methods by the base model's work.
    """
    active = 1.0
    if experts := getattr(config, "num_experts", None):
        active = config.num_experts_per_tok / experts
    weights = 0.0
    for name, parameter in model.named_parameters():
        looked_up = "embed_tokens" in name and not config.tie_word_embeddings
        if not looked_up and "router" not in name.split("."):
            weights += parameter.numel() * (active if "experts" in name else 1.0)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = config.num_hidden_layers * config.num_attention_heads * head_dim * sequence_length
    return 6 * weights + 6 * attention


def peak_flops(device: torch.device) -> float | None:
    """Peak bfloat16 FLOP/s of `device`; None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)
