"""A package imports only from packages above it in the list of docs/architecture.md."""

import ast
from pathlib import Path

import pytest

import mhar

PACKAGE = Path(mhar.__file__).parent
ORDER = [
    "errors",
    "runfile",
    "ops",
    "routing",
    "models",
    "conversion",
    "data",
    "evaluation",
    "training",
    "analysis",
    "bench",
    "demo",
    "commands",
    "cli",
]


def imported_packages(path: Path) -> set[str]:
    """First components after `mhar.` of every import in a file, imports inside functions included."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names} if node.module == "mhar" else {node.module}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("mhar.")} - {"__version__"}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_upwards(path):
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if part == "__init__":
        return
    assert part in ORDER, f"{part} has no place in the order of packages"
    below = {name for name in imported_packages(path) if name not in ORDER or ORDER.index(name) > ORDER.index(part)}
    assert not below, f"{part} may not import {sorted(below)}"


def test_every_command_exists():
    from mhar.cli import COMMANDS

    assert {p.stem for p in (PACKAGE / "commands").glob("*.py")} - {"__init__"} == set(COMMANDS)
