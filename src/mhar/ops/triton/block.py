"""The block forms: the launches of each site, forward and backward, in order."""

from typing import Any

import torch
from torch import Tensor

from mhar.ops.kernel_cache import KernelCache
from mhar.ops.schedule import block_groups
from mhar.ops.triton.blocks import block_backward_kernel, block_forward_kernel
from mhar.ops.triton.groups import ROWS, SITES, group_mix_kernel, group_scatter_kernel
from mhar.ops.triton.launch import Kernel, variant_of
from mhar.ops.triton.parameters import SiteParameters
from mhar.ops.triton.passes import Norm, RoutedPass, Saved
from mhar.ops.triton.shared import TILE, partial_mix_kernel, scatter_kernel
from mhar.ops.triton.tuning import Tuning, next_power_of_2


class BlockPass(RoutedPass):
    """A pass in which groups of sites read the same finished rows.

    Args:
        num_rows: per site, the shared rows it reads.
        per_block: sublayers of a block: the stream at sites 0, per_block, 2 * per_block, ... gives birth to a row.
        add: the stream is the residual stream and rows are its differences; else it is the partial sum of the block.
    """

    def __init__(
        self,
        num_rows: tuple[int, ...],
        per_block: int,
        add: bool,
        parameters: SiteParameters,
        shape: torch.Size,
        dtype: torch.dtype,
        stream_dtype: torch.dtype,
        tuning: Tuning,
        kernels: KernelCache,
    ) -> None:
        super().__init__(parameters, max(num_rows), shape, dtype, stream_dtype, tuning, kernels)
        self.per_block, self.add = per_block, add
        # Site 0 of replace reads has one source: the embedding, which is its stream.
        shared = num_rows if add else (0, *num_rows[1:])
        self.groups = block_groups(shared)
        self.group_of = {s: group for group in self.groups for s in range(*group)}
        self.rows_of = shared
        self.slots = max((end - begin for begin, end in self.groups), default=1)
        self.stream = self.like_source(stream_dtype)
        self.base = self.like_source(stream_dtype) if add else self.stream
        self.locals: dict[int, Tensor] = {}
        if self.groups:
            self.partial_buffers(self.slots)

    def _birth(self, s: int) -> int | None:
        """The row that the stream at site s gives birth to."""
        row = s // self.per_block
        return row if s % self.per_block == 0 and row < self.num_rows else None

    def _has_local(self, s: int) -> bool:
        return not self.add and (s == 0 or s % self.per_block != 0)

    def _routed(self, s: int) -> bool:
        return s in self.group_of or self._has_local(s)

    # Forward.

    def forward(self, s: int, x: Tensor, norm: Norm | None, save: bool) -> tuple[Tensor, Saved]:
        group = self.group_of.get(s)
        # A replace read sees the row that its own site gives birth to: birth, shared pass, read.
        split = group is not None and group[0] == s and not self.add and self._birth(s) is not None
        stream_in = self.stream
        if not self.add and save:  # the earlier sums are sources of earlier sites: they stay
            self.stream = torch.empty_like(self.stream)
            if self._has_local(s):
                self.locals[s] = self.stream
        if split:
            self._launch_forward(s, x, stream_in, None, False, Saved(), update=True, read=False)
        if group is not None and group[0] == s:
            self._mix(group, self.rows_of[s])
        saved = Saved(x_dtype=x.dtype)
        result = self._launch_forward(s, x, stream_in, norm, save, saved, update=not split, read=True)
        if s == self.parameters.num_sites - 1:
            self.partial = self.partial_lse = self.r  # no later site needs them
        return result, saved

    def _launch_forward(
        self,
        s: int,
        x: Tensor,
        stream_in: Tensor,
        norm: Norm | None,
        save: bool,
        saved: Saved,
        update: bool,
        read: bool,
    ) -> Tensor:
        t, p = self.tuning, self.parameters
        routed, local = self._routed(s), self._has_local(s)
        hidden = result = weight = nr = residual = local_r = p.a
        norm_eps = offset = 0.0
        if read:
            dtype = self.stream.dtype if self.add else self.dtype
            if save or norm is None:
                hidden = result = self.like_source(dtype)
            if norm is not None:
                weight, norm_eps, offset = norm
                result = self.like_source(dtype)
            if save:
                self._keep(saved, hidden, norm, local)
                residual = saved.residual if saved.residual is not None else p.a
                nr = saved.norm_r if saved.norm_r is not None else p.a
                local_r = saved.local_r if saved.local_r is not None else p.a
        row = self._birth(s) if update else None
        fresh = s == 0 or (not self.add and s % self.per_block == 1 % self.per_block)
        key = ("block_forward", update, fresh, row is not None, s > 0, read, routed, s in self.group_of, local,
               norm is not None, offset, save)  # fmt: skip
        kernel = self.kernels.get(key, lambda: self._forward_kernel(key))
        begin = self.group_of[s][0] if s in self.group_of else s
        kernel(
            (-(-self.tokens // t.forward_rows), 1, 1), (variant_of(x, weight), self.stream.dtype),
            x, stream_in, self.stream, self.base, self.rows, self.r, self.partial, self.partial_lse,
            p.a, p.gate, p.null, p.null_logit, hidden, residual, self.lse, local_r, hidden, weight, result, nr,
            s, row or 0, s - begin, self.tokens, self.num_rows, self.slots,
            self.padded_sites, p.eps, norm_eps,
        )  # fmt: skip
        return result

    def _keep(self, saved: Saved, hidden: Tensor, norm: Norm | None, local: bool) -> None:
        if norm is not None or not self.add:
            saved.hidden = hidden
        if not self.add and self.residual:
            saved.residual = torch.empty_like(hidden, dtype=torch.int8 if self.residual == 1 else None)
        if norm is not None:
            saved.norm_weight, saved.norm_offset = norm[0], norm[2]
            saved.norm_r = self.empty(self.tokens)
        if local:
            saved.local, saved.local_r = self.stream, self.empty(self.tokens)

    def _forward_kernel(self, key: tuple[Any, ...]) -> Kernel:
        _, update, fresh, birth, subtract, read, routed, partial, local, norm, offset, save = key
        return Kernel(
            block_forward_kernel, self.tuning.forward_warps, **self.site_shape(), BP=self.tuning.forward_rows,
            UPDATE=update, FRESH=fresh, BIRTH=birth, SUBTRACT=subtract and self.add, READ=read, ROUTED=routed,
            PARTIAL=partial, LOCAL=local, ADD=self.add,
            HAS_GATE=self.parameters.has_gate, HAS_NULL=self.parameters.has_null, NORM=norm, NORM_OFFSET=offset,
            SAVE=save, RESIDUAL=self.residual,
        )  # fmt: skip

    def _mix(self, group: tuple[int, int], rows: int) -> None:
        if self._on_ordinary_cores(rows):
            for site0 in range(*group, SITES):
                self._group_mix(group, site0, rows)
            return
        t, p = self.tuning, self.parameters
        kernel = self.kernels.get(
            ("partial_mix", False),
            lambda: Kernel(
                partial_mix_kernel, t.mix_warps, **self.pass_shape(t.mix_tile), MERGE=False, STAGES=t.mix_stages
            ),
        )  # fmt: skip
        kernel(
            (self.tokens * p.num_heads, 1, 1), self.device.index,
            self.rows, self.r, p.a_high, p.a_low, self.partial, self.partial_lse,
            group[0], group[1] - group[0], 0, 0, rows, self.tokens, self.num_rows, self.slots,
        )  # fmt: skip

    def _on_ordinary_cores(self, rows: int) -> bool:
        return self.tuning.group_warps > 0 and rows <= ROWS

    def _group_shape(self) -> dict[str, Any]:
        p = self.parameters
        head = p.width // p.num_heads
        return {"H": p.num_heads, "K": head, "KP": next_power_of_2(head), "TS": SITES}

    def _group_mix(self, group: tuple[int, int], site0: int, rows: int) -> None:
        p = self.parameters
        kernel = self.kernels.get(
            "group_mix", lambda: Kernel(group_mix_kernel, self.tuning.group_warps, **self._group_shape())
        )
        kernel(
            (self.tokens * p.num_heads, 1, 1), self.device.index,
            self.rows, self.r, p.a, self.partial, self.partial_lse,
            site0, min(SITES, group[1] - site0), site0 - group[0], rows, self.tokens, self.num_rows, self.slots,
        )  # fmt: skip

    # Backward.

    def _begin_backward(self, s: int) -> None:
        p = self.parameters
        self.last = s + 1
        self.begin_sums()
        self.d_rows = self.per_row(self.slots, self.dtype)
        shape = (self.tokens, p.num_heads, self.num_rows, self.padded_sites)
        self.d_logits = torch.zeros(shape, device=p.a.device)
        self.gathered = self.per_row(self.num_rows)
        self.gathered_t = self.empty(self.tokens, p.num_heads, self.num_rows)
        self.touched = 0  # rows that have received a gradient
        self.d_local = torch.zeros_like(p.a) if not self.add and p.trained else None
        self.carried: tuple[Tensor, Tensor | None] = (p.a, None)

    def backward(self, n: int, d: Tensor, saved: Saved) -> tuple[Tensor, Tensor | None]:
        if self.last == 0:
            self._begin_backward(n)
        group = self.group_of.get(n)
        first = group is not None and group[0] == n
        split = first and not self.add and self._birth(n) is not None
        d_norm = self._launch_backward(n, d, saved, read=True, finish=not split)
        if first:
            assert group is not None
            self._scatter(group, self.rows_of[n])
        if split:
            self._launch_backward(n, d, saved, read=False, finish=True)
        return self.carried[0], d_norm

    def _launch_backward(self, n: int, d: Tensor, saved: Saved, read: bool, finish: bool) -> Tensor | None:
        p = self.parameters
        a = p.a
        routed, local = self._routed(n), self._has_local(n)
        norm = saved.norm_weight is not None and read
        has_null = p.has_null and routed and read
        carry = n + 1 < self.last and (self.add or n % self.per_block != 0)
        row = self._birth(n)
        birth = finish and row is not None and row < self.touched
        follows = birth and self.add and row is not None and row + 1 < self.touched
        prev, prev_residual = self.carried
        dx = self.like_source(saved.x_dtype) if finish else a
        dx_mode = {torch.bfloat16: 1, torch.float16: 2}.get(saved.x_dtype, 0) if finish else 0
        dx_residual = torch.empty_like(dx, dtype=torch.int8 if dx_mode == 1 else None) if dx_mode else None
        programs = self.programs(norm or has_null or (local and read))
        norm_part = self.empty(programs, p.width) if norm else a
        null_part = self.empty(programs, p.width) if has_null else a
        local_part = self.empty(programs, p.width) if local and read else a
        prev_mode = 0 if prev_residual is None else 1 if prev_residual.dtype == torch.int8 else 2
        key = ("block_backward", read, finish, routed, local, carry, birth, follows, norm, saved.norm_offset,
               prev_mode, dx_mode)  # fmt: skip
        kernel = self.kernels.get(key, lambda: self._backward_kernel(key))
        weight = saved.norm_weight if saved.norm_weight is not None else a
        begin = self.group_of[n][0] if n in self.group_of else n
        kernel(
            (programs, 1, 1), (variant_of(d, weight), self.stream.dtype, saved.x_dtype, prev.dtype),
            d, _or(saved.hidden, a), _or(saved.residual, a), weight, _or(saved.norm_r, a),
            _or(saved.local, a), _or(saved.local_r, a), a, self.lse, self.c, p.gate, p.null, p.null_logit,
            self.null_c, self.d_rows, prev, _or(prev_residual, a), self.gathered, self.gathered_t, self.rows, self.r,
            dx, _or(dx_residual, a), norm_part, null_part, local_part,
            n, row or 0, n - begin, self.tokens, self.num_rows,
            self.padded_sites,
        )  # fmt: skip
        if finish:
            self.carried = (dx, dx_residual)
        if has_null:
            torch.sum(null_part, 0, out=self.d_null[n])
        if local and read and self.d_local is not None:
            torch.sum(local_part, 0, out=self.d_local[n])
        return norm_part.sum(0) if norm else None

    def _backward_kernel(self, key: tuple[Any, ...]) -> Kernel:
        _, read, finish, routed, local, carry, birth, follows, norm, offset, prev_mode, dx_mode = key
        return Kernel(
            block_backward_kernel, self.tuning.backward_warps, **self.site_shape(), BP=self.tuning.backward_rows,
            READ=read, FINISH=finish, ROUTED=routed, LOCAL=local, ADD=self.add, CARRY=carry, BIRTH=birth, NEXT=follows,
            HAS_GATE=self.parameters.has_gate, HAS_NULL=self.parameters.has_null, NORM=norm, NORM_OFFSET=offset,
            RESIDUAL=self.residual, PREV_MODE=prev_mode, DX_MODE=dx_mode,
        )  # fmt: skip

    def _scatter(self, group: tuple[int, int], rows: int) -> None:
        if self._on_ordinary_cores(rows):
            for site0 in range(group[0], min(group[1], self.last), SITES):
                self._group_scatter(group, site0, rows)
                self.touched = max(self.touched, rows)
            return
        t, p = self.tuning, self.parameters
        merge, one_tile = self.touched > 0, rows <= TILE
        kernel = self.kernels.get(
            ("scatter", merge, one_tile),
            lambda: Kernel(
                scatter_kernel, t.pull_warps, **self.pass_shape(t.pull_tile), HAS_GATE=p.has_gate, MERGE=merge,
                INLINE_C=self.add, ONE_TILE=one_tile, A_LOW=t.low_query, STAGES=t.pull_stages,
            ),
        )  # fmt: skip
        kernel(
            (self.tokens * p.num_heads, 1, 1), self.device.index,
            self.rows, self.r, self.d_rows, p.a_high, p.a_low, self.lse, self.c, p.gate, self.gathered,
            self.gathered_t, self.d_logits, rows, group[0], min(group[1], self.last) - group[0],
            self.tokens, self.num_rows, self.padded_sites,
        )  # fmt: skip
        self.touched = max(self.touched, rows)

    def _group_scatter(self, group: tuple[int, int], site0: int, rows: int) -> None:
        p, merge = self.parameters, self.touched > 0
        kernel = self.kernels.get(
            ("group_scatter", merge),
            lambda: Kernel(
                group_scatter_kernel, self.tuning.group_warps, **self._group_shape(), TN=ROWS,
                HAS_GATE=p.has_gate, MERGE=merge, INLINE_C=self.add,
            ),
        )  # fmt: skip
        kernel(
            (self.tokens * p.num_heads, 1, 1), self.device.index,
            self.rows, self.r, self.d_rows, p.a, self.lse, self.c, p.gate, self.gathered, self.gathered_t,
            self.d_logits, rows, site0, min(SITES, group[1] - site0, self.last - site0), site0 - group[0],
            self.tokens, self.num_rows, self.padded_sites,
        )  # fmt: skip

    def release(self) -> None:
        super().release()
        self.locals.clear()
        self.carried = (self.r, None)

    def parameter_gradients(self) -> dict[str, Tensor]:
        p = self.parameters
        if p.trained:
            for row0 in range(0, self.touched, TILE):
                rows = min(TILE, self.touched - row0)
                self.query_gradient(row0, rows, 0, self.d_logits[:, :, row0:], self.num_rows, lower=False)
        d_a = self.d_a.sum(0)
        if self.d_local is not None:
            d_a += self.d_local
        null_c = self._null_logit_gradient() if p.has_null else None
        d_gate = self.c.sum((0, 1)) if p.has_gate else None
        return p.gradients(d_a, d_gate, null_c, self.d_null, self.last)

    def _null_logit_gradient(self) -> Tensor:
        """[H, M]: gate * w (dw - c) of the null source, summed over tokens; null_c holds w dw."""
        p, m = self.parameters, self.parameters.num_sites
        weights = torch.exp(p.null_logit.T - self.lse[..., :m])
        d_logit = (self.null_c[..., :m] - weights * self.c[..., :m]).sum(0)
        return d_logit * p.gate if p.has_gate else d_logit


def _or(tensor: Tensor | None, fallback: Tensor) -> Tensor:
    return fallback if tensor is None else tensor
