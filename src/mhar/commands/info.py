"""Versions, hardware and usable backends, or what a checkpoint contains."""

import argparse
import importlib.metadata
import json
import math
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EXTRAS = {
    "train": ("tyro", "tensorboard", "datasets", "pyarrow"),
    "eval": ("lm_eval", "scipy", "datasets", "accelerate"),
    "analysis": ("matplotlib", "scipy", "pyarrow"),
    "bench": ("flash-linear-attention", "liger-kernel", "matplotlib"),
}
Line = tuple[str, str]


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    options = argparse.ArgumentParser(prog="mhar info", description=__doc__)
    options.add_argument("checkpoint", nargs="?", metavar="CHECKPOINT", help="folder of a saved model (optional)")
    options.add_argument("--json", action="store_true", help="print one JSON object")
    return options


def main(argv: list[str]) -> int:
    """Run the command; returns the exit status."""
    options = parser().parse_args(argv)
    lines = list(environment() if options.checkpoint is None else checkpoint(Path(options.checkpoint)))
    if options.json:
        print(json.dumps(dict(lines), indent=2))
    else:
        width = max(len(name) for name, _ in lines)
        print("\n".join(f"{name:<{width}}  {value}" for name, value in lines))
    return 0


def environment() -> Iterator[Line]:
    """What is installed, on what hardware, and which backends can run."""
    import torch

    from mhar.models.families import FAMILIES

    yield "mhar", version("mhar")
    yield "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    for package in ("torch", "transformers", "triton", "safetensors", "numpy"):
        yield package, version(package)
    yield "CPU threads", str(torch.get_num_threads())
    yield "GPUs", ", ".join(gpus()) or "none"
    yield "backend reference", "yes: plain PyTorch, on any device"
    yield "backend triton", triton_state()
    for extra, packages in EXTRAS.items():
        missing = [package for package in packages if version(package) == "not installed"]
        yield f"extra {extra}", f'needs {", ".join(missing)}: pip install "mhar[{extra}]"' if missing else "yes"
    yield "model families", ", ".join(sorted(FAMILIES))


def version(package: str) -> str:
    """The installed version of a distribution, or "not installed"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def gpus() -> Iterator[str]:
    """Name and memory of each visible GPU."""
    import torch

    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        yield f"{properties.name} ({properties.total_memory / 2**30:.0f} GiB)"


def triton_state() -> str:
    """Whether the Triton kernels can run here, or why not."""
    import torch

    from mhar.ops.backend import triton_obstacle

    device = "cuda" if torch.cuda.is_available() else "cpu"
    obstacle = triton_obstacle(torch.empty(1, 8, device=device))
    return "yes" if obstacle is None else f"no: {obstacle}"


def checkpoint(folder: Path) -> Iterator[Line]:
    """What a folder's config.json and safetensors headers say; no weight is loaded."""
    from mhar.models import MharConfig

    config = configuration(folder)
    routed = isinstance(config, MharConfig)
    yield "model", f"{config.base_model_type} with depth routing" if routed else config.model_type
    yield from sizes(config.get_text_config())
    yield from parameters(folder)
    if routed:
        yield from routing(config)
    yield "tokenizer", "yes" if any(folder.glob("tokenizer*.json")) else "no"


def configuration(folder: Path) -> Any:
    """The configuration of a saved model; CheckpointError when there is none that transformers can read."""
    from transformers import AutoConfig

    from mhar.conversion.checkpoint import read_config
    from mhar.errors import CheckpointError, MharError

    read_config(folder)
    try:
        return AutoConfig.from_pretrained(folder)
    except MharError:
        raise
    except (OSError, ValueError, TypeError, KeyError) as error:  # what transformers raises for fields it cannot use
        raise CheckpointError(
            f"{folder / 'config.json'} describes no model that transformers knows: {error}"
        ) from error


def sizes(config: Any) -> Iterator[Line]:
    """Width, depth, heads and vocabulary, as far as the family has them."""
    width, layers, heads, vocabulary = (
        getattr(config, name, "unknown")
        for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    )
    yield "width x layers", f"{width} x {layers}"
    yield "heads / KV heads", f"{heads} / {getattr(config, 'num_key_value_heads', heads)}"
    yield "vocabulary", f"{vocabulary} ({'tied' if getattr(config, 'tie_word_embeddings', False) else 'untied'})"


def parameters(folder: Path) -> Iterator[Line]:
    """Counts and dtypes of the model's stored tensors, those of routing apart."""
    from mhar.conversion.checkpoint import weight_files

    total, routing_total, dtypes = 0, 0, set[str]()
    for file in weight_files(folder):
        for name, shape, dtype in stored_tensors(folder / file):
            count = math.prod(shape)
            total += count
            routing_total += count if ".router." in f".{name}" else 0
            dtypes.add(dtype)
    yield "parameters", f"{total:,} ({', '.join(sorted(dtypes))})"
    if routing_total:
        yield "of them routing", f"{routing_total:,} ({routing_total / total:.3%})"


def stored_tensors(file: Path) -> list[tuple[str, list[int], str]]:
    """Name, shape and dtype (of any kind, quantised ones too) of each tensor in a safetensors file."""
    from safetensors import SafetensorError, safe_open

    from mhar.errors import CheckpointError

    try:
        with safe_open(file, framework="numpy") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 (not a dict)
            return [(name, stored.get_shape(), stored.get_dtype()) for name, stored in slices.items()]
    except SafetensorError as error:
        raise CheckpointError(f"{file} is damaged or cut short: {error}") from error


def routing(config: object) -> Iterator[Line]:
    """What is routed."""
    from mhar.models import MharConfig
    from mhar.routing import routing_plan

    assert isinstance(config, MharConfig)
    routed = config.routing_config
    yield "routing", f"{routed.name}: read {routed.read}, sources {routed.sources}, {routed.num_heads} heads"
    if routed.sources == "block" and routed.read != "none":
        yield "block size", f"{routed.block_size} layers"
    yield "gate / null source", f"{routed.gate} / {'yes' if routed.null_source else 'no'}"
    plan = routing_plan(routed, config.num_sites)
    yield "sites", f"{len(plan)} reads, {sum(site.row is not None for site in plan)} with parameters"
    yield "most sources", f"{max((len(site.source_names) for site in plan), default=0)}"
