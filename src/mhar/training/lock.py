"""One process at a time in a run's folder."""

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from mhar.errors import InputError

LOCK = ".lock"


def make_folder(folder: Path) -> None:
    """Make the folder of a run; InputError when that cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"out={folder} cannot be a folder: {error.strerror}") from error


@contextmanager
def folder_lock(folder: Path) -> Generator[None]:
    """Hold `folder` for this process; InputError when another process does. The system lets go when it dies.

    A POSIX record lock belongs to the process alone: loader workers, which outlive a killed parent for a moment, do
    not keep it. Windows has none, and runs there are not guarded.
    """
    if sys.platform == "win32":
        yield
        return
    import fcntl

    path = folder / LOCK
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            raise InputError(
                f"{folder} is in use by process {file.read().strip() or '?'}: wait, or choose another `out`"
            ) from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
