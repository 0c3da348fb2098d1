"""A wheel built from the tree carries the novels and runs the demo by itself."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from mhar.demo.corpus import NOVELS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return path


def test_the_novels_their_licence_note_and_the_report_assets_are_inside(wheel):
    with zipfile.ZipFile(wheel) as archive:
        sizes = {info.filename: info.file_size for info in archive.infolist()}
    source = ROOT / "src" / "mhar"
    wanted = [source / "demo" / "novels" / f"{name}.txt" for name in NOVELS]
    wanted += [source / "demo" / "novels" / "README.md", *(source / "analysis" / "assets").iterdir()]
    for path in wanted:
        assert sizes[path.relative_to(ROOT / "src").as_posix()] == path.stat().st_size
    assert not any("tests/" in name for name in sizes)


@pytest.mark.slow
def test_the_installed_wheel_runs_the_demo(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "OMP_NUM_THREADS": "1"}
    script = "import mhar, sys; from mhar.cli import main; print(mhar.__file__); sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", script, "demo", "--preset", "tiny", "--steps", "2", "--output", "run"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.startswith(str(tmp_path / "site"))
    assert (tmp_path / "run" / "report.html").is_file()
