"""What the models return, and what they collect on the way when asked."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast

from mhar.errors import InputError


@dataclass
class MharModelOutput(MoeModelOutputWithPast):
    """Output of `MharModel`: transformers' own fields; `router_logits` are the expert logits of sparse MLPs."""


@dataclass
class MharCausalLMOutput(MoeCausalLMOutputWithPast):
    """Output of `MharForCausalLM`: transformers' own fields and `z_loss`.

    Attributes:
        loss: what to minimise: cross-entropy, plus `z_loss`, plus the weighted `aux_loss` of sparse families.
        logits: [B, T, V]; None when `loss_chunk_size` is set and labels are given.
        z_loss: the z-loss term, coefficient included, so that `loss - z_loss` is comparable with other runs; None
            outside training or with coefficient 0.
    """

    z_loss: Tensor | None = None


class Collected:
    """Hidden states, attention weights and expert logits of one forward pass: a list where asked for, else None."""

    def __init__(
        self, config: PreTrainedConfig, hidden_states: bool | None, attentions: bool | None, expert_logits: bool | None
    ) -> None:
        def wanted(argument: bool | None, field: str) -> list[Tensor] | None:
            return [] if (getattr(config, field, False) if argument is None else argument) else None

        self.hidden_states = wanted(hidden_states, "output_hidden_states")
        self._attentions = wanted(attentions, "output_attentions")
        self._expert_logits = wanted(expert_logits, "output_router_logits")
        if self._attentions is not None and config._attn_implementation != "eager":
            raise InputError(
                "output_attentions needs the eager attention (attn_implementation='eager'),"
                f" got {config._attn_implementation!r}"
            )

    def add_attentions(self, weights: Tensor | None) -> None:
        """Keep one layer's attention weights, if asked for."""
        if self._attentions is not None and weights is not None:
            self._attentions.append(weights)

    @property
    def wants_expert_logits(self) -> bool:
        """Whether sparse MLPs should return their expert logits."""
        return self._expert_logits is not None

    def add_expert_logits(self, logits: Tensor | None) -> None:
        """Keep one sparse MLP's expert logits, if asked for."""
        if self._expert_logits is not None and logits is not None:
            self._expert_logits.append(logits)

    def fields(self, last: Tensor) -> dict[str, Any]:
        """What was collected as output fields; `last` ends the hidden states."""
        fields: dict[str, Any] = {}
        if self.hidden_states is not None:
            fields["hidden_states"] = (*self.hidden_states, last)
        if self._attentions is not None:
            fields["attentions"] = tuple(self._attentions)
        if self._expert_logits:
            fields["router_logits"] = tuple(self._expert_logits)
        return fields
