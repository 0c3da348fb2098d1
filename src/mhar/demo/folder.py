"""The output folder: one run each, never written over by accident."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mhar import runfile
from mhar.demo.settings import DemoSettings
from mhar.errors import InputError

CONFIG = "run.yaml"


def new_folder(folder: Path, settings: DemoSettings, *, overwrite: bool = False) -> DemoSettings:
    """Make `folder` for a new run and write its configuration there.

    Raises:
        InputError: the folder is not empty and `overwrite` is not set, or it holds something other than a demo run
            (which is never removed).
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
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    runfile.save(settings, folder / CONFIG)
    return settings


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
