"""Baseline, attention residuals and MHAR at the 100m shape, from the same weights and on the same tokens.

    python benchmarks/pretrain_100m.py --corpus .carry/corpus-smollm2 --out results

The shape is the paper's, the vocabulary SmolLM2's (49,152), the batch half the paper's: 32 sequences of 2,048 tokens.
`--out` receives pretrain-100m.tar.gz: per variant the metrics, the resolved run file and the summary, with a table and
a report. `--max-seconds` ends a variant early, but orderly; `name=value` arguments override the run file (for all).
"""

import argparse
from pathlib import Path

from training_runs import REPOSITORY, collect, metrics, table, train

VARIANTS = ("baseline", "attention_residuals", "mhar")
COLUMNS = {
    "variant": "variant|{}",
    "heldout_loss": "held-out loss, tail mean|{:.4f}",
    "heldout_loss_last": "last|{:.4f}",
    "heldout_bits_per_byte": "bits per byte|{:.4f}",
    "tokens_per_s": "tokens/s|{:,.0f}",
    "mfu": "MFU|{:.1%}",
    "peak_memory_gib": "peak GiB|{:.1f}",
    "steps": "steps|{}",
    "epochs": "epochs|{:.2f}",
    "parameters": "parameters|{:,}",
    "wall_seconds": "seconds|{:.0f}",
    "stopped": "ended|{}",
}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--corpus", type=Path, required=True, help="prepared folder with the splits train and val")
    options.add_argument("--out", type=Path, required=True, help="folder for the results")
    options.add_argument("--runs", type=Path, default=Path("runs/pretrain-100m"), help="folder for the runs themselves")
    options.add_argument("--variants", nargs="+", default=list(VARIANTS))
    options.add_argument("--steps", type=int, default=1500)
    options.add_argument("--max-seconds", type=float, default=None, help="for each variant")
    options.add_argument("--compile", default="sublayer", choices=["none", "sublayer", "model"])
    options.add_argument("overrides", nargs="*", metavar="name=value")
    arguments = options.parse_args()
    overrides = [
        f"data.train=[{arguments.corpus}]",
        f"steps={arguments.steps}",
        f"schedule.warmup_steps={arguments.steps // 15}",
        f"max_seconds={arguments.max_seconds or 'null'}",
        f"parallel.compile={arguments.compile}",
        f"checkpoint.every={arguments.steps}",
        *arguments.overrides,
    ]
    run_file = REPOSITORY / "configs/100m-smollm2.yaml"
    summaries, runs = [], []
    for variant in arguments.variants:
        run = arguments.runs / variant
        summary = train(run_file, run, [f"model.variant={variant}", *overrides])
        if summary is not None:
            summaries.append(summary)
            runs.append(run)
        if summaries:  # after each variant: what there is survives a kill
            arguments.out.mkdir(parents=True, exist_ok=True)
            collect(runs, arguments.out, "pretrain-100m", text(summaries, runs))


def text(summaries: list[dict], runs: list[Path]) -> str:
    first = summaries[0]
    lines = ["# Pretraining at the 100m shape\n", table(summaries, COLUMNS)]
    lines.append(
        f"{first['device']}, torch {first['torch']}, transformers {first['transformers']}, seed {first['seed']}."
    )
    evaluations = [{line["step"]: line["heldout_loss"] for line in metrics(run, "eval")} for run in runs]
    shared = sorted(set.intersection(*map(set, evaluations)))
    header = ["step", *(summary["variant"] for summary in summaries)]
    rows = [header, ["---"] * len(header)]
    rows += [[str(step), *(f"{losses[step]:.4f}" for losses in evaluations)] for step in shared]
    lines.append("\nHeld-out loss by step:\n\n" + "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
