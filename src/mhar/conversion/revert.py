"""A converted checkpoint whose gates are closed, back in the layout of its base."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mhar.conversion.checkpoint import (
    INDEX,
    ROUTER,
    Checkpoint,
    copy_side_files,
    count_in_index,
    read_checkpoint,
)
from mhar.conversion.folder import check_target, new_folder
from mhar.conversion.tensorfile import copy_tensors
from mhar.errors import CheckpointError
from mhar.models import MharConfig
from mhar.models.families import causal_lm_class
from mhar.routing import routing_plan

GATE = ROUTER + "gate"


def revert_checkpoint(
    converted: str | Path,
    out: str | Path,
    *,
    revision: str | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Checkpoint:
    """Write a converted checkpoint without its routing; every other tensor keeps its name, dtype and bytes.

    Exact only while all gates are zero, whatever the queries have learned. `out` appears whole or not at all.

    Args:
        converted: folder (or hub name, with `revision`) of a converted checkpoint.
        out: folder to create; it must not exist or be empty.
        progress: called with one line per shard.

    Returns:
        The checkpoint that was written.

    Raises:
        CheckpointError: not a converted checkpoint, open gates (each site is named), routing without gates, or any
            fault of the files.
    """
    out = Path(out)
    checkpoint = read_checkpoint(converted, revision, check=_check_converted)
    config = MharConfig.from_pretrained(checkpoint.folder)
    check_closed(checkpoint, config)
    check_target(out, checkpoint.num_bytes, checkpoint.folder)
    with new_folder(out) as partial:
        _write_weights(checkpoint, partial, progress)
        copy_side_files(checkpoint.folder, partial)
        base = config.to_base()
        base.architectures = [causal_lm_class(config.base_model_type).__name__]
        base.save_pretrained(partial)
    return read_checkpoint(out, check=lambda config: None)


def check_closed(checkpoint: Checkpoint, config: MharConfig) -> None:
    """Raise CheckpointError unless the routing adds nothing: no routing, or a gate of exactly zero at every site."""
    routing = config.routing_config
    if routing.read == "none":
        return
    if routing.gate == "none":
        raise CheckpointError(
            f"only gated routing can be closed, and taken off without changing the model: variant {routing.name!r}"
            " has no gates"
        )
    gate = checkpoint.file_of(GATE).read(GATE)
    sites = {site.row: site.name for site in routing_plan(routing, config.num_sites) if site.row is not None}
    if opened := [f"{sites[row]} {value:.3g}" for row, value in enumerate(gate.tolist()) if value != 0]:
        listed = ", ".join(opened[:6]) + (", ..." if len(opened) > 6 else "")
        raise CheckpointError(
            f"{len(opened)} of {len(sites)} gates are open ({listed}): the model reads its routing, and without it"
            " would be another model. Only closed gates (exactly zero) revert"
        )


def _check_converted(config: dict[str, Any]) -> None:
    if config.get("model_type") != "mhar":
        raise CheckpointError(f"not a converted checkpoint: model_type is {config.get('model_type')!r}, not 'mhar'")


def _is_base(name: str) -> bool:
    return not name.startswith(ROUTER)


def _write_weights(checkpoint: Checkpoint, folder: Path, progress: Callable[[str], None]) -> None:
    """Copy every shard but its routing; shards that held nothing else disappear."""
    files = [file for file in checkpoint.files if any(map(_is_base, file.names))]
    for number, file in enumerate(files, start=1):
        progress(f"weights {number}/{len(files)}: {file.path.name}")
        copy_tensors(file, folder / file.path.name, keep=_is_base)
    if (checkpoint.folder / INDEX).is_file():
        _write_index(checkpoint, folder)


def _write_index(checkpoint: Checkpoint, folder: Path) -> None:
    index = json.loads((checkpoint.folder / INDEX).read_text(encoding="utf-8"))
    removed = [entry for file in checkpoint.files for entry in file.entries if not _is_base(entry.name)]
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if _is_base(name)}
    count_in_index(index, -sum(e.num_bytes for e in removed), -sum(e.num_bytes // e.item_bytes for e in removed))
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
