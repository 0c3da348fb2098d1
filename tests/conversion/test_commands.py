"""`mhar convert` and `mhar revert` from the command line."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from helpers.golden import ROOT
from mhar.cli import main
from mhar.conversion import from_reference


def test_convert_and_revert(make_folder, tmp_path: Path, input_ids: Tensor, capsys: pytest.CaptureFixture[str]):
    base, out, back = make_folder("qwen3", "20KB", dtype=torch.bfloat16), tmp_path / "out", tmp_path / "back"
    assert main(["convert", str(base), str(out), "--num-heads", "4", "--block-size", "2"]) == 0
    printed = capsys.readouterr()
    assert "delta_block_mhar, 4 heads, +679 parameters, gates closed" in printed.out
    assert "bfloat16                   0         100.00%" in printed.out
    assert "weights 1/" in printed.err
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert model.config.routing_config.block_size == 2
    assert model.model.router.num_heads == 4

    assert main(["revert", str(out), str(back)]) == 0
    assert "qwen3, 37,216 parameters, no routing" in capsys.readouterr().out
    stock = AutoModelForCausalLM.from_pretrained(back, dtype="auto")
    assert torch.equal(stock(input_ids).logits, model(input_ids).logits)


@pytest.mark.parametrize("option, compared", [("--no-verify", False), ("--verify", True)])
def test_the_proof_can_be_chosen(make_folder, tmp_path: Path, capsys: pytest.CaptureFixture[str], option, compared):
    assert main(["convert", str(make_folder()), str(tmp_path / "out"), option]) == 0
    assert ("logits    not compared: not asked for" not in capsys.readouterr().out) == compared


@pytest.mark.parametrize(
    "options, message",
    [
        (["--variant", "delta_blok_mhar"], "did you mean 'delta_block_mhar'"),
        (["--variant", "mhar"], "which would change it"),
        (["--num-heads", "5"], "num_heads 5 for width 32 (divisors near it: 4, 8)"),
        (["--block-size", "9"], "block_size must not exceed the number of layers (4), got 9"),
        (["--block-size", "0"], "block_size must be a positive integer"),
        (["--variant", "delta_mhar", "--block-size", "2"], "variant 'delta_mhar' does not use --block-size 2"),
        (["--variant", "baseline", "--num-heads", "5"], "variant 'baseline' does not use --num-heads 5"),
        (["--device", "bogus"], "device 'bogus' cannot be used here"),
        (["--device", "meta"], "device 'meta' cannot be used here"),
        (["--revision", "main"], "a revision belongs to a hub name"),
        (["--from-reference", "--num-heads", "kv", "--no-verify"], "drop --num-heads, --verify"),
    ],
)
def test_mistakes_end_with_status_2_and_a_reason(make_folder, tmp_path: Path, capsys, options, message: str):
    assert main(["convert", str(make_folder()), str(tmp_path / "out"), *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_heads_that_are_no_number_are_named(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["convert", "base", "out", "--num-heads", "x"])
    assert """must be a positive integer or "kv", got 'x'""" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["file/out", "/proc/out"])
def test_an_output_that_cannot_be_made_is_named(make_folder, tmp_path: Path, capsys, place: str):
    (tmp_path / "file").write_text("mine")
    assert main(["convert", str(make_folder()), str(tmp_path / place), "--no-verify"]) == 2
    assert f"the output folder {tmp_path / place} cannot be made in" in capsys.readouterr().err


def test_an_output_inside_the_base_is_refused(make_folder, capsys):
    base = make_folder()
    assert main(["convert", str(base), str(base / "inside"), "--no-verify"]) == 2
    assert "must not lie in the checkpoint" in capsys.readouterr().err
    assert not (base / "inside").exists()


def test_revert_of_a_base_ends_with_status_2(make_folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["revert", str(make_folder()), str(tmp_path / "out")]) == 2
    assert "not a converted checkpoint" in capsys.readouterr().err


def test_a_released_layout_becomes_a_folder_of_ours(tmp_path: Path, input_ids: Tensor, capsys):
    released, out = ROOT / "a_delta", tmp_path / "out"
    assert main(["convert", "--from-reference", str(released), str(out)]) == 0
    assert "parameters" in capsys.readouterr().out
    expected, received = from_reference(released).state_dict(), AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert expected.keys() == received.keys()
    assert all(torch.equal(received[name], tensor) for name, tensor in expected.items())
    assert main(["convert", "--from-reference", str(released), str(out)]) == 2
    assert "must not exist or be empty" in capsys.readouterr().err
