"""What the forward and backward passes of all forms share: shapes, buffers, and the gradient of the queries."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mhar.ops.kernel_cache import KernelCache
from mhar.ops.triton.launch import Kernel, storage_modes
from mhar.ops.triton.parameters import SiteParameters
from mhar.ops.triton.shared import TILE, query_gradient_kernel
from mhar.ops.triton.tuning import Tuning, next_power_of_2

Norm = tuple[Tensor, float, float]  # weight [D], eps, what the norm adds to its weight


@dataclass(slots=True)
class Saved:
    """What the backward pass of one site needs beyond the shared buffers."""

    out: Tensor | None = None
    residual: Tensor | None = None
    hidden: Tensor | None = None
    local: Tensor | None = None
    local_r: Tensor | None = None
    norm_weight: Tensor | None = None
    norm_r: Tensor | None = None
    norm_offset: float = 0.0
    x_dtype: torch.dtype = torch.float32

    def take(self) -> tuple[Tensor | None, ...]:
        """The tensors, for autograd to keep; they are no longer kept here."""
        taken = (self.out, self.residual, self.hidden, self.local, self.local_r, self.norm_weight, self.norm_r)
        self.put((None,) * len(taken))
        return taken

    def put(self, tensors: tuple[Tensor | None, ...]) -> None:
        """The inverse of `take`."""
        self.out, self.residual, self.hidden, self.local, self.local_r, self.norm_weight, self.norm_r = tensors


class RoutedPass(ABC):
    """Buffers of one forward pass over all positions, and of its backward pass once that begins.

    Args:
        parameters: the routing parameters, prepared for the kernels.
        num_rows: source rows of a position.
        shape: of a source, [..., D].
        dtype: of the source rows; stream_dtype: of the residual stream of add reads, None for replace reads.
    """

    def __init__(
        self,
        parameters: SiteParameters,
        num_rows: int,
        shape: torch.Size,
        dtype: torch.dtype,
        stream_dtype: torch.dtype | None,
        tuning: Tuning,
        kernels: KernelCache,
    ) -> None:
        self.parameters, self.tuning, self.kernels = parameters, tuning, kernels.scope((dtype, tuning))
        self.num_rows, self.dtype, self.stream_dtype = num_rows, dtype, stream_dtype
        self.shape, self.tokens = shape, shape.numel() // parameters.width
        self.device = parameters.a.device
        tokens = self.tokens
        self.exact, self.precision, self.residual = storage_modes(dtype)
        p = parameters
        self.padded_sites = -(-p.num_sites // 16) * 16
        self.rows = self.source_rows(num_rows)
        self.r = self.empty(tokens, num_rows)
        self.lse = self.empty(tokens, p.num_heads, self.padded_sites)
        self.partial = self.partial_lse = self.r
        self.last = 0  # one past the last site of the backward pass; 0 before it begins

    @abstractmethod
    def forward(self, s: int, x: Tensor, norm: Norm | None, save: bool) -> tuple[Tensor, Saved]:
        """Site s reads, its newest source being x [..., D]: the hidden state (after `norm`), and what to keep."""

    @abstractmethod
    def backward(self, n: int, d: Tensor, saved: Saved) -> tuple[Tensor, Tensor | None]:
        """Site n's gradient d [..., D] in; gradients of its newest source and of the norm weight out."""

    @abstractmethod
    def parameter_gradients(self) -> dict[str, Tensor]:
        """Gradients of the routing parameters by name, complete once site 0 is done."""

    def release(self) -> None:
        """Lets all buffers go, at the end of the backward pass: the graph may outlive it."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.new_empty(0))

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """An uninitialised buffer on the pass's device."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def like_source(self, dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor [..., D]."""
        return torch.empty(self.shape, dtype=dtype, device=self.device)

    def per_row(self, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A buffer of `count` rows: [count, tokens, D]."""
        return self.empty(count, self.tokens, self.parameters.width, dtype=dtype)

    def source_rows(self, count: int) -> Tensor:
        """Room for the source rows."""
        return self.per_row(count, self.dtype)

    def partial_buffers(self, slots: int) -> None:
        """Room for the partial mixes of `slots` sites."""
        self.partial = self.per_row(slots)
        self.partial_lse = self.empty(self.tokens, self.parameters.num_heads, slots)

    def begin_sums(self) -> None:
        """Sums over tokens, gathered during the backward pass. Forward-only buffers are let go."""
        t, p = self.tuning, self.parameters
        self.partial = self.partial_lse = self.r
        self.c = self.empty(self.tokens, p.num_heads, self.padded_sites)
        self.null_c = torch.zeros_like(self.c) if p.has_null else self.c
        self.d_null = torch.zeros_like(p.null) if p.has_null else p.a
        rows = max(64, self.tokens // t.query_parts)
        self.part_tokens = -(-rows // t.query_positions) * t.query_positions
        self.parts = -(-self.tokens // self.part_tokens)
        self.d_a = torch.zeros(self.parts, p.num_sites, p.width, device=p.a.device) if p.trained else p.a

    def programs(self, reduces: bool) -> int:
        """Programs of a backward site kernel: one per block of positions, fewer where each returns a sum."""
        blocks = -(-self.tokens // self.tuning.backward_rows)
        return min(blocks, max(1, min(self.tuning.programs, blocks // 4))) if reduces else blocks

    def site_shape(self) -> dict[str, Any]:
        """Constants that describe a whole row."""
        p, kt = self.parameters, self.tuning.site_tile
        head = p.width // p.num_heads
        return {"H": p.num_heads, "HP": next_power_of_2(p.num_heads), "K": head, "KT": kt, "NT": -(-head // kt)}

    def pass_shape(self, kc: int) -> dict[str, Any]:
        """Constants that describe one head of a shared pass, in tiles of kc channels."""
        p = self.parameters
        head = p.width // p.num_heads
        shape = {"H": p.num_heads, "K": head, "KC": kc, "NT": -(-head // kc), "TS": TILE}
        return {**shape, "EXACT": self.exact, "PRECISION": self.precision}

    def query_gradient(self, row0: int, num_rows: int, site0: int, d_logits: Tensor, slots: int, lower: bool) -> None:
        """Adds rows [row0, row0 + num_rows) (at most 16) to the gradient of query * norm_weight of sites from site0 on.

        d_logits: [tokens, H, slots, sites], the rows' slots from 0 on; lower: site s reads row n only if n <= s.
        """
        t, p = self.tuning, self.parameters
        sites = self.last - site0
        if sites <= 0:
            return
        head, kc = p.width // p.num_heads, t.query_tile
        tiles = max(1, min(-(-head // kc), 256 // kc))
        ts = min(t.query_sites, max(16, next_power_of_2(sites)))
        kernel = self.kernels.get(
            ("query", ts, lower),
            lambda: Kernel(
                query_gradient_kernel, t.query_warps, H=p.num_heads, K=head, KC=kc, NT=tiles, TS=ts,
                PB=t.query_positions, LOWER=lower, EXACT=self.exact, PRECISION=self.precision, STAGES=t.query_stages,
            ),
        )  # fmt: skip
        kernel(
            (p.num_heads * -(-head // (kc * tiles)), self.parts, -(-sites // ts)), self.device.index,
            d_logits, self.rows, self.d_a, row0, num_rows, site0, self.last,
            self.tokens, self.part_tokens, slots, self.padded_sites, p.num_sites,
        )  # fmt: skip
