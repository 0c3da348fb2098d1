"""`MharForCausalLM`: the decoder with a language-model head, its loss, and generation."""

from typing import Any

from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.cache_utils import Cache

from mhar.models.compat import CACHE_NAME, cache_argument, either_cache
from mhar.models.configuration import MharConfig
from mhar.models.decoder import MharModel, MharPreTrainedModel
from mhar.models.loss import chunked_loss, load_balancing_loss, num_targets, shifted_targets, squared_log_partition
from mhar.models.outputs import MharCausalLMOutput

__all__ = ["MharForCausalLM", "MharModel"]


class MharForCausalLM(MharPreTrainedModel, GenerationMixin):
    """`MharModel` with a language-model head."""

    # Mutable, without ClassVar: as transformers declares them.
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012

    def __init__(self, config: MharConfig) -> None:
        super().__init__(config)
        self.model = MharModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Any] | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        output_router_logits: bool | None = None,
        return_dict: bool | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> MharCausalLMOutput | tuple[Any, ...]:
        """Logits [B, T, V], and the loss when labels are given. Arguments as in :meth:`MharModel.forward`, and:

        Args:
            labels: [B, T], of the tokens themselves (they are shifted here); -100 does not count.
            logits_to_keep: the last positions to compute logits for (0: all), or indices of positions.
            kwargs: `num_items_in_batch`, `shift_labels` and `ignore_index` go to the loss, all go to attention.
        """
        outputs = dict(
            self.model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                inputs_embeds=inputs_embeds,
                use_cache=False if use_cache is None and labels is not None else use_cache,
                output_hidden_states=output_hidden_states,
                output_attentions=output_attentions,
                output_router_logits=output_router_logits,
                return_dict=True,
                **cache_argument(either_cache(cache, past_key_values)),
                **kwargs,
            )
        )
        hidden = outputs.pop("last_hidden_state")
        logits, losses = None, {}
        if labels is not None and self.config.loss_chunk_size is not None:
            losses = self._chunked_loss(hidden, labels, **kwargs)
        else:
            positions = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self._head(hidden[:, positions, :])
            losses = {} if labels is None else self._loss(logits, labels, **kwargs)
        losses |= self._expert_loss(outputs.get("router_logits"), attention_mask, hidden.shape[1], losses.get("loss"))
        result = MharCausalLMOutput(logits=logits, **losses, **outputs)
        return result if (self.config.return_dict if return_dict is None else return_dict) else result.to_tuple()

    def prepare_inputs_for_generation(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_ids: Tensor, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """transformers' own, but the cache is dropped when a text grows past where LongRoPE changes its frequencies."""
        cache: Cache | None = kwargs.get(CACHE_NAME)
        if cache is not None and self._rope_changes(cache.get_seq_length(), input_ids.shape[1]):
            kwargs |= {CACHE_NAME: None, "next_sequence_length": None}
        parent: Any = super()
        return parent.prepare_inputs_for_generation(input_ids, inputs_embeds=inputs_embeds, **kwargs)

    def _rope_changes(self, num_cached: int, num_tokens: int) -> bool:
        """Whether cached keys were rotated with other frequencies than the whole text now needs (Phi-3)."""
        rope: dict[str, Any] = getattr(self.config, "rope_parameters", None) or {}
        if rope.get("rope_type") != "longrope":
            return False
        limit = rope.get("original_max_position_embeddings") or self.config.original_max_position_embeddings
        return num_cached <= limit < num_tokens

    def _head(self, hidden: Tensor) -> Tensor:
        return self.config.family.scale_logits(self.config, self.lm_head(hidden))

    @property
    def _z_coefficient(self) -> float:
        return self.config.z_loss if self.training else 0.0

    def _loss(self, logits: Tensor, labels: Tensor, **kwargs: Any) -> dict[str, Tensor]:
        loss_function: Any = self.loss_function
        loss: Tensor = loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        if not self._z_coefficient:
            return {"loss": loss}
        ignore_index = kwargs.get("ignore_index", -100)
        targets = shifted_targets(labels, kwargs.get("shift_labels"), ignore_index).to(logits.device)
        z_sum = squared_log_partition(logits.float(), targets, ignore_index)
        z_loss = self._z_coefficient * z_sum / num_targets(targets, kwargs.get("num_items_in_batch"), ignore_index)
        return {"loss": loss + z_loss, "z_loss": z_loss}

    def _chunked_loss(
        self,
        hidden: Tensor,
        labels: Tensor,
        num_items_in_batch: Any = None,
        shift_labels: Tensor | None = None,
        ignore_index: int = -100,
        **kwargs: Any,
    ) -> dict[str, Tensor]:
        coefficient, chunk_size = self._z_coefficient, self.config.loss_chunk_size
        assert chunk_size is not None
        targets = shifted_targets(labels, shift_labels, ignore_index).to(hidden.device)
        sums = chunked_loss(
            self._head, hidden, targets, chunk_size, with_z=bool(coefficient), ignore_index=ignore_index
        )
        count = num_targets(targets, num_items_in_batch, ignore_index)
        loss, z_loss = sums[0] / count, coefficient * sums[1] / count
        return {"loss": loss + z_loss, "z_loss": z_loss} if coefficient else {"loss": loss}

    def _expert_loss(
        self, router_logits: Any, attention_mask: Any, num_tokens: int, loss: Tensor | None
    ) -> dict[str, Tensor]:
        """Load-balancing loss of sparse families, as the stock model adds it."""
        if not router_logits:
            return {}
        is_padding_mask = isinstance(attention_mask, Tensor) and attention_mask.ndim == 2
        mask = attention_mask[:, -num_tokens:] if is_padding_mask else None  # with a cache it also covers past tokens
        aux_loss = load_balancing_loss(router_logits, self.config.num_experts_per_tok, mask)
        added = {} if loss is None else {"loss": loss + self.config.router_aux_loss_coef * aux_loss.to(loss.device)}
        return {"aux_loss": aux_loss, **added}
