"""Take the closed routing off a converted checkpoint."""

import argparse
import functools
import sys

EPILOG = """\
Every tensor but the routing keeps its name, dtype and bytes. A model with an open gate is refused: it reads its
routing, so without it it would be another model.
"""


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    options = argparse.ArgumentParser(prog="mhar revert", description=__doc__, epilog=EPILOG)
    options.add_argument("converted", metavar="CONVERTED", help="converted checkpoint: a folder or a hub name")
    options.add_argument("out", metavar="OUT", help="folder to create; it appears whole or not at all")
    options.add_argument("--revision", help="branch, tag or commit of a hub name")
    return options


def main(argv: list[str]) -> int:
    """Run the command; returns the exit status."""
    from mhar.conversion.revert import revert_checkpoint

    options = parser().parse_args(argv)
    say = functools.partial(print, file=sys.stderr, flush=True)
    base = revert_checkpoint(options.converted, options.out, revision=options.revision, progress=say)
    print(f"{options.out}: {base.config['model_type']}, {base.num_parameters:,} parameters, no routing")
    return 0
