"""A small routed module, and one training step of it on one of two processes."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from helpers.routed import device
from mhar.routing import DepthRouter

M, D, H = 5, 16, 2


class Stack(nn.Module):
    """Linear sublayers around a router."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(D, D, bias=False) for _ in range(M - 1))
        self.router = DepthRouter(M, D, H, backend=backend, schedule=2)
        nn.init.normal_(self.router.query)
        self.to(device())

    def forward(self, x: Tensor) -> Tensor:
        history = self.router.start(x)
        for layer in self.layers:
            history.append(layer(history.read()))
        return history.read()


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in module.named_parameters()}


def train_one_step(rank: int, kind: str, folder: str) -> None:
    """Process `rank` of 2: the gradients of the averaged loss under DDP or FSDP2, saved by process 0."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    net = Stack("triton")
    batches = torch.randn(2, 2, D, generator=torch.Generator().manual_seed(1))
    if kind == "ddp":
        wrapped: nn.Module = nn.parallel.DistributedDataParallel(net)
    else:
        from torch.distributed.fsdp import fully_shard

        for layer in net.layers:
            fully_shard(layer)
        wrapped = fully_shard(net)
    wrapped(batches[rank]).sin().sum().backward()
    full = {n: g.full_tensor() if kind == "fsdp" else g for n, g in gradients(net).items()}
    if rank == 0:
        torch.save(full, Path(folder) / "gradients.pt")
    dist.destroy_process_group()
