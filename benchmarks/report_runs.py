"""Probe the final checkpoints of finished runs, and report runs and probes together.

    python benchmarks/report_runs.py RUN [RUN ...] --data HELD_OUT --output docs/results/NAME [--screenshot]

RUN is a folder that `mhar train` or `mhar demo` wrote (or one above several). HELD_OUT is a prepared folder or a text.
Runs without routing are reported, not probed. Writes OUTPUT/{report.html, figures/, probes/NAME/}; with --screenshot
also report.png, through headless Chromium.
"""

import argparse
import json
import shutil
import subprocess
from pathlib import Path

from mhar.analysis.report import write_report
from mhar.analysis.runfolder import RunFolder, discover
from mhar.commands import probe

INTERVENTIONS = ("uniform", "freeze", "remove_source:embedding")


def final_checkpoint(run: Path) -> Path | None:
    """RUN/final, else the newest checkpoint that `from_pretrained` loads."""
    found = [path.parent for path in run.glob("checkpoint*/config.json")]
    latest = max(found, key=lambda path: int("".join(filter(str.isdigit, path.name)) or 0), default=None)
    return run / "final" if (run / "final" / "config.json").is_file() else latest


def probe_run(run: RunFolder, arguments: argparse.Namespace) -> Path | None:
    """The probe's folder, None for a run without a routed checkpoint."""
    checkpoint = final_checkpoint(run.path)
    if checkpoint is None:
        return None
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    routing = config.get("routing") or {"read": "none"}
    if routing["read"] == "none":
        return None
    output = arguments.output / "probes" / f"{run.name.replace('/', '-')}-probe"
    heads = config["num_key_value_heads"] if routing["num_heads"] == "kv" else routing["num_heads"]
    removed = [f"remove_head:{head}" for head in range(heads)] if heads > 1 else []
    shape = ["--context", str(arguments.context), "--sequences", str(arguments.sequences)]
    changes = [f"--intervene={text}" for text in (*INTERVENTIONS, *removed)]
    options = ["--null-queries", "4", "--token-stride", "4", *shape, *changes, "--output", str(output)]
    probe.main([str(checkpoint), "--data", str(arguments.data), *options])
    if run.routing:  # the run has drawn its own depth map
        (output / "routing.json").unlink()
    return output


def screenshot(page: Path, target: Path) -> None:
    """The top of the report as Chromium draws it."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        raise SystemExit("--screenshot needs Chromium (Debian: apt-get install chromium)")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1100,2400"]
    subprocess.run([chromium, *options, f"--screenshot={target}", page.resolve().as_uri()], check=True)


def main() -> None:
    """Probe, then report."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("runs", nargs="+", type=Path)
    options.add_argument("--data", type=Path, required=True)
    options.add_argument("--output", type=Path, required=True)
    options.add_argument("--context", type=int, default=128)
    options.add_argument("--sequences", type=int, default=128)
    options.add_argument("--title", default="Depth routing report")
    options.add_argument("--screenshot", action="store_true")
    arguments = options.parse_args()
    probes = [folder for run in discover(arguments.runs) if (folder := probe_run(run, arguments))]
    report = write_report(arguments.output / "report.html", [*arguments.runs, *probes], title=arguments.title)
    from mhar.analysis.figures import write_figures

    write_figures([*arguments.runs, *probes], arguments.output / "figures")
    if arguments.screenshot:
        screenshot(report, arguments.output / "report.png")
    print(report)


if __name__ == "__main__":
    main()
