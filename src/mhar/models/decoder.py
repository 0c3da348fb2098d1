"""`MharModel`: one decoder loop for every family and every variant."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from mhar.errors import ConfigurationError, InputError
from mhar.models.checkpoints import check_keys, check_one_device, damage_named, refuse_unsafe
from mhar.models.compat import cache_argument, either_cache, register_expert_layout
from mhar.models.configuration import MharConfig
from mhar.models.families import base_model_class
from mhar.models.outputs import Collected, MharModelOutput
from mhar.routing import DepthHistory, DepthRouter

register_expert_layout(MharConfig.model_type)

MASKS: dict[str, Callable[..., Any]] = {
    "full_attention": create_causal_mask,
    "sliding_attention": create_sliding_window_causal_mask,
}


class MharPreTrainedModel(PreTrainedModel):
    """What both models share: capabilities, initialisation, strict loading."""

    config_class = MharConfig
    config: MharConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True

    def __init__(self, config: MharConfig, *args: Any, **kwargs: Any) -> None:
        # By type name: code loaded from a folder may hold the configuration's class twice.
        if getattr(config, "model_type", None) != MharConfig.model_type:
            raise ConfigurationError(
                f"{type(self).__name__} needs a MharConfig (MharConfig.from_base makes one of another model's),"
                f" got {type(config).__name__}"
            )
        super().__init__(config, *args, **kwargs)

    @classmethod
    def from_pretrained(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls, pretrained_model_name_or_path: Any, *args: Any, strict: bool = True, **kwargs: Any
    ) -> Self:
        """transformers' `from_pretrained`, strict.

        Args:
            pretrained_model_name_or_path: a folder or a name, as in transformers; weights must be safetensors.
            strict: raise when the checkpoint lacks parameters of the model or brings others. False initialises the
                missing ones, which is how a pretrained base gets routing that has not been trained yet.
            args, kwargs: as in transformers.

        Raises:
            CheckpointError: no safetensors file, a damaged one, or (strict) missing or unexpected keys, all listed.
        """
        refuse_unsafe(pretrained_model_name_or_path)
        with_info = kwargs.pop("output_loading_info", False)
        kwargs |= {"use_safetensors": True, "output_loading_info": True}
        with damage_named(pretrained_model_name_or_path):
            loaded: Any = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        model, info = loaded
        check_one_device(model)
        if strict:
            # A decoder may be loaded from a checkpoint that also has the head.
            check_keys(pretrained_model_name_or_path, info, ignored="lm_head." if cls is MharModel else None)
        return loaded if with_info else model

    def _check_and_adjust_experts_implementation(self, experts_implementation: str | None) -> str:
        return self._as_base()._check_and_adjust_experts_implementation(experts_implementation)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Routing starts as the mean of the sources; all other modules start as the base family starts them."""
        if isinstance(module, DepthRouter):
            for name, parameter in module.named_parameters(recurse=False):
                init.constant_(parameter, 1.0 if name == "norm_weight" else 0.0)
        else:
            self._as_base()._init_weights(module)

    def _as_base(self) -> Any:
        """The base family's model without its modules: for what transformers keeps in methods of the model class."""
        base_class = base_model_class(self.config.base_model_type)
        shell: Any = base_class.__new__(base_class)
        nn.Module.__init__(shell)
        shell.config = self.config
        return shell


