"""Other libraries' reads, behind one signature: `read(sources, query [D], norm_weight [D]) -> [..., D]`.

Each function imports its library and returns the chain, or raises `UnavailableError` with the reason, which the results
keep.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from mhar.bench.problem import Chain, Problem, per_site_chain

Read = Callable[[list[Tensor], Tensor, Tensor], Tensor]


class UnavailableError(Exception):
    """An implementation that cannot run here, or not this problem; the message says why."""


def library(module: str, package: str, version: str) -> ModuleType:
    """The imported module; raises UnavailableError where the package is missing, old or broken."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UnavailableError(f"pip install {package}=={version} ({error})") from error


def one_head(problem: Problem) -> None:
    """Raise UnavailableError unless the problem has one head."""
    if problem.shape.num_heads != 1:
        raise UnavailableError(f"one head only, the shape has {problem.shape.num_heads}")


def on_gpu(problem: Problem) -> None:
    """Raise UnavailableError on a CPU."""
    if not problem.x.is_cuda:
        raise UnavailableError("needs a CUDA GPU")


def fla(problem: Problem, num_configs: int) -> Chain:
    """FLA's Triton kernels, its dispatcher disabled; autotuning tries `num_configs` settings."""
    one_head(problem)
    on_gpu(problem)
    os.environ["FLA_DISABLE_BACKEND_DISPATCH"] = "1"
    fused = library("fla.ops.attnres.fused", "flash-linear-attention", "0.6.0")
    limit_autotuning(fused, num_configs, lambda c: c.num_warps == 4 and c.num_stages == 2)

    def read(sources: list[Tensor], query: Tensor, norm_weight: Tensor) -> Tensor:
        return fused.fused_attnres(query, sources, norm_weight, rms_eps=problem.eps)

    return per_site_chain(problem, read)


def fla_gluon(problem: Problem, num_configs: int) -> Chain:
    """FLA's Gluon backend, called directly (its own switch is FLA_ATTNRES_GLUON=1)."""
    one_head(problem)
    on_gpu(problem)
    os.environ["FLA_DISABLE_BACKEND_DISPATCH"] = "1"
    gluon = library("fla.ops.attnres.backends.gluon", "flash-linear-attention", "0.6.0")
    # What its own rule keeps for more than eight sources.
    limit_autotuning(gluon, num_configs, lambda c: c.kwargs.get("BT") == 2 and c.num_warps == 8)
    backend = gluon.AttnResGluonBackend()

    def read(sources: list[Tensor], query: Tensor, norm_weight: Tensor) -> Tensor:
        return backend.fused_attnres(query, sources, norm_weight, rms_eps=problem.eps)

    return per_site_chain(problem, read)


def liger(problem: Problem) -> Chain:
    """Liger's operator, which takes stacked sources."""
    one_head(problem)
    on_gpu(problem)
    functional = library("liger_kernel.transformers.functional", "liger-kernel", "0.8.5")

    def read(sources: list[Tensor], query: Tensor, norm_weight: Tensor) -> Tensor:
        return functional.liger_attn_res(torch.stack(sources), query, norm_weight, problem.eps)

    return per_site_chain(problem, read)


def fast_attnres(problem: Problem) -> Chain:
    """fast-attnres: a list of sources, no norm weight (it is folded into the query, which must be bfloat16)."""
    one_head(problem)
    on_gpu(problem)
    if problem.x.dtype != torch.bfloat16:
        raise UnavailableError(f"bfloat16 only, got {problem.x.dtype}")
    package = library("attnres", "fast-attnres", "2.1.0")

    def read(sources: list[Tensor], query: Tensor, norm_weight: Tensor) -> Tensor:
        return package.attnres(sources, (query * norm_weight).bfloat16(), eps=problem.eps)

    return per_site_chain(problem, read)


def flash_attn_res(problem: Problem, num_configs: int) -> Chain:
    """flash-attn-res: Kimi's block form in one autograd function that calls the sublayers; no norm weight (folded)."""
    one_head(problem)
    if problem.config.sources != "block":
        raise UnavailableError("block form only, the shape has a source per sublayer")
    on_gpu(problem)
    if problem.shape.width & (problem.shape.width - 1) or problem.x.dtype != torch.bfloat16:
        raise UnavailableError(f"bfloat16 and widths that are powers of two only, got {problem.shape.width}")
    autograd = library("flash_attn_res.experimental.autograd", "flash-attn-res", "0.1.12")
    for name in ("phase_1", "phase_2", "reduce"):
        kernels = library(f"flash_attn_res.kernels.{name}", "flash-attn-res", "0.1.12")
        limit_autotuning(kernels, num_configs, lambda c: c.num_warps in (2, 4))
    sublayers = [Scale(c) for c in problem.scales]
    query, norm_weight = problem.parameters["query"], problem.parameters["norm_weight"]

    def chain(x: Tensor) -> Tensor:
        folded = (query * norm_weight).bfloat16()
        function = autograd.BlockAttentionResiduals
        return function.apply(x, folded, sublayers, 2 * problem.shape.block_size, problem.eps)

    return chain


class Scale(nn.Module):
    """A sublayer of the chain as a module."""

    def __init__(self, c: Tensor) -> None:
        super().__init__()
        self.c = c

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.c


def users_script(problem: Problem, path: Path) -> Chain:
    """A user's copy of another implementation: a Python file that defines `routing_chain(problem) -> chain`."""
    specification = importlib.util.spec_from_file_location("mhar_bench_script", path)
    if specification is None or specification.loader is None or not path.is_file():
        raise UnavailableError(f"no Python file at {path}")
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    if not hasattr(module, "routing_chain"):
        raise UnavailableError(f"{path} does not define routing_chain(problem)")
    return module.routing_chain(problem)


def limit_autotuning(module: ModuleType, num_configs: int, preferred: Callable[[Any], bool]) -> None:
    """Keep `num_configs` settings of every autotuned kernel, `preferred` ones first.

    FLA compiles anew for each number of sources: with all its settings that takes longer than the measurement.
    """
    for name in dir(module):
        kernel: Any = getattr(module, name)
        configs: Sequence[Any] | None = getattr(kernel, "configs", None)
        if configs is not None and hasattr(kernel, "early_config_prune"):
            kernel.configs = sorted(configs, key=lambda config: not preferred(config))[:num_configs]
