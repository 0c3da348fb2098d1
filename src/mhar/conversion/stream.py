"""A checkpoint converted folder to folder, without loading the model."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig

from mhar.conversion.card import CARD, base_metadata, model_card
from mhar.conversion.checkpoint import (
    INDEX,
    ROUTER,
    Checkpoint,
    copy_side_files,
    count_in_index,
    read_checkpoint,
)
from mhar.conversion.folder import check_target, new_folder
from mhar.conversion.graft import check_finite, resolve_routing
from mhar.conversion.report import REPORT, ConversionReport
from mhar.conversion.support import check_convertible
from mhar.conversion.tensorfile import copy_tensors
from mhar.conversion.verify import Verification, available_bytes, verification_bytes, verify_folders
from mhar.errors import CheckpointError
from mhar.models import MharConfig, MharForCausalLM
from mhar.models.devices import check_device
from mhar.models.export import add_remote_code
from mhar.routing import RoutingConfig

Progress = Callable[[str], None]


def convert_checkpoint(
    base: str | Path,
    out: str | Path,
    routing: RoutingConfig | str | None = None,
    *,
    revision: str | None = None,
    verify: bool | None = None,
    device: str = "cpu",
    progress: Progress = lambda line: None,
) -> ConversionReport:
    """Convert a checkpoint folder (or hub name) to a new folder, tensor by tensor.

    Weights are copied byte for byte through a small buffer; only `router.*` is new. `out` appears whole or not at all.

    Args:
        base, routing, revision: as in :func:`mhar.convert`.
        out: folder to create; it must not exist or be empty.
        verify: compare the logits of base and result before `out` appears. None: when the model fits in memory.
        device: where the comparison runs.
        progress: called with one line per step.

    Raises:
        CheckpointError: as :func:`mhar.convert`; also missing shards, too little disk space, logits that differ.
        ConfigurationError, InputError: routing that would change the model's function or does not fit its size, or a
            device that cannot be used here.
    """
    routing, out, device = resolve_routing(routing), Path(out), check_device(device)
    checkpoint = read_checkpoint(base, revision, check=check_convertible)
    config = MharConfig.from_base(AutoConfig.from_pretrained(checkpoint.folder), routing)
    added = _closed_router(config, checkpoint)
    check_target(out, checkpoint.num_bytes + sum(tensor.nbytes for tensor in added.values()), checkpoint.folder)
    with new_folder(out) as partial:
        _write_weights(checkpoint, partial, added, progress)
        num_added = sum(tensor.numel() for tensor in added.values())
        _write_description(checkpoint, partial, config, num_added, out.name)
        verification, skipped = _prove(checkpoint, partial, verify, device, progress)
        report = ConversionReport(
            base={
                "name": checkpoint.name,
                "revision": checkpoint.revision,
                "model_type": config.base_model_type,
                "num_parameters": checkpoint.num_parameters,
                **base_metadata(checkpoint.folder),
            },
            variant=config.routing_config.name,
            routing=config.routing_config.to_dict(),
            num_routing_parameters=num_added,
            verification=verification,
            skipped=skipped,
        )
        (partial / REPORT).write_text(json.dumps(report.to_dict(), indent=2) + "\n", encoding="utf-8")
    return report


def _closed_router(config: MharConfig, checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The routing's tensors at step 0, in the embedding's dtype. Also checks that the checkpoint is complete."""
    with torch.device("meta"):
        model = MharForCausalLM(config)
    _check_complete(model, checkpoint)
    router = model.model.router.to_empty(device="cpu").to(checkpoint.dtype)
    router.reset_parameters()
    return {ROUTER + name: tensor for name, tensor in router.state_dict().items()}


def _check_complete(model: MharForCausalLM, checkpoint: Checkpoint) -> None:
    """Raise CheckpointError naming the model's tensors that the checkpoint lacks."""
    tied = model.all_tied_weights_keys
    expected = [name for name in model.state_dict() if not name.startswith(ROUTER) and name not in tied]
    # Checkpoints store experts one by one, the model stacks them: loading checks these.
    missing = [name for name in expected if name not in checkpoint.names and ".experts." not in name]
    if missing:
        listed = ", ".join(missing[:10]) + (", ..." if len(missing) > 10 else "")
        raise CheckpointError(f"{checkpoint.name} lacks {len(missing)} tensors of its architecture: {listed}")


def _write_weights(checkpoint: Checkpoint, folder: Path, added: dict[str, Tensor], progress: Progress) -> None:
    """Copy every shard under its own name; the routing goes to the end of the last one."""
    for number, file in enumerate(checkpoint.files, start=1):
        progress(f"weights {number}/{len(checkpoint.files)}: {file.path.name}")
        extra = added if number == len(checkpoint.files) else {}
        check_finite(copy_tensors(file, folder / file.path.name, keep=lambda name: True, extra=extra))
    if (checkpoint.folder / INDEX).is_file():
        index = json.loads((checkpoint.folder / INDEX).read_text(encoding="utf-8"))
        index["weight_map"] |= dict.fromkeys(added, checkpoint.files[-1].path.name)
        count_in_index(index, sum(t.nbytes for t in added.values()), sum(t.numel() for t in added.values()))
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write_description(checkpoint: Checkpoint, folder: Path, config: MharConfig, num_added: int, title: str) -> None:
    """Configuration, remote code, tokenizer and other files of the base, and the model card."""
    copy_side_files(checkpoint.folder, folder)
    config.architectures = [MharForCausalLM.__name__]
    config.save_pretrained(folder)
    add_remote_code(folder)
    (folder / CARD).write_text(model_card(checkpoint, config, num_added, title), encoding="utf-8")


def _prove(
    checkpoint: Checkpoint, folder: Path, verify: bool | None, device: str, progress: Progress
) -> tuple[Verification | None, str | None]:
    """Compare base and result, or say why not; raises CheckpointError when their float32 logits differ."""
    needed, free = verification_bytes(checkpoint.num_parameters), available_bytes(device)
    if verify is False:
        return None, "not asked for"
    if verify is None and needed > free:
        return None, f"float32 logits need {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB of memory are free"
    progress(f"comparing logits on {device}")
    verification = verify_folders(checkpoint.folder, folder, checkpoint.dtype, device=device)
    if not verification.passed:
        raise CheckpointError(
            f"the converted model's float32 logits differ from the base's: {verification.comparisons[0]};"
            " nothing was written"
        )
    return verification, None
