"""mhar generate, info and export."""

import io
import json

import pytest
import torch

from helpers.corpora import save_tokenizer
from helpers.models import base_config, routed_model
from mhar.cli import main


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    routed_model("qwen3", "delta_block_mhar", eos_token_id=None, vocab_size=22).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def run(capsys, *arguments):
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_generate_continues_the_prompt(checkpoint, capsys):
    arguments = ("generate", checkpoint, "--prompt", "the cat", "--max-new-tokens", 6)
    status, greedy, _ = run(capsys, *arguments, "--greedy")
    assert status == 0
    assert greedy.startswith("the cat")
    assert len(greedy.split()) > 2
    assert run(capsys, *arguments, "--greedy")[1] == greedy
    assert run(capsys, *arguments, "--seed", 3)[1] == run(capsys, *arguments, "--seed", 3)[1]


def test_generate_reads_standard_input(checkpoint, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("the cat\n"))
    status, text, _ = run(capsys, "generate", checkpoint, "--greedy", "--max-new-tokens", 3)
    assert status == 0
    assert text.startswith("the cat")


def test_generate_from_nothing(checkpoint, capsys):
    status, text, _ = run(capsys, "generate", checkpoint, "--prompt", "", "--max-new-tokens", 5)
    assert status == 0
    assert text.split()


@pytest.mark.parametrize(
    "option, value, rule",
    [
        ("--max-new-tokens", "0", "positive, got 0"),
        ("--temperature", "-1", "positive, got -1.0"),
        ("--top-p", "1.5", "in (0, 1], got 1.5"),
    ],
)
def test_generate_refuses_bad_numbers(checkpoint, capsys, option, value, rule):
    status, _, error = run(capsys, "generate", checkpoint, "--prompt", "a", option, value)
    assert status == 2
    assert f"{option} must be {rule}" in error


def test_generate_without_checkpoint_or_tokenizer(tmp_path, capsys):
    assert "no config.json" in run(capsys, "generate", tmp_path, "--prompt", "a")[2]
    routed_model("llama").save_pretrained(tmp_path)
    assert "no tokenizer: name its folder with --tokenizer" in run(capsys, "generate", tmp_path, "--prompt", "a")[2]


def test_info_about_the_machine(capsys):
    status, text, _ = run(capsys, "info")
    assert status == 0
    for word in ("torch", torch.__version__, "transformers", "backend triton", "qwen3_moe", "extra train"):
        assert word in text
    values = json.loads(run(capsys, "info", "--json")[1])
    assert values["backend reference"].startswith("yes")


def test_info_about_a_checkpoint(checkpoint, capsys):
    values = json.loads(run(capsys, "info", checkpoint, "--json")[1])
    model = routed_model("qwen3", "delta_block_mhar", eos_token_id=None, vocab_size=22)
    total = sum(p.numel() for p in model.parameters())
    routing = sum(p.numel() for p in model.model.router.parameters())
    assert values["parameters"].startswith(f"{total:,} (F32)")
    assert values["of them routing"].startswith(f"{routing:,} ")
    assert values["routing"] == "delta_block_mhar: read add, sources block, 2 heads"
    assert values["block size"] == "2 layers"
    assert values["gate / null source"] == "scalar / yes"
    assert values["sites"] == "7 reads, 5 with parameters"
    assert values["tokenizer"] == "yes"


def test_info_about_a_stock_checkpoint(tmp_path, capsys):
    from mhar.models.families import causal_lm_class

    causal_lm_class("llama")(base_config("llama")).save_pretrained(tmp_path)
    values = json.loads(run(capsys, "info", tmp_path, "--json")[1])
    assert values["model"] == "llama"
    assert "routing" not in values


def test_info_without_a_checkpoint(tmp_path, capsys):
    status, _, error = run(capsys, "info", tmp_path)
    assert status == 2
    assert "no config.json" in error


def test_export(checkpoint, tmp_path, capsys):
    out = tmp_path / "served"
    status, text, _ = run(capsys, "export", checkpoint, out)
    assert status == 0
    assert "auto_map" in text
    assert set(json.loads((out / "config.json").read_text())["auto_map"]) == {
        "AutoConfig",
        "AutoModel",
        "AutoModelForCausalLM",
    }
    assert {"model.safetensors", "tokenizer.json", "modeling_mhar.py"} <= {file.name for file in out.iterdir()}
    assert [file.name for file in tmp_path.iterdir()] == ["served"]
    status, _, error = run(capsys, "export", checkpoint, out)
    assert status == 2
    assert "does not exist yet" in error


def test_export_leaves_nothing_behind_when_it_fails(tmp_path, capsys):
    from mhar.models.families import causal_lm_class

    causal_lm_class("llama")(base_config("llama")).save_pretrained(tmp_path / "stock")
    status, _, error = run(capsys, "export", tmp_path / "stock", tmp_path / "out")
    assert status == 2
    assert "'llama'" in error
    assert [file.name for file in tmp_path.iterdir()] == ["stock"]
    assert "no config.json" in run(capsys, "export", tmp_path / "nothing", tmp_path / "out")[2]
