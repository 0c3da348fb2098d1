"""`mhar bench routing`: every implementation on every shape, gated on correctness."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mhar.bench import timing
from mhar.bench.gate import Gate
from mhar.bench.implementations import AUTHORS_MS, IMPLEMENTATIONS, BuildOptions, Implementation
from mhar.bench.machine import provenance
from mhar.bench.peers import UnavailableError
from mhar.bench.problem import Chain, Problem, bare_chain, draw_problem
from mhar.bench.shapes import RoutingShape
from mhar.bench.timing import Timing
from mhar.bench.traffic import chain_bytes
from mhar.ops.triton.tuning import tuning_for

Say = Callable[[str], None]
GATE_TOKENS = {"cuda": 128, "cpu": 6}


@dataclass(frozen=True, slots=True)
class RoutingOptions:
    """How to measure: device, storage dtype, repeats of a graph replay, most GPU memory to plan for, in GB."""

    device: str
    dtype: torch.dtype = torch.bfloat16
    repeats: int = 20
    max_gigabytes: float = 120.0
    build: BuildOptions = field(default_factory=BuildOptions)


def bench_routing(
    shapes: tuple[RoutingShape, ...],
    names: list[str] | None,
    options: RoutingOptions,
    say: Say = print,
    save: Callable[[dict[str, Any]], object] = lambda _result: None,
) -> dict[str, Any]:
    """The content of `routing-*.json`; `save` gets it after every shape, so that an interruption loses one at most.

    `rows` hold times with the bare chain's subtracted; `not_run` says what has no row and why: not installed, not
    applicable, too large, or a red gate. Nothing is left out silently.
    """
    chosen = [i for i in IMPLEMENTATIONS if names is None or i.name in names]
    result: dict[str, Any] = {**provenance(options.device), "rows": [], "not_run": []}
    result["copy_bandwidth_gb_s"] = round(timing.copy_bandwidth(options.device) / 1e9, 1)
    with timing.side_stream(options.device):
        for shape in shapes:
            ShapeRun(shape, options, result, say).run(chosen)
            save(result)
    return result


class ShapeRun:
    """All implementations on one shape."""

    def __init__(self, shape: RoutingShape, options: RoutingOptions, result: dict[str, Any], say: Say) -> None:
        self.shape, self.options, self.result, self.say = shape, options, result, say
        self.bandwidth = result["copy_bandwidth_gb_s"] * 1e9

    def run(self, implementations: list[Implementation]) -> None:
        """Gate and measure; appends to the result."""
        options = self.options
        small = draw_problem(self.shape, GATE_TOKENS[options.device], options.device, options.dtype)
        self.gate = Gate(small)
        self.problem = draw_problem(self.shape, self.shape.tokens, options.device, options.dtype)
        self.bare = Measured.of(bare_chain(self.problem), self.problem, options, graph=True)
        self.bare_eager = Measured.of(bare_chain(self.problem), self.problem, options, graph=False)
        for implementation in implementations:
            try:
                self._measure(implementation)
            except UnavailableError as reason:
                self._skip(implementation.name, str(reason))
            except Exception as error:  # whatever another library raises: its reason is the result
                lines = str(error).strip().splitlines() or [""]
                self._skip(
                    implementation.name, f"{type(error).__name__}: {lines[0]} {'' if len(lines) == 1 else lines[-1]}"
                )
            timing.release()
        if any(i.name == "authors" for i in implementations) and options.build.authors is None:
            self._quote_authors()

    def _measure(self, implementation: Implementation) -> None:
        needed = implementation.gigabytes(self.shape)
        if needed > self.options.max_gigabytes:
            raise UnavailableError(f"needs about {needed:.0f} GB, the limit is {self.options.max_gigabytes:.0f}")
        gate = self.gate.check(implementation.build(self.gate.problem, self.options.build), own=implementation.own)
        if not gate.green:
            raise UnavailableError(f"correctness gate red: {gate.reason}")
        chain = implementation.build(self.problem, self.options.build)
        graph = implementation.graph and self.options.device == "cuda"
        measured = Measured.of(chain, self.problem, self.options, graph=graph)
        row = self._row(implementation.name, measured, self.bare if graph else self.bare_eager)
        row["errors"] = {name: float(f"{error:.3g}") for name, error in gate.errors.items()}
        self.result["rows"].append(row)
        self.say(f"{self.shape.key:>14}  {implementation.name:<14} {row['ms']:9.3f} ms  {row['peak_gib']:6.2f} GiB")

    def _row(self, name: str, measured: "Measured", bare: "Measured") -> dict[str, Any]:
        both, forward = measured.both.ms - bare.both.ms, measured.forward.ms - bare.forward.ms
        row = {
            "shape": self.shape.name,
            "tokens": self.shape.tokens,
            "num_heads": self.shape.num_heads,
            "implementation": name,
            "ms": both,
            "forward_ms": forward,
            "backward_ms": both - forward,
            "spread_ms": measured.both.spread_ms,
            "eager_ms": measured.eager.ms - self.bare_eager.eager.ms,
            "launch_ms": measured.launch.ms - self.bare_eager.launch.ms,
            "bare_chain_ms": bare.both.ms,
            "peak_gib": measured.peak_gib,
            "cuda_graph": measured.graph,
        }
        moved = chain_bytes(self.shape, name, self._schedule(name))
        if moved is not None and both > 0:
            row["model_gb"] = moved / 1e9
            row["share_of_copy_bandwidth"] = moved / (both / 1e3) / self.bandwidth
        return {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}

    def _schedule(self, name: str) -> tuple[int, int] | None:
        """(block, inner) of our fused path."""
        if name == "mhar-dense":
            return (0, 0)
        if name != "mhar":
            return None
        x = self.problem.x
        capability = torch.cuda.get_device_capability() if x.is_cuda else (0, 0)
        tuning = tuning_for(self.shape.width, self.shape.num_heads, self.shape.num_sites, x.dtype, capability)
        return (tuning.block, tuning.inner)

    def _skip(self, name: str, reason: str) -> None:
        entry = {"shape": self.shape.name, "tokens": self.shape.tokens, "implementation": name, "reason": reason}
        self.result["not_run"].append(entry)
        self.say(f"{self.shape.key:>14}  {name:<14} not run: {reason}")

    def _quote_authors(self) -> None:
        quoted = AUTHORS_MS.get(self.shape.key)
        if quoted is None:
            return
        self.result["rows"].append(
            {
                "shape": self.shape.name,
                "tokens": self.shape.tokens,
                "num_heads": self.shape.num_heads,
                "implementation": "authors",
                "ms": quoted,
                "spread_ms": None,
                "peak_gib": None,
                "source": "kernels.md",
            }
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """One chain: forward, forward and backward together, plain calls of both, host time of their launch, memory."""

    forward: Timing
    both: Timing
    eager: Timing
    launch: Timing
    peak_gib: float
    graph: bool

    @classmethod
    def of(cls, chain: Chain, problem: Problem, options: RoutingOptions, *, graph: bool) -> "Measured":
        leaves = list(problem.leaves.values())

        def forward() -> Tensor:
            return chain(problem.x)

        def both() -> tuple[Tensor | None, ...]:
            return torch.autograd.grad(chain(problem.x), leaves, problem.dout, allow_unused=True)

        plain, launch = timing.eager(both, options.device)
        peak = timing.peak_gib(both, options.device)
        if not graph or options.device == "cpu":
            return cls(timing.eager(forward, options.device)[0], plain, plain, launch, peak, False)
        repeats = options.repeats
        return cls(timing.replayed(forward, repeats), timing.replayed(both, repeats), plain, launch, peak, True)
