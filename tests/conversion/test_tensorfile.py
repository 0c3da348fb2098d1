"""Safetensors files copied as bytes, judged by the format's own reader and writer."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mhar.conversion import tensorfile
from mhar.conversion.tensorfile import copy_tensors, open_tensor_file
from mhar.errors import CheckpointError


def tensors() -> dict[str, Tensor]:
    """Every floating dtype, an integer, a scalar, an empty tensor, sizes that are no multiple of anything, ö."""
    generator = torch.Generator().manual_seed(0)
    return {
        "b.weight": torch.randn(7, 5, generator=generator),
        "a.weight": torch.randn(3, 3, generator=generator).bfloat16(),
        "half": torch.randn(5, generator=generator).half(),
        "double": torch.randn(2, 3, generator=generator, dtype=torch.float64),
        "ids": torch.arange(9),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "größe": torch.randn(1, generator=generator).bfloat16(),
    }


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.safetensors"
    save_file(tensors(), path, metadata={"format": "pt"})
    return path


def keep_all(name: str) -> bool:
    return True


@pytest.mark.parametrize("chunk", [8, 16 * 2**20])
def test_a_whole_copy_is_the_same_file(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int):
    monkeypatch.setattr(tensorfile, "CHUNK_BYTES", chunk)
    target = tmp_path / "target.safetensors"
    assert copy_tensors(open_tensor_file(source), target, keep=keep_all) == []
    assert target.read_bytes() == source.read_bytes()


def test_added_and_dropped_again_is_the_same_file(source: Path, tmp_path: Path):
    """Added tensors of every dtype leave the others as they are, and dropping them gives the first file back."""
    extra = {"router.query": torch.randn(3, 4).bfloat16(), "router.gate": torch.zeros(3), "router.ids": torch.arange(2)}
    wider, back = tmp_path / "wider.safetensors", tmp_path / "back.safetensors"
    copy_tensors(open_tensor_file(source), wider, keep=keep_all, extra=extra)
    loaded = load_file(wider)
    assert loaded.keys() == tensors().keys() | extra.keys()
    for name, expected in {**tensors(), **extra}.items():
        assert loaded[name].dtype == expected.dtype
        assert torch.equal(loaded[name], expected), name
    copy_tensors(open_tensor_file(wider), back, keep=lambda name: not name.startswith("router."))
    assert back.read_bytes() == source.read_bytes()


def test_one_tensor_is_read_alone(source: Path):
    file = open_tensor_file(source)
    for name, expected in tensors().items():
        assert torch.equal(file.read(name), expected), name
    with pytest.raises(CheckpointError, match="no tensor 'other'"):
        file.read("other")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_weights_that_are_not_finite_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, value: float
):
    """Also in the last element, which is alone in its chunk."""
    monkeypatch.setattr(tensorfile, "CHUNK_BYTES", 64)
    bad = torch.ones(129, dtype=dtype)
    bad[-1] = value
    save_file({"good": torch.ones(9), "bad": bad, "mask": torch.ones(3, dtype=torch.bool)}, tmp_path / "s")
    assert copy_tensors(open_tensor_file(tmp_path / "s"), tmp_path / "t", keep=keep_all) == ["bad"]


def cut(data: bytes) -> bytes:
    return data[:-1]


def lengthened(data: bytes) -> bytes:
    return data + b"\0"


def no_json(data: bytes) -> bytes:
    return data[:8] + b"#" + data[9:]


@pytest.mark.parametrize(
    "damage, message",
    [
        (cut, "cut short"),
        (lengthened, "cut short"),
        (no_json, "not JSON"),
        (lambda data: b"PK\x03\x04" + data, "not a whole safetensors file"),  # a pickled checkpoint is a zip file
        (lambda data: b"", "not a whole safetensors file"),
        (lambda data: data.replace(b'"shape":[7,5]', b'"shape":[7,4]'), "damaged: tensor 'b.weight'"),
        (lambda data: data.replace(b'"dtype":"F32"', b'"dtype":"F8 "', 1), "quantised"),
        (lambda data: data.replace(b'"shape":[7,5]', b'"shap" :[7,5]'), "no readable entry"),
    ],
)
def test_damaged_files_are_refused(source: Path, damage, message: str):
    source.write_bytes(damage(source.read_bytes()))
    with pytest.raises(CheckpointError, match=message):
        open_tensor_file(source)
