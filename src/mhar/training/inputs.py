"""The prepared data of a run, opened and checked against the model."""

from pathlib import Path
from typing import Any

import torch.distributed as dist

from mhar.data.packing import PackedWindows
from mhar.data.shards import Manifest, PreparedSplit
from mhar.data.tokenization import check_same_tokenizer, load_tokenizer
from mhar.errors import InputError
from mhar.training.config import RunConfig
from mhar.training.distributed import World


def open_data(config: RunConfig, world: World) -> tuple[list[PackedWindows], Manifest]:
    """The training sets, checked: sizes always, checksums on the first rank, one tokenizer for all."""
    section = config.data
    splits = [PreparedSplit(folder, "train") for folder in section.train]
    evaluated = [PreparedSplit(section.val or section.train[0], "val")] if config.eval.every else []
    first = splits[0].manifest
    for split in (*splits, *evaluated):
        if split.manifest.tokenizer.fingerprint != first.tokenizer.fingerprint:
            raise InputError(f"{split.folder} was prepared with another tokenizer than {splits[0].folder}")
        if section.verify and world.is_main:
            split.verify()
    if section.tokenizer is not None:
        check_same_tokenizer(load_tokenizer(section.tokenizer), section.tokenizer, first.tokenizer)
    if world.size > 1:
        dist.barrier()
    isolate = section.isolate_documents
    return [PackedWindows(split, section.sequence_length, isolate_documents=isolate) for split in splits], first


def check_vocabulary(model: Any, manifest: Manifest, config: RunConfig) -> None:
    """InputError when the data holds ids that the model does not have, or is not the checkpoint's own tokens."""
    if manifest.tokenizer.vocab_size > model.vocab_size:
        raise InputError(
            f"the data's tokenizer {manifest.tokenizer.name!r} has {manifest.tokenizer.vocab_size} ids, the model's "
            f"vocabulary {model.vocab_size}"
        )
    source = config.model.init_from
    if source is not None and (Path(source) / "tokenizer.json").is_file():
        check_same_tokenizer(load_tokenizer(source), source, manifest.tokenizer)
