"""What a result must name to be believed: device, versions, commit."""

import datetime
import importlib.metadata
import platform
import subprocess
from pathlib import Path

import torch

import mhar

PACKAGES = (
    "torch", "triton", "transformers", "flash-linear-attention", "liger-kernel", "fast-attnres", "flash-attn-res",
)  # fmt: skip


def device_name(device: str) -> str:
    """ "NVIDIA H200", or the processor."""
    return torch.cuda.get_device_name() if device == "cuda" else f"CPU ({platform.machine()})"


def versions() -> dict[str, str]:
    """Versions of what was measured; absent packages are left out."""
    found = {"mhar": mhar.__version__, "python": platform.python_version(), "cuda": str(torch.version.cuda)}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def provenance(device: str) -> dict[str, object]:
    """The head of every result file."""
    return {
        "device": device_name(device),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(),
        "versions": versions(),
    }


def commit() -> str | None:
    """The checkout's commit; None outside one."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
