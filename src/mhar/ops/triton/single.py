"""One depth read over separate source tensors: each source is read once in forward and once in backward.

Letters (the paper's where it has them): N sources v_n [T, D] (leading dimensions flattened to T tokens), H heads of
K = D / H channels, a = query * norm_weight, l the logits, w the softmax weights over n, c the softmax coupling term.

Sources are not stacked: the kernels find them through a table of addresses in device memory. The addresses travel as
kernel arguments, so building the table needs no copy from the host and a CUDA graph captures it.

Backward needs, per token and head, c = <dout, out>. It comes from `out` in float32: rounded to bfloat16 it would ruin
the query's gradient where sources are similar. With r = rsqrt(mean v^2 + eps), l = r <a, v>, w = softmax(l):

    dw_n = <dout, v_n>         dl_n = w_n (dw_n - c)
    dv_n = w_n dout + r_n dl_n a - (r_n^2 / D) (sum over heads of dl_n l_n) v_n
    da   = sum over n and tokens of r_n dl_n v_n;   dquery = da * norm_weight;   dnorm_weight = da * query

Each program keeps its tokens' da in registers and writes one partial row; the rows are summed in a second stage, in a
fixed order. A tile holds a whole row: [BT tokens, H2 heads, KT channels] x NT tiles along the channels of a head.
"""

# ruff: noqa: RUF005  (Triton compiles no unpacking)
# Triton's language is typed for its compiler, not for a type checker:
# pyright: reportMissingParameterType=false, reportGeneralTypeIssues=false, reportConstantRedefinition=false
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportMissingImports=false

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mhar.ops.triton.storage import stored

ADDRESSES_PER_LAUNCH = 32
NOWHERE = 1 << 60  # stands in the table for a gradient that nobody wants; no address is that large
_NOWHERE = tl.constexpr(NOWHERE)


@triton.jit(do_not_specialize=["start"])
def address_table_kernel(TABLE, start, tagged, COUNT: tl.constexpr):
    """TABLE[start + i] = the address in tagged[i] = 2 * address + 1."""
    for i in tl.static_range(COUNT):
        tl.store(TABLE + start + i, tagged[i] >> 1)


