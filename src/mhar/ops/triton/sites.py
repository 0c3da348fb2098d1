# ruff: noqa: RUF005  (Triton compiles neither unpacking nor code after a constant branch)
"""One site of the sublayer forms: what remains after the shared passes, for one block of token positions.

`site_forward_kernel`  takes the newest source in, mixes it with the rows of its own block and the partial mix of all
                       earlier rows, adds it to the residual stream (add reads) and applies the norm that follows
`site_backward_kernel` the reverse: norm, coupling term c, and the finished gradient of the newest source

A program owns BP whole rows, as tiles [BP, HP, KT]. The backward kernel walks over several blocks of positions so that
the gradients of what all tokens share (norm weight, null source) leave it as one partial sum per program.
"""

# Kernels are written in Triton's language, whose types pyright does not know.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportMissingParameterType=false
# pyright: reportOperatorIssue=false

import triton
import triton.language as tl

from mhar.ops.triton.common import residual_of, restore
from mhar.ops.triton.storage import stored


@triton.jit(do_not_specialize=["s", "first", "slot", "tokens", "VR", "S", "MP"])
def site_forward_kernel(
    X, V, R, P, LSEP, A, GATE, NULL, NULL_LOGIT, STREAM, OUT, RES, LSE, HIDDEN, NORM_W, Y, NORM_R,
    s, first, slot, tokens, VR, S, MP, eps, norm_eps,
    H: tl.constexpr, HP: tl.constexpr, K: tl.constexpr, KT: tl.constexpr, NT: tl.constexpr, BP: tl.constexpr,
    PARTIAL: tl.constexpr, ROUTED: tl.constexpr, ADD: tl.constexpr, OPENING: tl.constexpr,
    HAS_GATE: tl.constexpr, HAS_NULL: tl.constexpr, NORM: tl.constexpr, NORM_OFFSET: tl.constexpr,
    SAVE: tl.constexpr, RESIDUAL: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Site s reads rows [first, s) one by one, the newest row s = X, and P (rows before `first`).

    ADD: STREAM += X (OPENING: the stream begins), hidden = STREAM + gate * out; ROUTED=False leaves out = 0.
    NORM: Y = norm(hidden). SAVE keeps what the backward needs: OUT + RES, LSE, and HIDDEN, NORM_R.
    """
    D: tl.constexpr = H * K
    p = (tl.program_id(0) * BP + tl.arange(0, BP)).to(tl.int64)
    hh = tl.arange(0, HP)
    kk = tl.arange(0, KT)
    pmask = p < tokens
    phmask = pmask[:, None] & (hh < H)[None, :]
    channel = hh[None, :, None] * K + kk[None, None, :]
    at = p[:, None, None] * D + channel
    new_row = V + s.to(tl.int64) * tokens * D + at
    ph = p[:, None] * H + hh[None, :]

    a = ()
    v = ()
    added = ()
    masks = ()
    for j in tl.static_range(NT):
        mask = phmask[:, :, None]
        if K != KT * NT:
            mask = mask & (j * KT + kk < K)[None, None, :]
        masks = masks + (mask,)
        x = tl.load(X + at + j * KT, mask=mask, other=0.0)
        kept = stored(x.to(tl.float32), V.dtype.element_ty)
        tl.store(new_row + j * KT, kept, mask=mask)
        v = v + (kept.to(tl.float32),)
        added = added + (x.to(tl.float32),)
    square = v[0] * v[0]
    for j in tl.static_range(1, NT):
        square += v[j] * v[j]
    r = tl.rsqrt(tl.sum(tl.sum(square, axis=2), axis=1) * (1.0 / D) + eps)
    tl.store(R + p * VR + s, r, mask=pmask)

    acc = ()
    if ROUTED:
        for j in tl.static_range(NT):
            a_mask = (hh < H)[None, :, None]
            if K != KT * NT:
                a_mask = a_mask & (j * KT + kk < K)[None, None, :]
            a = a + (tl.load(A + s * D + channel + j * KT, mask=a_mask, other=0.0),)
        m_sum = v[0] * a[0]
        for j in tl.static_range(1, NT):
            m_sum += v[j] * a[j]
        m = tl.sum(m_sum, axis=2) * r[:, None]
        z = tl.full((BP, HP), 1.0, tl.float32)
        if PARTIAL:
            side = ph * S + slot
            lp = tl.load(LSEP + side, mask=phmask, other=0.0)
            new_m = tl.maximum(lp, m)
            e_new = tl.exp(m - new_m)
            e_old = tl.exp(lp - new_m)
            z = e_old + e_new
            m = new_m
            p_at = P + slot.to(tl.int64) * tokens * D + at
            for j in tl.static_range(NT):
                x = tl.load(p_at + j * KT, mask=masks[j], other=0.0)
                acc = acc + (x * e_old[:, :, None] + v[j] * e_new[:, :, None],)
        else:
            acc = v
        if HAS_NULL:
            logit = tl.load(NULL_LOGIT + s * H + hh, mask=hh < H, other=0.0)[None, :]
            new_m = tl.maximum(m, logit)
            alpha = tl.exp(m - new_m)
            e = tl.exp(logit - new_m)
            z = z * alpha + e
            m = new_m
            new_acc = ()
            for j in tl.static_range(NT):
                null = tl.load(NULL + s * D + channel + j * KT, mask=masks[j], other=0.0).to(tl.float32)
                new_acc = new_acc + (acc[j] * alpha[:, :, None] + null * e[:, :, None],)
            acc = new_acc
        for n0 in tl.range(first, s, UNROLL, num_stages=1):
            # All loads first: their latency is what a row costs.
            xs = ()
            rs = ()
            for u in tl.static_range(UNROLL):
                n = n0 + u
                rs = rs + (tl.load(R + p * VR + n, mask=pmask & (n < s), other=0.0),)
                for j in tl.static_range(NT):
                    row = V + (n.to(tl.int64) * tokens) * D + at + j * KT
                    xs = xs + (tl.load(row, mask=masks[j] & (n < s), other=0.0),)
            for u in tl.static_range(UNROLL):
                products = xs[u * NT].to(tl.float32) * a[0]
                for j in tl.static_range(1, NT):
                    products += xs[u * NT + j].to(tl.float32) * a[j]
                ln = tl.where(n0 + u < s, tl.sum(products, axis=2) * rs[u][:, None], -1e30)
                new_m = tl.maximum(m, ln)
                alpha = tl.exp(m - new_m)
                e = tl.exp(ln - new_m)
                z = z * alpha + e
                m = new_m
                new_acc = ()
                for j in tl.static_range(NT):
                    new_acc = new_acc + (acc[j] * alpha[:, :, None] + xs[u * NT + j].to(tl.float32) * e[:, :, None],)
                acc = new_acc
        inverse = 1.0 / z
        if SAVE:
            tl.store(LSE + ph * MP + s, m + tl.log(z), mask=phmask)

    if ADD and ROUTED:
        gate = 1.0
        if HAS_GATE:
            gate = tl.load(GATE + s)
    hidden = ()
    for j in tl.static_range(NT):
        if ROUTED:
            out = acc[j] * inverse[:, :, None]
            if SAVE or not ADD:
                rounded = stored(out, OUT.dtype.element_ty)
                if not NORM or SAVE or ADD:
                    tl.store(OUT + at + j * KT, rounded, mask=masks[j])
                if SAVE and RESIDUAL != 0:
                    tl.store(
                        RES + s.to(tl.int64) * tokens * D + at + j * KT,
                        residual_of(out, rounded, RESIDUAL),
                        mask=masks[j],
                    )
        if ADD:
            if OPENING:
                x = stored(added[j], STREAM.dtype.element_ty)
            else:
                x = tl.load(STREAM + at + j * KT, mask=masks[j], other=0.0).to(tl.float32) + added[j]
                x = stored(x, STREAM.dtype.element_ty)
            tl.store(STREAM + at + j * KT, x, mask=masks[j])
            value = x.to(tl.float32)
            if ROUTED:
                value += gate * out
            rounded = stored(value, HIDDEN.dtype.element_ty)
            if not NORM or SAVE:
                tl.store(HIDDEN + at + j * KT, rounded, mask=masks[j])
            hidden = hidden + (value,)
        else:
            hidden = hidden + (out,)
    if NORM:
        square = hidden[0] * hidden[0]
        for j in tl.static_range(1, NT):
            square += hidden[j] * hidden[j]
        nr = tl.rsqrt(tl.sum(tl.sum(square, axis=2), axis=1) * (1.0 / D) + norm_eps)
        if SAVE:
            tl.store(NORM_R + p, nr, mask=pmask)
        for j in tl.static_range(NT):
            weight = tl.load(NORM_W + channel + j * KT, mask=masks[j], other=0.0).to(tl.float32) + NORM_OFFSET
            tl.store(Y + at + j * KT, stored(hidden[j] * nr[:, None, None] * weight, Y.dtype.element_ty), mask=masks[j])


@triton.jit(do_not_specialize=["n", "slot", "s_end", "tokens", "VR", "S", "MP"])
def site_backward_kernel(
    DOUT_IN, OUT, RES, HIDDEN, NORM_W, NORM_R, V, R, A, LSE, C, GATE, NULL, NULL_LOGIT, DOUT, G, T, DL, DSTREAM, DX,
    NORM_PART, NULL_PART, NULL_C,
    n, slot, s_end, tokens, VR, S, MP,
    H: tl.constexpr, HP: tl.constexpr, K: tl.constexpr, KT: tl.constexpr, NT: tl.constexpr, BP: tl.constexpr,
    GATHERED: tl.constexpr, ROUTED: tl.constexpr, ADD: tl.constexpr, CLOSING: tl.constexpr,
    HAS_GATE: tl.constexpr, HAS_NULL: tl.constexpr, NORM: tl.constexpr, NORM_OFFSET: tl.constexpr,
    RESIDUAL: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Gradient of site n's hidden state in, gradient of its newest source (row n) out.

    Row n gathers from site n (ROUTED), the sites (n, s_end) of its block, and G, T (GATHERED). CLOSING: the first site
    of the backward pass, whose stream gradient starts from zero.
    """
    D: tl.constexpr = H * K
    hh = tl.arange(0, HP)
    kk = tl.arange(0, KT)
    channel = hh[None, :, None] * K + kk[None, None, :]
    norm_sum = ()
    null_sum = ()
    for _ in tl.static_range(NT):
        norm_sum = norm_sum + (tl.zeros((BP, HP, KT), tl.float32),)
        null_sum = null_sum + (tl.zeros((BP, HP, KT), tl.float32),)

    for block in tl.range(tl.program_id(0), tl.cdiv(tokens, BP), tl.num_programs(0), num_stages=1):
        p = (block * BP + tl.arange(0, BP)).to(tl.int64)
        pmask = p < tokens
        phmask = pmask[:, None] & (hh < H)[None, :]
        at = p[:, None, None] * D + channel
        own_row = n.to(tl.int64) * tokens * D + at
        ph = p[:, None] * H + hh[None, :]
        masks = ()
        for j in tl.static_range(NT):
            mask = phmask[:, :, None]
            if K != KT * NT:
                mask = mask & (j * KT + kk < K)[None, None, :]
            masks = masks + (mask,)

        # Through the norm, to the gradient of the hidden state.
        d = ()
        for j in tl.static_range(NT):
            d = d + (tl.load(DOUT_IN + at + j * KT, mask=masks[j], other=0.0).to(tl.float32),)
        if NORM:
            nr = tl.load(NORM_R + p, mask=pmask, other=0.0)[:, None, None]
            unit = ()
            scaled = ()
            for j in tl.static_range(NT):
                if ADD:
                    x = tl.load(HIDDEN + at + j * KT, mask=masks[j], other=0.0).to(tl.float32)
                else:
                    x = tl.load(OUT + at + j * KT, mask=masks[j], other=0.0)
                    if RESIDUAL != 0:
                        x = restore(x, tl.load(RES + own_row + j * KT, mask=masks[j], other=0), RESIDUAL)
                    x = x.to(tl.float32)
                weight = tl.load(NORM_W + channel + j * KT, mask=masks[j], other=0.0).to(tl.float32) + NORM_OFFSET
                unit = unit + (x * nr,)
                scaled = scaled + (d[j] * weight,)
            inner = scaled[0] * unit[0]
            for j in tl.static_range(1, NT):
                inner += scaled[j] * unit[j]
            mean = (tl.sum(tl.sum(inner, axis=2), axis=1) * (1.0 / D))[:, None, None]
            new_d = ()
            new_sum = ()
            for j in tl.static_range(NT):
                new_sum = new_sum + (norm_sum[j] + d[j] * unit[j],)
                new_d = new_d + (nr * (scaled[j] - unit[j] * mean),)
            d = new_d
            norm_sum = new_sum
        stream = ()
        if ADD:
            for j in tl.static_range(NT):
                x = d[j]
                if not CLOSING:
                    x += tl.load(DSTREAM + at + j * KT, mask=masks[j], other=0.0)
                tl.store(DSTREAM + at + j * KT, x, mask=masks[j])
                stream = stream + (x,)

        v = ()
        for j in tl.static_range(NT):
            v = v + (tl.load(V + own_row + j * KT, mask=masks[j], other=0.0).to(tl.float32),)
        r = tl.load(R + p * VR + n, mask=pmask, other=0.0)
        acc = ()
        t = tl.zeros((BP, HP), tl.float32)
        if GATHERED:
            t = tl.load(T + ph * S + slot, mask=phmask, other=0.0)
            g_at = G + slot.to(tl.int64) * tokens * D + at
            for j in tl.static_range(NT):
                acc = acc + (tl.load(g_at + j * KT, mask=masks[j], other=0.0),)
        else:
            for _ in tl.static_range(NT):
                acc = acc + (tl.zeros((BP, HP, KT), tl.float32),)

        if ROUTED:
            # The rounded gradient serves both products of dl = w (dw - c): they cancel for similar sources.
            new_d = ()
            c_sum = tl.zeros((BP, HP, KT), tl.float32)
            dw_sum = tl.zeros((BP, HP, KT), tl.float32)
            l_sum = tl.zeros((BP, HP, KT), tl.float32)
            a = ()
            for j in tl.static_range(NT):
                x = stored(d[j], DOUT.dtype.element_ty)
                tl.store(DOUT + own_row + j * KT, x, mask=masks[j])
                x = x.to(tl.float32)
                out = tl.load(OUT + at + j * KT, mask=masks[j], other=0.0)
                if RESIDUAL != 0:
                    out = restore(out, tl.load(RES + own_row + j * KT, mask=masks[j], other=0), RESIDUAL)
                w_a = tl.load(A + n * D + channel + j * KT, mask=masks[j], other=0.0)
                c_sum += x * out.to(tl.float32)
                dw_sum += x * v[j]
                l_sum += v[j] * w_a
                a = a + (w_a,)
                new_d = new_d + (x,)
            d = new_d
            c = tl.sum(c_sum, axis=2)
            dw = tl.sum(dw_sum, axis=2)
            logit = tl.sum(l_sum, axis=2) * r[:, None]
            tl.store(C + ph * MP + n, c, mask=phmask)
            lse = tl.load(LSE + ph * MP + n, mask=phmask, other=0.0)
            gate = 1.0
            if HAS_GATE:
                gate = tl.load(GATE + n)
            if HAS_NULL:
                null_logit = tl.load(NULL_LOGIT + n * H + hh, mask=hh < H, other=0.0)[None, :]
                null_w = tl.where(phmask, tl.exp(null_logit - lse), 0.0) * gate
                null_dw = tl.zeros((BP, HP, KT), tl.float32)
                new_sum = ()
                for j in tl.static_range(NT):
                    null = tl.load(NULL + n * D + channel + j * KT, mask=masks[j], other=0.0).to(tl.float32)
                    null_dw += d[j] * null
                    new_sum = new_sum + (null_sum[j] + d[j] * null_w[:, :, None],)
                null_sum = new_sum
                tl.store(NULL_C + ph * MP + n, null_w * (tl.sum(null_dw, axis=2) - c), mask=phmask)
            w = tl.where(phmask, tl.exp(logit - lse), 0.0) * gate
            dl = w * (dw - c)
            t += dl * logit
            dl = dl * r[:, None]
            tl.store(DL + (ph * S + slot) * MP + n, dl, mask=phmask)
            new_acc = ()
            for j in tl.static_range(NT):
                new_acc = new_acc + (acc[j] + w[:, :, None] * d[j] + dl[:, :, None] * a[j],)
            acc = new_acc

        for s0 in tl.range(n + 1, s_end, UNROLL, num_stages=1):
            ds = ()
            cs = ()
            lses = ()
            for u in tl.static_range(UNROLL):
                s = s0 + u
                cs = cs + (tl.load(C + ph * MP + s, mask=phmask & (s < s_end), other=0.0),)
                lses = lses + (tl.load(LSE + ph * MP + s, mask=phmask & (s < s_end), other=0.0),)
                for j in tl.static_range(NT):
                    row = DOUT + (s.to(tl.int64) * tokens) * D + at + j * KT
                    ds = ds + (tl.load(row, mask=masks[j] & (s < s_end), other=0.0),)
            for u in tl.static_range(UNROLL):
                s = s0 + u
                a_s = ()
                for j in tl.static_range(NT):
                    a_s = a_s + (tl.load(A + s * D + channel + j * KT, mask=masks[j] & (s < s_end), other=0.0),)
                dw_sum = ds[u * NT].to(tl.float32) * v[0]
                l_sum = v[0] * a_s[0]
                for j in tl.static_range(1, NT):
                    dw_sum += ds[u * NT + j].to(tl.float32) * v[j]
                    l_sum += v[j] * a_s[j]
                logit = tl.sum(l_sum, axis=2) * r[:, None]
                w = tl.where(phmask & (s < s_end), tl.exp(logit - lses[u]), 0.0)
                if HAS_GATE:
                    w = w * tl.load(GATE + s, mask=s < s_end, other=0.0)
                dl = w * (tl.sum(dw_sum, axis=2) - cs[u])
                t += dl * logit
                dl = dl * r[:, None]
                tl.store(DL + (ph * S + slot) * MP + s, dl, mask=phmask & (s < s_end))
                new_acc = ()
                for j in tl.static_range(NT):
                    d_j = ds[u * NT + j].to(tl.float32)
                    new_acc = new_acc + (acc[j] + w[:, :, None] * d_j + dl[:, :, None] * a_s[j],)
                acc = new_acc

        through_norm = (tl.sum(t, axis=1) * (r * r) * (1.0 / D))[:, None, None]
        for j in tl.static_range(NT):
            x = acc[j] - through_norm * v[j]
            if ADD:
                x += stream[j]
            tl.store(DX + at + j * KT, stored(x, DX.dtype.element_ty), mask=masks[j])

    for j in tl.static_range(NT):
        part_at = tl.program_id(0) * D + channel + j * KT
        mask = (hh < H)[None, :, None] & (j * KT + kk < K)[None, None, :]
        if NORM:
            tl.store(NORM_PART + part_at, tl.sum(norm_sum[j], axis=0)[None, :, :], mask=mask)
        if HAS_NULL and ROUTED:
            tl.store(NULL_PART + part_at, tl.sum(null_sum[j], axis=0)[None, :, :], mask=mask)
