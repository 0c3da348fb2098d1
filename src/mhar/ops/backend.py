"""Which implementation computes a read: the Triton kernels or plain PyTorch."""

import importlib.util
import os
from typing import Literal

import torch
from torch import Tensor

from mhar.errors import BackendError, unknown

Backend = Literal["auto", "triton", "reference"]
BACKENDS = ("auto", "triton", "reference")

TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TRITON_MAX_WIDTH = 12288

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def resolve_backend(backend: str, sources: Tensor | None = None) -> Backend:
    """A backend's name -> the backend that will run on `sources` (any one of them); "auto" never fails.

    Without `sources` only the name is checked. "triton" runs on CUDA and ROCm GPUs, and on CPU tensors under
    TRITON_INTERPRET=1, which is how the kernels are tested without a GPU.

    Raises:
        ConfigurationError: a name that does not exist.
        BackendError: backend="triton" where it cannot run; the message says why and what to do.
    """
    if backend not in BACKENDS:
        raise unknown("backend", backend, BACKENDS)
    if sources is None or backend == "reference":
        return backend
    if backend == "auto":
        return "triton" if sources.is_cuda and triton_obstacle(sources) is None else "reference"
    obstacle = triton_obstacle(sources)
    if obstacle is not None:
        raise BackendError(f'backend "triton" cannot run here: {obstacle}; or use backend="reference"')
    return "triton"


def triton_obstacle(sources: Tensor) -> str | None:
    """Why the Triton kernels cannot take these sources and what would help; None where they can."""
    if not HAS_TRITON:
        return "Triton is not installed: pip install triton (Linux)"
    if not sources.is_cuda and not INTERPRETED:
        return f"the sources are on {sources.device.type}: it needs a CUDA or ROCm GPU, or TRITON_INTERPRET=1 for tests"
    if sources.dtype not in TRITON_DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in TRITON_DTYPES)
        return f"it takes {names}, got {str(sources.dtype).removeprefix('torch.')}: convert the sources"
    if sources.shape[-1] > TRITON_MAX_WIDTH:
        return f"it takes widths up to {TRITON_MAX_WIDTH}, got {sources.shape[-1]}"
    return _old_gpu(sources)


def _old_gpu(sources: Tensor) -> str | None:
    """Compiled code does not ask: its answer would have been the same in the eager call or in Triton's own error."""
    if torch.compiler.is_compiling() or not sources.is_cuda or torch.version.hip is not None:
        return None
    capability = torch.cuda.get_device_capability(sources.device)
    return None if capability >= (8, 0) else f"it needs compute capability 8.0 (Ampere) or newer, got {capability}"
