"""Compiles every kernel of the fused path for one GPU architecture: `compile_kernels.py cuda:90` prints how many."""

import sys
from unittest import mock

import torch
from torch import nn
from triton.backends.compiler import GPUTarget

from mhar.ops.triton.offline import captured_launches, compile_kernel, signature
from mhar.routing import DepthRouter, RoutingConfig

CASES = [("mhar", 20, 320, 2, True), ("delta_mhar", 6, 64, 4, False), ("block_mhar", 9, 64, 4, True),
         ("delta_block_mhar", 9, 256, 2, True), ("delta_block_mhar", 7, 512, 2, False)]  # fmt: skip


def main(target: str) -> None:
    backend, architecture = target.split(":")
    chip = GPUTarget(backend, int(architecture), 32) if backend == "cuda" else GPUTarget(backend, architecture, 64)
    done: set[tuple[object, ...]] = set()
    for variant, num_sites, width, heads, norm in CASES:
        options = {"block_size": 1} if "block" in variant else {}
        config = RoutingConfig.named(variant, num_heads=heads, **options)
        router = DepthRouter(num_sites, width, config=config)
        rms_norm = nn.RMSNorm(width, eps=1e-6) if norm else None
        reach = mock.patch("mhar.routing.history.resolve_backend", return_value="triton")
        with captured_launches() as launches, reach:
            history = router.start(torch.randn(4, width, dtype=torch.bfloat16, requires_grad=True))
            for _ in range(num_sites - 1):
                history.append((history.read(rms_norm) * 1).bfloat16())
            history.read(rms_norm).sum().backward()
        for kernel, arguments in launches:
            flags = tuple(value for value in kernel.constants.values() if isinstance(value, bool))
            if (kernel.function.__name__, *flags) not in done:
                done.add((kernel.function.__name__, *flags))
                types = signature(kernel, arguments)
                compile_kernel(kernel.function, types, kernel.constants, kernel.num_warps, chip)
    print(len(done), "kernels compiled for", target)


if __name__ == "__main__":
    main(sys.argv[1])
