"""A checkpoint with its code beside it, for servers and machines without mhar."""

import argparse
import shutil
from pathlib import Path

EPILOG = """\
example:
  mhar export runs/demo/mhar/checkpoint-300 served-model
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
    files = _export(source, out)
    print(f"written   {out}: the checkpoint and {len(files)} files of code, named in config.json's auto_map")
    return 0


def _export(source: Path, out: Path) -> list[str]:
    """Copy what serving needs, add the code, and return the names of its files."""
    from mhar.conversion.card import CARD
    from mhar.conversion.checkpoint import CONFIG, INDEX, copy_side_files, weight_files
    from mhar.conversion.folder import check_target, new_folder
    from mhar.models.checkpoints import refuse_unsafe
    from mhar.models.export import add_remote_code, routed_config

    routed_config(source)
    refuse_unsafe(source)
    weights = weight_files(source)
    check_target(out, sum((source / name).stat().st_size for name in weights), source)
    with new_folder(out) as partial:
        for name in (CONFIG, INDEX, CARD, *weights):
            if (source / name).is_file():
                shutil.copyfile(source / name, partial / name)
        copy_side_files(source, partial)
        return add_remote_code(partial)
