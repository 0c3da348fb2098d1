"""The sublayer forms: the launches of each site, forward and backward, in order."""

import torch
from torch import Tensor

from mhar.ops.kernel_cache import KernelCache
from mhar.ops.schedule import Pass, SublayerSchedule
from mhar.ops.triton.launch import Kernel, variant_of
from mhar.ops.triton.parameters import SiteParameters
from mhar.ops.triton.passes import Norm, RoutedPass, Saved
from mhar.ops.triton.shared import TILE, partial_mix_kernel, pull_kernel
from mhar.ops.triton.sites import site_backward_kernel, site_forward_kernel
from mhar.ops.triton.tuning import Tuning


class SublayerPass(RoutedPass):
    """A pass in which site s reads rows 0..s, with the passes that `schedule` shares between sites."""

    def __init__(
        self,
        schedule: SublayerSchedule,
        parameters: SiteParameters,
        tokens: int,
        dtype: torch.dtype,
        stream_dtype: torch.dtype | None,
        tuning: Tuning,
        kernels: KernelCache,
    ) -> None:
        super().__init__(parameters, parameters.num_sites, tokens, dtype, stream_dtype, tuning, kernels)
        self.schedule = schedule
        self.slots = schedule.block or TILE
        self.stream = None if stream_dtype is None else self.empty(tokens, parameters.width, dtype=stream_dtype)
        if schedule.block:
            self.partial_buffers(self.slots)

    # Forward.

    def forward(self, s: int, x: Tensor, norm: Norm | None, save: bool) -> tuple[Tensor, Saved]:
        p, t, schedule = self.parameters, self.tuning, self.schedule
        shared = schedule.forward(s)
        if shared is not None:
            self._mix(shared)
        routed = schedule.first <= s < schedule.last
        add = self.stream is not None
        hidden_dtype = self.dtype if self.stream_dtype is None else self.stream_dtype
        saved = Saved(x_dtype=x.dtype)
        out = self.r
        if routed and (save or not add):
            out = self.empty(self.tokens, p.width, dtype=self.dtype) if save or norm is None else self.r
            saved.out = out if save else None
        if routed and save and self.residual:
            saved.residual = torch.empty_like(out, dtype=torch.int8 if self.residual == 1 else None)
        hidden = out
        if add and (save or norm is None):
            hidden = self.empty(self.tokens, p.width, dtype=hidden_dtype)
        result = hidden
        weight = nr = p.a
        norm_eps = offset = 0.0
        if norm is not None:
            weight, norm_eps, offset = norm
            result = self.empty(self.tokens, p.width, dtype=hidden_dtype)
            if save:
                saved.hidden, saved.norm_weight, saved.norm_offset = hidden, weight, offset
                saved.norm_r = nr = self.empty(self.tokens)
        own = schedule.own_start(s)
        key = ("site_forward", routed, add, s == 0, own > 0, norm is not None, offset, save)
        kernel = self.kernels.get((key, self.dtype, t), lambda: self._site_forward(key))
        kernel(
            (-(-self.tokens // t.forward_rows), 1, 1), (variant_of(x, weight), hidden_dtype),
            x, self.rows, self.r, self.partial, self.partial_lse, p.a, p.gate, p.null, p.null_logit,
            self.stream if add else p.a, out, saved.residual if saved.residual is not None else p.a, self.lse,
            hidden, weight, result, nr,
            s, own, s - schedule.block_start(s), self.tokens, self.num_rows,
            self.slots, self.padded_sites,
            p.eps, norm_eps,
        )  # fmt: skip
        return result, saved

    def _site_forward(self, key: tuple[object, ...]) -> Kernel:
        _, routed, add, opening, partial, norm, offset, save = key
        t = self.tuning
        return Kernel(
            site_forward_kernel, t.forward_warps, **self.site_shape(), BP=t.forward_rows,
            PARTIAL=partial, ROUTED=routed, ADD=add, OPENING=opening,
            HAS_GATE=self.parameters.has_gate, HAS_NULL=self.parameters.has_null, NORM=norm, NORM_OFFSET=offset,
            SAVE=save, RESIDUAL=self.residual, UNROLL=t.forward_unroll,
        )  # fmt: skip

    def _mix(self, shared: Pass) -> None:
        t, p = self.tuning, self.parameters
        kernel = self.kernels.get(
            ("partial_mix", shared.merge, self.dtype, t),
            lambda: Kernel(
                partial_mix_kernel, t.mix_warps, **self.pass_shape(t.mix_tile),
                MERGE=shared.merge, STAGES=t.mix_stages,
            ),
        )  # fmt: skip
        kernel(
            (self.tokens * p.num_heads, 1, 1), self.r.device.index,
            self.rows, self.r, p.a_high, p.a_low, self.partial, self.partial_lse,
            shared.site0, shared.site1 - shared.site0, shared.site0 - self.schedule.block_start(shared.site0),
            shared.row0, shared.row1, self.tokens, self.num_rows, self.slots,
        )  # fmt: skip

    # Backward.

    def _begin_backward(self, s: int) -> None:
        p = self.parameters
        self.last = min(s + 1, self.schedule.last)
        self.begin_sums()
        self.d_rows = self.per_row(p.num_sites, self.dtype)
        self.d_logits = self.empty(self.tokens, p.num_heads, self.slots, self.padded_sites)
        self.d_stream = None if self.stream is None else self.empty(self.tokens, p.width)
        self.gathered = self.gathered_t = self.r
        if self.schedule.block:
            self.gathered = self.per_row(self.slots)
            self.gathered_t = self.empty(self.tokens, p.num_heads, self.slots)

    def backward(self, n: int, d: Tensor, saved: Saved) -> tuple[Tensor, Tensor | None]:
        p, t, schedule = self.parameters, self.tuning, self.schedule
        closing = self.last == 0
        if closing:
            self._begin_backward(n)
        last = self.last
        for shared in schedule.backward(n, last):
            self._pull(shared)
        routed = schedule.first <= n < last
        add = self.stream is not None
        gathered = n < last and schedule.gathered(n, last)
        norm = saved.norm_weight
        reduces = norm is not None or (p.has_null and routed)
        programs = self.programs(reduces)
        norm_part = self.empty(programs, p.width) if norm is not None else p.a
        null_part = self.empty(programs, p.width) if p.has_null and routed else p.a
        dx = self.empty(self.tokens, p.width, dtype=saved.x_dtype)
        key = ("site_backward", routed, add, closing, gathered, norm is not None, saved.norm_offset)
        kernel = self.kernels.get((key, self.dtype, t), lambda: self._site_backward(key))
        out = saved.out if saved.out is not None else p.a
        own_end = min(schedule.own_end(n), last)
        weight = norm if norm is not None else p.a
        kernel(
            (programs, 1, 1), (variant_of(d, weight), saved.x_dtype),
            d, out, saved.residual if saved.residual is not None else p.a,
            saved.hidden if saved.hidden is not None else p.a, weight,
            saved.norm_r if saved.norm_r is not None else p.a, self.rows, self.r, p.a, self.lse, self.c, p.gate,
            p.null, p.null_logit, self.d_rows, self.gathered, self.gathered_t, self.d_logits,
            self.d_stream if self.d_stream is not None else p.a, dx, norm_part, null_part, self.null_c,
            n, self._slot(n), own_end, self.tokens, self.num_rows, self.slots, self.padded_sites,
        )  # fmt: skip
        if p.has_null and routed:
            torch.sum(null_part, 0, out=self.d_null[n])
        if p.trained and n < last and self._slot(n) == 0:
            rows = min(self.slots, last - n)
            self.query_gradient(n, rows, max(n, schedule.first), self.d_logits, self.slots, lower=True)
        return dx, norm_part.sum(0) if norm is not None else None

    def _slot(self, n: int) -> int:
        return n % self.slots

    def _site_backward(self, key: tuple[object, ...]) -> Kernel:
        _, routed, add, closing, gathered, norm, offset = key
        t = self.tuning
        return Kernel(
            site_backward_kernel, t.backward_warps, **self.site_shape(), BP=t.backward_rows,
            GATHERED=gathered, ROUTED=routed, ADD=add, CLOSING=closing,
            HAS_GATE=self.parameters.has_gate, HAS_NULL=self.parameters.has_null, NORM=norm, NORM_OFFSET=offset,
            RESIDUAL=self.residual, UNROLL=t.backward_unroll,
        )  # fmt: skip

    def _pull(self, shared: Pass) -> None:
        t, p = self.tuning, self.parameters
        kernel = self.kernels.get(
            ("pull", shared.merge, self.dtype, t),
            lambda: Kernel(
                pull_kernel, t.pull_warps, **self.pass_shape(t.pull_tile), PP=t.pull_positions,
                HAS_GATE=p.has_gate, MERGE=shared.merge, A_LOW=t.low_query, STAGES=t.pull_stages,
            ),
        )  # fmt: skip
        kernel(
            (-(-self.tokens // t.pull_positions) * p.num_heads, 1, 1), self.r.device.index,
            self.rows, self.r, self.d_rows, p.a_high, p.a_low, self.lse, self.c, p.gate,
            self.gathered, self.gathered_t, self.d_logits,
            shared.row0, shared.row1 - shared.row0, self._slot(shared.row0), shared.site0, shared.site1,
            self.tokens, self.num_rows, self.slots, self.padded_sites,
        )  # fmt: skip

    def parameter_gradients(self) -> dict[str, Tensor]:
        null_c = self.null_c.sum(0) if self.parameters.has_null else None
        d_gate = self.c.sum((0, 1)) if self.parameters.has_gate else None
        return self.parameters.gradients(self.d_a.sum(0), d_gate, null_c, self.d_null, self.last)
