"""The one-read kernels as PyTorch operators: opaque to torch.compile, with fake kernels and autograd.

A graph holds one node per read, whatever the number of tokens. Source gradients are computed once, in float32, and
rounded once; there is no second derivative.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mhar.errors import BackendError


@torch.library.custom_op("mhar::depth_read", mutates_args=())
def depth_read_operator(
    sources: Sequence[Tensor],
    query: Tensor,
    norm_weight: Tensor,
    num_heads: int,
    eps: float,
    stacked: bool,
    save: bool,
    return_weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out [..., D], out in float32, softmax statistics [T, H, 2], weights [N, T, H]).

    `stacked`: `sources` holds one tensor [N, ..., D]. Only `save` fills the second and third result, and only
    `return_weights` the fourth; float32 sources leave the second empty, `out` being exact.
    """
    from mhar.ops.triton.single import depth_read_fwd

    results = _empty_results(sources, num_heads, stacked, save, return_weights)
    rows = _rows(sources, stacked)
    out, *rest = results
    wanted = _wanted(out, save, return_weights)
    exact, stats, weights = (t if w else None for t, w in zip(rest, wanted, strict=True))
    if return_weights and not save:
        stats = out.new_empty(_statistics_shape(out, num_heads), dtype=torch.float32)
    depth_read_fwd(rows, query.contiguous(), norm_weight.contiguous(), num_heads, eps, out, exact, stats, weights)
    if weights is not None and stats is not None:
        weights.sub_(stats[..., 0]).exp_().mul_(stats[..., 1])
    return results


@depth_read_operator.register_fake
def _(
    sources: Sequence[Tensor],
    query: Tensor,
    norm_weight: Tensor,
    num_heads: int,
    eps: float,
    stacked: bool,
    save: bool,
    return_weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _empty_results(sources, num_heads, stacked, save, return_weights)


@torch.library.custom_op("mhar::depth_read_backward", mutates_args=())
def depth_read_backward_operator(
    dout: Tensor,
    dweights: Tensor | None,
    sources: Sequence[Tensor],
    query: Tensor,
    norm_weight: Tensor,
    exact: Tensor,
    stats: Tensor,
    weights: Tensor | None,
    num_heads: int,
    eps: float,
    stacked: bool,
    wanted: Sequence[bool],
) -> list[Tensor]:
    """[gradient of each entry of `sources` (empty unless `wanted`), of the query, of the norm weight]."""
    from mhar.ops.triton.single import depth_read_bwd

    grads = _empty_gradients(sources, wanted)
    rows = _rows(sources, stacked)
    row_grads: list[Tensor | None] = [g if w else None for g, w in zip(grads, wanted, strict=True)]
    if stacked:
        row_grads = list(grads[0].unbind()) if wanted[0] else [None] * len(rows)
    coupling = None if dweights is None or weights is None else (weights * dweights).sum(dim=0)
    dweights = None if dweights is None else dweights.contiguous()
    dkey = depth_read_bwd(
        rows, row_grads, query.contiguous(), norm_weight.contiguous(), num_heads, eps,
        dout.contiguous(), exact, stats, dweights, coupling,
    )  # fmt: skip
    return [*grads, (dkey * norm_weight).to(query.dtype), (dkey * query).to(norm_weight.dtype)]


@depth_read_backward_operator.register_fake
def _(
    dout: Tensor,
    dweights: Tensor | None,
    sources: Sequence[Tensor],
    query: Tensor,
    norm_weight: Tensor,
    exact: Tensor,
    stats: Tensor,
    weights: Tensor | None,
    num_heads: int,
    eps: float,
    stacked: bool,
    wanted: Sequence[bool],
) -> list[Tensor]:
    return [*_empty_gradients(sources, wanted), torch.empty_like(query), torch.empty_like(norm_weight)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    sources, query, norm_weight, ctx.num_heads, ctx.eps, ctx.stacked, save, _ = inputs
    out, exact, stats, weights = output
    assert save
    ctx.set_materialize_grads(False)
    exact = out if out.dtype == torch.float32 else exact
    ctx.save_for_backward(*sources, query, norm_weight, exact, stats, weights)
    ctx.out_shape, ctx.out_dtype = out.shape, out.dtype


def _backward(ctx: Any, dout: Tensor | None, _exact: None, _stats: None, dweights: Tensor | None) -> tuple[Any, ...]:
    *sources, query, norm_weight, exact, stats, weights = ctx.saved_tensors
    if dout is None:
        dout = exact.new_zeros(ctx.out_shape, dtype=ctx.out_dtype)
    wanted = list(ctx.needs_input_grad[0])
    *grads, dquery, dnorm_weight = depth_read_backward_operator(
        dout, dweights, sources, query, norm_weight, exact, stats,
        weights if dweights is not None else None, ctx.num_heads, ctx.eps, ctx.stacked, wanted,
    )  # fmt: skip
    source_grads = [grad if needed else None for grad, needed in zip(grads, wanted, strict=True)]
    return source_grads, dquery, dnorm_weight, None, None, None, None, None


def _no_second_derivative(ctx: Any, *grads: Any) -> Any:
    raise BackendError('the Triton depth read has no second derivative: use backend="reference" for create_graph=True')


depth_read_operator.register_autograd(_backward, setup_context=_setup_context)
depth_read_backward_operator.register_autograd(_no_second_derivative)


def _rows(sources: Sequence[Tensor], stacked: bool) -> list[Tensor]:
    """N contiguous tensors [..., D]."""
    return list(sources[0].contiguous().unbind()) if stacked else [source.contiguous() for source in sources]


def _wanted(out: Tensor, save: bool, return_weights: bool) -> tuple[bool, bool, bool]:
    return save and out.dtype != torch.float32, save, return_weights


def _statistics_shape(out: Tensor, num_heads: int) -> tuple[int, int, int]:
    return out.numel() // out.shape[-1], num_heads, 2


def _empty_results(
    sources: Sequence[Tensor], num_heads: int, stacked: bool, save: bool, return_weights: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    first = sources[0]
    shape = first.shape[1:] if stacked else first.shape
    out = first.new_empty(shape)
    tokens, heads, _ = statistics = _statistics_shape(out, num_heads)
    num_sources = first.shape[0] if stacked else len(sources)
    shapes = (shape, statistics, (num_sources, tokens, heads))
    rest = [
        first.new_empty(s if wanted else (0,), dtype=torch.float32)
        for s, wanted in zip(shapes, _wanted(out, save, return_weights), strict=True)
    ]
    return out, rest[0], rest[1], rest[2]


def _empty_gradients(sources: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor]:
    return [s.new_empty(s.shape if w else (0,)) for s, w in zip(sources, wanted, strict=True)]
