"""Any causal language model from a folder or hub name: ours, or whatever the Auto classes know."""

import importlib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors import SafetensorError

from mhar.errors import CheckpointError, DependencyError, InputError
from mhar.evaluation.records import model_revision

DTYPES = {"auto": "auto", "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in evaluation mode and what identifies it; `tokenizer` is None where the checkpoint has none."""

    model: Any
    tokenizer: Any
    info: dict[str, Any]


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def load_model(
    name: str, *, revision: str | None = None, device: str | None = None, dtype: str = "auto"
) -> LoadedModel:
    """Load a checkpoint and its tokenizer.

    Raises:
        InputError: a device that is not there, or an unknown dtype.
        CheckpointError: no checkpoint under that name, or one that cannot be loaded; the cause is quoted.
    """
    from transformers import AutoModelForCausalLM

    importlib.import_module("mhar.models")  # registers our models with the Auto classes

    place = check_device(device or default_device())
    if dtype not in DTYPES:
        raise InputError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    try:
        model = AutoModelForCausalLM.from_pretrained(name, revision=revision or "main", dtype=DTYPES[dtype])
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"{name!r} cannot be loaded as a causal language model: {error}") from error
    model.eval()
    torch.nn.Module.to(model, place)
    info = {
        "name": name,
        "type": model.config.model_type,
        "width": model.config.get_text_config().hidden_size,
        "revision": revision_of(name, model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "device": str(place),
    }
    return LoadedModel(model, load_tokenizer(name, revision), info)


def load_tokenizer(name: str, revision: str | None = None) -> Any:
    """The checkpoint's tokenizer, None when it has none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, revision=revision or "main")
    except (OSError, ValueError, KeyError):
        return None


def display_name(name: str) -> str:
    """A checkpoint's name in tables and default folders: its folder's, with the run's where the former says little."""
    path = Path(name)
    says_little = path.name in ("final", "final_ema") or path.name.startswith("checkpoint")
    parent = path.resolve().parent.name
    return f"{parent}-{path.name}" if says_little and parent else path.name


def revision_of(name: str, model: Any) -> str:
    """The hub's commit, or a fingerprint of the files of a local folder."""
    folder = Path(name)
    return model_revision(folder) if folder.is_dir() else str(getattr(model.config, "_commit_hash", None))


def check_device(name: str) -> torch.device:
    """The device, InputError when this machine does not have it."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    return device


def require(module: str, extra: str) -> ModuleType:
    """Import an optional dependency; DependencyError names the extra that brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DependencyError(f"{module} is needed here: pip install 'mhar[{extra}]'") from error
