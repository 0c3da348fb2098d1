"""Launching kernels: constants bound once, compiled forms kept, so that a launch costs few microseconds of Python."""

from typing import Any

import torch
from torch import Tensor

from mhar.ops.triton.common import INTERPRETED


class Kernel:
    """A Triton kernel with its compile-time constants bound.

    The first launch goes through Triton's own path, which compiles; later ones call the compiled kernel directly and
    skip Triton's inspection of every argument. `variant` must therefore name whatever the compiled code depends on
    besides the constants: dtypes and alignment of the caller's tensors.
    """

    def __init__(self, function: Any, num_warps: int, **constants: Any) -> None:
        self.function = function
        self.num_warps = num_warps
        self.constants = constants
        self.values = tuple(constants[name] for name in function.arg_names if name in constants)
        self.compiled: dict[Any, Any] = {}

    def __call__(self, grid: tuple[int, int, int], variant: Any, *arguments: Any) -> None:
        compiled = self.compiled.get(variant)
        if compiled is not None:
            # Addresses instead of tensors: Triton then asks neither PyTorch nor the driver about each of them.
            pointers = [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments]
            compiled[grid](*pointers, *self.values)
            return
        compiled = self.function[grid](*arguments, **self.constants, num_warps=self.num_warps)
        if not INTERPRETED:
            self.compiled[variant] = compiled


def variant_of(*tensors: Tensor) -> tuple[Any, ...]:
    """What compiled code depends on in tensors that come from outside: dtype and 16-byte alignment, and the device."""
    return (tensors[0].device.index, *((t.dtype, t.data_ptr() % 16 == 0) for t in tensors))


def storage_modes(dtype: torch.dtype) -> tuple[bool, str, int]:
    """How values finer than `dtype` are handled: (EXACT, dot precision, RESIDUAL).

    bfloat16 storage multiplies two-term bfloat16 weights; float16 and float32 multiply in float32 (split tf32, exact).
    """
    if dtype == torch.bfloat16:
        return False, "tf32", 1
    if dtype == torch.float16:
        return True, "tf32x3" if torch.version.hip is None else "ieee", 2
    return True, "ieee", 0
