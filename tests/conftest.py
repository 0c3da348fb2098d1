"""Fixtures shared by all tests."""

import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    # Kernels are tested on CPU in Triton's interpreter; it must be chosen before triton is first imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of experiment data beside the checkout (`MHAR_DATA` names another); skips the test without it."""
    folder = Path(os.environ.get("MHAR_DATA", Path(__file__).parents[2] / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no experiment data in {folder}")
    return folder
