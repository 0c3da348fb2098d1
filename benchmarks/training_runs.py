"""Shared by the training benchmarks: run `mhar train` in a process of its own, collect, tabulate, bundle."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
KEPT = ("run.yaml", "metrics.jsonl", "summary.json", "failure.json")


def train(run_file: Path, out: Path, overrides: Sequence[str]) -> dict[str, Any] | None:
    """Train in a new process, so that memory is measured alone; the summary, or None if it failed."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "mhar.cli", "train", str(run_file), f"out={out}", *overrides]
    print(f"\n== {out.name}: {' '.join(command[3:])}", flush=True)
    begin = time.monotonic()
    code = subprocess.run(command, env=environment, check=False).returncode
    print(f"== {out.name}: exit {code} after {time.monotonic() - begin:.0f} s", flush=True)
    return json.loads((out / "summary.json").read_text()) if code == 0 else None


def metrics(out: Path, kind: str) -> list[dict[str, Any]]:
    """The metric lines of one kind."""
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def table(summaries: Sequence[dict[str, Any]], columns: dict[str, str]) -> str:
    """A Markdown table: `columns` maps keys of a summary to a heading and a format, "heading|format"."""
    headings, formats = zip(*(column.split("|") for column in columns.values()), strict=True)
    rows = [
        [
            form.format(summary[key]) if summary.get(key) is not None else "-"
            for key, form in zip(columns, formats, strict=True)
        ]
        for summary in summaries
    ]
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def collect(runs: Sequence[Path], out: Path, name: str, text: str) -> None:
    """Put the small files of the runs, the text and a report into `out`, and all of it into `out/NAME.tar.gz`."""
    from mhar.analysis.report import write_report

    folder = out / name
    for run in runs:
        (folder / run.name).mkdir(parents=True, exist_ok=True)
        for kept in KEPT:
            if (run / kept).is_file():
                shutil.copyfile(run / kept, folder / run.name / kept)
    (folder / "README.md").write_text(text)
    write_report(folder / "report.html", [folder], title=name)
    with tarfile.open(out / f"{name}.tar.gz", "w:gz") as archive:
        archive.add(folder, name)
    print("\n" + text, flush=True)
