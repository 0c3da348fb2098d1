"""A result folder that appears whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from mhar.errors import CheckpointError


def check_target(out: Path, num_bytes: int, source: Path | None = None) -> None:
    """Raise CheckpointError unless `out` is free, outside `source`, and can be made with room for `num_bytes`."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"the output folder must not exist or be empty: {out} holds files; name another one")
    if source is not None and out.resolve().is_relative_to(source.resolve()):
        raise CheckpointError(f"the output folder must not lie in the checkpoint {source}, got {out}")
    parent = _existing_parent(out)
    _check_writable(parent, out)
    free = shutil.disk_usage(parent).free
    if free < num_bytes:
        leftovers = [str(path) for path in parent.glob(f".{out.name}.*.partial")]
        hint = f"; left by interrupted runs and safe to delete: {', '.join(leftovers)}" if leftovers else ""
        raise CheckpointError(
            f"not enough disk space in {parent}: the result needs {num_bytes / 1e9:.2f} GB,"
            f" {free / 1e9:.2f} GB are free{hint}"
        )


@contextmanager
def new_folder(out: Path) -> Generator[Path]:
    """Yield a temporary sibling of `out` that is flushed to disk and renamed to `out` when the block succeeds.

    When it fails or is interrupted, the sibling is removed. A killed process can only leave `.NAME.*.partial` behind.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
    try:
        yield partial
        partial.chmod(0o777 & ~_umask())
        for path in sorted(partial.rglob("*"), reverse=True):
            _flush(path)
        _flush(partial)
        if out.is_dir():
            out.rmdir()
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _flush(out.parent)


def _existing_parent(path: Path) -> Path:
    return next(parent for parent in path.absolute().parents if parent.exists())


def _check_writable(parent: Path, out: Path) -> None:
    """Raise CheckpointError unless a folder can be made in `parent`; permissions alone do not tell."""
    try:
        Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=parent)).rmdir()
    except OSError as error:
        raise CheckpointError(f"the output folder {out} cannot be made in {parent}: {error.strerror}") from error


def _umask() -> int:
    """The process's umask: temporary folders are private, results are as open as any other new folder."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _flush(path: Path) -> None:
    """Make a file's bytes, or a folder's names, survive a power cut."""
    if os.name == "nt" and path.is_dir():  # Windows has no handle on a folder
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
