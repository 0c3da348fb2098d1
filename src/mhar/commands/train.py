"""Pretrain or mid-train a routed model from a run file."""

import os

USAGE = """usage: mhar train RUN.yaml [name=value ...]
       torchrun --nproc-per-node=8 -m mhar.cli train RUN.yaml [name=value ...]

Killed or interrupted? The same command continues where the last checkpoint was.

  mhar train configs/100m.yaml model.variant=baseline data.train='[data/corpus]' out=runs/100m-baseline

names:
  """
HELP = {"-h", "--help"}
INTERRUPTED = 130
SHOWN = ("variant", "steps", "epochs", "heldout_loss", "tokens_per_s", "mfu", "peak_memory_gib")


def main(argv: list[str]) -> int:
    """Run the command; returns the exit status."""
    from mhar import runfile
    from mhar.training.config import RunConfig

    if not argv or not HELP.isdisjoint(argv):
        print(USAGE + "\n  ".join(runfile.describe(RunConfig)))
        return 0
    path, overrides = (None, argv) if "=" in argv[0] else (argv[0], argv[1:])
    config = runfile.load(RunConfig, path, overrides)
    from mhar.training.recipe import train

    summary = train(config)
    if summary["stopped"] == "interrupted":
        print(f"\nInterrupted after step {summary['steps']} and saved: the same command continues.")
        return INTERRUPTED
    if os.environ.get("RANK", "0") == "0":
        print(f"\n{config.out}: " + ", ".join(f"{name} {summary[name]}" for name in SHOWN))
    return 0
