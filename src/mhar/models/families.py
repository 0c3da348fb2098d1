"""The supported model families: how a decoder layer of each runs its two sublayers.

A new family costs one entry here and one row in the table tests. Modules are made by the family's own public classes
of transformers, so parameter names are those of the base model.
"""

import threading
from dataclasses import dataclass
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from mhar.errors import ConfigurationError, unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What the decoder loop must know of one family. Names refer to attributes of a decoder layer or of the config.

    Attributes:
        base_model: public class whose embedding, layers, norm and rotary embedding are used.
        causal_lm: public class with a language-model head, from which checkpoints are converted.
        attention_norm, mlp_norm: norm before the sublayer; None where a family has none.
        attention_outputs, mlp_outputs: modules applied in order to the sublayer's output before the residual
            addition: post-norms, dropout.
        residual_multiplier: layer attribute that scales both sublayer outputs.
        embedding_multiplier: config field that scales the embeddings.
        logits_divisor: config field that the logits are divided by.
        logits_softcap: config field c of c * tanh(logits / c).
        masks: "causal" for all layers, "window" (sliding wherever the config has a `sliding_window`), or "layer_types"
            (the config says it layer by layer).
        rope_per_layer_type: the rotary embedding depends on the layer's type.
        expert_gate: attribute of a sparse MLP that maps tokens to expert logits.
        unsupported: config fields that must be false, with the reason.
    """

    base_model: str
    causal_lm: str
    attention_norm: str | None = "input_layernorm"
    mlp_norm: str | None = "post_attention_layernorm"
    attention_outputs: tuple[str, ...] = ()
    mlp_outputs: tuple[str, ...] = ()
    residual_multiplier: str | None = None
    embedding_multiplier: str | None = None
    logits_divisor: str | None = None
    logits_softcap: str | None = None
    masks: Literal["causal", "window", "layer_types"] = "causal"
    rope_per_layer_type: bool = False
    expert_gate: str | None = None
    unsupported: tuple[tuple[str, str], ...] = ()

    def check(self, config: PreTrainedConfig) -> None:
        """Raise ConfigurationError for a config that asks for what the decoder loop does not do."""
        for field, reason in self.unsupported:
            if getattr(config, field, None):
                raise ConfigurationError(f"{field} must be false: {reason}; got {getattr(config, field)!r}")

    def layer_types(self, config: PreTrainedConfig) -> list[str]:
        """ "full_attention" or "sliding_attention" for each layer."""
        if self.masks == "layer_types":
            return list(config.layer_types)
        sliding = self.masks == "window" and config.sliding_window is not None
        return ["sliding_attention" if sliding else "full_attention"] * config.num_hidden_layers

    def norm(self, layer: nn.Module, sublayer: Literal["attention", "mlp"]) -> nn.Module | None:
        """The norm before a sublayer of `layer`, to be applied by the read."""
        name = self.attention_norm if sublayer == "attention" else self.mlp_norm
        return None if name is None else getattr(layer, name)

    def attention(self, layer: Any, hidden: Tensor, **arguments: Any) -> tuple[Tensor, Tensor | None]:
        """Raw output of the attention sublayer, as the stock layer adds it to its stream, and the attention weights."""
        output, weights = layer.self_attn(hidden_states=hidden, **arguments)
        return self._finish(layer, output, self.attention_outputs), weights

    def mlp(self, layer: Any, hidden: Tensor, with_expert_logits: bool = False) -> tuple[Tensor, Tensor | None]:
        """Raw output of the MLP sublayer, as the stock layer adds it to its stream; expert logits if asked for."""
        gate = getattr(layer.mlp, self.expert_gate or "", None) if with_expert_logits else None
        if gate is None:
            output, logits = layer.mlp(hidden), None
        else:
            output, logits = call_watching(layer.mlp, hidden, gate)
        return self._finish(layer, output, self.mlp_outputs), logits

    def _finish(self, layer: Any, output: Tensor, names: tuple[str, ...]) -> Tensor:
        for name in names:
            output = getattr(layer, name)(output)
        return output if self.residual_multiplier is None else output * getattr(layer, self.residual_multiplier)

    def scale_embedding(self, config: PreTrainedConfig, embedding: Tensor) -> Tensor:
        """Embeddings as the stock loop has them (Gemma 3 scales inside its embedding module)."""
        if self.embedding_multiplier is None:
            return embedding
        return embedding * getattr(config, self.embedding_multiplier)

    def scale_logits(self, config: PreTrainedConfig, logits: Tensor) -> Tensor:
        """Logits as the stock head returns them."""
        if self.logits_divisor is not None:
            logits = logits / getattr(config, self.logits_divisor)
        cap = None if self.logits_softcap is None else getattr(config, self.logits_softcap)
        return logits if cap is None else torch.tanh(logits / cap) * cap


def call_watching(mlp: nn.Module, hidden: Tensor, gate: nn.Module) -> tuple[Tensor, Tensor]:
    """`mlp(hidden)` and the expert logits [B * T, E] that `gate`, a part of it, computes for this thread."""
    kept: list[Tensor] = []
    thread = threading.get_ident()

    def keep(module: nn.Module, arguments: Any, output: Any) -> None:
        if threading.get_ident() == thread:
            kept.append(output[0] if isinstance(output, tuple) else output)

    handle = gate.register_forward_hook(keep)
    try:
        return mlp(hidden), kept[0]
    finally:
        handle.remove()


FAMILIES: dict[str, Family] = {
    "llama": Family(base_model="LlamaModel", causal_lm="LlamaForCausalLM"),
    "mistral": Family(base_model="MistralModel", causal_lm="MistralForCausalLM", masks="window"),
    "qwen2": Family(base_model="Qwen2Model", causal_lm="Qwen2ForCausalLM", masks="layer_types"),
    "qwen3": Family(base_model="Qwen3Model", causal_lm="Qwen3ForCausalLM", masks="layer_types"),
    "qwen3_moe": Family(
        base_model="Qwen3MoeModel",
        causal_lm="Qwen3MoeForCausalLM",
        masks="window",
        expert_gate="gate",
    ),
    "smollm3": Family(base_model="SmolLM3Model", causal_lm="SmolLM3ForCausalLM", masks="layer_types"),
    "phi3": Family(
        base_model="Phi3Model",
        causal_lm="Phi3ForCausalLM",
        attention_outputs=("resid_attn_dropout",),
        mlp_outputs=("resid_mlp_dropout",),
        masks="window",
    ),
    "granite": Family(
        base_model="GraniteModel",
        causal_lm="GraniteForCausalLM",
        residual_multiplier="residual_multiplier",
        embedding_multiplier="embedding_multiplier",
        logits_divisor="logits_scaling",
    ),
    "olmo2": Family(
        base_model="Olmo2Model",
        causal_lm="Olmo2ForCausalLM",
        attention_norm=None,
        mlp_norm=None,
        attention_outputs=("post_attention_layernorm",),
        mlp_outputs=("post_feedforward_layernorm",),
    ),
    "gemma3_text": Family(
        base_model="Gemma3TextModel",
        causal_lm="Gemma3ForCausalLM",
        mlp_norm="pre_feedforward_layernorm",
        attention_outputs=("post_attention_layernorm",),
        mlp_outputs=("post_feedforward_layernorm",),
        logits_softcap="final_logit_softcapping",
        masks="layer_types",
        rope_per_layer_type=True,
        unsupported=(("use_bidirectional_attention", "the decoder loop is causal"),),
    ),
}


def family_of(base_model_type: str) -> Family:
    """The family of a base model's `model_type`; raises ConfigurationError with the nearest valid name."""
    if base_model_type not in FAMILIES:
        raise unknown("model family", base_model_type, FAMILIES)
    return FAMILIES[base_model_type]


def base_model_class(base_model_type: str) -> type[PreTrainedModel]:
    """The public transformers class of the family's decoder."""
    return getattr(transformers, family_of(base_model_type).base_model)


def causal_lm_class(base_model_type: str) -> type[PreTrainedModel]:
    """The public transformers class of the family's language model."""
    return getattr(transformers, family_of(base_model_type).causal_lm)
