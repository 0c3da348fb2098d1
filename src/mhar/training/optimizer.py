"""AdamW with parameter groups by role, and a float32 average of the weights."""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from mhar.errors import ConfigurationError
from mhar.training.config import GROUPS, GroupSection, OptimizerSection


def group_of(name: str, parameter: Tensor) -> str:
    """The role of a parameter: "routing", "embeddings" (a tied head with them), "norms", "biases" or "matrices"."""
    parts = name.split(".")
    if "router" in parts:
        return "routing"
    if any("embed" in part for part in parts):
        return "embeddings"
    if any("norm" in part for part in parts):
        return "norms"
    return "biases" if parts[-1] == "bias" or parameter.ndim < 2 else "matrices"


def build_optimizer(model: nn.Module, config: OptimizerSection, device: torch.device) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; fused on a GPU. Each group keeps its `lr_scale` for `set_lr`."""
    members: dict[str, list[nn.Parameter]] = {name: [] for name in GROUPS}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            members[group_of(name, parameter)].append(parameter)
    if not any(members.values()):
        raise ConfigurationError("no parameter is trainable (frozen_base needs a model with routing)")
    groups: list[dict[str, Any]] = []
    for name, parameters in members.items():
        section = config.groups.get(name, GroupSection())
        decay = config.weight_decay if section.weight_decay is None else section.weight_decay
        if parameters:
            groups.append({"params": parameters, "weight_decay": decay, "lr_scale": section.lr_scale})
    betas = (config.betas[0], config.betas[1])
    return torch.optim.AdamW(groups, config.lr, betas, config.eps, fused=device.type == "cuda" or None)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set every group's learning rate to `lr` times its scale."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


class WeightAverage:
    """Exponential moving average of the trainable weights, in float32, sharded as they are.

    average <- decay * average + (1 - decay) * weight after each update; in bfloat16 a decay of 0.999 would never move.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay, self.model = decay, model
        self.weights = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.averages = {name: parameter.detach().clone() for name, parameter in self.weights.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take in the current weights."""
        averages, weights = _local(self.averages.values()), _local(self.weights.values())
        torch._foreach_lerp_(averages, weights, 1 - self.decay)  # pyright: ignore[reportPrivateImportUsage]

    @contextmanager
    def swapped(self) -> Generator[None]:
        """The model holds the averages inside the context."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for weight, average in zip(_local(self.weights.values()), _local(self.averages.values()), strict=True):
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # what is still gathered from the last forward holds the old values


def _local(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach() for tensor in tensors]
