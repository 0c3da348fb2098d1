"""One self-contained HTML file from runs, evaluations, probes and comparisons."""

import argparse
from pathlib import Path


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    options = argparse.ArgumentParser(prog="mhar report", description=__doc__)
    options.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders, searched downwards")
    options.add_argument("--output", type=Path, default=Path("report.html"))
    options.add_argument("--title", default="Depth routing report")
    options.add_argument("--figures", type=Path, metavar="FOLDER", help="also write print figures (SVG and PDF) there")
    return options


def main(argv: list[str]) -> int:
    """Run the command; returns the exit status."""
    arguments = parser().parse_args(argv)
    from mhar.analysis.report import write_report
    from mhar.evaluation.outputs import check_file, check_folder

    check_file(arguments.output)
    if arguments.figures is not None:
        check_folder(arguments.figures)
    print(write_report(arguments.output, arguments.runs, title=arguments.title))
    if arguments.figures is not None:
        from mhar.analysis.figures import write_figures

        for path in write_figures(arguments.runs, arguments.figures):
            print(path)
    return 0
