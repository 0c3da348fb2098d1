"""The model of a run: built or loaded, placed on its ranks, and exported."""

import dataclasses
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.nn.parallel import DistributedDataParallel
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from mhar.conversion import convert
from mhar.errors import CheckpointError, ConfigurationError, MharError, unknown
from mhar.models import FAMILIES, MharConfig, MharForCausalLM
from mhar.routing import RoutingConfig
from mhar.training.config import STOCK, ModelSection, RunConfig
from mhar.training.distributed import World, spread

BASELINE = "baseline"
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)


def build_model(section: ModelSection, seed: int, device: str = "cpu") -> PreTrainedModel:
    """The model of a run file in float32 on the host, or without memory on device "meta".

    From scratch, the seed alone decides the backbone's values: routing parameters draw no random numbers, so that
    every variant starts from the same backbone. Raises MharError subclasses for a model that cannot be.
    """
    with _refusals_named(section):
        if section.init_from is not None and device != "meta":
            model = _load(section)
        else:
            torch.manual_seed(seed)
            with torch.device(device):
                model = AutoModelForCausalLM.from_config(
                    model_config(section), dtype=torch.float32, attn_implementation=section.attention
                )
    if section.frozen_base:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("router" in name.split("."))
    if section.activation_checkpointing:
        # 5.24 renamed it and warns about the old name
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    return model


@contextmanager
def _refusals_named(section: ModelSection) -> Generator[None]:
    """What transformers refuses (a missing checkpoint, a size, an attention implementation) as a user's error."""
    try:
        yield
    except MharError:
        raise
    except (OSError, ValueError, ImportError) as error:
        kind = ConfigurationError if section.init_from is None else CheckpointError
        raise kind(f"model {section.init_from or section.family!r} cannot be built: {error}") from error


def model_config(section: ModelSection) -> Any:
    """The configuration that a run file describes."""
    fields = {"z_loss": section.z_loss, "loss_chunk_size": section.loss_chunk_size, "routing_backend": section.backend}
    if section.init_from is None:
        if section.family not in FAMILIES:
            raise unknown("model.family", section.family, FAMILIES)
        check_shape(section.family, section.shape)
        base = AutoConfig.for_model(section.family, **section.shape)
        if section.variant == STOCK:
            return base
        return MharConfig.from_base(base, RoutingConfig.named(section.variant, **section.routing), **fields)
    found = AutoConfig.from_pretrained(section.init_from)
    if section.control:
        base = found.to_base() if isinstance(found, MharConfig) else found
        return MharConfig.from_base(base, BASELINE, **fields)
    if not isinstance(found, MharConfig):
        raise CheckpointError(f"{section.init_from} has no routing: `mhar convert` it first, or set model.control=true")
    return MharConfig.from_base(found.to_base(), found.routing_config, **fields)


def check_shape(family: str, shape: dict[str, Any]) -> None:
    """ConfigurationError for a field that the family's configuration class does not have, or a size below 1."""
    kind: Any = CONFIG_MAPPING[family]
    # Sizes too: qwen3_moe reads a head_dim that its configuration does not declare.
    fields = {*(field.name for field in dataclasses.fields(kind)), *kind.attribute_map, *SIZES}
    for name, value in shape.items():
        if name not in fields:
            raise unknown(f"model.shape field of {family}", name, fields)
        if name in SIZES and not (isinstance(value, int) and value > 0):
            raise ConfigurationError(f"model.shape.{name} must be a positive integer, received {value!r}")


def _load(section: ModelSection) -> PreTrainedModel:
    assert section.init_from is not None
    config = model_config(section)
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": section.attention}
    if not section.control:
        return MharForCausalLM.from_pretrained(section.init_from, config=config, **options)
    model = AutoModelForCausalLM.from_pretrained(section.init_from, **options)
    if not isinstance(model, MharForCausalLM):
        return with_config(convert(model, BASELINE), config)
    gate = model.model.router.gate
    if model.config.routing_config.read != "none" and (gate is None or bool(gate.any())):
        raise CheckpointError(
            f"model.control: the routing of {section.init_from} is not closed, so its base is unknown"
        )
    base = {name: tensor for name, tensor in model.state_dict().items() if ".router." not in name}
    with torch.device("meta"):
        control = AutoModelForCausalLM.from_config(config, **options)
    _copy_buffers(model, control)
    control.load_state_dict(base, assign=True)
    control.tie_weights()
    return control


