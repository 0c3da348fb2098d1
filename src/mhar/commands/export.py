"""A checkpoint with its code beside it, for servers and machines without mhar."""

import argparse
import shutil
from pathlib import Path

EPILOG = """\
example:
  mhar export runs/mhar/checkpoint served-model
  vllm serve served-model --trust-remote-code --model-impl transformers
"""


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    options = argparse.ArgumentParser(
        prog="mhar export",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("checkpoint", metavar="CHECKPOINT", help="folder of a saved routed model")
    options.add_argument("out", metavar="OUT", help="folder to create; it appears whole or not at all")
    return options


def main(argv: list[str]) -> int:
    """Run the command; returns the exit status."""
    options = parser().parse_args(argv)
    source, out = Path(options.checkpoint), Path(options.out)

    from mhar.errors import InputError
    from mhar.models.checkpoints import refuse_unsafe

    if out.exists():
        raise InputError(f"OUT must be a folder that does not exist yet, got {out}")
    if not (source / "config.json").is_file():
        raise InputError(f"CHECKPOINT must be the folder of a saved model, found no config.json in {source}")
    refuse_unsafe(source)
    files = _export(source, out)
    print(f"written   {out}: the checkpoint and {len(files)} files of code, named in config.json's auto_map")
    return 0


def _export(source: Path, out: Path) -> list[str]:
    from mhar.models.export import add_remote_code

    unfinished = out.with_name(f".{out.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        shutil.copytree(source, unfinished)
        files = add_remote_code(unfinished)
        unfinished.rename(out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return files
