"""The sublayer forms: the launches of each site, forward and backward, in order."""

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class _Step:
    """What the schedule says about one site and the row that it brings."""

    routed: bool
    forward: Pass | None
    own: int
    slot: int
    backward: tuple[Pass, ...]
    gathered: bool
    own_end: int

    @classmethod
    def of(cls, schedule: SublayerSchedule, s: int, last: int | None = None) -> "_Step":
        """Site s, in a backward pass over the sites before `last`."""
        last = schedule.last if last is None else last
        return cls(
            routed=schedule.first <= s < last,
            forward=schedule.forward(s),
            own=schedule.own_start(s),
            slot=s % (schedule.block or TILE),
            backward=tuple(schedule.backward(s, last)),
            gathered=s < last and schedule.gathered(s, last),
            own_end=min(schedule.own_end(s), last),
        )


class SublayerPass(RoutedPass):
    """A pass in which site s reads rows 0..s, with the passes that `schedule` shares between sites."""

    def __init__(
        self,
        schedule: SublayerSchedule,
        parameters: SiteParameters,
        shape: torch.Size,
        dtype: torch.dtype,
        stream_dtype: torch.dtype | None,
        tuning: Tuning,
        kernels: KernelCache,
    ) -> None:
        self.schedule = schedule
        self.slots = schedule.block or TILE
        super().__init__(parameters, parameters.num_sites, shape, dtype, stream_dtype, tuning, kernels)
        self.stream = None if stream_dtype is None else self.like_source(stream_dtype)
        self.residuals: Tensor | None = None
        self.steps = self.kernels.get(
            ("steps", schedule), lambda: [_Step.of(schedule, s) for s in range(self.num_rows)]
        )
        if schedule.block:
            self.partial_buffers(self.slots)

    def source_rows(self, count: int) -> Tensor:
        """Rows 0 .. M-1, and one block of rows more.

        The backward pass keeps DOUT of site s in row s + slots: when it is written, the source rows of later blocks,
        whose gradients are done, are no longer needed.
        """
        return self.per_row(count + self.slots, self.dtype)

    # Forward.

    def forward(self, s: int, x: Tensor, norm: Norm | None, save: bool) -> tuple[Tensor, Saved]:
        p, t, step = self.parameters, self.tuning, self.steps[s]
        if step.forward is not None:
            self._mix(step.forward)
        add, routed = self.stream is not None, step.routed
        hidden_dtype = self.dtype if self.stream_dtype is None else self.stream_dtype
        saved = Saved(x_dtype=x.dtype)
        out = nr = weight = p.a
        if routed and (save or (norm is None and not add)):
            out = self.like_source(self.dtype)
            saved.out = out if save else None
        hidden = self.like_source(hidden_dtype) if add and (save or norm is None) else out
        result, norm_eps, offset = hidden, 0.0, 0.0
        if norm is not None:
            weight, norm_eps, offset = norm
            result = self.like_source(hidden_dtype)
            if save:
                saved.hidden, saved.norm_weight, saved.norm_offset = hidden, weight, offset
                saved.norm_r = nr = self.empty(self.tokens)
        if save and self.residual and self.residuals is None:
            residual_dtype = torch.int8 if self.residual == 1 else self.dtype
            self.residuals = self.empty(p.num_sites, self.tokens, p.width, dtype=residual_dtype)
        key = ("site_forward", routed, add, s == 0, step.own > 0, norm is not None, offset, save)
        kernel = self.kernels.get(key, lambda: self._site_forward(key))
        kernel(
            (-(-self.tokens // t.forward_rows), 1, 1), (variant_of(x, weight), hidden_dtype),
            x, self.rows, self.r, self.partial, self.partial_lse, p.a, p.gate, p.null, p.null_logit,
            self.stream if add else p.a, out, p.a if self.residuals is None else self.residuals, self.lse,
            hidden, weight, result, nr,
            s, step.own, step.slot, self.tokens, self.num_rows, self.slots, self.padded_sites, p.eps, norm_eps,
        )  # fmt: skip
        if s == self.num_rows - 1:
            self.partial = self.partial_lse = self.r  # no later site needs them
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
            ("partial_mix", shared.merge),
            lambda: Kernel(
                partial_mix_kernel, t.mix_warps, **self.pass_shape(t.mix_tile),
                MERGE=shared.merge, STAGES=t.mix_stages,
            ),
        )  # fmt: skip
        kernel(
            (self.tokens * p.num_heads, 1, 1), self.device.index,
            self.rows, self.r, p.a_high, p.a_low, self.partial, self.partial_lse,
            shared.site0, shared.site1 - shared.site0, shared.site0 - self.schedule.block_start(shared.site0),
            shared.row0, shared.row1, self.tokens, self.num_rows, self.slots,
        )  # fmt: skip

    # Backward.

    def _begin_backward(self, s: int) -> None:
        p = self.parameters
        self.last = min(s + 1, self.schedule.last)
        self.begin_sums()
        self.d_rows = self.rows[self.slots :]
        self.d_logits = self.empty(self.tokens, p.num_heads, self.slots, self.padded_sites)
        self.d_stream = None if self.stream is None else self.like_source(torch.float32)
        self.gathered = self.gathered_t = self.r
        if self.schedule.block:
            self.gathered = self.per_row(self.slots)
            self.gathered_t = self.empty(self.tokens, p.num_heads, self.slots)

    def backward(self, n: int, d: Tensor, saved: Saved) -> tuple[Tensor, Tensor | None]:
        p, schedule = self.parameters, self.schedule
        closing = self.last == 0
        if closing:
            self._begin_backward(n)
        last = self.last
        step = self.steps[n] if last == schedule.last else _Step.of(schedule, n, last)
        for shared in step.backward:
            self._pull(shared)
        routed, add, norm = step.routed, self.stream is not None, saved.norm_weight
        programs = self.programs(norm is not None or (p.has_null and routed))
        norm_part = self.empty(programs, p.width) if norm is not None else p.a
        null_part = self.empty(programs, p.width) if p.has_null and routed else p.a
        dx = self.like_source(saved.x_dtype)
        key = ("site_backward", routed, add, closing, step.gathered, norm is not None, saved.norm_offset)
        kernel = self.kernels.get(key, lambda: self._site_backward(key))
        weight = norm if norm is not None else p.a
        kernel(
            (programs, 1, 1), (variant_of(d, weight), saved.x_dtype),
            d, _or(saved.out, p.a), _or(self.residuals, p.a), _or(saved.hidden, p.a), weight, _or(saved.norm_r, p.a),
            self.rows, self.r, p.a, self.lse, self.c, p.gate, p.null, p.null_logit,
            self.d_rows, self.gathered, self.gathered_t, self.d_logits, _or(self.d_stream, p.a), dx,
            norm_part, null_part, self.null_c,
            n, step.slot, step.own_end, self.tokens, self.num_rows, self.slots, self.padded_sites,
        )  # fmt: skip
        if p.has_null and routed:
            torch.sum(null_part, 0, out=self.d_null[n])
        if p.trained and n < last and step.slot == 0:
            rows = min(self.slots, last - n)
            self.query_gradient(n, rows, max(n, schedule.first), self.d_logits, self.slots, lower=True)
        return dx, norm_part.sum(0) if norm is not None else None

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
            ("pull", shared.merge),
            lambda: Kernel(
                pull_kernel, t.pull_warps, **self.pass_shape(t.pull_tile), PP=t.pull_positions,
                HAS_GATE=p.has_gate, MERGE=shared.merge, A_LOW=t.low_query, STAGES=t.pull_stages,
            ),
        )  # fmt: skip
        kernel(
            (-(-self.tokens // t.pull_positions) * p.num_heads, 1, 1), self.device.index,
            self.rows, self.r, self.d_rows, p.a_high, p.a_low, self.lse, self.c, p.gate,
            self.gathered, self.gathered_t, self.d_logits,
            shared.row0, shared.row1 - shared.row0, shared.row0 % self.slots, shared.site0, shared.site1,
            self.tokens, self.num_rows, self.slots, self.padded_sites,
        )  # fmt: skip

    def parameter_gradients(self) -> dict[str, Tensor]:
        null_c = self.null_c.sum(0) if self.parameters.has_null else None
        d_gate = self.c.sum((0, 1)) if self.parameters.has_gate else None
        return self.parameters.gradients(self.d_a.sum(0), d_gate, null_c, self.d_null, self.last)


def _or(tensor: Tensor | None, fallback: Tensor) -> Tensor:
    return fallback if tensor is None else tensor
