"""Processes, devices, and how a model is spread over them: one process, DDP, FSDP2 or HSDP."""

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from mhar.errors import ConfigurationError
from mhar.training.config import ParallelSection

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class World:
    """This process among the others. `save_group` carries checkpoints: training must not share its group with them."""

    rank: int
    size: int
    device: torch.device
    mode: str  # "none", "ddp", "fsdp" or "hsdp"
    save_group: Any

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def scalar(self, value: Tensor | float) -> Tensor:
        """The value as a tensor on the device, without waiting for the device as a copy would."""
        return value if isinstance(value, Tensor) else torch.full((), value, dtype=torch.float64, device=self.device)

    def sum(self, *values: Tensor | float) -> list[float]:
        """Sums of scalars over the ranks, in float64; waits for the device once."""
        tensor = torch.stack([self.scalar(value).detach().double() for value in values])
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor.tolist()

    def gather(self, value: T) -> list[T]:
        """The value of every rank, on every rank."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, self.save_group)
        return values

    def from_main(self, compute: Callable[[], T]) -> T:
        """What `compute` returns on the first rank, on every rank."""
        values = [compute() if self.is_main else None]
        if self.size > 1:
            dist.broadcast_object_list(values, 0, self.save_group)
        return cast(T, values[0])


@contextmanager
def start_world(config: ParallelSection) -> Generator[World]:
    """Join the processes that torchrun started (or be alone), and leave them at the end.

    Raises ConfigurationError for a device that is not there and a mode that the number of processes does not allow.
    """
    device = pick_device(config.device)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    mode = resolve_mode(config, size)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" and mode != "none" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if size > 1:
        dist.init_process_group(backend)
    else:
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield World(dist.get_rank(), size, device, mode, dist.new_group(backend="gloo"))
    finally:
        dist.destroy_process_group()


def pick_device(name: str) -> torch.device:
    """The device of this process; ConfigurationError when it is not there."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigurationError("parallel.device: no CUDA device is there, received 'cuda'; use cpu or auto")
    index = int(os.environ.get("LOCAL_RANK", "0"))
    if index >= torch.cuda.device_count():
        raise ConfigurationError(
            f"parallel.device: process {index} of this host has no GPU of its own: {torch.cuda.device_count()} there"
        )
    return torch.device("cuda", index)


def resolve_mode(config: ParallelSection, size: int) -> str:
    """The mode for `size` processes; ConfigurationError where the one asked for cannot be had."""
    if config.mode == "auto":
        return "none" if size == 1 else "fsdp"
    if config.mode == "none" and size > 1:
        raise ConfigurationError(f"parallel.mode none is for one process, received {size} processes")
    if config.mode in ("ddp", "hsdp") and size == 1:
        raise ConfigurationError(f"parallel.mode {config.mode} needs several processes (torchrun), received 1")
    if config.mode == "hsdp" and (config.shard is None or config.shard < 2 or size % config.shard):
        raise ConfigurationError(f"parallel.shard must divide the {size} processes and exceed 1, got {config.shard}")
    return config.mode


def spread(model: nn.Module, config: ParallelSection, world: World) -> nn.Module:
    """The model as the loop calls it: compiled and wrapped, and checked to be spread as was asked."""
    if compute_dtype(config) != torch.float32 and world.mode in ("none", "ddp"):
        _round_embedding(model, compute_dtype(config))
    units = [module for module in model.modules() if type(module).__name__ in unit_names(model)]
    if config.compile == "sublayer":
        _compile_parts(model, units, config.compile_mode)
    if world.mode in ("fsdp", "hsdp"):
        _shard(model, units, config, world)
    if config.compile == "model":
        model.compile(mode=config.compile_mode)
    if world.mode == "ddp":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    check_spread(model, world, config.shard)
    return model


def _compile_parts(model: Any, units: list[nn.Module], mode: str) -> None:
    """Compile what lies between two reads: sublayers, norms (where no read applies them itself) and the loss."""
    inside = {id(module) for unit in units for module in unit.modules()}
    norms = [m for m in model.modules() if type(m).__name__.endswith("RMSNorm") and id(m) not in inside]
    for module in (*units, *norms):
        module.compile(mode=mode)
    loss = "_loss" if hasattr(model, "_loss") else "loss_function"
    setattr(model, loss, torch.compile(getattr(model, loss), mode=mode))


def _round_embedding(model: Any, dtype: torch.dtype) -> None:
    """Let the residual stream start in `dtype`, as it does under FSDP; autocast alone leaves it in float32."""
    model.get_input_embeddings().register_forward_hook(lambda module, arguments, output: output.to(dtype))


def unit_names(model: nn.Module) -> set[str]:
    """Class names of the modules that are gathered and compiled one by one: what the model says must not be split."""
    return {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}


def _shard(model: nn.Module, units: list[nn.Module], config: ParallelSection, world: World) -> None:
    if not units:
        raise ConfigurationError(f"{type(model).__name__} names no _no_split_modules, which FSDP shards one by one")
    shape, names = ((world.size,), ("shard",))
    if world.mode == "hsdp" and config.shard is not None:
        shape, names = (world.size // config.shard, config.shard), ("replicate", "shard")
    options: dict[str, Any] = {"mesh": init_device_mesh(world.device.type, shape, mesh_dim_names=names)}
    options["mp_policy"] = MixedPrecisionPolicy(param_dtype=compute_dtype(config), reduce_dtype=torch.float32)
    for unit in units:
        fully_shard(unit, reshard_after_forward=config.reshard, **options)
    fully_shard(model, **options)


def check_spread(model: nn.Module, world: World, shard: int | None) -> None:
    """ConfigurationError unless every parameter is spread over the ranks as was asked."""
    if world.mode == "ddp":
        obtained = isinstance(model, DistributedDataParallel)
    elif world.mode in ("fsdp", "hsdp"):
        expected = (world.size,) if world.mode == "fsdp" else (world.size // (shard or 1), shard)
        obtained = all(_is_sharded(parameter, expected) for parameter in model.parameters())
    else:
        obtained = not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    if not obtained:
        raise ConfigurationError(f"parallel.mode {world.mode} was asked for, but the model is not spread that way")


def _is_sharded(parameter: Tensor, mesh_shape: tuple[int | None, ...]) -> bool:
    if not isinstance(parameter, DTensor) or tuple(parameter.device_mesh.shape) != mesh_shape:
        return False
    *outer, inner = parameter.placements
    return isinstance(inner, Shard) and all(isinstance(placement, Replicate) for placement in outer)


def whole(tensor: Tensor) -> Tensor:
    """The tensor in one piece; every rank must call it for a sharded one."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compute_dtype(config: ParallelSection) -> torch.dtype:
    """The dtype of matrix products."""
    return torch.bfloat16 if config.dtype == "bfloat16" else torch.float32


def autocast(config: ParallelSection, world: World) -> Any:
    """The context of a forward pass: autocast to bfloat16, unless FSDP casts the weights itself."""
    if compute_dtype(config) == torch.float32 or world.mode in ("fsdp", "hsdp"):
        return nullcontext()
    return torch.autocast(world.device.type, torch.bfloat16)


@contextmanager
def gradient_sync(model: nn.Module, enabled: bool) -> Generator[None]:
    """Whether backward passes inside exchange gradients: only the last micro-batch of a step needs to."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled)
        yield
    elif isinstance(model, DistributedDataParallel) and not enabled:
        with model.no_sync():
            yield
    else:
        yield
