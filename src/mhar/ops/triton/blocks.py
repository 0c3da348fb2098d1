# ruff: noqa: RUF005  (Triton does not compile unpacking)
"""One site of the block forms: the running sum of sublayer outputs, the births of rows, and what each site mixes.

The finished rows reach a site through the shared passes of its group (shared.py). The site kernels keep the stream: the
residual stream of add reads, the partial sum of the current block of replace reads (LOCAL: also a source of the site).
With replace reads a row is visible at the site where it is born, between two launches of these kernels (READ, UPDATE
and FINISH say which part runs).
"""

# Kernels are written in Triton's language, whose types pyright does not know.
# pyright: reportGeneralTypeIssues=false, reportMissingParameterType=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false

import triton
import triton.language as tl

from mhar.ops.triton.common import residual_of, restore
from mhar.ops.triton.storage import stored


@triton.jit(do_not_specialize=["s", "row", "slot", "tokens", "VR", "S", "MP"])
def block_forward_kernel(
    X, STREAM_IN, STREAM, BASE, V, R, P, LSEP, A, GATE, NULL, NULL_LOGIT, OUT, RES, LSE, LOCAL_R,
    HIDDEN, NORM_W, Y, NORM_R, s, row, slot, tokens, VR, S, MP, eps, norm_eps,
    H: tl.constexpr, HP: tl.constexpr, K: tl.constexpr, KT: tl.constexpr, NT: tl.constexpr, BP: tl.constexpr,
    UPDATE: tl.constexpr, FRESH: tl.constexpr, BIRTH: tl.constexpr, SUBTRACT: tl.constexpr, READ: tl.constexpr,
    ROUTED: tl.constexpr, PARTIAL: tl.constexpr, LOCAL: tl.constexpr, ADD: tl.constexpr,
    HAS_GATE: tl.constexpr, HAS_NULL: tl.constexpr, NORM: tl.constexpr, NORM_OFFSET: tl.constexpr,
    SAVE: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """UPDATE: STREAM = STREAM_IN + X (FRESH: = X); BIRTH: row `row` = STREAM (SUBTRACT: - BASE), BASE = STREAM.

    READ: out mixes P (PARTIAL), the stream (LOCAL) and the null source; hidden = out, or STREAM + gate * out with ADD.
    """
    D: tl.constexpr = H * K
    p = (tl.program_id(0) * BP + tl.arange(0, BP)).to(tl.int64)
    hh = tl.arange(0, HP)
    kk = tl.arange(0, KT)
    pmask = p < tokens
    phmask = pmask[:, None] & (hh < H)[None, :]
    channel = hh[None, :, None] * K + kk[None, None, :]
    at = p[:, None, None] * D + channel
    v_at = row.to(tl.int64) * tokens * D + at
    ph = p[:, None] * H + hh[None, :]
    masks = ()
    stream = ()
    for j in tl.static_range(NT):
        mask = phmask[:, :, None]
        if K != KT * NT:
            mask = mask & (j * KT + kk < K)[None, None, :]
        masks = masks + (mask,)
        if UPDATE:
            x = tl.load(X + at + j * KT, mask=mask, other=0.0).to(tl.float32)
            if not FRESH:
                x += tl.load(STREAM_IN + at + j * KT, mask=mask, other=0.0).to(tl.float32)
            kept = stored(x, STREAM.dtype.element_ty)
            tl.store(STREAM + at + j * KT, kept, mask=mask)
            stream = stream + (kept.to(tl.float32),)
    if BIRTH:
        square = tl.zeros((BP, HP, KT), tl.float32)
        for j in tl.static_range(NT):
            x = stream[j]
            if SUBTRACT:
                x -= tl.load(BASE + at + j * KT, mask=masks[j], other=0.0).to(tl.float32)
                x = stored(x, STREAM.dtype.element_ty).to(tl.float32)
            kept = stored(x, V.dtype.element_ty)
            tl.store(V + v_at + j * KT, kept, mask=masks[j])
            if ADD:
                tl.store(BASE + at + j * KT, stored(stream[j], BASE.dtype.element_ty), mask=masks[j])
            x = kept.to(tl.float32)
            square += x * x
        r = tl.rsqrt(tl.sum(tl.sum(square, axis=2), axis=1) * (1.0 / D) + eps)
        tl.store(R + p * VR + row, r, mask=pmask)

    if READ:
        out = ()
        if ROUTED:
            m = tl.full((BP, HP), -1e30, tl.float32)
            z = tl.zeros((BP, HP), tl.float32)
            for _ in tl.static_range(NT):
                out = out + (tl.zeros((BP, HP, KT), tl.float32),)
            if PARTIAL:
                side = ph * S + slot
                m = tl.load(LSEP + side, mask=phmask, other=0.0)
                z = tl.full((BP, HP), 1.0, tl.float32)
                p_at = P + slot.to(tl.int64) * tokens * D + at
                new_out = ()
                for j in tl.static_range(NT):
                    new_out = new_out + (tl.load(p_at + j * KT, mask=masks[j], other=0.0),)
                out = new_out
            if LOCAL:
                square = tl.zeros((BP, HP, KT), tl.float32)
                product = tl.zeros((BP, HP, KT), tl.float32)
                for j in tl.static_range(NT):
                    a = tl.load(A + s * D + channel + j * KT, mask=masks[j], other=0.0)
                    square += stream[j] * stream[j]
                    product += stream[j] * a
                r = tl.rsqrt(tl.sum(tl.sum(square, axis=2), axis=1) * (1.0 / D) + eps)
                if SAVE:
                    tl.store(LOCAL_R + p, r, mask=pmask)
                logit = tl.sum(product, axis=2) * r[:, None]
                new_m = tl.maximum(m, logit)
                alpha = tl.exp(m - new_m)
                e = tl.exp(logit - new_m)
                z = z * alpha + e
                m = new_m
                new_out = ()
                for j in tl.static_range(NT):
                    new_out = new_out + (out[j] * alpha[:, :, None] + stream[j] * e[:, :, None],)
                out = new_out
            if HAS_NULL:
                logit = tl.load(NULL_LOGIT + s * H + hh, mask=hh < H, other=0.0)[None, :]
                new_m = tl.maximum(m, logit)
                alpha = tl.exp(m - new_m)
                e = tl.exp(logit - new_m)
                z = z * alpha + e
                m = new_m
                new_out = ()
                for j in tl.static_range(NT):
                    null = tl.load(NULL + s * D + channel + j * KT, mask=masks[j], other=0.0)
                    new_out = new_out + (out[j] * alpha[:, :, None] + null * e[:, :, None],)
                out = new_out
            inverse = 1.0 / z
            if SAVE:
                tl.store(LSE + ph * MP + s, m + tl.log(z), mask=phmask)
        gate = 1.0
        if HAS_GATE and ROUTED:
            gate = tl.load(GATE + s)
        hidden = ()
        for j in tl.static_range(NT):
            if ADD:
                value = stream[j]
                if ROUTED:
                    value += gate * (out[j] * inverse[:, :, None])
            else:
                value = out[j] * inverse[:, :, None]
            rounded = stored(value, HIDDEN.dtype.element_ty)
            if SAVE or not NORM:
                tl.store(HIDDEN + at + j * KT, rounded, mask=masks[j])
            if SAVE and not ADD and RESIDUAL != 0:
                tl.store(RES + at + j * KT, residual_of(value, rounded, RESIDUAL), mask=masks[j])
            hidden = hidden + (value,)
        if NORM:
            square = hidden[0] * hidden[0]
            for j in tl.static_range(1, NT):
                square += hidden[j] * hidden[j]
            nr = tl.rsqrt(tl.sum(tl.sum(square, axis=2), axis=1) * (1.0 / D) + norm_eps)
            if SAVE:
                tl.store(NORM_R + p, nr, mask=pmask)
            for j in tl.static_range(NT):
                weight = tl.load(NORM_W + channel + j * KT, mask=masks[j], other=0.0).to(tl.float32) + NORM_OFFSET
                y = stored(hidden[j] * nr[:, None, None] * weight, Y.dtype.element_ty)
                tl.store(Y + at + j * KT, y, mask=masks[j])


@triton.jit
def row_gradient(G, T, V, R, p, ph, n, tokens, VR, channel, mask, pmask, phmask, j: tl.constexpr, D: tl.constexpr):
    """Tile j of the finished gradient of row n: G - (r^2 / D) (sum over heads of T) v."""
    r = tl.load(R + p * VR + n, mask=pmask, other=0.0)
    t = tl.sum(tl.load(T + ph * VR + n, mask=phmask, other=0.0), axis=1) * (r * r) * (1.0 / D)
    at = (n.to(tl.int64) * tokens + p[:, None, None]) * D + channel
    v = tl.load(V + at + j, mask=mask, other=0.0).to(tl.float32)
    return tl.load(G + at + j, mask=mask, other=0.0) - t[:, None, None] * v


@triton.jit(do_not_specialize=["s", "row", "slot", "tokens", "VR", "MP"])
def block_backward_kernel(
    DOUT_IN, HIDDEN, RES, NORM_W, NORM_R, LOCAL_V, LOCAL_R, A, LSE, C, GATE, NULL, NULL_LOGIT, NULL_C, DOUT,
    PREV, PREV_RES, G, T, V, R, DX, DX_RES, NORM_PART, NULL_PART, LOCAL_PART,
    s, row, slot, tokens, VR, MP,
    H: tl.constexpr, HP: tl.constexpr, K: tl.constexpr, KT: tl.constexpr, NT: tl.constexpr, BP: tl.constexpr,
    READ: tl.constexpr, FINISH: tl.constexpr, ROUTED: tl.constexpr, LOCAL: tl.constexpr, ADD: tl.constexpr,
    CARRY: tl.constexpr, BIRTH: tl.constexpr, NEXT: tl.constexpr,
    HAS_GATE: tl.constexpr, HAS_NULL: tl.constexpr, NORM: tl.constexpr, NORM_OFFSET: tl.constexpr,
    RESIDUAL: tl.constexpr, PREV_MODE: tl.constexpr, DX_MODE: tl.constexpr,
):  # fmt: skip
    """READ: through the norm to the gradient of the mixture, kept in DOUT, with C (replace) or its null part (add).

    FINISH: the stream's gradient DX (+ DX_RES) = what later sites left in PREV (CARRY) + this site's share + the
    gradient of row `row` (BIRTH), minus that of the next row, whose delta starts from the same stream (NEXT).
    """
    D: tl.constexpr = H * K
    hh = tl.arange(0, HP)
    kk = tl.arange(0, KT)
    channel = hh[None, :, None] * K + kk[None, None, :]
    norm_sum = ()
    null_sum = ()
    local_sum = ()
    for _ in tl.static_range(NT):
        norm_sum = norm_sum + (tl.zeros((BP, HP, KT), tl.float32),)
        null_sum = null_sum + (tl.zeros((BP, HP, KT), tl.float32),)
        local_sum = local_sum + (tl.zeros((BP, HP, KT), tl.float32),)

    for block in tl.range(tl.program_id(0), tl.cdiv(tokens, BP), tl.num_programs(0), num_stages=1):
        p = (block * BP + tl.arange(0, BP)).to(tl.int64)
        pmask = p < tokens
        phmask = pmask[:, None] & (hh < H)[None, :]
        at = p[:, None, None] * D + channel
        ph = p[:, None] * H + hh[None, :]
        masks = ()
        stream = ()
        for j in tl.static_range(NT):
            mask = phmask[:, :, None]
            if K != KT * NT:
                mask = mask & (j * KT + kk < K)[None, None, :]
            masks = masks + (mask,)
            x = tl.zeros((BP, HP, KT), tl.float32)
            if CARRY and FINISH:
                x = tl.load(PREV + at + j * KT, mask=mask, other=0.0).to(tl.float32)
                if PREV_MODE != 0:
                    x = restore(
                        x.to(PREV.dtype.element_ty), tl.load(PREV_RES + at + j * KT, mask=mask, other=0), PREV_MODE
                    )
            stream = stream + (x,)

        if READ:
            d = ()
            hidden = ()
            for j in tl.static_range(NT):
                d = d + (tl.load(DOUT_IN + at + j * KT, mask=masks[j], other=0.0).to(tl.float32),)
                if NORM or (ROUTED and not ADD):
                    x = tl.load(HIDDEN + at + j * KT, mask=masks[j], other=0.0)
                    if RESIDUAL != 0 and not ADD:
                        x = restore(x, tl.load(RES + at + j * KT, mask=masks[j], other=0), RESIDUAL)
                    hidden = hidden + (x.to(tl.float32),)
            if NORM:
                nr = tl.load(NORM_R + p, mask=pmask, other=0.0)[:, None, None]
                inner = tl.zeros((BP, HP, KT), tl.float32)
                scaled = ()
                new_sum = ()
                for j in tl.static_range(NT):
                    weight = tl.load(NORM_W + channel + j * KT, mask=masks[j], other=0.0).to(tl.float32) + NORM_OFFSET
                    scaled = scaled + (d[j] * weight,)
                    inner += d[j] * weight * (hidden[j] * nr)
                    new_sum = new_sum + (norm_sum[j] + d[j] * (hidden[j] * nr),)
                norm_sum = new_sum
                mean = (tl.sum(tl.sum(inner, axis=2), axis=1) * (1.0 / D))[:, None, None]
                new_d = ()
                for j in tl.static_range(NT):
                    new_d = new_d + (nr * (scaled[j] - hidden[j] * nr * mean),)
                d = new_d
            if ADD:
                new_stream = ()
                for j in tl.static_range(NT):
                    new_stream = new_stream + (stream[j] + d[j],)
                stream = new_stream
            if ROUTED:
                lse = tl.load(LSE + ph * MP + s, mask=phmask, other=0.0)
                c_sum = tl.zeros((BP, HP, KT), tl.float32)
                new_d = ()
                for j in tl.static_range(NT):
                    x = stored(d[j], DOUT.dtype.element_ty)
                    tl.store(DOUT + slot.to(tl.int64) * tokens * D + at + j * KT, x, mask=masks[j])
                    x = x.to(tl.float32)
                    if not ADD:
                        c_sum += x * hidden[j]
                    new_d = new_d + (x,)
                d = new_d
                c = tl.sum(c_sum, axis=2)
                if HAS_NULL:
                    gate = 1.0
                    if HAS_GATE:
                        gate = tl.load(GATE + s)
                    null_logit = tl.load(NULL_LOGIT + s * H + hh, mask=hh < H, other=0.0)[None, :]
                    null_w = tl.where(phmask, tl.exp(null_logit - lse), 0.0)
                    null_dw = tl.zeros((BP, HP, KT), tl.float32)
                    new_sum = ()
                    for j in tl.static_range(NT):
                        null = tl.load(NULL + s * D + channel + j * KT, mask=masks[j], other=0.0)
                        null_dw += d[j] * null
                        new_sum = new_sum + (null_sum[j] + d[j] * (null_w * gate)[:, :, None],)
                    null_sum = new_sum
                    c = null_w * tl.sum(null_dw, axis=2)
                    tl.store(NULL_C + ph * MP + s, c, mask=phmask)
                tl.store(C + ph * MP + s, c, mask=phmask)
                if LOCAL:
                    r = tl.load(LOCAL_R + p, mask=pmask, other=0.0)
                    dw_sum = tl.zeros((BP, HP, KT), tl.float32)
                    l_sum = tl.zeros((BP, HP, KT), tl.float32)
                    v = ()
                    a = ()
                    for j in tl.static_range(NT):
                        x = tl.load(LOCAL_V + at + j * KT, mask=masks[j], other=0.0).to(tl.float32)
                        w_a = tl.load(A + s * D + channel + j * KT, mask=masks[j], other=0.0)
                        dw_sum += x * d[j]
                        l_sum += x * w_a
                        v = v + (x,)
                        a = a + (w_a,)
                    logit = tl.sum(l_sum, axis=2) * r[:, None]
                    w = tl.where(phmask, tl.exp(logit - lse), 0.0)
                    dl = w * (tl.sum(dw_sum, axis=2) - c)
                    t = (tl.sum(dl * logit, axis=1) * (r * r) * (1.0 / D))[:, None, None]
                    dl = (dl * r[:, None])[:, :, None]
                    new_stream = ()
                    new_sum = ()
                    for j in tl.static_range(NT):
                        new_stream = new_stream + (stream[j] + w[:, :, None] * d[j] + dl * a[j] - t * v[j],)
                        new_sum = new_sum + (local_sum[j] + dl * v[j],)
                    stream = new_stream
                    local_sum = new_sum

        if FINISH:
            for j in tl.static_range(NT):
                x = stream[j]
                if BIRTH:
                    x += row_gradient(G, T, V, R, p, ph, row, tokens, VR, channel, masks[j], pmask, phmask, j * KT, D)
                if NEXT:
                    x -= row_gradient(
                        G, T, V, R, p, ph, row + 1, tokens, VR, channel, masks[j], pmask, phmask, j * KT, D
                    )
                rounded = stored(x, DX.dtype.element_ty)
                tl.store(DX + at + j * KT, rounded, mask=masks[j])
                if DX_MODE != 0:
                    tl.store(DX_RES + at + j * KT, residual_of(x, rounded, DX_MODE), mask=masks[j])

    for j in tl.static_range(NT):
        part_at = tl.program_id(0) * D + channel + j * KT
        mask = (hh < H)[None, :, None] & (j * KT + kk < K)[None, None, :]
        if NORM and READ:
            tl.store(NORM_PART + part_at, tl.sum(norm_sum[j], axis=0)[None, :, :], mask=mask)
        if HAS_NULL and ROUTED and READ:
            tl.store(NULL_PART + part_at, tl.sum(null_sum[j], axis=0)[None, :, :], mask=mask)
        if LOCAL and READ:
            tl.store(LOCAL_PART + part_at, tl.sum(local_sum[j], axis=0)[None, :, :], mask=mask)
