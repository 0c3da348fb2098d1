"""Checks of a checkpoint: safetensors only, and every missing or unexpected key is named."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from mhar.errors import CheckpointError, InputError

UNSAFE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def refuse_unsafe(folder: Any) -> None:
    """Raise CheckpointError for a local folder that holds weights, but none as safetensors."""
    path = Path(str(folder))
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return
    unsafe = sorted(file.name for pattern in UNSAFE_PATTERNS for file in path.glob(pattern))
    found = f"found {', '.join(unsafe)}" if unsafe else "found no weights"
    raise CheckpointError(
        f"a checkpoint must be in safetensors files (pickled weights can run code); {found} in {path}"
    )


@contextmanager
def damage_named(source: Any) -> Generator[None]:
    """Turn the error of a file that is no whole safetensors file into a CheckpointError that names `source`."""
    try:
        yield
    except SafetensorError as error:
        raise CheckpointError(f"a weight file of {source} is damaged or cut short: {error}") from error


def check_keys(source: Any, info: dict[str, Any], ignored: str | None = None) -> None:
    """Raise CheckpointError with all missing and unexpected keys of transformers' loading info but those `ignored`."""
    missing = sorted(info["missing_keys"])
    unexpected = sorted(key for key in info["unexpected_keys"] if ignored is None or not key.startswith(ignored))
    if not missing and not unexpected:
        return
    lines = [f"checkpoint {source} does not fit the model"]
    lines += [f"missing ({len(missing)}): {', '.join(missing)}"] if missing else []
    lines += [f"unexpected ({len(unexpected)}): {', '.join(unexpected)}"] if unexpected else []
    raise CheckpointError("; ".join(lines))


def check_one_device(model: Any) -> None:
    """Raise InputError for a model that transformers spread over several devices."""
    devices = sorted({str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()})
    if len(devices) > 1:
        raise InputError(
            "a routed model must be on one device, since a read mixes the outputs of all layers before it;"
            f" got a device_map over {', '.join(devices)} (to spread a model, shard it: FSDP or tensor parallelism)"
        )