class MharModel(MharPreTrainedModel):
    """A decoder of any supported family whose sublayers read through a `DepthRouter`.

    Embedding, layers, norm and rotary embedding are the base family's own modules under their own names; routing adds
    `router.*` and nothing else.
    """

    embed_tokens: nn.Module
    layers: Any  # nn.ModuleList of the family's decoder layers
    norm: nn.Module
    rotary_emb: nn.Module

    def __init__(self, config: MharConfig) -> None:
        super().__init__(config)
        base: Any = base_model_class(config.base_model_type)(config)
        self.embed_tokens = base.embed_tokens
        self.layers = base.layers
        self.norm = base.norm
        self.rotary_emb = base.rotary_emb
        self.router = DepthRouter(
            config.num_sites,
            config.hidden_size,
            eps=config.rms_norm_eps,
            config=config.routing_config,
            backend=config.routing_backend,  # pyright: ignore[reportArgumentType]
            schedule=config.routing_schedule,  # pyright: ignore[reportArgumentType]
        )
        self.layer_types = config.family.layer_types(config)
        self.gradient_checkpointing = False
        # The loop calls sublayers, not layers: they are the units that sharding and placement must not split.
        sublayers = [module for layer in self.layers for module in (layer.self_attn, layer.mlp)]
        self._no_split_modules = sorted({type(module).__name__ for module in sublayers})
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Any] | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        output_router_logits: bool | None = None,
        return_dict: bool | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> MharModelOutput | tuple[Any, ...]:
        """Run the decoder; arguments are those of transformers' decoders, the cache goes by either of its names.

        Args:
            input_ids: [B, T]; or `inputs_embeds` [B, T, D], one of the two.
            attention_mask: [B, S] with zeros at padding, a prepared 4D mask, or one of these per layer type.
            position_ids: [B, T]; positions that restart within a row separate packed sequences (without a cache).
            use_cache: by default the config's value, but false in training.
            kwargs: passed on to every attention module.

        Returns:
            `hidden_states[i]` is what layer i's attention site reads before its norm; the last entry is the output of
            the final norm.
        """
        cache = either_cache(cache, past_key_values)
        hidden = self._embed(input_ids, inputs_embeds)
        cache = self._cache(cache, use_cache)
        # Before default positions exist: in them the mask builder would look for packed sequences, which waits for the
        # device, and under torch.compile makes it write a whole mask that keeps attention off its fastest kernel.
        masks = self._masks(attention_mask, hidden, cache, position_ids)
        if position_ids is None:
            seen = cache.get_seq_length() if cache is not None else 0
            position_ids = (torch.arange(hidden.shape[1], device=hidden.device) + seen).unsqueeze(0)
        rotations = self._rotations(hidden, position_ids)
        collect = Collected(self.config, output_hidden_states, output_attentions, output_router_logits)

        history = self.router.start(hidden)
        for layer, layer_type in zip(self.layers, self.layer_types, strict=True):
            arguments = {
                "attention_mask": masks[layer_type],
                "position_embeddings": rotations[layer_type],
                "position_ids": position_ids,
                "use_cache": cache is not None,
                **cache_argument(cache),
                **kwargs,
            }
            self._run_layer(layer, history, arguments, collect)
        hidden = history.read(norm=self.norm)

        outputs = MharModelOutput(last_hidden_state=hidden, **cache_argument(cache), **collect.fields(hidden))
        return outputs if self._wants_dict(return_dict) else outputs.to_tuple()

    def _run_layer(self, layer: Any, history: DepthHistory, arguments: dict[str, Any], collect: "Collected") -> None:
        family = self.config.family
        norm = family.norm(layer, "attention")
        if collect.hidden_states is None:
            hidden = history.read(norm=norm)
        else:
            hidden = history.read()
            collect.hidden_states.append(hidden)
            hidden = hidden if norm is None else norm(hidden)
        output, attentions = self._checkpointed(layer, partial(family.attention, layer, **arguments), hidden)
        history.append(output)
        collect.add_attentions(attentions)

        hidden = history.read(norm=family.norm(layer, "mlp"))
        mlp = partial(family.mlp, layer, with_expert_logits=collect.wants_expert_logits)
        output, expert_logits = self._checkpointed(layer, mlp, hidden)
        history.append(output)
        collect.add_expert_logits(expert_logits)

    def _checkpointed(self, layer: Any, sublayer: Any, hidden: Tensor) -> Any:
        """Run a sublayer, under gradient checkpointing when that is on: routing itself is never recomputed."""
        if self.training and layer.gradient_checkpointing:
            return layer._gradient_checkpointing_func(sublayer, hidden)
        return sublayer(hidden)

    def _embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        if (input_ids is None) == (inputs_embeds is None):
            given = "neither" if input_ids is None else "both"
            raise InputError(f"give exactly one of input_ids and inputs_embeds, got {given}")
        embedding = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        return self.config.family.scale_embedding(self.config, embedding)

    def _cache(self, cache: Cache | None, use_cache: bool | None) -> Cache | None:
        """The KV cache of this pass: the one given, a new one, or None."""
        if self.training and self.gradient_checkpointing:
            if cache is not None or use_cache:
                raise InputError("gradient checkpointing in training cannot use a KV cache: call eval() to generate")
            return None
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        return DynamicCache(config=self.config) if use_cache and cache is None else cache

    def _masks(
        self, attention_mask: Any, hidden: Tensor, cache: Cache | None, position_ids: Tensor | None
    ) -> dict[str, Any]:
        """Attention mask of each layer type that the model has."""
        if isinstance(attention_mask, dict):
            return attention_mask
        arguments: dict[str, Any] = {
            "config": self.config,
            "inputs_embeds": hidden,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            **cache_argument(cache),
        }
        return {layer_type: MASKS[layer_type](**arguments) for layer_type in dict.fromkeys(self.layer_types)}

    def _rotations(self, hidden: Tensor, position_ids: Tensor) -> Mapping[str, Any]:
        """Rotary position embedding (cos, sin) of each layer type that the model has."""
        if self.config.family.rope_per_layer_type:
            return {name: self.rotary_emb(hidden, position_ids, name) for name in dict.fromkeys(self.layer_types)}
        return dict.fromkeys(self.layer_types, self.rotary_emb(hidden, position_ids))

    def _wants_dict(self, return_dict: bool | None) -> bool:
        return bool(self.config.return_dict if return_dict is None else return_dict)
