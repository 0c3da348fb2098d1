"""Times launch settings of the fused routing kernels on this GPU: `python benchmarks/tune.py --out tune.json`.

Every site of one micro-batch, forward and backward, between elementwise sublayers; as CUDA-graph replays with the cost
of the sublayers alone subtracted. `--sweep` runs each candidate of CANDIDATES: fields of different kernels change
together, and the profiler tells the kernels apart, so that one pass measures one candidate of every kernel. The fastest
settings belong in `MEASURED` of src/mhar/ops/triton/tuning.py. All kernels are compiled beforehand, in parallel.
"""

import argparse
import cProfile
import dataclasses
import json
import multiprocessing
import pstats
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from mhar.routing import DepthRouter, RoutingConfig


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model of the paper: variant, reads, width, routing heads, and tokens of a micro-batch."""

    variant: str
    num_sites: int
    width: int
    num_heads: int
    tokens: tuple[int, ...]


SHAPES = {
    "100m": Shape("mhar", 25, 512, 4, (4096,)),
    "350m": Shape("mhar", 49, 1024, 8, (1024, 4096)),
    "1b": Shape("mhar", 73, 1280, 8, (1024, 4096)),
    "8b-delta": Shape("delta_block_mhar", 65, 4096, 8, (8192,)),
}

CANDIDATES = Path(__file__).with_name("candidates.json")


class Scale(torch.autograd.Function):
    """An elementwise sublayer whose backward pass is one elementwise kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor, None


