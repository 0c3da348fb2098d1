"""Routing operators and whole training steps against the alternatives, gated on correctness."""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from mhar.errors import ConfigurationError, DependencyError

Save = Callable[[dict[str, Any]], None]

EPILOG = """\
examples:
  mhar bench routing --output benchmarks/results/routing-h200.json
  mhar bench routing --shapes 1b:1024 --implementations mhar mhar-dense fla
  mhar bench step --shapes 350m --output step.json
  mhar bench report routing.json step.json      tables and a figure beside the files
  TRITON_INTERPRET=1 mhar bench routing --device cpu --preset tiny      a rehearsal without a GPU
"""


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    options = argparse.ArgumentParser(
        prog="mhar bench", description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = options.add_subparsers(dest="action", required=True, metavar="{routing,step,report}")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    common.add_argument("--preset", choices=("paper", "tiny"), default="paper", help="which set of shapes")
    common.add_argument("--shapes", nargs="+", metavar="SHAPE", help='such as "1b" or "1b:4096" (default: all)')
    common.add_argument("--output", type=Path, metavar="JSON", help="also written: a Markdown table and a figure")
    routing = actions.add_parser("routing", parents=[common], help="all sites of a micro-batch")
    routing.add_argument("--implementations", nargs="+", metavar="NAME", help="default: all; the rest is not measured")
    routing.add_argument("--repeats", type=int, default=20, help="replays of each CUDA graph (default 20)")
    routing.add_argument("--max-gigabytes", type=float, default=120, help="skip what needs more GPU memory")
    routing.add_argument("--peer-configs", type=int, default=1, help="settings that FLA's autotuner tries (default 1)")
    routing.add_argument("--authors", type=Path, metavar="SCRIPT", help="Python file with routing_chain(problem)")
    step = actions.add_parser("step", parents=[common], help="whole training steps, MHAR against the baseline")
    step.add_argument("--repeats", type=int, default=10, help="steps timed (default 10)")
    step.add_argument("--num-layers", type=int, help="a smaller depth, to rehearse or to fill compilation caches")
    report = actions.add_parser("report", help="Markdown tables and figures from results")
    report.add_argument("results", nargs="+", type=Path, metavar="JSON")
    return options


def main(argv: list[str]) -> int:
    """Run the command; returns the exit status."""
    options = parser().parse_args(argv)
    if options.action == "report":
        for path in options.results:
            print("\n".join(map(str, write_report(read_result(path), path))))
        return 0
    check_device(options.device)
    result = (run_routing if options.action == "routing" else run_step)(options, partial(save, options.output))
    if options.output is not None:
        print("\n".join(map(str, (options.output, *write_report(result, options.output)))))
    return 0


def check_device(device: str) -> None:
    """Raise ConfigurationError where the device does not exist."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError("--device cuda: PyTorch sees no GPU; --device cpu --preset tiny rehearses without one")


def run_routing(options: argparse.Namespace, save: Save) -> dict[str, Any]:
    from mhar.bench.implementations import IMPLEMENTATIONS, BuildOptions
    from mhar.bench.routing import RoutingOptions, bench_routing
    from mhar.bench.shapes import ROUTING_SHAPES, select
    from mhar.errors import unknown

    known = [implementation.name for implementation in IMPLEMENTATIONS]
    for name in options.implementations or ():
        if name not in known:
            raise unknown("implementation", name, known)
    shapes = select(ROUTING_SHAPES[options.preset], options.shapes)
    build = BuildOptions(options.peer_configs, options.authors)
    how = RoutingOptions(options.device, repeats=options.repeats, max_gigabytes=options.max_gigabytes, build=build)
    return bench_routing(shapes, options.implementations, how, save=save)


def run_step(options: argparse.Namespace, save: Save) -> dict[str, Any]:
    from mhar.bench.shapes import STEP_SHAPES, select
    from mhar.bench.step import StepOptions, bench_step

    shapes = select(STEP_SHAPES[options.preset], options.shapes)
    return bench_step(shapes, StepOptions(options.device, options.repeats, options.num_layers), save=save)


def read_result(path: Path) -> dict[str, Any]:
    """A result file; raises ConfigurationError for a file that is none."""
    try:
        result = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigurationError(f"{path} is not a result of mhar bench: {error}") from error
    if not isinstance(result, dict) or "rows" not in result:
        raise ConfigurationError(f"{path} is not a result of mhar bench: it has no rows")
    return result


def write_report(result: dict[str, Any], path: Path) -> list[Path]:
    """The Markdown table beside a result, and a routing result's figure; returns what was written."""
    from mhar.bench.figure import routing_figure
    from mhar.bench.tables import routing_table, step_table

    steps = "relative" in result
    table = path.with_suffix(".md")
    table.write_text(step_table(result) if steps else routing_table(result))
    if steps or not result["rows"]:
        return [table]
    try:
        routing_figure(result, path.with_suffix(".svg"))
    except DependencyError as error:
        print(f"no figure: {error}", file=sys.stderr)
        return [table]
    return [table, path.with_suffix(".svg")]


def save(path: Path | None, result: dict[str, Any]) -> None:
    """Write a result through a temporary file, so that an interruption leaves no half; nowhere without a path."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(result, indent=1) + "\n")
    temporary.replace(path)
