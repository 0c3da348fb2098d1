"""The command table: help, version, and names that do not exist."""

import mhar
from mhar.cli import COMMANDS, main


def test_usage_lists_every_command(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"mhar {mhar.__version__}\n"


def test_unknown_command_suggests_the_nearest(capsys):
    assert main(["covert"]) == 2
    assert "unknown command 'covert'; did you mean 'convert'" in capsys.readouterr().err
