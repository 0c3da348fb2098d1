"""Paired statistics between evaluated models."""

import argparse
from pathlib import Path

EPILOG = """The first evaluation is the reference: every other one is compared with it. Accuracies: exact McNemar and
Agresti-Min interval; other scores: sign-flip test and paired bootstrap interval (differences of perplexities are in
nats per unit). Holm's correction runs over all rows. Different items, prompts, few-shot counts or harness versions are
refused."""


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    options = argparse.ArgumentParser(
        prog="mhar compare",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("evaluations", nargs="+", type=Path, metavar="EVALUATION", help="folder of `mhar evaluate`")
    options.add_argument("--all-metrics", action="store_true", help="test every metric, not each task's primary one")
    options.add_argument("--confidence", type=float, default=0.95)
    options.add_argument("--seed", type=int, default=0, help="of the resamples")
    options.add_argument("--output", type=Path, help="folder for comparison.json and comparison.md")
    return options


def main(argv: list[str]) -> int:
    """Run the command; returns the exit status."""
    arguments = parser().parse_args(argv)
    import json

    from mhar.errors import InputError
    from mhar.evaluation import compare, records
    from mhar.evaluation.outputs import check_folder
    from mhar.runfile import write_atomically

    if not 0 < arguments.confidence < 1:
        raise InputError(f"confidence must lie between 0 and 1, got {arguments.confidence}")
    if arguments.output is not None:
        check_folder(arguments.output)
    comparison = compare.compare(
        [records.load(folder) for folder in arguments.evaluations],
        all_metrics=arguments.all_metrics,
        confidence=arguments.confidence,
        seed=arguments.seed,
    )
    table = compare.markdown(comparison)
    if arguments.output is not None:
        arguments.output.mkdir(parents=True, exist_ok=True)
        write_atomically(arguments.output / "comparison.json", json.dumps(comparison.to_dict(), indent=1) + "\n")
        write_atomically(arguments.output / "comparison.md", table + "\n")
    print(table)
    return 0
