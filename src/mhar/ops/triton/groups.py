"""The shared passes of block sources for wide heads, on the ordinary cores: few rows, up to 8 sites of a group at once.

The tensor-core passes (shared.py) pad a group's rows to 16 and keep their operands in shared memory: with 512 channels
a head that leaves too few programs on a multiprocessor. Here a program owns one (position, head), keeps the sites in
registers as a tile [TS, KP], and lets the rows (at most ROWS) stream by.
"""

# Kernels are written in Triton's language, whose types pyright does not know.
# pyright: reportMissingParameterType=false

import triton
import triton.language as tl

SITES = 8  # of a launch
ROWS = 16  # at most


@triton.jit(do_not_specialize=["site0", "num_sites", "slot0", "rows", "tokens", "VR", "S"])
def group_mix_kernel(
    V, R, A, P, LSEP, site0, num_sites, slot0, rows, tokens, VR, S,
    H: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, TS: tl.constexpr,
):  # fmt: skip
    """P, LSEP (slots from slot0 on) of sites [site0, site0 + num_sites) over rows [0, rows)."""
    D: tl.constexpr = H * K
    p = (tl.program_id(0) // H).to(tl.int64)
    h = tl.program_id(0) % H
    tokens64 = tokens.to(tl.int64)
    si = tl.arange(0, TS)
    ki = tl.arange(0, KP)
    smask = si < num_sites
    mask = smask[:, None] & (ki < K)[None, :]
    a_at = A + (site0 + si)[:, None] * D + h * K + ki[None, :]
    m = tl.full((TS,), -1e30, tl.float32)
    z = tl.zeros((TS,), tl.float32)
    acc = tl.zeros((TS, KP), tl.float32)
    for n in tl.range(0, rows, num_stages=1):
        v = tl.load(V + (n * tokens64 + p) * D + h * K + ki, mask=ki < K, other=0.0).to(tl.float32)
        r = tl.load(R + p * VR + n)
        a = tl.load(a_at, mask=mask, other=0.0)
        logits = tl.sum(a * v[None, :], axis=1) * r
        new_m = tl.maximum(m, logits)
        alpha = tl.exp(m - new_m)
        e = tl.exp(logits - new_m)
        z = z * alpha + e
        acc = acc * alpha[:, None] + e[:, None] * v[None, :]
        m = new_m
    p_at = P + ((slot0 + si).to(tl.int64) * tokens + p)[:, None] * D + h * K + ki[None, :]
    tl.store(p_at, acc / z[:, None], mask=mask)
    tl.store(LSEP + (p * H + h) * S + slot0 + si, m + tl.log(z), mask=smask)


@triton.jit(do_not_specialize=["num_rows", "site0", "num_sites", "slot0", "tokens", "VR", "MP"])
def group_scatter_kernel(
    V, R, DOUT, A, LSE, C, GATE, G, T, DL, num_rows, site0, num_sites, slot0, tokens, VR, MP,
    H: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, TS: tl.constexpr, TN: tl.constexpr,
    HAS_GATE: tl.constexpr, MERGE: tl.constexpr, INLINE_C: tl.constexpr,
):  # fmt: skip
    """What `scatter_kernel` computes, for at most TN rows: logits and dw of all rows first, then their gradients."""
    D: tl.constexpr = H * K
    p = (tl.program_id(0) // H).to(tl.int64)
    h = tl.program_id(0) % H
    tokens64 = tokens.to(tl.int64)
    si = tl.arange(0, TS)
    ki = tl.arange(0, KP)
    ni = tl.arange(0, TN)
    smask = si < num_sites
    mask = smask[:, None] & (ki < K)[None, :]
    a_at = A + (site0 + si)[:, None] * D + h * K + ki[None, :]
    d_at = DOUT + ((slot0 + si).to(tl.int64) * tokens + p)[:, None] * D + h * K + ki[None, :]
    side = (p * H + h) * MP + site0 + si
    d = tl.load(d_at, mask=mask, other=0.0)
    logits = tl.zeros((TN, TS), tl.float32)
    dw = tl.zeros((TN, TS), tl.float32)
    for n in tl.range(0, num_rows, num_stages=1):
        v = tl.load(V + (n * tokens64 + p) * D + h * K + ki, mask=ki < K, other=0.0).to(tl.float32)
        a = tl.load(a_at, mask=mask, other=0.0)
        own = (ni == n)[:, None]
        logits = tl.where(own, tl.sum(a * v[None, :], axis=1)[None, :], logits)
        dw = tl.where(own, tl.sum(d.to(tl.float32) * v[None, :], axis=1)[None, :], dw)
    both = (ni < num_rows)[:, None] & smask[None, :]
    r = tl.load(R + p * VR + ni, mask=ni < num_rows, other=0.0)
    logits = logits * r[:, None]
    lse = tl.load(LSE + side, mask=smask, other=0.0)
    w = tl.where(both, tl.exp(logits - lse[None, :]), 0.0)
    c = tl.load(C + side, mask=smask, other=0.0)
    if INLINE_C:
        c += tl.sum(w * dw, axis=0)
        tl.store(C + side, c, mask=smask)
    if HAS_GATE:
        w = w * tl.load(GATE + site0 + si, mask=smask, other=0.0)[None, :]
    dl = w * (dw - c[None, :])
    t_at = T + (p * H + h) * VR + ni
    t = tl.sum(dl * logits, axis=1)
    if MERGE:
        t += tl.load(t_at, mask=ni < num_rows, other=0.0)
    tl.store(t_at, t, mask=ni < num_rows)
    dl = dl * r[:, None]
    tl.store(DL + ((p * H + h) * VR + ni)[:, None] * MP + (site0 + si)[None, :], dl, mask=both)
    for n in tl.range(0, num_rows, num_stages=1):
        own = (ni == n)[:, None]
        w_n = tl.sum(tl.where(own, w, 0.0), axis=0)
        dl_n = tl.sum(tl.where(own, dl, 0.0), axis=0)
        a = tl.load(a_at, mask=mask, other=0.0)
        total = tl.sum(w_n[:, None] * d.to(tl.float32) + dl_n[:, None] * a, axis=0)
        g_at = G + (n * tokens64 + p) * D + h * K + ki
        if MERGE:
            total += tl.load(g_at, mask=ki < K, other=0.0)
        tl.store(g_at, total, mask=ki < K)
