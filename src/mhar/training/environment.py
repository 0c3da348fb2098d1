"""Where a run took place: versions, hardware, memory; for its summary."""

import platform
import sys
from typing import Any

import torch
import transformers

import mhar
from mhar.models import MharConfig
from mhar.training.config import STOCK
from mhar.training.distributed import World

GIB = 2**30


def environment(world: World) -> dict[str, Any]:
    """Versions, device and parallelism, as flat values."""
    on_gpu = world.device.type == "cuda"
    return {
        "processes": world.size,
        "parallel_mode": world.mode,
        "device": torch.cuda.get_device_name(world.device) if on_gpu else platform.processor() or platform.machine(),
        "mhar": mhar.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
    }


def peak_memory(device: torch.device) -> float | None:
    """Most memory in use at once, GiB: of tensors on a GPU, of this process on a CPU; None where it is not told."""
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated(device) / GIB, 3)
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB, 3)


def variant_name(config: Any) -> str:
    """The routing variant of a model's configuration; "stock" for a class of transformers."""
    return config.routing_config.name if isinstance(config, MharConfig) else STOCK
