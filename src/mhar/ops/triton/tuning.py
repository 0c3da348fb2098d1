"""Launch settings by shape: a table of measured shapes and a safe rule for all others. No search at run time.

`python benchmarks/tune.py` measures settings on a GPU; docs/kernels.md says how to add a line for another one.
"""

from dataclasses import dataclass

import torch

from mhar.ops.schedule import MAX_BLOCK

MAX_SHARED_HEAD = 1024  # channels of a head: a block's partial mixes of one head stay in registers


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Settings of all kernels for one shape. Tiles count channels of a head; warps and stages are Triton's.

    Attributes:
        block, inner: lengths of the two levels of site blocks (schedule.py); 0 is the dense form.
        site_tile: channels per tile of the site kernels.
        forward_rows, forward_warps, forward_unroll: positions per program of the forward site kernel, its warps, and
            the source rows whose loads are under way together.
        backward_rows, backward_warps, backward_unroll: the same for the backward site kernel.
        programs: programs of a backward site kernel that also reduces over tokens (norm weight, null source).
        mix_tile, mix_warps, mix_stages: partial_mix_kernel.
        pull_tile, pull_warps, pull_stages: pull_kernel and scatter_kernel; pull_positions: of a program of the former.
        group_warps: group_mix_kernel and group_scatter_kernel; 0 takes the tensor-core passes for block sources too.
        low_query: multiply logit gradients with both terms of query * norm_weight.
        query_tile, query_sites, query_positions, query_parts, query_warps, query_stages: query_gradient_kernel.
    """

    block: int = 16
    inner: int = 16
    site_tile: int = 32
    forward_rows: int = 1
    forward_warps: int = 2
    forward_unroll: int = 4
    backward_rows: int = 1
    backward_warps: int = 2
    backward_unroll: int = 2
    programs: int = 1056
    mix_tile: int = 32
    mix_warps: int = 1
    mix_stages: int = 2
    pull_tile: int = 32
    pull_warps: int = 2
    pull_stages: int = 2
    pull_positions: int = 4
    group_warps: int = 0
    low_query: bool = True
    query_tile: int = 32
    query_sites: int = 64
    query_positions: int = 4
    query_parts: int = 32
    query_warps: int = 4
    query_stages: int = 2


def next_power_of_2(n: int) -> int:
    """The smallest power of two >= n."""
    return 1 << max(n - 1, 0).bit_length()


def tile(channels: int, preferred: int, smallest: int) -> int:
    """Channels per tile: at most 8 tiles (16 for the smallest tile), the least padding, close to `preferred`."""
    options = [1 << i for i in range(smallest.bit_length() - 1, next_power_of_2(channels).bit_length())]
    options = [t for t in options if -(-channels // t) <= 8] or [max(smallest, next_power_of_2(channels))]
    return min(options, key=lambda t: (-(-channels // t) * t, abs(t - preferred), -t))


def default_tuning(width: int, num_heads: int, num_sites: int) -> Tuning:
    """A setting that works for every shape: resources grow with the width, blocks share the depth evenly."""
    head = width // num_heads
    warps = min(max(next_power_of_2(width // 512 + 1) // 2, 1), 16)
    pass_warps = 1 if head <= 64 else 2 if head <= 256 else 4 if head <= 512 else 8
    block = 0 if head > MAX_SHARED_HEAD or num_sites <= MAX_BLOCK else -(-num_sites // -(-num_sites // 15))
    return Tuning(
        block=block,
        inner=block,
        site_tile=tile(head, max(32, 256 // next_power_of_2(num_heads)), next_power_of_2(min(head, 16))),
        forward_warps=warps,
        backward_warps=max(warps, min(2 * warps, 8)),
        mix_tile=tile(head, 128 if head <= 256 else 64, 16),
        mix_warps=pass_warps,
        pull_tile=tile(head, 32 if head <= 256 else 128, 16),
        pull_warps=pass_warps,
        pull_stages=2 if head <= 256 else 1,
        group_warps=2 if 256 <= head <= MAX_SHARED_HEAD else 0,
        query_tile=tile(min(head, 256), 32, 16),
    )


def tuning_for(width: int, num_heads: int, num_sites: int, dtype: torch.dtype, capability: tuple[int, int]) -> Tuning:
    """The setting of the nearest measured shape, or the default."""
    measured = MEASURED.get((capability[0], dtype, width, num_heads))
    return default_tuning(width, num_heads, num_sites) if measured is None else measured


MEASURED: dict[tuple[int, torch.dtype, int, int], Tuning] = {}
