"""Running one pass of a router three ways: as it is, exactly (float64), and as the comparator of the error bounds.

The comparator is the reference on the same stored inputs: every tensor that the model stores (sources, streams,
results) is rounded to the storage dtype, everything between is float32, and gradients of sources are summed in float32
and rounded once. Gradients of parameters are compared as a parameter of the sources' dtype would receive them.
"""

import os
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from helpers.compare import relative_error
from mhar.routing import DepthRouter, RoutingConfig

# Error at most this factor times the comparator's. Sources gather their gradient in several roundings of float32.
BOUNDS = {"dx": 1.2}
BOUND = 1.1
# Below these the comparator itself has next to no error (float32 results of exact sums): an absolute floor.
FLOORS = {torch.float32: 1e-6, torch.float16: 2e-5, torch.bfloat16: 2e-4}
# Both errors are random: over few numbers (gates, tiny cases) their ratio scatters. Large tensors test the bounds.
TINY, SLACK = 4096, 2.0


def device() -> torch.device:
    """Where kernels run: the GPU if there is one and the interpreter is off."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return torch.device("cuda" if torch.cuda.is_available() and not interpreted else "cpu")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One pass: `chain` makes every source an elementwise function of the read before it (similar sources)."""

    variant: str = "mhar"
    options: dict[str, Any] = field(default_factory=dict)
    num_sites: int = 7
    width: int = 24
    num_heads: int = 2
    tokens: tuple[int, ...] = (3,)
    dtype: torch.dtype = torch.float32
    schedule: Any = 4
    levels: tuple[int, int] | None = None
    tuning: dict[str, Any] = field(default_factory=dict)
    norm: bool = False
    chain: bool = False
    seed: int = 0

    def __str__(self) -> str:
        options = "".join(f"-{k}{v}" for k, v in self.options.items())
        shape = f"M{self.num_sites}-D{self.width}-H{self.num_heads}-T{'x'.join(map(str, self.tokens))}"
        flags = "".join(f"-{name}" for name in ("norm", "chain") if getattr(self, name))
        flags += "".join(f"-{k}{v}" for k, v in self.tuning.items())
        schedule = self.levels or self.schedule
        return f"{self.variant}{options}-{shape}-{str(self.dtype)[6:]}-{schedule}{flags}".replace(" ", "")


@dataclass
class Inputs:
    sources: Tensor  # [M, ..., D] in the storage dtype; for chains, [0] is the embedding and the others are factors
    douts: Tensor
    parameters: dict[str, Tensor]
    norm_weights: Tensor


