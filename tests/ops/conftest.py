"""Every kernel test runs on poisoned memory: what a kernel fails to write is NaN, not last week's right answer."""

import pytest
import torch


def _poisoned(allocate):
    def empty(*args, **kwargs):
        tensor = allocate(*args, **kwargs)
        with torch.no_grad():
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    return empty


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """torch.empty, torch.empty_like and Tensor.new_empty give NaN."""
    monkeypatch.setattr(torch, "empty", _poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", _poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", _poisoned(torch.Tensor.new_empty))


@pytest.fixture
def device() -> str:
    """The GPU where there is one; else the CPU, where the kernels run in Triton's interpreter."""
    return "cuda" if torch.cuda.is_available() else "cpu"
