# ruff: noqa: RUF005  (Triton compiles neither unpacking nor code after a constant branch)
"""Passes that many sites share: one read of the source rows (forward) or of the gradients (backward) serves a block.

`partial_mix_kernel`   forward: a block of sites against rows that all exist before the block
`pull_kernel`          backward: a block of rows gathers its gradient from the sites of later blocks
`scatter_kernel`       backward: a block of sites adds its gradient to all rows it read (block sources)
`query_gradient_kernel` backward: gradient of query * norm_weight, summed over positions and rows

A program owns one (position, head): the rows of a position lie together, so a tile is [16 rows, K channels] at constant
strides. Softmax weights enter the products as two bfloat16 terms (EXACT=False) or in float32 (EXACT=True).
"""

# Kernels are written in Triton's language, whose types pyright does not know.
# pyright: reportGeneralTypeIssues=false, reportMissingParameterType=false, reportUnboundVariable=false

import triton
import triton.language as tl

from mhar.ops.triton.common import dot, operand
from mhar.ops.triton.storage import stored

TILE = 16  # sites and rows of a tensor-core tile


@triton.jit(do_not_specialize=["site0", "num_sites", "slot0", "row0", "row1", "tokens", "VR", "S"])
def partial_mix_kernel(
    V, R, AH, AL, P, LSEP, site0, num_sites, slot0, row0, row1, tokens, VR, S,
    H: tl.constexpr, K: tl.constexpr, KC: tl.constexpr, NT: tl.constexpr, TS: tl.constexpr,
    MERGE: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """P, LSEP of sites [site0, site0 + num_sites) over rows [row0, row1); MERGE continues an earlier partial mix."""
    D: tl.constexpr = H * K
    EVEN: tl.constexpr = K == KC * NT
    p = (tl.program_id(0) // H).to(tl.int64)
    h = tl.program_id(0) % H
    si = tl.arange(0, TS)
    ni = tl.arange(0, TS)
    ki = tl.arange(0, KC)
    smask = si < num_sites
    v_base = V + p * D + h * K
    p_base = P + p * D + h * K + ((slot0 + si).to(tl.int64) * tokens)[:, None] * D + ki[None, :]
    side = (p * H + h) * S + slot0 + si
    ah = ()
    al = ()
    acc = ()
    for j in tl.static_range(NT):
        mask = smask[:, None] if EVEN else smask[:, None] & (j * KC + ki[None, :] < K)
        at = (site0 + si)[:, None] * D + h * K + j * KC + ki[None, :]
        ah = ah + (tl.load(AH + at, mask=mask, other=0.0),)
        if not EXACT:
            al = al + (tl.load(AL + at, mask=mask, other=0.0),)
    if MERGE:
        m = tl.load(LSEP + side, mask=smask, other=0.0)
        z = tl.full((TS,), 1.0, tl.float32)
        for j in tl.static_range(NT):
            mask = smask[:, None] if EVEN else smask[:, None] & (j * KC + ki[None, :] < K)
            x = tl.load(p_base + j * KC, mask=mask, other=0.0)
            acc = acc + (x,)
    else:
        m = tl.full((TS,), -1e30, tl.float32)
        z = tl.zeros((TS,), tl.float32)
        for _ in tl.static_range(NT):
            acc = acc + (tl.zeros((TS, KC), tl.float32),)
    for n0 in tl.range(row0, row1, TS, num_stages=STAGES):
        n = n0 + ni
        nmask = n < row1
        r = tl.load(R + p * VR + n, mask=nmask, other=0.0)
        v = ()
        for j in tl.static_range(NT):
            mask = nmask[:, None] if EVEN else nmask[:, None] & (j * KC + ki[None, :] < K)
            tile = tl.load(v_base + (n.to(tl.int64) * tokens)[:, None] * D + j * KC + ki[None, :], mask=mask, other=0.0)
            v = v + (operand(tile, EXACT),)
        logits = tl.zeros((TS, TS), tl.float32)
        for j in tl.static_range(NT):
            vt = tl.trans(v[j])
            logits = dot(ah[j], vt, logits, PRECISION)
            if not EXACT:
                logits = dot(al[j], vt, logits, PRECISION)
        logits = tl.where(nmask[None, :], logits * r[None, :], -1e30)
        new_m = tl.maximum(m, tl.max(logits, axis=1))
        alpha = tl.exp(m - new_m)
        e = tl.exp(logits - new_m[:, None])
        z = z * alpha + tl.sum(e, axis=1)
        m = new_m
        eh = e if EXACT else stored(e, v[0].dtype)
        new_acc = ()
        for j in tl.static_range(NT):
            mixed = dot(eh, v[j], acc[j] * alpha[:, None], PRECISION)
            if not EXACT:
                mixed = dot(stored(e - eh.to(tl.float32), v[0].dtype), v[j], mixed, PRECISION)
            new_acc = new_acc + (mixed,)
        acc = new_acc
    inverse = 1.0 / z
    for j in tl.static_range(NT):
        mask = smask[:, None] if EVEN else smask[:, None] & (j * KC + ki[None, :] < K)
        tl.store(p_base + j * KC, acc[j] * inverse[:, None], mask=mask)
    tl.store(LSEP + side, m + tl.log(z), mask=smask)


@triton.jit(do_not_specialize=["row0", "num_rows", "slot0", "site0", "site1", "tokens", "VR", "S", "MP"])
def pull_kernel(
    V, R, DOUT, AH, AL, LSE, C, GATE, G, T, DL, row0, num_rows, slot0, site0, site1, tokens, VR, S, MP,
    H: tl.constexpr, K: tl.constexpr, KC: tl.constexpr, NT: tl.constexpr, TS: tl.constexpr, PP: tl.constexpr,
    HAS_GATE: tl.constexpr, MERGE: tl.constexpr, A_LOW: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """G, T, DL of rows [row0, row0 + num_rows) from sites [site0, site1), which all read these rows.

    MERGE adds to an earlier G and T. One loop walks over PP positions and their tiles of sites, so that the loads of
    the next tile, be it of the next position, are under way while this one is computed; gradients stay in registers
    from a position's first tile to its last.
    """
    D: tl.constexpr = H * K
    EVEN: tl.constexpr = K == KC * NT
    h = tl.program_id(0) % H
    p_first = (tl.program_id(0) // H) * PP
    ni = tl.arange(0, TS)
    si = tl.arange(0, TS)
    ki = tl.arange(0, KC)
    nmask = ni < num_rows
    row_at = ((row0 + ni).to(tl.int64) * tokens)[:, None] * D + h * K + ki[None, :]
    slot_at = ((slot0 + ni).to(tl.int64) * tokens)[:, None] * D + h * K + ki[None, :]
    steps = tl.cdiv(site1 - site0, TS)
    positions = tl.minimum(tokens - p_first, PP)
    acc = ()
    for _ in tl.static_range(NT):
        acc = acc + (tl.zeros((TS, KC), tl.float32),)
    t = tl.zeros((TS,), tl.float32)
    for i in tl.range(0, positions * steps, num_stages=STAGES):
        step = i % steps
        p = (p_first + i // steps).to(tl.int64)
        ph = p * H + h
        s = site0 + step * TS + si
        smask = s < site1
        both = nmask[:, None] & smask[None, :]
        r = tl.load(R + p * VR + row0 + ni, mask=nmask, other=0.0)
        lse = tl.load(LSE + ph * MP + s, mask=smask, other=0.0)
        c = tl.load(C + ph * MP + s, mask=smask, other=0.0)
        v = ()
        d = ()
        ah = ()
        al = ()
        for j in tl.static_range(NT):
            mask = nmask[:, None] if EVEN else nmask[:, None] & (j * KC + ki[None, :] < K)
            v = v + (operand(tl.load(V + p * D + row_at + j * KC, mask=mask, other=0.0), EXACT),)
            mask = smask[:, None] if EVEN else smask[:, None] & (j * KC + ki[None, :] < K)
            at = p * D + h * K + (s.to(tl.int64) * tokens)[:, None] * D + j * KC + ki[None, :]
            d = d + (operand(tl.load(DOUT + at, mask=mask, other=0.0), EXACT),)
            a_at = s[:, None] * D + h * K + j * KC + ki[None, :]
            ah = ah + (tl.load(AH + a_at, mask=mask, other=0.0),)
            if not EXACT:
                al = al + (tl.load(AL + a_at, mask=mask, other=0.0),)
        logits = tl.zeros((TS, TS), tl.float32)
        dw = tl.zeros((TS, TS), tl.float32)
        for j in tl.static_range(NT):
            dw = dot(v[j], tl.trans(d[j]), dw, PRECISION)
            logits = dot(v[j], tl.trans(ah[j]), logits, PRECISION)
            if not EXACT:
                logits = dot(v[j], tl.trans(al[j]), logits, PRECISION)
        logits = logits * r[:, None]
        w = tl.where(both, tl.exp(logits - lse[None, :]), 0.0)
        if HAS_GATE:
            w = w * tl.load(GATE + s, mask=smask, other=0.0)[None, :]
        dl = w * (dw - c[None, :])
        kept = tl.where(step == 0, 0.0, 1.0)
        t = t * kept + tl.sum(dl * logits, axis=1)
        dl = dl * r[:, None]
        tl.store(DL + (ph * S + slot0 + ni)[:, None] * MP + s[None, :], dl, mask=both)
        dl_h = dl if EXACT else stored(dl, v[0].dtype)
        wh = w if EXACT else stored(w, v[0].dtype)
        new_acc = ()
        for j in tl.static_range(NT):
            total = dot(wh, d[j], acc[j] * kept, PRECISION)
            if not EXACT:
                total = dot(stored(w - wh.to(tl.float32), v[0].dtype), d[j], total, PRECISION)
            total = dot(dl_h, ah[j], total, PRECISION)
            if A_LOW and not EXACT:
                total = dot(dl_h, al[j], total, PRECISION)
            new_acc = new_acc + (total,)
        acc = new_acc
        if step == steps - 1:
            for j in tl.static_range(NT):
                gmask = nmask[:, None] if EVEN else nmask[:, None] & (j * KC + ki[None, :] < K)
                g_at = G + p * D + slot_at + j * KC
                if MERGE:
                    tl.store(g_at, acc[j] + tl.load(g_at, mask=gmask, other=0.0), mask=gmask)
                else:
                    tl.store(g_at, acc[j], mask=gmask)
            t_at = T + ph * S + slot0 + ni
            if MERGE:
                tl.store(t_at, t + tl.load(t_at, mask=nmask, other=0.0), mask=nmask)
            else:
                tl.store(t_at, t, mask=nmask)


@triton.jit(do_not_specialize=["num_rows", "site0", "num_sites", "tokens", "VR", "MP"])
def scatter_kernel(
    V, R, DOUT, AH, AL, LSE, C, GATE, G, T, DL, num_rows, site0, num_sites,
    tokens, VR, MP,
    H: tl.constexpr, K: tl.constexpr, KC: tl.constexpr, NT: tl.constexpr, TS: tl.constexpr,
    HAS_GATE: tl.constexpr, MERGE: tl.constexpr, INLINE_C: tl.constexpr, ONE_TILE: tl.constexpr, A_LOW: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """G, T (+)= gradients of rows [0, num_rows) from the sites [site0, site0 + num_sites), all of which read them.

    The sites' DOUT (slots from 0 on) stays in registers while the rows stream by. INLINE_C: C holds what the
    softmax coupling term gets from sources outside the rows; the kernel adds the rows' share and stores the whole.
    """
    D: tl.constexpr = H * K
    EVEN: tl.constexpr = K == KC * NT
    p = (tl.program_id(0) // H).to(tl.int64)
    h = tl.program_id(0) % H
    si = tl.arange(0, TS)
    ni = tl.arange(0, TS)
    ki = tl.arange(0, KC)
    smask = si < num_sites
    v_base = V + p * D + h * K
    g_base = G + p * D + h * K
    side = (p * H + h) * MP + site0 + si
    d = ()
    ah = ()
    al = ()
    for j in tl.static_range(NT):
        mask = smask[:, None] if EVEN else smask[:, None] & (j * KC + ki[None, :] < K)
        at = p * D + h * K + (si.to(tl.int64) * tokens)[:, None] * D + j * KC + ki[None, :]
        d = d + (operand(tl.load(DOUT + at, mask=mask, other=0.0), EXACT),)
        at = (site0 + si)[:, None] * D + h * K + j * KC + ki[None, :]
        ah = ah + (tl.load(AH + at, mask=mask, other=0.0),)
        if not EXACT:
            al = al + (tl.load(AL + at, mask=mask, other=0.0),)
    lse = tl.load(LSE + side, mask=smask, other=0.0)
    c = tl.load(C + side, mask=smask, other=0.0)
    if INLINE_C and not ONE_TILE:
        for n0 in tl.range(0, num_rows, TS, num_stages=1):
            n = n0 + ni
            nmask = n < num_rows
            r = tl.load(R + p * VR + n, mask=nmask, other=0.0)
            dw = tl.zeros((TS, TS), tl.float32)
            logits = tl.zeros((TS, TS), tl.float32)
            for j in tl.static_range(NT):
                mask = nmask[:, None] if EVEN else nmask[:, None] & (j * KC + ki[None, :] < K)
                x = tl.load(
                    v_base + (n.to(tl.int64) * tokens)[:, None] * D + j * KC + ki[None, :], mask=mask, other=0.0
                )
                x = operand(x, EXACT)
                dw = dot(x, tl.trans(d[j]), dw, PRECISION)
                logits = dot(x, tl.trans(ah[j]), logits, PRECISION)
                if not EXACT:
                    logits = dot(x, tl.trans(al[j]), logits, PRECISION)
            w = tl.where(nmask[:, None] & smask[None, :], tl.exp(logits * r[:, None] - lse[None, :]), 0.0)
            c += tl.sum(w * dw, axis=0)
    if HAS_GATE:
        gate = tl.load(GATE + site0 + si, mask=smask, other=0.0)
    for n0 in tl.range(0, num_rows, TS, num_stages=STAGES):
        n = n0 + ni
        nmask = n < num_rows
        both = nmask[:, None] & smask[None, :]
        r = tl.load(R + p * VR + n, mask=nmask, other=0.0)
        v = ()
        for j in tl.static_range(NT):
            mask = nmask[:, None] if EVEN else nmask[:, None] & (j * KC + ki[None, :] < K)
            x = tl.load(v_base + (n.to(tl.int64) * tokens)[:, None] * D + j * KC + ki[None, :], mask=mask, other=0.0)
            v = v + (operand(x, EXACT),)
        dw = tl.zeros((TS, TS), tl.float32)
        logits = tl.zeros((TS, TS), tl.float32)
        for j in tl.static_range(NT):
            dw = dot(v[j], tl.trans(d[j]), dw, PRECISION)
            logits = dot(v[j], tl.trans(ah[j]), logits, PRECISION)
            if not EXACT:
                logits = dot(v[j], tl.trans(al[j]), logits, PRECISION)
        logits = logits * r[:, None]
        w = tl.where(both, tl.exp(logits - lse[None, :]), 0.0)
        if INLINE_C and ONE_TILE:
            c += tl.sum(w * dw, axis=0)
        if HAS_GATE:
            w = w * gate[None, :]
        dl = w * (dw - c[None, :])
        t = tl.sum(dl * logits, axis=1)
        dl = dl * r[:, None]
        dl_h = dl if EXACT else stored(dl, v[0].dtype)
        tl.store(DL + ((p * H + h) * VR + n)[:, None] * MP + (site0 + si)[None, :], dl, mask=both)
        wh = w if EXACT else stored(w, v[0].dtype)
        for j in tl.static_range(NT):
            mask = nmask[:, None] if EVEN else nmask[:, None] & (j * KC + ki[None, :] < K)
            g_at = g_base + (n.to(tl.int64) * tokens)[:, None] * D + j * KC + ki[None, :]
            total = tl.zeros((TS, KC), tl.float32)
            if MERGE:
                total = tl.load(g_at, mask=mask, other=0.0)
            total = dot(wh, d[j], total, PRECISION)
            if not EXACT:
                total = dot(stored(w - wh.to(tl.float32), v[0].dtype), d[j], total, PRECISION)
            total = dot(dl_h, ah[j], total, PRECISION)
            if A_LOW and not EXACT:
                total = dot(dl_h, al[j], total, PRECISION)
            tl.store(g_at, total, mask=mask)
        t_at = T + (p * H + h) * VR + n
        if MERGE:
            t += tl.load(t_at, mask=nmask, other=0.0)
        tl.store(t_at, t, mask=nmask)
    if INLINE_C:
        tl.store(C + side, c, mask=smask)


@triton.jit(do_not_specialize=["row0", "num_rows", "site0", "site1", "tokens", "split", "S", "MP", "M"])
def query_gradient_kernel(
    DL, V, DA, row0, num_rows, site0, site1, tokens, split, S, MP, M,
    H: tl.constexpr, K: tl.constexpr, KC: tl.constexpr, NT: tl.constexpr, TS: tl.constexpr, PB: tl.constexpr,
    LOWER: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """DA[part, s] += sum over the part's positions and rows [row0, row0 + num_rows) of DL * v, in a fixed order.

    The contraction index runs over (position, row slot): PB positions of `TILE` slots. LOWER: site s reads row n only
    if n <= s, and DL above that diagonal was never written.
    """
    D: tl.constexpr = H * K
    part = tl.program_id(1)
    h = tl.program_id(0) % H
    kb = (tl.program_id(0) // H) * (KC * NT)
    s = site0 + tl.program_id(2) * TS + tl.arange(0, TS)
    smask = s < site1
    i = tl.arange(0, PB * 16)
    slot = i % 16
    ki = tl.arange(0, KC)
    acc = ()
    for _ in tl.static_range(NT):
        acc = acc + (tl.zeros((TS, KC), tl.float32),)
    last = tl.minimum((part + 1) * split, tokens)
    for p0 in tl.range(part * split, last, PB, num_stages=STAGES):
        p = (p0 + i // 16).to(tl.int64)
        rows = (p < last) & (slot < num_rows)
        mask = rows[None, :] & smask[:, None]
        if LOWER:
            mask = mask & ((row0 + slot)[None, :] <= s[:, None])
        dl = tl.load(DL + ((p * H + h) * S + slot)[None, :] * MP + s[:, None], mask=mask, other=0.0)
        if not EXACT:
            dl_high = stored(dl, V.dtype.element_ty)
            dl_low = stored(dl - dl_high.to(tl.float32), V.dtype.element_ty)
        new_acc = ()
        for j in tl.static_range(NT):
            k = kb + j * KC + ki[None, :]
            vmask = rows[:, None] & (k < K)
            x = tl.load(V + (p + (row0 + slot).to(tl.int64) * tokens)[:, None] * D + h * K + k, mask=vmask, other=0.0)
            if EXACT:
                total = dot(dl, x.to(tl.float32), acc[j], PRECISION)
            else:
                total = dot(dl_high, x, acc[j], PRECISION)
                total = dot(dl_low, x, total, PRECISION)
            new_acc = new_acc + (total,)
        acc = new_acc
    for j in tl.static_range(NT):
        k = kb + j * KC + ki[None, :]
        mask = smask[:, None] & (k < K)
        at = DA + (part * M + s)[:, None].to(tl.int64) * D + h * K + k
        tl.store(at, tl.load(at, mask=mask, other=0.0) + acc[j], mask=mask)
