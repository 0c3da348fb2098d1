"""Depth routing grafted on a model in memory."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from mhar.conversion.checkpoint import ROUTER, read_checkpoint
from mhar.conversion.support import check_convertible, check_starts_closed
from mhar.errors import CheckpointError
from mhar.models import MharConfig, MharForCausalLM
from mhar.models.compat import keep_checkpointing
from mhar.models.configuration import as_routing
from mhar.models.families import causal_lm_class
from mhar.routing import RoutingConfig

DEFAULT_VARIANT = "delta_block_mhar"


def convert(
    base: PreTrainedModel | str | Path,
    routing: RoutingConfig | str | dict[str, Any] | None = None,
    *,
    revision: str | None = None,
) -> MharForCausalLM:
    """A pretrained model with depth routing whose logits are still those of the base.

    Args:
        base: a model in memory, a local folder or a hub name.
        routing: what is routed: a RoutingConfig, the name of a variant, a dict of fields, or None for
            "delta_block_mhar". Its gates must start closed (read "add", gate "scalar"), or `read` be "none".
        revision: branch, tag or commit of a hub name.

    Returns:
        The routed model, in the base's dtype, device and mode, with its attention implementation and gradient
        checkpointing. It shares the weights of a model given in memory: training one trains the other.

    Raises:
        CheckpointError: a model or checkpoint that cannot be converted, weights that are NaN or infinite.
        ConfigurationError, InputError: routing that would change the model's function or does not fit its size.
    """
    routing = resolve_routing(routing)
    if isinstance(base, (str, Path)):
        checkpoint = read_checkpoint(base, revision, check=check_convertible)
        return _graft(AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype="auto"), routing)
    if revision is not None:
        raise CheckpointError(f"a revision belongs to a hub name, got {revision!r} with a model in memory")
    if not isinstance(base, PreTrainedModel):
        raise CheckpointError(
            f"give a transformers model, a folder or a hub name, got {type(base).__name__}"
            " (merge adapters first: PEFT's merge_and_unload)"
        )
    return _graft(base, routing)


def resolve_routing(routing: RoutingConfig | str | dict[str, Any] | None) -> RoutingConfig:
    """A configuration, a variant's name or the default -> a configuration that starts closed."""
    resolved = as_routing(DEFAULT_VARIANT if routing is None else routing)
    check_starts_closed(resolved)
    return resolved


def check_finite(not_finite: Iterable[str]) -> None:
    """Raise CheckpointError naming the tensors that hold NaN or infinity."""
    if names := list(not_finite):
        raise CheckpointError(
            f"{len(names)} tensors hold NaN or infinity: {', '.join(names)}; get an intact checkpoint"
        )


def _graft(base: PreTrainedModel, routing: RoutingConfig) -> MharForCausalLM:
    check_convertible({**base.config.to_dict(), "architectures": [type(base).__name__]})
    expected = causal_lm_class(base.config.model_type)
    if type(base) is not expected:
        raise CheckpointError(f"only a plain {expected.__name__} of transformers converts, got {type(base)}")
    if elsewhere := [name for name, weight in base.named_parameters() if weight.is_meta]:
        raise CheckpointError(f"weights must be in memory: {elsewhere[0]} is offloaded or was never loaded")
    check_finite(name for name, weight in base.named_parameters() if not bool(weight.isfinite().all()))
    # Implementations round differently, so logits are the base's only with the base's own; no config file has them.
    implementations = {
        "attn_implementation": base.config._attn_implementation,
        "experts_implementation": base.config._experts_implementation,
    }
    config = MharConfig.from_base(base.config, routing, **implementations)
    with torch.device("meta"):
        model = MharForCausalLM(config)
    _take_weights(model, base)
    keep_checkpointing(model, base)
    embedding = base.get_input_embeddings().weight
    router = model.model.router.to_empty(device=embedding.device).to(embedding.dtype)  # pyright: ignore
    router.reset_parameters()
    model.generation_config = base.generation_config
    return model.train(base.training)


def _take_weights(model: MharForCausalLM, base: PreTrainedModel) -> None:
    """Make the base's parameters and buffers those of `model`; modules have the same names in both."""
    trainable = {name: weight.requires_grad for name, weight in base.named_parameters()}
    keys = model.load_state_dict(base.state_dict(keep_vars=True), strict=False, assign=True)
    missing = [name for name in keys.missing_keys if not name.startswith(ROUTER)]
    if wrong := [*missing, *keys.unexpected_keys]:
        raise CheckpointError(
            f"the model's modules are not those of a plain {type(base).__name__} (adapters? merge them first):"
            f" {', '.join(wrong[:6])}"
        )
    for name, weight in base.named_parameters():
        weight.requires_grad_(trainable[name])  # assignment took the new model's flags
    # No state dict carries these: rotary frequencies, embedding scales.
    for name, buffer in base.named_buffers():
        module, _, leaf = name.rpartition(".")
        model.get_submodule(module).register_buffer(leaf, buffer, persistent=False)
