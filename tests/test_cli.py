"""The command table: help, version, and names that do not exist."""

import subprocess
import sys

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


def run_patched(code):
    """`mhar info` whose command is replaced by `code`, as a process whose output nobody reads."""
    script = f"""
import sys, types
def main(argv):
    {code}
sys.modules["mhar.commands.info"] = types.SimpleNamespace(main=main)
from mhar.cli import main
raise SystemExit(main(["info"]))
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        return process.stderr.read().decode(), process.wait()


def test_ctrl_c_is_one_line():
    assert run_patched("raise KeyboardInterrupt") == ("\nmhar info: interrupted\n", 130)


def test_a_closed_pipe_is_no_error():
    assert run_patched("print('x' * 1_000_000)") == ("", 141)
    assert run_patched("print('x'); return 0") == ("", 141)
