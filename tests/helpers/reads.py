"""Inputs of one depth read, and its results with every gradient."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class ReadInputs:
    """sources: N tensors [..., D]; query, norm_weight [D]; dout [..., D]; dweights [N, ..., H]."""

    sources: tuple[Tensor, ...]
    query: Tensor
    norm_weight: Tensor
    dout: Tensor
    dweights: Tensor
    num_heads: int
    eps: float = 1e-6

    def double(self) -> "ReadInputs":
        """The same stored values in float64."""
        return replace(
            self,
            sources=tuple(s.double() for s in self.sources),
            **{name: getattr(self, name).double() for name in ("query", "norm_weight", "dout", "dweights")},
        )


def draw_read(
    count: int,
    shape: tuple[int, ...],
    width: int,
    num_heads: int,
    dtype: torch.dtype = torch.float32,
    *,
    spread: float | None = None,
    parameter_dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> ReadInputs:
    """Random inputs: independent sources with RMS from 0.3 to 3 as in real models, or, with `spread`, similar ones.

    `spread` is the distance of the sources from a common tensor, relative to it.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    sources = normal(count, *shape, width)
    if spread is None:
        sources *= torch.linspace(0.3, 3.0, count).view(-1, *[1] * (len(shape) + 1))
    else:
        sources = normal(1, *shape, width) + spread * sources
    query = normal(width) * (num_heads / width) ** 0.5
    return ReadInputs(
        sources=tuple(s.to(device, dtype, copy=True) for s in sources),
        query=query.to(device, parameter_dtype),
        norm_weight=(1 + 0.2 * normal(width)).to(device, parameter_dtype),
        dout=normal(*shape, width).to(device, dtype),
        dweights=normal(count, *shape, num_heads).to(device),
        num_heads=num_heads,
    )


def read_results(
    read: Callable[..., tuple[Tensor, Tensor]], inputs: ReadInputs, *, stacked: bool = False, weights: bool = False
) -> dict[str, Tensor]:
    """out, weights and the gradients of sources (stacked), query and norm_weight.

    `read(sources, query, norm_weight, num_heads, eps)` returns (out, weights); with `weights` its weights' gradient
    counts too.
    """
    leaves = [s.detach().clone().requires_grad_() for s in inputs.sources]
    whole = torch.stack([s.detach() for s in inputs.sources]).requires_grad_() if stacked else None
    query, norm_weight = (p.detach().clone().requires_grad_() for p in (inputs.query, inputs.norm_weight))
    out, w = read(leaves if whole is None else whole, query, norm_weight, inputs.num_heads, inputs.eps)
    roots, gradients = [out], [inputs.dout]
    if weights:
        roots, gradients = [*roots, w], [*gradients, inputs.dweights.to(w.dtype)]
    torch.autograd.backward(roots, gradients)
    sources = torch.stack([s.grad for s in leaves]) if whole is None else whole.grad
    results = {"out": out, "weights": w, "sources": sources, "query": query.grad, "norm_weight": norm_weight.grad}
    return {name: tensor.detach() for name, tensor in results.items() if tensor is not None}
