"""Checkpoints of a variant: a Hugging Face folder, plus what training needs to continue exactly."""

import json
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from mhar.errors import CheckpointError
from mhar.models import MharForCausalLM

PREFIX = "checkpoint-"
OPTIMIZER, STATE = "optimizer.safetensors", "training_state.json"


def save_checkpoint(
    folder: Path,
    model: MharForCausalLM,
    optimizer: torch.optim.Optimizer,
    tokenizer: PreTrainedTokenizerFast,
    state: Mapping[str, Any],
) -> None:
    """Write `folder/checkpoint-STEP`, STEP being `state["step"]`; the older one goes once the new one is complete."""
    target = folder / f"{PREFIX}{state['step']}"
    if target.is_dir():
        return
    partial = folder / f".{target.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    with no_progress_bars():
        model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    save_file(flat_state(optimizer), partial / OPTIMIZER)
    (partial / STATE).write_text(json.dumps(state), encoding="utf-8")
    older = list(folder.glob(f"{PREFIX}*"))
    partial.rename(target)
    for path in older:
        shutil.rmtree(path)


def newest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint with the highest step in `folder`."""
    found = {int(path.name.removeprefix(PREFIX)): path for path in folder.glob(f"{PREFIX}*")}
    return found[max(found)] if found else None


def load_model(checkpoint: Path) -> MharForCausalLM:
    """The model of a checkpoint; CheckpointError when it cannot be loaded."""
    try:
        with no_progress_bars():
            return MharForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    except OSError as error:
        raise CheckpointError(f"cannot continue from {checkpoint}: {error}") from error


def restore(checkpoint: Path, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Put the checkpoint's moments into `optimizer` and return the state that was saved with them."""
    moments: dict[int, dict[str, Tensor]] = {}
    for key, value in load_file(checkpoint / OPTIMIZER).items():
        index, name = key.split(".", 1)
        moments.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})
    return json.loads((checkpoint / STATE).read_text(encoding="utf-8"))


def flat_state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's tensors under `INDEX.NAME`, INDEX counting the parameters."""
    state: dict[int, dict[str, Tensor]] = optimizer.state_dict()["state"]
    return {f"{index}.{name}": value for index, values in state.items() for name, value in values.items()}


@contextmanager
def no_progress_bars() -> Generator[None]:
    """Silence the bars of transformers, which would break up ours."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