def inputs(case: Case) -> Inputs:
    """Fresh random values: magnitudes of sources grow with depth as in real models; routing parameters are not zero."""
    generator = torch.Generator().manual_seed(case.seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    m, d = case.num_sites, case.width
    sources = draw(m, *case.tokens, d)
    if case.chain:
        sources[1:] = 0.8 + 0.1 * draw(m - 1, *([1] * len(case.tokens)), d)
    else:
        sources *= torch.linspace(0.3, 3.0, m).view(m, *([1] * (len(case.tokens) + 1)))
    shapes = {name: p.shape for name, p in router(case, "reference", torch.float32).named_parameters()}
    values = {name: draw(*shape) for name, shape in shapes.items()}
    values["query"] = values["query"] / (d / case.num_heads) ** 0.5
    values["norm_weight"] = 1 + 0.2 * values["norm_weight"]
    parameters = {name: v.to(case.dtype).float() for name, v in values.items()}
    norms = (1 + 0.2 * draw(m, d)).to(case.dtype).float()
    return Inputs(sources.to(case.dtype), draw(m, *case.tokens, d).to(case.dtype), parameters, norms)


def router(case: Case, backend: str, dtype: torch.dtype) -> DepthRouter:
    """The case's router; `levels` overrides the tuned block lengths."""
    config = RoutingConfig.named(case.variant, num_heads=case.num_heads, **case.options)
    made = DepthRouter(
        case.num_sites, case.width, config=config, backend=backend, schedule=case.schedule, device=device(), dtype=dtype
    )
    changes = dict(case.tuning)
    if case.levels is not None:
        changes |= {"block": case.levels[0], "inner": case.levels[1]}
        made.schedule = "auto"
    if changes:
        from mhar.ops.triton.tuning import default_tuning

        made.tuning = replace(default_tuning(case.width, case.num_heads, case.num_sites), **changes)
    return made


def run(case: Case, how: str, given: Inputs | None = None) -> dict[str, Tensor]:
    """Results and gradients of one pass: how = "fused", "exact" or "comparator"."""
    given = given or inputs(case)
    compute = torch.float64 if how == "exact" else torch.float32
    store = compute if how == "exact" else case.dtype
    made = router(case, "triton" if how == "fused" else "reference", compute)
    made.load_state_dict({name: v.to(compute) for name, v in given.parameters.items()})
    norms = [_norm(w, compute) for w in given.norm_weights] if case.norm else None
    rounded = _stored(case.dtype) if how == "comparator" else lambda x: x

    place = {"device": device(), "dtype": store if how == "fused" else compute}
    leaves = [x.to(**place).requires_grad_() for x in given.sources]
    douts = given.douts.to(**place)
    history = made.start(leaves[0])
    results: list[Tensor] = []
    loss = torch.zeros((), device=device(), dtype=compute)
    for s in range(case.num_sites):
        if how == "fused":
            hidden = history.read(norms[s] if norms else None)
        else:
            hidden = rounded(history.read())
            hidden = rounded(norms[s](hidden)) if norms else hidden
        results.append(hidden)
        if not case.chain or s == case.num_sites - 1:
            loss = loss + (hidden * douts[s]).to(compute).sum()
        if s < case.num_sites - 1:
            history.append(rounded(hidden * leaves[s + 1]) if case.chain else leaves[s + 1])
            if how == "comparator":
                _round_stored(history, case.dtype)
    loss.backward()
    dx = leaves[:1] if case.chain else leaves
    found = {"out": torch.stack(results), "dx": torch.stack([x.grad for x in dx])}
    found |= {f"d_{name}": torch.zeros_like(p) if p.grad is None else p.grad for name, p in made.named_parameters()}
    if norms:
        found["d_norm"] = torch.stack([norm.weight.grad for norm in norms])
    return {name: x.detach() if how == "exact" else x.detach().to(case.dtype) for name, x in found.items()}


def _norm(weight: Tensor, dtype: torch.dtype) -> nn.RMSNorm:
    norm = nn.RMSNorm(weight.shape[0], eps=1e-6, dtype=dtype, device=device())
    norm.weight.data.copy_(weight)
    return norm


def _stored(dtype: torch.dtype) -> Any:
    """What storing does: the value is rounded once, and so is the sum of its gradients."""
    return lambda x: x.to(dtype).to(x.dtype)


def _round_stored(history: Any, dtype: torch.dtype) -> None:
    """Rounds the streams and rows that the history made itself; their gradients stay float32, as in the kernels."""
    rounded = lambda x: x + (x.detach().to(dtype).to(x.dtype) - x.detach())  # noqa: E731
    if history._stream is not None:
        history._stream = rounded(history._stream)
    if history._partial is not None:
        history._partial = rounded(history._partial)
    history._rows[-1] = rounded(history._rows[-1])
    history._versions[-1] = history._rows[-1]._version


def assert_within_bounds(case: Case) -> dict[str, Tensor]:
    """The fused results are as close to float64 as the bounds ask, every one of them; returns them."""
    given = inputs(case)
    fused, exact, comparator = (run(case, how, given) for how in ("fused", "exact", "comparator"))
    failures: list[str] = []
    for name, expected in exact.items():
        assert torch.isfinite(fused[name]).all(), f"{name} is not finite"
        error, allowed = relative_error(fused[name], expected), relative_error(comparator[name], expected)
        slack = SLACK if expected.numel() < TINY else 1.0
        bound = slack * max(BOUNDS.get(name, BOUND) * allowed, FLOORS[case.dtype])
        if error > bound:
            failures.append(f"{name}: {error:.2e}, comparator {allowed:.2e}, bound {bound:.2e}")
    assert not failures, "; ".join(failures)
    return fused
