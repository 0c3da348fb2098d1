"""The registry of routing implementations: a name, how to build its chain, and what is known about it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mhar.bench import peers
from mhar.bench.peers import UnavailableError
from mhar.bench.problem import Chain, Problem, per_site_chain, router_chain
from mhar.bench.shapes import RoutingShape
from mhar.errors import BackendError
from mhar.ops import depth_read, depth_read_reference
from mhar.ops.backend import Backend, resolve_backend
from mhar.routing import routing_plan


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """What a builder may need: settings that FLA's autotuner may try, and a user's script for `authors`."""

    peer_configs: int = 1
    authors: Path | None = None


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to run a chain.

    Attributes:
        name: as in the results. build: raises UnavailableError (or BackendError) with the reason where it cannot run.
        own: held to the strict bound of the gate. ignored: results that it does not give.
        graph: whether a CUDA graph of it is measured; else the wall time of plain calls.
        gigabytes: memory that it needs for a shape, where that can exceed a GPU's.
    """

    name: str
    build: Callable[[Problem, BuildOptions], Chain]
    own: bool = False
    graph: bool = True
    gigabytes: Callable[[RoutingShape], float] = lambda _shape: 0.0


def shared(problem: Problem, _options: BuildOptions) -> Chain:
    """Ours: DepthRouter as a model uses it."""
    return router_chain(problem, backend=_triton(problem), schedule="auto")


def dense(problem: Problem, _options: BuildOptions) -> Chain:
    """Ours without shared passes."""
    if problem.config.sources == "block":
        raise UnavailableError("the block forms have one schedule")
    return router_chain(problem, backend=_triton(problem), schedule="dense")


def single(problem: Problem, _options: BuildOptions) -> Chain:
    """Ours, one `depth_read` a site: the functional form, autograd adding up the source gradients."""
    backend = _triton(problem)

    def read(sources: list[Tensor], query: Tensor, norm_weight: Tensor) -> Tensor:
        return depth_read(
            sources, query, norm_weight, num_heads=problem.shape.num_heads, eps=problem.eps, backend=backend
        )

    return per_site_chain(problem, read)


def reference(problem: Problem, _options: BuildOptions) -> Chain:
    """The equation in plain PyTorch."""
    return router_chain(problem, backend="reference")


def compiled(problem: Problem, _options: BuildOptions) -> Chain:
    """The equation through torch.compile, once for all numbers of sources and tokens; stacking outside."""

    @torch.compile(dynamic=True)
    def mix(stacked: Tensor, query: Tensor, norm_weight: Tensor) -> Tensor:
        return depth_read_reference(stacked, query, norm_weight, problem.shape.num_heads, problem.eps)[0]

    return per_site_chain(problem, lambda sources, query, gain: mix(torch.stack(sources), query, gain))


def authors(problem: Problem, options: BuildOptions) -> Chain:
    """The MHAR authors' kernels, from a user's script."""
    if options.authors is None:
        raise UnavailableError("not published as a package: give a script with --authors (benchmarks/README.md)")
    return peers.users_script(problem, options.authors)


def stacked_gigabytes(copies: float) -> Callable[[RoutingShape], float]:
    """Memory of forms that keep, per site, so many bytes for each element of its stacked sources."""

    def gigabytes(shape: RoutingShape) -> float:
        reads = sum(len(site.source_names) for site in routing_plan(shape.config, shape.num_sites))
        return copies * reads * shape.tokens * shape.width / 1e9

    return gigabytes


IMPLEMENTATIONS = (
    Implementation("mhar", shared, own=True),
    Implementation("mhar-dense", dense, own=True),
    Implementation("mhar-single", single, own=True),
    Implementation("eager", reference, own=True, graph=False, gigabytes=stacked_gigabytes(16)),
    Implementation("torch.compile", compiled, graph=False, gigabytes=stacked_gigabytes(8.3)),
    Implementation("authors", authors),
    Implementation("fla", lambda problem, options: peers.fla(problem, options.peer_configs)),
    Implementation("fla-gluon", lambda problem, options: peers.fla_gluon(problem, options.peer_configs)),
    Implementation("liger", lambda problem, _options: peers.liger(problem)),
    Implementation("fast-attnres", lambda problem, _options: peers.fast_attnres(problem)),
    Implementation("flash-attn-res", lambda problem, options: peers.flash_attn_res(problem, options.peer_configs)),
)

# GPU time of the authors' fused kernels on one H200, CUDA-graph replay, chain subtracted (kernels.md), ms by shape.
AUTHORS_MS = {
    "100m:4096": 4.54, "350m:1024": 9.01, "350m:4096": 30.05, "1b:1024": 39.01, "1b:4096": 149.5,
    "8b-delta:8192": 136.0, "100m-h1:4096": 5.02,
}  # fmt: skip


def _triton(problem: Problem) -> Backend:
    try:
        return resolve_backend("triton", problem.x)
    except BackendError as error:
        raise UnavailableError(str(error)) from error
