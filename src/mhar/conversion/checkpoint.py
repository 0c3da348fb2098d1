"""A checkpoint folder as it lies on disk: configuration, shards, revision. No weights are loaded."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from mhar.conversion.tensorfile import DTYPES, TensorFile, open_tensor_file
from mhar.errors import CheckpointError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
EMBEDDING = "model.embed_tokens.weight"
ROUTER = "model.router."  # what every tensor of the routing is called, and nothing else

# What a converted folder takes over from its base, beside configuration and weights.
SIDE_FILES = (
    "tokenizer*",
    "*.model",
    "*.tiktoken",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "additional_chat_templates/*",
    "generation_config.json",
    "LICENSE*",
    "LICENCE*",
    "NOTICE*",
    "USE_POLICY*",
)


@dataclass(frozen=True)
class Checkpoint:
    """One local checkpoint.

    Attributes:
        folder: where it lies.
        name: how the user named it: a hub name, or the folder's own name.
        revision: commit of the hub that the folder holds; None when unknown.
        config: contents of config.json.
        files: the safetensors files, in order of their names.
    """

    folder: Path
    name: str
    revision: str | None
    config: dict[str, Any]
    files: tuple[TensorFile, ...]

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(name for file in self.files for name in file.names)

    @cached_property
    def num_bytes(self) -> int:
        """Size of all weight files."""
        return sum(file.path.stat().st_size for file in self.files)

    @cached_property
    def num_parameters(self) -> int:
        """Elements of all tensors."""
        return sum(entry.num_bytes // entry.item_bytes for file in self.files for entry in file.entries)

    @cached_property
    def dtype(self) -> torch.dtype:
        """Of the embedding, which is that of the whole checkpoint where it is uniform."""
        entries = self.file_of(EMBEDDING).entries
        return DTYPES[next(entry.dtype for entry in entries if entry.name == EMBEDDING)]

    def file_of(self, name: str) -> TensorFile:
        """The file that holds a tensor."""
        found = next((file for file in self.files if name in file.names), None)
        if found is None:
            raise CheckpointError(f"{self.name} holds no tensor {name!r}")
        return found


def read_checkpoint(
    base: str | Path, revision: str | None = None, *, check: Callable[[dict[str, Any]], None]
) -> Checkpoint:
    """Find a checkpoint (a folder, or a hub name that is downloaded) and read the headers of all its shards.

    Args:
        base: a local folder or a hub name.
        revision: branch, tag or commit on the hub.
        check: called with the contents of config.json before any weights are downloaded or read.

    Raises:
        CheckpointError: nothing there, no config.json, weights that are not safetensors, missing or damaged shards.
    """
    local = Path(base).expanduser()
    folder = _local_folder(local, revision) if local.exists() else _download(str(base), revision, [CONFIG])
    config = read_config(folder)
    check(config)
    if not local.exists():
        folder = _download(str(base), revision, [CONFIG, INDEX, "README.md", *SIDE_FILES, "*.safetensors"])
    files = tuple(open_tensor_file(folder / file) for file in weight_files(folder))
    name = local.resolve().name if local.exists() else str(base)
    checkpoint = Checkpoint(folder, name, hub_revision(folder), config, files)
    _check_index(checkpoint)
    return checkpoint


def _local_folder(path: Path, revision: str | None) -> Path:
    if not path.is_dir():
        raise CheckpointError(f"a checkpoint is a folder with {CONFIG} and safetensors, got the file {path}")
    if revision is not None:
        raise CheckpointError(f"a revision belongs to a hub name, got {revision!r} with the local folder {path}")
    return path


def _download(name: str, revision: str | None, patterns: list[str]) -> Path:
    """The hub's files in its local cache, without weights in subfolders (other formats live there)."""
    from huggingface_hub import snapshot_download

    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise CheckpointError(f"no folder {name}, and it is not a hub name such as 'organisation/model'")
    try:
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=["*/*.safetensors"])
        )
    except (OSError, ValueError) as error:  # the hub's errors are these two, offline and unknown names included
        raise CheckpointError(f"no local folder {name!r}, and the hub did not give it: {error}") from error


def read_config(folder: Path) -> dict[str, Any]:
    """Contents of config.json; CheckpointError when there is none, or none that can be read."""
    if not (folder / CONFIG).is_file():
        raise CheckpointError(f"{folder} is not a checkpoint: it has no {CONFIG}")
    return read_object(folder / CONFIG)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; CheckpointError when it holds something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold an object, got {type(content).__name__}")
    return content


def weight_files(folder: Path) -> list[str]:
    """Names of the weight files: those of the index, or the single file; CheckpointError when some are missing."""
    if (folder / INDEX).is_file():
        names = sorted(set(_weight_map(folder).values()))
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise CheckpointError(
                f"{len(missing)} of {len(names)} shards are missing from {folder}: {', '.join(missing)};"
                " download the checkpoint again"
            )
        return names
    if (folder / WEIGHTS).is_file():
        return [WEIGHTS]
    raise CheckpointError(_no_weights(folder))


def _weight_map(folder: Path) -> dict[str, str]:
    weight_map = read_object(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{folder / INDEX} has no weight_map, which names the file of each tensor")
    return weight_map


def _no_weights(folder: Path) -> str:
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    if shards:
        return f"{folder} has safetensors ({', '.join(shards[:3])}) but neither {WEIGHTS} nor {INDEX}: it is incomplete"
    others = [path.name for pattern in ("*.bin", "*.pth", "*.gguf") for path in folder.glob(pattern)]
    if any(name.endswith(".gguf") for name in others):
        return f"{folder} is quantised ({others[0]}): convert the unquantised checkpoint it was made from"
    if others:
        return (
            f"weights must be safetensors, got {', '.join(sorted(others)[:3])}:"
            " load them with from_pretrained and save_pretrained them first"
        )
    return f"{folder} holds no weights: neither {WEIGHTS} nor {INDEX}"


def _check_index(checkpoint: Checkpoint) -> None:
    if not (checkpoint.folder / INDEX).is_file():
        return
    for name, file in _weight_map(checkpoint.folder).items():
        if name not in checkpoint.names:
            raise CheckpointError(f"{file} does not hold tensor {name!r}, which the index promises there")


def count_in_index(index: dict[str, dict[str, int]], num_bytes: int, num_elements: int) -> None:
    """Correct the totals of an index by what was added (or, negative, taken out)."""
    metadata = index.setdefault("metadata", {})
    for field, change in (("total_size", num_bytes), ("total_parameters", num_elements)):
        if field in metadata:
            metadata[field] += change


def copy_side_files(source: Path, target: Path) -> None:
    """Copy tokenizer, generation configuration and licence files from one folder to another."""
    found = {path for pattern in SIDE_FILES for path in source.glob(pattern) if path.is_file()}
    for path in sorted(found):
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)


def hub_revision(folder: Path) -> str | None:
    """The hub commit of a folder in the hub's cache, or of one downloaded with `hf download --local-dir`."""
    path = folder.resolve()
    if path.parent.name == "snapshots" and is_commit(path.name):
        return path.name
    record = folder / ".cache" / "huggingface" / "download" / f"{CONFIG}.metadata"
    if not record.is_file():
        return None
    first = record.read_text(encoding="utf-8").splitlines()[:1]
    return first[0] if first and is_commit(first[0]) else None


def is_commit(name: str) -> bool:
    """Whether `name` is a commit's full hash."""
    return re.fullmatch(r"[0-9a-f]{40}", name) is not None
