"""Compiling kernels for any GPU, with or without one: for tests, and to fill Triton's cache in parallel."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mhar.ops.triton import launch

POINTERS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.int8: "*i8"}

Launch = tuple[launch.Kernel, tuple[Any, ...]]


@contextmanager
def captured_launches() -> Generator[list[Launch]]:
    """Collects the launches inside the context instead of running them; outputs stay uninitialised."""
    launches: list[Launch] = []
    original = launch.Kernel.__call__

    def record(self: launch.Kernel, grid: tuple[int, int, int], variant: Any, *arguments: Any) -> None:
        launches.append((self, arguments))

    launch.Kernel.__call__ = record
    try:
        yield launches
    finally:
        launch.Kernel.__call__ = original


def signature(kernel: launch.Kernel, arguments: tuple[Any, ...]) -> dict[str, str]:
    """Triton's type of each parameter, as a launch of 16-byte aligned tensors gives it."""
    kinds = [
        POINTERS[value.dtype] if isinstance(value, Tensor) else "fp32" if isinstance(value, float) else "i32"
        for value in arguments
    ]
    names = kernel.function.arg_names
    return {name: "constexpr" if name in kernel.constants else kinds[i] for i, name in enumerate(names)}


def compile_kernel(
    function: Any, types: dict[str, str], constants: dict[str, Any], num_warps: int, target: GPUTarget
) -> Any:
    """Triton's compiled kernel for `target` (such as GPUTarget("cuda", 90, 32)), from the disk cache if it is there."""
    names = function.arg_names
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name, kind in types.items() if kind[0] == "*"}
    source = ASTSource(function, types, constants, aligned)
    return triton.compile(source, target=target, options={"num_warps": num_warps})