class Problem:
    """Inputs of one shape and the pass to time."""

    def __init__(self, shape: Shape, tokens: int, device: str, norm: bool, seed: int = 0) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        draw = lambda *s: torch.randn(*s, device=device, generator=generator)  # noqa: E731
        self.shape = shape
        config = RoutingConfig.named(shape.variant, num_heads=shape.num_heads)
        self.router = DepthRouter(shape.num_sites, shape.width, config=config, backend="triton", device=device)
        with torch.no_grad():
            for name, p in self.router.named_parameters():
                noise = draw(*p.shape)
                p.copy_(1 + 0.1 * noise if name == "norm_weight" else noise / (shape.width // shape.num_heads) ** 0.5)
        self.x = draw(tokens, shape.width).bfloat16().requires_grad_()
        self.dout = draw(tokens, shape.width).bfloat16()
        self.factors = (0.6 + 0.1 * draw(shape.num_sites, shape.width)).bfloat16()
        self.norms = None
        if norm:
            self.norms = [nn.RMSNorm(shape.width, eps=1e-6, device=device).bfloat16() for _ in range(shape.num_sites)]
        self.leaves = [self.x, *self.router.parameters()]
        if self.norms:
            self.leaves += [n.weight for n in self.norms]

    def routed(self) -> Tensor:
        history = self.router.start(self.x)
        for s in range(self.shape.num_sites - 1):
            hidden = history.read(self.norms[s] if self.norms else None)
            history.append(Scale.apply(hidden, self.factors[s]))
        return history.read(self.norms[-1] if self.norms else None)

    def chain(self) -> Tensor:
        x = self.x
        for s in range(self.shape.num_sites - 1):
            x = Scale.apply(self.norms[s](x) if self.norms else x, self.factors[s])
        return self.norms[-1](x) if self.norms else x

    def step(self, run: Callable[[], Tensor]) -> None:
        """Forward and backward; gradients are not kept."""
        torch.autograd.grad(run(), self.leaves, self.dout, allow_unused=True)


def graph_ms(step: Callable[[], None], repeats: int = 20) -> tuple[float, float]:
    """Median and spread (max - min) of CUDA-graph replays in milliseconds."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times: list[float] = []
    for i in range(repeats + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 3:
            times.append(begin.elapsed_time(end))
    times.sort()
    return times[len(times) // 2], times[-1] - times[0]


def kernel_us(step: Callable[[], None]) -> dict[str, float]:
    """Microseconds per kernel name in one pass (the fastest of three)."""
    best: dict[str, float] = {}
    step()
    for _ in range(3):
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step()
            torch.cuda.synchronize()
        sums: dict[str, float] = defaultdict(float)
        for event in profile.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                sums[event.name] += event.device_time
        for name, us in sums.items():
            best[name] = min(us, best.get(name, us))
    return {name: round(us, 1) for name, us in sorted(best.items(), key=lambda item: -item[1])}


def eager_ms(step: Callable[[], None], repeats: int = 10) -> tuple[float, float]:
    """Median wall milliseconds of a pass, and of its launches alone (before the GPU is waited for)."""
    step()
    wall: list[float] = []
    launch: list[float] = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        launch.append(1e3 * (time.perf_counter() - begin))
        torch.cuda.synchronize()
        wall.append(1e3 * (time.perf_counter() - begin))
    return sorted(wall)[repeats // 2], sorted(launch)[repeats // 2]


@contextmanager
def capturing() -> Iterator[list[Any]]:
    """Records launches on CPU tensors instead of running them."""
    from mhar.ops.triton.offline import captured_launches

    backend = mock.patch("mhar.routing.history.resolve_backend", return_value="triton")
    with captured_launches() as launches, backend:
        yield launches


def compile_task(task: tuple[str, str, dict[str, str], dict[str, Any], int, int]) -> str | None:
    """One kernel, in a worker process; returns the error if it does not compile."""
    import importlib

    from triton.backends.compiler import GPUTarget

    from mhar.ops.triton.offline import compile_kernel

    module, name, types, constants, num_warps, capability = task
    try:
        function = getattr(importlib.import_module(module), name)
        compile_kernel(function, types, constants, num_warps, GPUTarget("cuda", capability, 32))
    except Exception as error:  # a setting that does not compile is a result, not a failure
        return f"{name}: {str(error)[-200:]}"
    return None


def tasks(shape: Shape, tuning: Any, norm: bool, capability: int) -> list[Any]:
    """What one pass with this tuning launches, as compile tasks."""
    from mhar.ops.triton.offline import signature

    with capturing() as launches:
        problem = Problem(shape, 64, "cpu", norm)
        problem.router.tuning = tuning
        problem.step(problem.routed)
    found: dict[int, Any] = {}
    for kernel, arguments in launches:
        f = kernel.function
        task = (f.fn.__module__, f.fn.__name__, signature(kernel, arguments), kernel.constants, kernel.num_warps)
        found[id(kernel)] = (*task, capability)
    return list(found.values())


def default_for(shape: Shape) -> Any:
    """The tuning in force for a shape."""
    from mhar.ops.triton.tuning import tuning_for

    return tuning_for(shape.width, shape.num_heads, shape.num_sites, torch.bfloat16, (9, 0))


def candidates(shape: Shape, sweeps: list[dict[str, Any]]) -> list[Any]:
    """The default tuning and one per sweep entry."""
    base = default_for(shape)
    return [base, *(dataclasses.replace(base, **changes) for changes in sweeps)]


def measure(shape: Shape, tokens: int, tunings: list[Any], norm: bool, deadline: float) -> Iterator[dict[str, Any]]:
    """Rows of results, the first one for the default tuning."""
    problem = Problem(shape, tokens, "cuda", norm)
    chain, _ = graph_ms(lambda: problem.step(problem.chain))
    for tuning in tunings:
        if time.monotonic() > deadline:
            return
        problem.router.tuning = tuning
        try:
            torch.cuda.reset_peak_memory_stats()
            total, spread = graph_ms(lambda: problem.step(problem.routed))
            row = {"ms": round(total - chain, 3), "spread_ms": round(spread, 3), "chain_ms": round(chain, 3)}
            row["kernels_us"] = kernel_us(lambda: problem.step(problem.routed))
            row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 3)
            row["eager_wall_ms"], row["eager_launch_ms"] = eager_ms(lambda: problem.step(problem.routed))
        except Exception as error:
            row = {"error": str(error)[-300:]}
        yield {"norm": norm, "tuning": dataclasses.asdict(tuning), **row}


KERNELS = {
    "site_forward_kernel": ("forward_",),
    "site_backward_kernel": ("backward_", "programs"),
    "block_forward_kernel": ("forward_",),
    "block_backward_kernel": ("backward_", "programs"),
    "partial_mix_kernel": ("mix_",),
    "pull_kernel": ("pull_", "low_query"),
    "scatter_kernel": ("pull_", "low_query"),
    "group_mix_kernel": ("group_",),
    "group_scatter_kernel": ("group_",),
    "query_gradient_kernel": ("query_",),
}


def combined(rows: list[dict[str, Any]]) -> list[Any]:
    """For each block length that was measured, the fastest setting of every kernel; the best sum first."""
    from mhar.ops.triton.tuning import Tuning

    groups: dict[tuple[int, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if "kernels_us" in row and not row["norm"]:
            groups[tuple(row["tuning"][f] for f in ("block", "inner", "site_tile"))].append(row)
    found: list[tuple[float, Any]] = []
    for group in groups.values():
        fields, total = dict(group[0]["tuning"]), 0.0
        for kernel, prefixes in KERNELS.items():
            timed = [row for row in group if kernel in row["kernels_us"]]
            if timed:
                best = min(timed, key=lambda row: row["kernels_us"][kernel])
                total += best["kernels_us"][kernel]
                fields |= {k: v for k, v in best["tuning"].items() if k.startswith(prefixes)}
        found.append((total, Tuning(**fields)))
    return [tuning for _, tuning in sorted(found, key=lambda item: item[0])]


def profile_launches(shape: Shape) -> None:
    """Prints the functions in which the CPU spends the time of an eager pass."""
    problem = Problem(shape, shape.tokens[0], "cuda", False)
    problem.step(problem.routed)
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(5):
        problem.step(problem.routed)
    profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(25)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("tune.json"))
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--sweep", type=Path, default=CANDIDATES, help="JSON: shape -> list of changed fields")
    parser.add_argument("--norm", action="store_true", help="also with the following RMSNorm fused")
    parser.add_argument("--seconds", type=float, default=200, help="stop measuring after this time")
    parser.add_argument("--profile", action="store_true", help="print where the launches of a pass spend CPU time")
    parser.add_argument("--compile-only", action="store_true", help="fill Triton's cache and stop")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    sweeps = json.loads(arguments.sweep.read_text())
    plans = {name: candidates(SHAPES[name], sweeps.get(name, [])) for name in arguments.shapes}

    capability = 90
    work = {
        repr(task): task
        for name, tunings in plans.items()
        for i, tuning in enumerate(tunings)
        for norm in ([False, True] if arguments.norm and i == 0 else [False])
        for task in tasks(SHAPES[name], tuning, norm, capability)
    }
    begin = time.monotonic()
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        errors = [error for error in pool.map(compile_task, work.values(), chunksize=2) if error]
    print(f"compiled {len(work)} kernels in {time.monotonic() - begin:.0f} s; {errors}", flush=True)
    if arguments.compile_only:
        return

    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": []}

    def record(name: str, tokens: int, label: str, tunings: list[Any], norm: bool) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for i, row in enumerate(measure(SHAPES[name], tokens, tunings, norm, deadline)):
            rows.append({"shape": name, "tokens": tokens, "candidate": f"{label}{i}", **row})
            brief = [v for k, v in row.items() if k not in ("tuning", "kernels_us")]
            ours = {k.removesuffix("_kernel"): v for k, v in row.get("kernels_us", {}).items() if "::" not in k}
            print(name, tokens, f"{label}{i}", *brief, ours, flush=True)
        results["rows"] += rows
        arguments.out.write_text(json.dumps(results, indent=1))
        return rows

    for name, tunings in plans.items():
        rows = record(name, SHAPES[name].tokens[-1], "candidate", tunings, False)
        best = combined(rows)[:2]
        for tokens in SHAPES[name].tokens:
            record(name, tokens, "combined", best, False)
            if arguments.norm:
                record(name, tokens, "combined", best[:1], True)
    if arguments.profile:
        profile_launches(SHAPES[arguments.shapes[-1]])


if __name__ == "__main__":
    main()
