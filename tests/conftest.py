"""Fixtures shared by all tests."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of experiment data beside the checkout (`MHAR_DATA` names another); skips the test without it."""
    folder = Path(os.environ.get("MHAR_DATA", Path(__file__).parents[2] / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no experiment data in {folder}")
    return folder
