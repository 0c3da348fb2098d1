"""Graft depth routing on a pretrained checkpoint without changing its logits."""

import argparse
import functools
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mhar.routing import RoutingConfig

EPILOG = """\
examples:
  mhar convert meta-llama/Llama-3.1-8B llama-3.1-8b-mhar
  mhar convert ./smollm2-135m ./smollm2-mhar --block-size 6 --num-heads 9
  mhar convert --from-reference ./released ./released-mhar
"""


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    options = argparse.ArgumentParser(
        prog="mhar convert",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("base", metavar="BASE", help="checkpoint folder, or a hub name such as organisation/model")
    options.add_argument("out", metavar="OUT", help="folder to create; it appears whole or not at all")
    options.add_argument("--variant", help="delta_block_mhar (default), delta_mhar or baseline")
    options.add_argument("--num-heads", type=_heads, metavar="H", help='routing heads, a divisor of the width, or "kv"')
    options.add_argument("--block-size", type=int, metavar="B", help="layers per block (default 4)")
    options.add_argument("--revision", help="branch, tag or commit of a hub name")
    options.add_argument(
        "--verify",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="compare the logits of base and result on real text (default: when the model fits in memory)",
    )
    options.add_argument("--device", default="cpu", help="where logits are compared (default cpu)")
    options.add_argument(
        "--from-reference",
        action="store_true",
        help="BASE is a folder in the layout of the authors' released checkpoints; it brings its own routing",
    )
    return options


def main(argv: list[str]) -> int:
    """Run the command; returns the exit status."""
    options = parser().parse_args(argv)
    say = functools.partial(print, file=sys.stderr, flush=True)
    if options.from_reference:
        return _from_reference(options)
    from mhar.conversion.stream import convert_checkpoint

    report = convert_checkpoint(
        options.base,
        options.out,
        _routing(options),
        revision=options.revision,
        verify=options.verify,
        device=options.device,
        progress=say,
    )
    print("\n".join(report.lines()))
    print(f"written   {options.out}")
    return 0


def _heads(text: str) -> int | str:
    try:
        return text if text == "kv" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f'must be a positive integer or "kv", got {text!r}') from None


def _routing(options: argparse.Namespace) -> "RoutingConfig":
    from mhar.conversion.graft import DEFAULT_VARIANT
    from mhar.errors import ConfigurationError
    from mhar.routing import RoutingConfig

    chosen = {"num_heads": options.num_heads, "block_size": options.block_size}
    overrides = {name: value for name, value in chosen.items() if value is not None}
    routing = RoutingConfig.named(options.variant or DEFAULT_VARIANT, **overrides)
    used = {"num_heads": routing.read != "none", "block_size": routing.read != "none" and routing.sources == "block"}
    if unused := [f"--{name.replace('_', '-')} {overrides[name]}" for name in overrides if not used[name]]:
        raise ConfigurationError(f"variant {options.variant!r} does not use {' and '.join(unused)}: drop it")
    return routing


def _from_reference(options: argparse.Namespace) -> int:
    from pathlib import Path

    from mhar.conversion.checkpoint import copy_side_files
    from mhar.conversion.folder import check_target, new_folder
    from mhar.conversion.reference_layout import from_reference
    from mhar.errors import ConfigurationError
    from mhar.models.export import export_model

    given = ("variant", "num_heads", "block_size", "revision", "verify")
    if refused := [f"--{name.replace('_', '-')}" for name in given if getattr(options, name) is not None]:
        raise ConfigurationError(f"a released folder brings its own routing and logits: drop {', '.join(refused)}")
    model = from_reference(options.base)
    check_target(Path(options.out), sum(p.nbytes for p in model.parameters()), Path(options.base))
    with new_folder(Path(options.out)) as partial:
        copy_side_files(Path(options.base), partial)
        export_model(model, partial)
    print(f"{options.out}: {model.config.routing_config.name}, {model.num_parameters():,} parameters")
    return 0
