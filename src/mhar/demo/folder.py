"""The output folder: one run each, never written over by accident."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mhar import runfile
from mhar.demo.settings import VARIANTS, DemoSettings
from mhar.errors import InputError

CONFIG = "run.yaml"

# Everything that a run writes; the configuration comes last, so that a removal cut short still leaves a run's folder.
SHARED_FILES = (
    "tokenizer/tokenizer.json",
    "tokenizer/tokenizer_config.json",
    "tokenizer/special_tokens_map.json",
    "table.txt",
    "comparison.json",
    "report.html",
)
VARIANT_FILES = (
    "metrics.jsonl",
    "summary.json",
    "routing.json",
    "sample.txt",
    "checkpoint-[0-9]*",
    ".checkpoint-[0-9]*.partial",
)
WRITTEN = (
    *(f"{variant}/{name}" for variant in VARIANTS for name in VARIANT_FILES),
    *SHARED_FILES,
    CONFIG,
)


def new_folder(folder: Path, settings: DemoSettings, *, overwrite: bool = False) -> DemoSettings:
    """Make `folder` for a new run and write its configuration there.

    Args:
        overwrite: remove the files of the run that `folder` holds; all other files in it stay.

    Raises:
        InputError: the folder is not empty and `overwrite` is not set, it holds something other than a demo run
            (which is never removed), or it cannot be written.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"the output must be a folder, got the file {folder}")
    if folder.is_dir() and any(folder.iterdir()):
        if not (folder / CONFIG).is_file():
            raise InputError(f"{folder} is not empty and holds no demo run ({CONFIG}): choose another --output")
        if not overwrite:
            raise InputError(
                f"{folder} already holds another run: continue it with --resume, replace it with --overwrite,"
                " or choose another --output"
            )
        runfile.load(DemoSettings, folder / CONFIG)  # refuses the folder of another command
        remove_run(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        runfile.save(settings, folder / CONFIG)
    except OSError as error:
        raise InputError(f"the output folder {folder} cannot be written: {error.strerror}") from error
    return settings


def remove_run(folder: Path) -> None:
    """Remove what a run wrote in `folder`, and its subfolders where nothing else is in them."""
    for pattern in WRITTEN:
        for path in folder.glob(pattern):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    for name in ("tokenizer", *VARIANTS):
        subfolder = folder / name
        if subfolder.is_dir() and not any(subfolder.iterdir()):
            subfolder.rmdir()


def resumed_settings(folder: Path, given: Mapping[str, Any]) -> DemoSettings:
    """The settings of the run in `folder`.

    Args:
        given: options that the user set for this call; they must agree with the run's.

    Raises:
        InputError: no run there, or an option that differs from the run's.
    """
    if not (folder / CONFIG).is_file():
        raise InputError(f"nothing to resume: {folder} holds no {CONFIG}")
    settings = runfile.load(DemoSettings, folder / CONFIG)
    for name, value in given.items():
        if getattr(settings, name) != value:
            raise InputError(
                f"--resume continues a run as it was started: its {name} is {getattr(settings, name)!r}, got {value!r}"
            )
    return settings
