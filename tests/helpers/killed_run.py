"""`python killed_run.py KILL RUN.yaml`: a training process that kills itself with SIGKILL at a chosen moment."""

import os
import signal
import sys
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem

from mhar.cli import main


def kill_at_call(owner: Any, name: str, count: int) -> None:
    """Replace `owner.name` by a function whose `count`th call kills this process."""
    original, calls = getattr(owner, name), []

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(name)
        if len(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **options)

    setattr(owner, name, counted)


if __name__ == "__main__":
    moment, _, number = sys.argv[1].partition(":")
    if moment == "step":
        kill_at_call(torch.optim.AdamW, "step", int(number))
    elif moment == "save":  # each rank writes its part, then the first rank the index: all die before it
        kill_at_call(filesystem.FileSystemWriter, "write_data", int(number))
    raise SystemExit(main(["train", sys.argv[2]]))
