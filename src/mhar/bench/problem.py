"""What every implementation computes: a chain of sites whose sublayers are elementwise products.

The sublayer after site j multiplies by a fixed vector c_j, so that the time above that of the same chain without
routing is routing's own. Values are random and never zero: zeros can hide mistakes and run faster than data.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mhar.bench.shapes import RoutingShape
from mhar.routing import DepthRouter, RoutingConfig, routing_plan

Chain = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Problem:
    """Inputs of one chain.

    Attributes:
        x: the embedding [1, tokens, D]. scales: M - 1 vectors [D], the sublayers. dout: gradient of the result.
        parameters: query, norm_weight [P, D] and, in the delta form, gate [P] and null_source [P, D], float32.
    """

    shape: RoutingShape
    x: Tensor
    scales: tuple[Tensor, ...]
    dout: Tensor
    parameters: dict[str, nn.Parameter]
    eps: float = 1e-6

    @property
    def config(self) -> RoutingConfig:
        """What is routed."""
        return self.shape.config

    @property
    def leaves(self) -> dict[str, Tensor]:
        """Everything whose gradient counts."""
        return {"x": self.x, **self.parameters}

    def double(self) -> "Problem":
        """The same stored values in float64."""
        return Problem(
            self.shape,
            _leaf(self.x.double()),
            tuple(c.double() for c in self.scales),
            self.dout.double(),
            {name: nn.Parameter(p.detach().double()) for name, p in self.parameters.items()},
            self.eps,
        )


def draw_problem(shape: RoutingShape, tokens: int, device: str, dtype: torch.dtype, seed: int = 0) -> Problem:
    """Random inputs, the same on every device."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    template = DepthRouter(shape.num_sites, shape.width, config=shape.config)
    width, add = shape.width, "delta" in shape.variant
    parameters: dict[str, nn.Parameter] = {}
    for name, parameter in template.named_parameters():
        value = normal(*parameter.shape)
        scale = {"query": (shape.num_heads / width) ** 0.5, "norm_weight": 0.2, "gate": 0.1, "null_source": 0.3}[name]
        parameters[name] = nn.Parameter((value * scale + (name == "norm_weight")).to(device))
    # Outputs in a delta form add to a stream: small ones keep it from growing with depth.
    size = 0.05 if add else 1.0
    scales = tuple((size * (1 + 0.3 * normal(width))).to(device, dtype) for _ in range(shape.num_sites - 1))
    x = torch.empty(1, tokens, width, device=device, dtype=dtype).copy_(normal(1, tokens, width))
    dout = normal(1, tokens, width).to(device, dtype)
    return Problem(shape, _leaf(x), scales, dout, parameters)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()


def router_chain(problem: Problem, **options: object) -> Chain:
    """The chain through a DepthRouter with these parameters; `options` are the router's (backend, schedule)."""
    router = DepthRouter(
        problem.shape.num_sites, problem.shape.width, config=problem.config, eps=problem.eps, **options,  # pyright: ignore
    )  # fmt: skip
    for name, parameter in problem.parameters.items():
        setattr(router, name, parameter)

    def chain(x: Tensor) -> Tensor:
        history = router.start(x)
        for c in problem.scales:
            history.append(history.read() * c)
        return history.read()

    return chain


def bare_chain(problem: Problem) -> Chain:
    """The same sublayers without routing; in the delta form, the residual additions stay."""
    add = problem.config.read == "add"

    def chain(x: Tensor) -> Tensor:
        for c in problem.scales:
            x = x + x * c if add else x * c
        return x

    return chain


def per_site_chain(problem: Problem, read: Callable[[list[Tensor], Tensor, Tensor], Tensor]) -> Chain:
    """The chain by one call per site of `read(sources, query [D], norm_weight [D])`, as other libraries offer it."""
    plan = routing_plan(problem.config, problem.shape.num_sites)
    parameters, per_block = problem.parameters, 2 * problem.shape.block_size
    add, blocks = problem.config.read == "add", problem.config.sources == "block"

    def chain(x: Tensor) -> Tensor:
        rows, stream, start = [x], x, x  # `stream` from the embedding in a delta form, else from the block's start
        for site in plan:
            hidden = stream
            if site.row is not None:
                sources = [*rows[: site.num_rows], *([stream] if site.has_partial else [])]
                if site.has_null:
                    null = parameters["null_source"][site.row].to(x.dtype)
                    sources = [null.expand_as(x), *sources]
                hidden = read(sources, parameters["query"][site.row], parameters["norm_weight"][site.row])
                if add:
                    hidden = stream + (parameters["gate"][site.row] * hidden).to(x.dtype)
            if site.index == len(problem.scales):
                return hidden
            output = hidden * problem.scales[site.index]
            at_end = (site.index + 1) % per_block == 0
            if not blocks:
                rows.append(output)
            elif not add:
                stream = stream + output if site.has_partial else output
                rows += [stream] if at_end else []
            else:
                stream = stream + output
                rows += [stream - start] if at_end and site.index + 1 < len(problem.scales) else []
                start = stream if at_end else start
        raise AssertionError("the last site returns")

    return chain