def with_config(model: PreTrainedModel, config: Any) -> PreTrainedModel:
    """The model with the training fields of `config`."""
    for name in ("z_loss", "loss_chunk_size", "routing_backend"):
        setattr(model.config, name, getattr(config, name))
    return model


def place_model(config: RunConfig, world: World) -> nn.Module:
    """The run's model on its ranks. Only the first rank of a sharded run ever holds the whole model."""
    if world.mode not in ("fsdp", "hsdp"):
        model = nn.Module.to(build_model(config.model, config.seed), world.device)
        return spread(model, config.parallel, world)
    whole = build_model(config.model, config.seed) if world.is_main else None
    skeleton = build_model(config.model, config.seed, "meta")
    model = spread(skeleton, config.parallel, world)
    skeleton.to_empty(device=world.device)
    skeleton.tie_weights()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, whole.state_dict() if whole is not None else {}, options=options)
    _broadcast_buffers(whole, skeleton, world)
    return model


def _broadcast_buffers(whole: nn.Module | None, skeleton: nn.Module, world: World) -> None:
    sources = dict(whole.named_buffers()) if whole is not None else {}
    for name, buffer in list(skeleton.named_buffers()):
        value = torch.empty_like(buffer, device=world.device)
        if name in sources:
            value.copy_(sources[name])
        dist.broadcast(value, 0)
        _set_buffer(skeleton, name, value)


def _copy_buffers(source: nn.Module, target: nn.Module) -> None:
    for name, buffer in source.named_buffers():
        _set_buffer(target, name, buffer.clone())


def _set_buffer(model: nn.Module, name: str, value: Tensor) -> None:
    owner, _, last = name.rpartition(".")
    model.get_submodule(owner)._buffers[last] = value


def unwrapped(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside what the loop calls."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    assert isinstance(inner, PreTrainedModel)
    return inner


def export(model: nn.Module, folder: Path, world: World, dtype: str, tokenizer: Path | None) -> None:
    """Save the whole model for `AutoModelForCausalLM.from_pretrained`, atomically; every rank must call it."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Any] = get_model_state_dict(model, options=options)
    if world.is_main:
        inner = unwrapped(model)
        partial = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        state = {name: tensor.to(getattr(torch, dtype)) for name, tensor in state.items()}
        inner.save_pretrained(partial, state_dict=_tied(inner, state))
        if tokenizer is not None and tokenizer.is_dir():
            shutil.copytree(tokenizer, partial, dirs_exist_ok=True)
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
    if world.size > 1:
        dist.barrier()


def _tied(model: PreTrainedModel, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tied weights as one tensor, which save_pretrained then writes once."""
    if getattr(model.config, "tie_word_embeddings", False):
        ties: dict[str, str] = getattr(model, "_tied_weights_keys", None) or {}
        for target, source in ties.items():
            if target in state and source in state:
                state[target] = state[source]
    return state


def parameter_counts(model: nn.Module) -> dict[str, int]:
    """Numbers of parameters: all, of routing, of the input embedding, and trainable ones."""
    counts = {"parameters": 0, "routing_parameters": 0, "embedding_parameters": 0, "trainable_parameters": 0}
    for name, parameter in model.named_parameters():
        counts["parameters"] += parameter.numel()
        counts["routing_parameters"] += parameter.numel() * ("router" in name.split("."))
        counts["embedding_parameters"] += parameter.numel() * ("embed_tokens" in name)
        counts["trainable_parameters"] += parameter.numel() * parameter.requires_grad
    return counts
