"""The one-read kernels compile for the GPUs that the library claims, on any machine; nothing runs here."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys
from triton.backends.compiler import GPUTarget
from mhar.ops.triton import single
from mhar.ops.triton.offline import compile_kernel

backend, architecture, warp, width, heads, dtype = sys.argv[1:]
target = GPUTarget(backend, int(architecture) if architecture.isdigit() else architecture, int(warp))
tiling = single.Tiling.of(int(width), int(heads)).arguments()
num_warps = tiling.pop("num_warps")
given = {"T": "i32", "N": "i32", "steps": "i32", "eps": "fp32", "TABLE": "*i64", "GRAD_TABLE": "*i64"}
given |= dict.fromkeys(("OUT", "DOUT"), "*" + dtype)
for kernel, options in (
    (single.depth_read_fwd_kernel, dict(SAVE=True, SAVE_EXACT=dtype != "fp32", WEIGHTS=True, STAGES=3)),
    (single.depth_read_bwd_kernel, dict(HAS_DWEIGHTS=True, STAGES=2)),
):
    constants = {**tiling, "ALIGNED": True, **options}
    types = {n: "constexpr" if n in constants else given.get(n, "*fp32") for n in kernel.arg_names}
    compiled = compile_kernel(kernel, types, constants, num_warps, target)
    assert compiled.asm, kernel
    print(compiled.metadata.name)
"""

TARGETS = [
    pytest.param("cuda", "80", "32", "1280", "8", "bf16", id="Ampere"),
    pytest.param("cuda", "90", "32", "12288", "12", "bf16", id="Hopper, the widest row"),
    pytest.param("cuda", "120", "32", "1000", "1", "fp32", id="Blackwell"),
    pytest.param("hip", "gfx942", "64", "1024", "8", "fp16", id="ROCm"),
]


@pytest.mark.parametrize("backend, architecture, warp, width, heads, dtype", TARGETS)
def test_compiles(backend, architecture, warp, width, heads, dtype, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", SCRIPT, backend, architecture, warp, width, heads, dtype]
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["depth_read_fwd_kernel", "depth_read_bwd_kernel"]
