"""Times on a GPU by CUDA events over graph replays, eager times by the host clock, and the machine's copy bandwidth."""

import gc
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

Step = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Timing:
    """Median and spread (largest minus smallest) of repeated runs, in ms."""

    ms: float
    spread_ms: float

    @classmethod
    def of(cls, samples: list[float]) -> "Timing":
        return cls(statistics.median(samples), max(samples) - min(samples))


def replayed(step: Step, repeats: int = 20) -> Timing:
    """`step` captured in a CUDA graph and replayed; each replay is timed by events."""
    graph, kept = captured(step)
    for _ in range(3):
        graph.replay()
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, stop in pairs:
        start.record()
        graph.replay()
        stop.record()
    torch.cuda.synchronize()
    timing = Timing.of([start.elapsed_time(stop) for start, stop in pairs])
    del graph, kept
    release()
    return timing


def captured(step: Step, warmup: int = 2) -> tuple[torch.cuda.CUDAGraph, object]:
    """The graph of `step` and what it returned, which must live as long as the graph is replayed.

    Call it inside `side_stream`, as everything before it that used the same parameters.
    """
    for _ in range(warmup):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        kept = step()
    return graph, kept


def side_stream(device: str) -> AbstractContextManager[object]:
    """One stream for eager calls, warm-up and capture alike.

    Autograd remembers for each parameter the stream of its first use, and waits for that stream in backward. During a
    capture, waiting for the default stream is an error.
    """
    return nullcontext() if device == "cpu" else torch.cuda.stream(torch.cuda.Stream())


def eager(step: Step, device: str, repeats: int = 5) -> tuple[Timing, Timing]:
    """(wall time to the end of the GPU's work, host time until everything is launched) of plain calls."""
    repeats = repeats if device == "cuda" else 1
    step()
    synchronize(device)
    walls: list[float] = []
    launches: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        kept = step()
        launches.append(1e3 * (time.perf_counter() - start))
        synchronize(device)
        walls.append(1e3 * (time.perf_counter() - start))
        del kept
    return Timing.of(walls), Timing.of(launches)


def peak_gib(step: Step, device: str) -> float:
    """Most memory allocated during `step`, inputs included, in GiB; 0 on a CPU, where PyTorch does not count it."""
    if device == "cpu":
        return 0.0
    release()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**30


def copy_bandwidth(device: str) -> float:
    """Bytes read and written per second by an elementwise kernel over 2 GiB: the ceiling for memory-bound code."""
    count = (1 << 30) if device == "cuda" else (1 << 22)
    source = torch.ones(count, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    wall = Timing.of([_once(lambda: torch.mul(source, 1.5, out=target), device) for _ in range(10)][2:])
    return 2 * source.nbytes / (wall.ms / 1e3)


def _once(step: Step, device: str) -> float:
    if device == "cpu":
        start = time.perf_counter()
        step()
        return 1e3 * (time.perf_counter() - start)
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    step()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop)


def synchronize(device: str) -> None:
    """Wait for the GPU; nothing on a CPU."""
    if device != "cpu":
        torch.cuda.synchronize()


def release() -> None:
    """Give back memory that Python or the allocator still holds."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
