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
from torch import Tensor

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
    """Raise UnavailableError unless the problem has one head and sublayer sources."""
    if problem.shape.num_heads != 1:
        raise UnavailableError(f"one head only, the shape has {problem.shape.num_heads}")
    if problem.config.read != "replace":
        raise UnavailableError("no delta form")


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


def flash_attn_res(problem: Problem) -> Chain:
    """flash-attn-res computes Kimi's block form inside an autograd function of its own: not a chain of dense reads."""
    raise UnavailableError(
        "flash-attn-res 0.1.12 has the block form only (H = 1, sums of blocks); these chains have a source per sublayer"
        if problem.config.sources == "sublayer"
        else "flash-attn-res 0.1.12 has one head and no delta form"
    )


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
