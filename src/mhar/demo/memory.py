"""Peak memory of one training step, from PyTorch's own storages: the same number on every run and every machine."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of the tensor storages that operators return inside the context.

    Attributes:
        live: bytes alive now; peak: the largest `live` so far. Scratch memory inside an operator is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in given:
                self._add(leaf.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known[key] = storage.nbytes()
        self.live += self._known[key]
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._release, key)

    def _release(self, key: int) -> None:
        self.live -= self._known.pop(key)


def peak_bytes(step: Callable[[], object], device: torch.device) -> int:
    """Bytes that `step` holds at its peak beyond what was allocated before it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    with LiveStorages() as storages:
        step()
    return storages.peak


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of a model's parameters and buffers and of its optimizer's state."""
    tensors: Iterable[Tensor] = (
        *model.parameters(),
        *model.buffers(),
        *(x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)),
    )
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
