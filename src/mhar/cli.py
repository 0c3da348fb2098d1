"""`mhar COMMAND ...`: finds the command and hands it its arguments. Commands are imported only when they run."""

import importlib
import os
import sys

from mhar.errors import MharError, nearest

COMMANDS: dict[str, str] = {
    "demo": "train baseline, attention residuals and MHAR on bundled English novels, and compare them",
    "prepare": "turn documents into tokenised, memory-mapped shards",
    "train": "pretrain or mid-train a routed model from a run file",
    "convert": "graft depth routing on a pretrained checkpoint without changing its logits",
    "revert": "take the (closed) routing off a converted checkpoint",
    "evaluate": "benchmark tasks and held-out loss, with per-item records",
    "compare": "paired statistics between evaluated models",
    "probe": "what the routing learned: weights, disagreement, interventions",
    "report": "one self-contained HTML file from runs, evaluations and probes",
    "bench": "routing operators and training steps against the alternatives",
    "generate": "text from a checkpoint",
    "export": "a checkpoint with its code beside it, for servers and machines without mhar",
    "info": "versions, hardware and usable backends, or what a checkpoint contains",
}


def main(argv: list[str] | None = None) -> int:
    """Entry point of the `mhar` script; returns the process's exit status (2: the user's input was wrong; 130: Ctrl-C;
    141: nobody reads the output)."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0
    name, *rest = arguments
    if name == "--version":
        from mhar import __version__

        print(f"mhar {__version__}")
        return 0
    if name not in COMMANDS:
        print(f"mhar: unknown command {name!r}{nearest(name, COMMANDS)}", file=sys.stderr)
        return 2
    try:
        status = importlib.import_module(f"mhar.commands.{name}").main(rest)
        sys.stdout.flush()
        return status
    except MharError as error:
        print(f"mhar {name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\nmhar {name}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has seen enough; Python would fail once more at its exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def usage() -> str:
    """The list of commands."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
    return "usage: mhar COMMAND [options]   (mhar COMMAND --help for its options)\n\ncommands:\n" + "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
