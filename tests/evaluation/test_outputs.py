"""Outputs are checked before the work, and the check leaves nothing behind."""

import os

import pytest

from mhar.cli import main
from mhar.errors import InputError
from mhar.evaluation.outputs import check_file, check_folder


def test_a_folder_that_can_be_made_is_accepted_and_not_made(tmp_path):
    check_folder(tmp_path / "a" / "b")
    check_file(tmp_path / "a" / "b.html")
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "a" / "b"):
        with pytest.raises(InputError, match=f"cannot be made: {tmp_path / 'file'} is a file"):
            check_folder(folder)
    with pytest.raises(InputError, match="must be a file"):
        check_file(tmp_path)
    with pytest.raises(InputError, match="cannot be made: File name too long"):
        check_folder(tmp_path / ("x" * 300))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_named(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(InputError, match="no permission in"):
        check_folder(tmp_path / "out")


@pytest.mark.parametrize(
    "command",
    [
        ["evaluate", "no-model", "--heldout", "no-data", "--output"],
        ["compare", "no-a", "no-b", "--output"],
        ["report", "no-run", "--output"],
        ["report", "no-run", "--figures"],
    ],
    ids=lambda command: " ".join((command[0], command[-1])),
)
def test_commands_check_their_output_first(command, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert main([*command, str(tmp_path / "file" / "out")]) == 2
    assert "file is a file" in capsys.readouterr().err
