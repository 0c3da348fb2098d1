# ruff: noqa: RET505  (Triton compiles neither unpacking nor code after a constant branch)
"""What all kernels share: matrix products, masks, and the storage of values finer than the sources' dtype.

Letters of the kernels (the paper's where it has them):

    p       a token position, 0 .. BT-1 (batch and tokens flattened); s a routing site; n a source row
    V       [VR, BT, D]  source rows        DOUT [VS, BT, D]  gradients of the reads (before the gate)
    R       [BT, VR]     rsqrt(mean v^2 + eps) of each row
    A       [M, D]       query * norm_weight, float32; AH + AL the same as two bfloat16 terms
    LSE, C  [BT, H, MP]  log-sum-exp of the logits, and <dout, out>, of each site and head
    P       [S, BT, D]   partial mixes of the sites of one block; LSEP [BT, H, S] their log-sum-exp
    G, T    [S, BT, D], [BT, H, S]  gathered gradients of the rows of one block
    DL      [BT, H, S, MP]  r * gradient of the logits of one block's rows, per site
    H, K    heads and channels of a head, D = H * K; HP the power of two >= H
"""

# Kernels are written in Triton's language, whose types pyright does not know.
# pyright: reportMissingParameterType=false

import os

import triton
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
INTERPRET = tl.constexpr(INTERPRETED)

# How the difference between a float32 result and its rounded copy is kept.
NO_RESIDUAL, BYTE_RESIDUAL, SAME_RESIDUAL = 0, 1, 2
BYTE = tl.constexpr(BYTE_RESIDUAL)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a @ b with float32 accumulation. The interpreter cannot multiply bfloat16 matrices: cast there."""
    if INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def operand(x, EXACT: tl.constexpr):
    """A loaded tile as a matrix operand: float32 where float32 or float16 storage asks for exact products."""
    if EXACT:
        return x.to(tl.float32)
    else:
        return x


@triton.jit
def residual_of(exact, rounded, MODE: tl.constexpr):
    """exact - rounded. MODE 1 (bfloat16): the 8 bits of the float32 pattern below bfloat16's 16, as a signed byte."""
    if MODE == BYTE:
        bits = exact.to(tl.int32, bitcast=True) - rounded.to(tl.float32).to(tl.int32, bitcast=True)
        return tl.minimum((bits + 128) >> 8, 127).to(tl.int8)
    else:
        return (exact - rounded.to(tl.float32)).to(rounded.dtype)


@triton.jit
def restore(rounded, residual, MODE: tl.constexpr):
    """The float32 value that `residual_of` was given, to about 2^-17 for bfloat16."""
    if MODE == BYTE:
        bits = rounded.to(tl.float32).to(tl.int32, bitcast=True) + (residual.to(tl.int32) << 8)
        return bits.to(tl.float32, bitcast=True)
    else:
        return rounded.to(tl.float32) + residual.to(tl.float32)
