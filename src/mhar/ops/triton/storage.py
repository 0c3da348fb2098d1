"""One rounding from float32 to a storage dtype, on a GPU and in the interpreter alike."""

# pyright: reportMissingParameterType=false, reportAttributeAccessIssue=false, reportMissingImports=false

import os

import triton
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def stored(x, dtype: tl.constexpr):
    """Float32 `x` as `dtype`, rounded to nearest even. The interpreter's own cast to bfloat16 truncates."""
    if _INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return x.to(dtype)
