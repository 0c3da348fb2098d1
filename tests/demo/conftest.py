"""One finished tiny run, shared by the tests that only read it."""

from pathlib import Path
from typing import NamedTuple

import pytest

from mhar.demo.folder import new_folder
from mhar.demo.outputs import Outcome
from mhar.demo.session import run_demo
from mhar.demo.settings import DemoSettings, preset


class Run(NamedTuple):
    folder: Path
    settings: DemoSettings
    outcome: Outcome


def run_tiny(folder: Path, **overrides) -> Run:
    settings = preset("tiny", **{"steps": 6, "num_evaluations": 2, **overrides})
    new_folder(folder, settings)
    return Run(folder, settings, run_demo(settings, folder, say=lambda line: None))


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Run:
    """Six steps of every variant, evaluated after steps 3 and 6. Read only."""
    return run_tiny(tmp_path_factory.mktemp("demo") / "run")


@pytest.fixture
def tiny_run():
    """`tiny_run(folder, **settings)` makes a run like `finished`."""
    return run_tiny
