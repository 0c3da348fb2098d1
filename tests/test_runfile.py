"""Run files: typing, overrides, messages, and the round trip."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from mhar import runfile
from mhar.errors import ConfigurationError


@dataclass(frozen=True)
class Optimizer:
    lr: float = 1e-3
    betas: tuple[float, ...] = (0.9, 0.95)
    kind: Literal["adamw", "sgd"] = "adamw"


@dataclass(frozen=True)
class Run:
    steps: int
    out: Path = Path("runs/x")
    heads: int | Literal["kv"] = "kv"
    limit: float | None = None
    compile: bool = False
    optimizer: Optimizer = field(default_factory=Optimizer)
    shape: dict[str, Any] = field(default_factory=dict)


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def test_values_are_typed_and_nested(tmp_path: Path) -> None:
    path = written(
        tmp_path, "steps: 1e3\nheads: 4\nout: a/b\noptimizer: {lr: 1, betas: [0.8, 0.9]}\nshape: {eps: 1e-6}"
    )
    run = runfile.load(Run, path)
    assert run == Run(1000, Path("a/b"), 4, None, False, Optimizer(1.0, (0.8, 0.9)), {"eps": 1e-6})
    assert isinstance(run.steps, int)
    assert isinstance(run.optimizer.lr, float)


def test_dotted_overrides_win_over_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "steps: 1\noptimizer: {lr: 1e-2}")
    overrides = ["optimizer.lr=3e-4", "--compile=true", "shape.hidden_size=64", "heads=kv", "limit=null"]
    run = runfile.load(Run, path, overrides)
    assert (run.optimizer.lr, run.compile, run.shape, run.heads, run.limit) == (
        3e-4,
        True,
        {"hidden_size": 64},
        "kv",
        None,
    )


def test_the_resolved_file_loads_to_an_equal_object(tmp_path: Path) -> None:
    run = runfile.load(Run, None, ["steps=5", "optimizer.betas=[0.5, 0.6]", "out=here", "shape.theta=1e4"])
    runfile.save(run, tmp_path / "resolved.yaml")
    assert runfile.load(Run, tmp_path / "resolved.yaml") == run
    assert [path.name for path in tmp_path.iterdir()] == ["resolved.yaml"]


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["step=1"], "unknown key 'step'; did you mean 'steps'"),
        (["steps=1", "optimizer.lrr=1"], r"unknown key 'optimizer\.lrr'; did you mean 'lr'"),
        (["steps=1", "optimizer.lr=fast"], "optimizer.lr: expected float, received 'fast'"),
        (["steps=1.5"], "steps: expected int, received 1.5"),
        (["steps=.nan"], "steps: expected int, received nan"),
        (["steps=.inf"], "steps: expected int, received inf"),
        (["steps=1", "compile=1"], "compile: expected bool, received 1"),
        (["steps=1", "optimizer.kind=adam"], "unknown value 'adam'; did you mean 'adamw'"),
        (["steps=1", "optimizer.betas=[0.9, x]"], r"optimizer\.betas\[1\]: expected float, received 'x'"),
        (["steps=1", "heads=all"], "heads: expected int | .*Literal.*, received 'all'"),
        (["steps=1", "steps.x=2"], "'steps' is a value, not a section"),
        (["steps"], "written name=value, received 'steps'"),
        ([], "steps has no default and must be given"),
        (["steps=[1"], "not valid YAML"),
    ],
)  # fmt: skip
def test_mistakes_are_named(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        runfile.load(Run, None, overrides)


@pytest.mark.parametrize(
    "text, message",
    [("steps: 1\nsteps: 2", "steps given twice"), ("- 1", "is a mapping"), ("a: [", "not valid YAML")],
)
def test_malformed_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        runfile.load(Run, written(tmp_path, text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot read the run file .*none\.yaml"):
        runfile.load(Run, tmp_path / "none.yaml")


def test_describe_lists_every_dotted_name() -> None:
    lines = runfile.describe(Run)
    assert "steps: int (required)" in lines
    assert "optimizer.lr: float = 0.001" in lines


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "state.json"
    runfile.write_atomically(target, "old")
    with pytest.raises(UnicodeEncodeError):
        runfile.write_atomically(target, "new \ud800")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]