@triton.jit
def row_pointer(address, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    return address.to(tl.pointer_type(dtype))


@triton.jit
def tile_mask(tokens, T, heads, channels, j, H: tl.constexpr, K: tl.constexpr, EXACT: tl.constexpr):
    """[BT, H2, KT], or [BT, 1, 1] where tiles fit H and K exactly."""
    mask = (tokens < T)[:, None, None]
    if not EXACT:
        mask = mask & (heads < H)[None, :, None] & (channels + j < K)[None, None, :]
    return mask


@triton.jit
def load_row(pointer, offset, tokens, T, heads, channels,
             H: tl.constexpr, K: tl.constexpr, KT: tl.constexpr, NT: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip
    """NT float32 tiles [BT, H2, KT] of the rows at pointer + offset; zero outside."""
    tiles = ()
    for j in tl.static_range(NT):
        mask = tile_mask(tokens, T, heads, channels, j * KT, H, K, EXACT)
        tiles = tiles + (tl.load(pointer + offset + j * KT, mask=mask, other=0.0).to(tl.float32),)
    return tiles


@triton.jit
def load_key(Q, G, heads, channels, H: tl.constexpr, K: tl.constexpr, KT: tl.constexpr, NT: tl.constexpr):
    """NT tiles [1, H2, KT] of a = query * norm_weight in float32."""
    tiles = ()
    for j in tl.static_range(NT):
        offset = heads[:, None] * K + channels[None, :] + j * KT
        mask = (heads < H)[:, None] & (channels + j * KT < K)[None, :]
        q = tl.load(Q + offset, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(G + offset, mask=mask, other=0.0).to(tl.float32)
        tiles = tiles + ((q * g)[None, :, :],)
    return tiles


@triton.jit
def inner(a, b, NT: tl.constexpr):
    """[BT, H2]: per token and head, the sum over channels of a * b."""
    total = a[0] * b[0]
    for j in tl.static_range(1, NT):
        total += a[j] * b[j]
    return tl.sum(total, axis=2)


@triton.jit(do_not_specialize=["T", "N"])
def depth_read_fwd_kernel(
    TABLE, Q, G, OUT, EXACT_OUT, STATS, LOGITS, T, N, eps,
    H: tl.constexpr, K: tl.constexpr, H2: tl.constexpr, KT: tl.constexpr, NT: tl.constexpr, BT: tl.constexpr,
    EXACT: tl.constexpr, ALIGNED: tl.constexpr, SAVE: tl.constexpr, SAVE_EXACT: tl.constexpr, WEIGHTS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """OUT of BT tokens. SAVE: STATS [T, H, 2] = (max of the logits, 1 / sum of exp(l - max)).

    SAVE_EXACT: OUT again in float32. WEIGHTS: LOGITS [N, T, H].
    """
    D: tl.constexpr = H * K
    tokens = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    heads = tl.arange(0, H2)
    channels = tl.arange(0, KT)
    offset = tokens[:, None, None] * D + heads[None, :, None] * K + channels[None, None, :]
    head_offset = tokens[:, None] * H + heads[None, :]
    head_mask = (tokens < T)[:, None] & (heads < H)[None, :]
    a = load_key(Q, G, heads, channels, H, K, KT, NT)
    m = tl.full((BT, H2), float("-inf"), tl.float32)
    z = tl.zeros((BT, H2), tl.float32)
    acc = ()
    for _ in tl.static_range(NT):
        acc = acc + (tl.zeros((BT, H2, KT), tl.float32),)
    for n in tl.range(0, N, num_stages=STAGES):
        source = row_pointer(tl.load(TABLE + n), OUT.dtype.element_ty, ALIGNED)
        v = load_row(source, offset, tokens, T, heads, channels, H, K, KT, NT, EXACT)
        r = tl.rsqrt(tl.sum(inner(v, v, NT), axis=1) / D + eps)
        logit = r[:, None] * inner(v, a, NT)
        if WEIGHTS:
            tl.store(LOGITS + tl.cast(n, tl.int64) * T * H + head_offset, logit, mask=head_mask)
        larger = tl.maximum(m, logit)
        decay = tl.exp(m - larger)
        e = tl.exp(logit - larger)
        z = z * decay + e
        m = larger
        updated = ()
        for j in tl.static_range(NT):
            updated = updated + (acc[j] * decay[:, :, None] + e[:, :, None] * v[j],)
        acc = updated
    scale = 1.0 / z
    for j in tl.static_range(NT):
        mask = tile_mask(tokens, T, heads, channels, j * KT, H, K, EXACT)
        exact = acc[j] * scale[:, :, None]
        tl.store(OUT + offset + j * KT, stored(exact, OUT.dtype.element_ty), mask=mask)
        if SAVE_EXACT:
            tl.store(EXACT_OUT + offset + j * KT, exact, mask=mask)
    if SAVE:
        tl.store(STATS + head_offset * 2, m, mask=head_mask)
        tl.store(STATS + head_offset * 2 + 1, scale, mask=head_mask)


@triton.jit(do_not_specialize=["T", "N", "steps"])
def depth_read_bwd_kernel(
    TABLE, GRAD_TABLE, Q, G, DOUT, EXACT_OUT, STATS, DWEIGHTS, COUPLING, DKEY, T, N, steps, eps,
    H: tl.constexpr, K: tl.constexpr, H2: tl.constexpr, KT: tl.constexpr, NT: tl.constexpr, BT: tl.constexpr,
    EXACT: tl.constexpr, ALIGNED: tl.constexpr, HAS_DWEIGHTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Source gradients of steps * BT tokens (none where GRAD_TABLE says NOWHERE); DKEY [programs, D]: their part of da.

    HAS_DWEIGHTS: DWEIGHTS [N, T, H] is the gradient of the weights and COUPLING [T, H] = sum over n of w * dweights.
    """
    D: tl.constexpr = H * K
    heads = tl.arange(0, H2)
    channels = tl.arange(0, KT)
    a = load_key(Q, G, heads, channels, H, K, KT, NT)
    dkey = ()
    for _ in tl.static_range(NT):
        dkey = dkey + (tl.zeros((BT, H2, KT), tl.float32),)
    for step in tl.range(0, steps):
        tokens = (tl.program_id(0).to(tl.int64) * steps + step) * BT + tl.arange(0, BT)
        offset = tokens[:, None, None] * D + heads[None, :, None] * K + channels[None, None, :]
        head_offset = tokens[:, None] * H + heads[None, :]
        head_mask = (tokens < T)[:, None] & (heads < H)[None, :]
        dout = load_row(DOUT, offset, tokens, T, heads, channels, H, K, KT, NT, EXACT)
        c = inner(dout, load_row(EXACT_OUT, offset, tokens, T, heads, channels, H, K, KT, NT, EXACT), NT)
        if HAS_DWEIGHTS:
            c += tl.load(COUPLING + head_offset, mask=head_mask, other=0.0)
        m = tl.load(STATS + head_offset * 2, mask=head_mask, other=0.0)
        scale = tl.load(STATS + head_offset * 2 + 1, mask=head_mask, other=0.0)
        for n in tl.range(0, N, num_stages=STAGES):
            source = row_pointer(tl.load(TABLE + n), DOUT.dtype.element_ty, ALIGNED)
            grad_address = tl.load(GRAD_TABLE + n)
            grad = row_pointer(grad_address, DOUT.dtype.element_ty, ALIGNED)
            v = load_row(source, offset, tokens, T, heads, channels, H, K, KT, NT, EXACT)
            r = tl.rsqrt(tl.sum(inner(v, v, NT), axis=1) / D + eps)
            r = tl.where(tokens < T, r, 0.0)  # with eps 0, an infinite r past the end would reach da
            logit = r[:, None] * inner(v, a, NT)
            w = tl.exp(logit - m) * scale
            dw = inner(v, dout, NT)
            if HAS_DWEIGHTS:
                dw += tl.load(DWEIGHTS + tl.cast(n, tl.int64) * T * H + head_offset, mask=head_mask, other=0.0)
            # A single source has weight one whatever the query: its logit's gradient is exactly zero.
            dl = tl.where(N > 1, w * (dw - c), 0.0)
            shrink = r * r / D * tl.sum(dl * logit, axis=1)
            dl = r[:, None] * dl
            wanted = grad_address != _NOWHERE
            updated = ()
            for j in tl.static_range(NT):
                dv = w[:, :, None] * dout[j] + dl[:, :, None] * a[j] - shrink[:, None, None] * v[j]
                mask = tile_mask(tokens, T, heads, channels, j * KT, H, K, EXACT) & wanted
                tl.store(grad + offset + j * KT, stored(dv, DOUT.dtype.element_ty), mask=mask)
                updated = updated + (dkey[j] + dl[:, :, None] * v[j],)
            dkey = updated
    for j in tl.static_range(NT):
        row = tl.program_id(0).to(tl.int64) * D + heads[:, None] * K + channels[None, :] + j * KT
        mask = (heads < H)[:, None] & (channels + j * KT < K)[None, :]
        tl.store(DKEY + row, tl.sum(dkey[j], axis=0), mask=mask)


@dataclass(frozen=True, slots=True)
class Tiling:
    """How one row of D channels is laid over a program: NT tiles of [BT, H2, KT], and the program's warps."""

    H: int
    K: int
    H2: int
    KT: int
    NT: int
    BT: int
    num_warps: int

    @classmethod
    def of(cls, width: int, num_heads: int) -> "Tiling":
        """About 16 channels a thread; the tile length that pads K least, the longest of equals."""
        K = width // num_heads
        H2 = triton.next_power_of_2(num_heads)
        longest = triton.next_power_of_2(K)
        lengths = [longest >> i for i in range(8) if longest >> i >= min(8, longest)]
        KT = min((t for t in lengths if triton.cdiv(K, t) <= 8), key=lambda t: (triton.cdiv(K, t) * t, -t))
        NT = triton.cdiv(K, KT)
        row = H2 * KT * NT
        BT = max(1, 512 // triton.next_power_of_2(row))
        warps = min(16, 1 << (max(1, row * BT // 512).bit_length() - 1))
        return cls(num_heads, K, H2, KT, NT, BT, warps)

    def arguments(self) -> dict[str, int | bool]:
        """The kernels' compile-time arguments."""
        exact = self.H == self.H2 and self.K == self.KT * self.NT
        names = ("H", "K", "H2", "KT", "NT", "BT", "num_warps")
        return {name: getattr(self, name) for name in names} | {"EXACT": exact}


def depth_read_fwd(
    rows: Sequence[Tensor],
    query: Tensor,
    norm_weight: Tensor,
    num_heads: int,
    eps: float,
    out: Tensor,
    exact: Tensor | None,
    stats: Tensor | None,
    logits: Tensor | None,
) -> None:
    """Fill `out` [..., D] from contiguous `rows`, N tensors [..., D]; also what of the rest is given.

    `exact`: out in float32. `stats` [T, H, 2]: what backward needs of the softmax. `logits` [N, T, H], float32.
    """
    width = query.shape[0]
    tokens = out.numel() // width
    if tokens == 0:
        return
    tiling = Tiling.of(width, num_heads)
    with device_of(out):
        table, aligned = address_table([row.data_ptr() for row in rows], out)
        depth_read_fwd_kernel[(triton.cdiv(tokens, tiling.BT),)](
            table, query, norm_weight, out,
            out if exact is None else exact, out if stats is None else stats, out if logits is None else logits,
            tokens, len(rows), eps,
            **tiling.arguments(), ALIGNED=aligned, SAVE=stats is not None, SAVE_EXACT=exact is not None,
            WEIGHTS=logits is not None, STAGES=3,
        )  # fmt: skip


def depth_read_bwd(
    rows: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    query: Tensor,
    norm_weight: Tensor,
    num_heads: int,
    eps: float,
    dout: Tensor,
    exact: Tensor,
    stats: Tensor,
    dweights: Tensor | None,
    coupling: Tensor | None,
) -> Tensor:
    """Fill `grads` (None: not wanted) and return da [D] in float32, the gradient of query * norm_weight.

    `dout` [..., D] and all rows are contiguous; `dweights` [N, T, H] and `coupling` [T, H] come together.
    """
    width = query.shape[0]
    tokens = dout.numel() // width
    if tokens == 0:
        return torch.zeros(width, device=dout.device, dtype=torch.float32)
    tiling = Tiling.of(width, num_heads)
    steps = steps_per_program(triton.cdiv(tokens, tiling.BT))
    programs = triton.cdiv(tokens, tiling.BT * steps)
    partial = torch.empty(programs, width, device=dout.device, dtype=torch.float32)
    with device_of(dout):
        table, aligned = address_table([row.data_ptr() for row in rows], dout)
        grad_table, grads_aligned = address_table([NOWHERE if g is None else g.data_ptr() for g in grads], dout)
        depth_read_bwd_kernel[(programs,)](
            table, grad_table, query, norm_weight, dout, exact, stats,
            stats if dweights is None else dweights, stats if coupling is None else coupling, partial,
            tokens, len(rows), steps, eps,
            **tiling.arguments(), ALIGNED=aligned and grads_aligned, HAS_DWEIGHTS=dweights is not None, STAGES=2,
        )  # fmt: skip
        return partial.sum(dim=0)


def steps_per_program(groups: int) -> int:
    """Groups of BT tokens that one program takes in turn: up to 16, while about a thousand programs remain.

    It depends on the shape alone, so that results do not depend on the GPU.
    """
    return min(16, 1 << (max(1, groups // 1024).bit_length() - 1))


def address_table(addresses: Sequence[int], like: Tensor) -> tuple[Tensor, bool]:
    """The addresses in device memory (int64, padded), and whether rows at all of them are aligned to 16 bytes."""
    count = ADDRESSES_PER_LAUNCH
    padded = [*addresses, *[addresses[-1]] * (-len(addresses) % count)]
    table = torch.empty(len(padded), device=like.device, dtype=torch.int64)
    for start in range(0, len(padded), count):
        # Odd numbers: Triton would compile anew for each pattern of multiples of 16.
        tagged = tuple(2 * address + 1 for address in padded[start : start + count])
        address_table_kernel[(1,)](table, start, tagged, COUNT=count, num_warps=1)
    row_bytes = like.shape[-1] * like.element_size()
    return table, row_bytes % 16 == 0 and all(address % 16 == 0 for address in addresses)


def device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Kernels launch on the current device, which need not be the tensors'."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
