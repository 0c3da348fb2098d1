"""Train baseline, attention residuals and MHAR on bundled English novels, and compare them."""

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mhar.demo.settings import DemoSettings

DESCRIPTION = """\
Trains three models from the same initial weights on the same tokens: the additive baseline, attention residuals
(one routing head) and multi-head attention residuals. Five novels of Jane Austen are trained on, one is held out.
Ctrl-C stops after the current step and leaves the results so far; --resume continues exactly.
"""


def main(argv: list[str]) -> int:
    """Run `mhar demo`; returns 0, or 130 when the run was stopped before its last step."""
    arguments = parser().parse_args(argv)
    started = time.monotonic()
    try:
        settings = resolve(arguments)
    except KeyboardInterrupt:
        print("\nstopped before the run began; nothing was written yet")
        return 130
    try:
        finished = run(settings, arguments.output, started)
    except KeyboardInterrupt:
        print(f"\nstopped; continue with: mhar demo --output {arguments.output} --resume")
        return 130
    return 0 if finished else 130


def run(settings: "DemoSettings", folder: Path, started: float) -> bool:
    """Train, print the results, and return whether all steps were made."""
    from mhar.demo.corpus import NOVELS
    from mhar.demo.outputs import REPORT
    from mhar.demo.session import run_demo
    from mhar.demo.settings import VARIANTS

    print(
        f"{len(VARIANTS)} variants, {settings.steps} steps of {settings.tokens_per_step:,} tokens each, on"
        f" {settings.device}; {len(NOVELS) - 1} novels to train, {settings.held_out} held out; output in {folder}"
    )
    outcome = run_demo(settings, folder)
    print(f"\n{outcome.table}\n")
    print(
        "Loss in nats per token on the same held-out windows for all; ± is one standard error of the paired\n"
        f"difference over those windows. One seed ({settings.seed}): the spread between seeds is not in it."
    )
    for name, text in outcome.samples.items():
        print(f"\n[{name}] {text}")
    print(f"\n{time.monotonic() - started:.0f} s; report: {folder / REPORT}")
    if not outcome.finished:
        print(f"stopped early; continue with: mhar demo --output {folder} --resume")
    return outcome.finished


def resolve(arguments: argparse.Namespace) -> "DemoSettings":
    """The run's settings: those saved in the folder with --resume, else the preset's with the options given."""
    from mhar.demo.folder import new_folder, resumed_settings
    from mhar.demo.settings import preset
    from mhar.models.devices import check_device

    names = ("preset", "steps", "seed", "device")
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    if "device" in given or not arguments.resume:
        given["device"] = check_device(chosen_device(given.get("device", "auto")))
    if arguments.resume:
        settings = resumed_settings(arguments.output, given)
        check_device(settings.device)
        return settings
    settings = preset(given.pop("preset", "small"), **given)
    return new_folder(arguments.output, settings, overwrite=arguments.overwrite)


def chosen_device(name: str) -> str:
    """ "auto" resolved: a GPU if there is one."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def parser() -> argparse.ArgumentParser:
    """The options of `mhar demo`."""
    options = argparse.ArgumentParser(
        prog="mhar demo", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--preset", help="tiny (seconds), small (default: minutes on two CPU cores), large (a GPU)")
    options.add_argument("--steps", type=int, help="optimizer steps of each variant (default: the preset's)")
    options.add_argument("--seed", type=int, help="initial weights, token order and samples (default: 0)")
    options.add_argument("--device", help="cpu, cuda, ... (default: auto: a GPU if there is one)")
    options.add_argument("--output", type=Path, default=Path("runs/demo"), help="run folder (default: runs/demo)")
    existing = options.add_mutually_exclusive_group()
    existing.add_argument("--resume", action="store_true", help="continue the run in the output folder, exactly")
    existing.add_argument(
        "--overwrite", action="store_true", help="replace the run in the output folder; other files stay"
    )
    return options
