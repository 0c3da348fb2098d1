"""The correctness gate: nothing that computes something else gets a time."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mhar.bench.problem import Chain, Problem, router_chain

# Ours: at most so many times the error of the reference on the same stored inputs (float32 inside). The ratio of two
# errors is noisy on few tokens: OWN_SLACK allows for that; the tests hold the bounds themselves.
OWN_RATIOS = {"x": 1.2}
OWN_RATIO = 1.1
OWN_SLACK = 1.1
# Others: this relative error separates rounding (up to 1e-2 in these chains) from another function (1e-1 and more).
PEER_BOUND = 5e-2


@dataclass(frozen=True, slots=True)
class GateResult:
    """Relative errors against float64 by result ("out", "x", "query", ...), and why the gate is red, if it is."""

    errors: dict[str, float]
    reason: str | None

    @property
    def green(self) -> bool:
        return self.reason is None


class Gate:
    """Compares implementations of one problem with float64."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        exact = problem.double()
        self.exact = results(router_chain(exact, backend="reference"), exact)
        self.reference = self._errors(results(router_chain(problem, backend="reference"), problem))

    def check(self, chain: Chain, *, own: bool, ignored: tuple[str, ...] = ()) -> GateResult:
        """Errors of `chain`; `ignored` names results that an implementation does not give."""
        errors = self._errors(results(chain, self.problem), ignored)
        for name, error in errors.items():
            bound = self._bound(name) if own else PEER_BOUND
            if not error <= bound:  # NaN fails too
                return GateResult(errors, f"{name} is {error:.1e} from float64, the bound is {bound:.1e}")
        return GateResult(errors, None)

    def _bound(self, name: str) -> float:
        return OWN_SLACK * OWN_RATIOS.get(name, OWN_RATIO) * self.reference[name]

    def _errors(self, found: dict[str, Tensor], ignored: tuple[str, ...] = ()) -> dict[str, float]:
        return {name: relative(t, self.exact[name]) for name, t in found.items() if name not in ignored}


def results(chain: Chain, problem: Problem) -> dict[str, Tensor]:
    """The chain's result and the gradient of every leaf."""
    leaves = problem.leaves
    out = chain(problem.x)
    gradients = torch.autograd.grad(out, list(leaves.values()), problem.dout)
    return {"out": out.detach(), **dict(zip(leaves, gradients, strict=True))}


def relative(actual: Tensor, exact: Tensor) -> float:
    """|actual - exact| / |exact|, norms over the whole tensor, in float64."""
    difference = (actual.double() - exact).norm()
    return float(difference / exact.norm()) if exact.norm() > 0 else float(difference)
