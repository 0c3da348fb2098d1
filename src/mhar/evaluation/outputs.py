"""Output folders, checked before the work whose results they are to hold."""

import os
from pathlib import Path

from mhar.errors import InputError


def check_folder(folder: Path) -> None:
    """Raise unless `folder` is a writable folder or can be made one; nothing is created.

    Raises:
        InputError: a file is in the way, or there is no permission; the path concerned is named.
    """
    try:
        nearest = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    except OSError as error:
        raise InputError(f"the output folder {folder} cannot be made: {error.strerror}") from error
    if not nearest.is_dir():
        raise InputError(f"the output folder {folder} cannot be made: {nearest} is a file")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise InputError(f"the output folder {folder} cannot be written: no permission in {nearest}")


def check_file(path: Path) -> None:
    """Raise unless `path` can be written as a file; nothing is created.

    Raises:
        InputError: a folder of that name, or a parent that `check_folder` refuses.
    """
    if path.is_dir():
        raise InputError(f"the output must be a file, {path} is a folder")
    check_folder(path.parent)
