"""Result folders appear whole or not at all."""

import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from mhar.conversion.folder import check_target, new_folder
from mhar.errors import CheckpointError

Usage = namedtuple("Usage", "total used free")


def test_success_leaves_only_the_result(tmp_path: Path):
    with new_folder(tmp_path / "sub" / "out") as partial:
        (partial / "nested").mkdir()
        (partial / "nested" / "file").write_text("x")
        assert not (tmp_path / "sub" / "out").exists()
    assert (tmp_path / "sub" / "out" / "nested" / "file").read_text() == "x"
    assert os.listdir(tmp_path / "sub") == ["out"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_failure_and_interruption_leave_nothing(tmp_path: Path, error: type[BaseException]):
    def fail() -> None:
        with new_folder(tmp_path / "out") as partial:
            (partial / "file").write_text("x")
            raise error

    with pytest.raises(error):
        fail()
    assert os.listdir(tmp_path) == []


def test_an_empty_folder_is_replaced(tmp_path: Path):
    (tmp_path / "out").mkdir()
    check_target(tmp_path / "out", 1)
    with new_folder(tmp_path / "out") as partial:
        (partial / "file").write_text("x")
    assert os.listdir(tmp_path / "out") == ["file"]


def test_the_result_is_as_readable_as_any_new_folder(tmp_path: Path):
    (tmp_path / "usual").mkdir()
    with new_folder(tmp_path / "out"):
        pass
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_a_killed_process_leaves_no_result_and_its_leftover_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    code = (
        "import sys, time; from pathlib import Path; from mhar.conversion.folder import new_folder\n"
        "with new_folder(Path(sys.argv[1])) as p: (p / 'f').write_text('x'); print('in', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "out")], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "in\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10, 9, 1))
    with pytest.raises(CheckpointError, match=r"safe to delete: .*\.out\..*\.partial"):
        check_target(tmp_path / "out", 2)


@pytest.mark.parametrize("occupied", ["file", "folder"])
def test_an_occupied_target_is_refused(tmp_path: Path, occupied: str):
    out = tmp_path / "out"
    if occupied == "file":
        out.write_text("mine")
    else:
        out.mkdir()
        (out / "mine").write_text("mine")
    with pytest.raises(CheckpointError, match="must not exist or be empty"):
        check_target(out, 1)


def test_too_little_disk_space_is_found_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 10**12 - 10**9, 10**9))
    check_target(tmp_path / "missing" / "out", 10**9)
    with pytest.raises(CheckpointError, match=r"needs 2\.50 GB, 1\.00 GB are free"):
        check_target(tmp_path / "missing" / "out", 2_500_000_000)
    assert not (tmp_path / "missing").exists()
