"""`mhar demo` as a person runs it: options, refusals, Ctrl-C."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mhar.cli import main
from mhar.demo.folder import new_folder
from mhar.demo.metrics import read_metrics
from mhar.demo.settings import VARIANTS


def demo(*options) -> int:
    return main(["demo", "--preset", "tiny", "--device", "cpu", *map(str, options)])


def test_it_prints_the_table_a_sample_of_each_and_the_report(tmp_path, capsys):
    assert demo("--steps", 2, "--output", tmp_path / "run") == 0
    printed = capsys.readouterr().out
    assert (tmp_path / "run" / "table.txt").read_text() in printed
    assert "One seed (0)" in printed
    assert all(f"[{variant}] She had always" in printed for variant in VARIANTS)
    assert str(tmp_path / "run" / "report.html") in printed


def test_progress_shows_loss_speed_and_time_left(tmp_path, capfd):
    demo("--steps", 2, "--output", tmp_path / "run")
    progress = capfd.readouterr().err
    assert "loss" in progress
    assert "tokens/s" in progress
    assert re.search(r"<\d\d:\d\d", progress)  # tqdm's "elapsed<left"


@pytest.mark.parametrize(
    "options, message",
    [
        (["--preset", "smal"], "unknown preset 'smal'; did you mean 'small'"),
        (["--steps", "0"], "steps must be a positive integer, got 0"),
        (["--device", "gpu"], "device 'gpu' cannot be used here"),
        (["--device", "meta"], "device 'meta' cannot be used here"),
        (
            ["--seed", "99999999999999999999"],
            "seed must be an integer from 0 to 4294967295, got 99999999999999999999",
        ),
    ],
)
def test_wrong_options_are_named(options, message, tmp_path, capsys):
    assert demo("--output", tmp_path / "run", *options) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_an_occupied_folder_is_refused_resumed_or_overwritten(finished, tmp_path, capsys):
    output = tmp_path / "run"
    assert demo("--steps", 1, "--output", output) == 0
    assert demo("--steps", 1, "--output", output) == 2
    assert "already holds another run" in capsys.readouterr().err
    assert demo("--steps", 2, "--output", output, "--resume") == 2
    assert "its steps is 1, got 2" in capsys.readouterr().err
    assert demo("--output", output, "--resume") == 0
    assert demo("--steps", 2, "--output", output, "--overwrite") == 0
    assert read_metrics(output / "mhar" / "metrics.jsonl")[-1]["step"] == 2


def test_overwrite_leaves_the_users_own_files(finished, tmp_path):
    stored = shutil.copytree(finished.folder, tmp_path / "stored")
    own = [stored / name for name in ("my_notes.txt", "mydata/numbers.csv", "mhar/notes.txt", "tokenizer/mine.json")]
    for file in own:
        file.parent.mkdir(exist_ok=True)
        file.write_text("mine")
    link = tmp_path / "link"
    link.symlink_to(stored)
    new_folder(link, finished.settings, overwrite=True)
    assert link.is_symlink()
    left = {file for file in stored.rglob("*") if file.is_file()}
    assert left == {*own, stored / "run.yaml"}
    assert not (stored / "baseline").exists()


@pytest.mark.parametrize("place", ["file/run", "/proc/run"])
def test_an_output_that_cannot_be_made_is_named(place, tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    assert demo("--output", tmp_path / place) == 2
    assert f"the output folder {tmp_path / place} cannot be written" in capsys.readouterr().err


def test_ctrl_c_before_the_folder_is_made_says_so(tmp_path, capsys, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("mhar.demo.folder.new_folder", interrupted)
    assert demo("--output", tmp_path / "run") == 130
    printed = capsys.readouterr().out
    assert "nothing was written yet" in printed
    assert "--resume" not in printed


@pytest.mark.resume
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_leaves_a_usable_folder_that_resumes(number, tmp_path):
    output = tmp_path / "run"
    command = [sys.executable, "-m", "mhar.cli", "demo", "--preset", "tiny", "--steps", "400", "--output", str(output)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        wait_for(output / "baseline" / "metrics.jsonl", process)
        process.send_signal(number)
        printed, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130, printed
    assert "--resume" in printed
    assert (output / "table.txt").read_text() in printed
    assert (output / "report.html").exists()
    last = read_metrics(output / "baseline" / "metrics.jsonl")[-1]["step"]
    assert (output / "baseline" / f"checkpoint-{last}").is_dir()
    assert last < 400


def wait_for(path: Path, process: "subprocess.Popen[str]", timeout: float = 120) -> None:
    """Until `path` has some lines."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and process.poll() is None:
        if path.is_file() and len(read_metrics(path)) >= 3:
            return
        time.sleep(0.05)
    raise AssertionError(f"no {path.name} after {timeout} s; exit status {process.poll()}")
