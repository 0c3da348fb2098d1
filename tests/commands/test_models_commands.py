"""mhar generate, info and export."""

import io
import json
import shutil

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from helpers.corpora import save_tokenizer
from helpers.models import base_config, routed_model
from mhar import MharForCausalLM
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
    assert "must not exist or be empty" in error


def test_export_leaves_nothing_behind_when_it_fails(tmp_path, capsys):
    from mhar.models.families import causal_lm_class

    causal_lm_class("llama")(base_config("llama")).save_pretrained(tmp_path / "stock")
    status, _, error = run(capsys, "export", tmp_path / "stock", tmp_path / "out")
    assert status == 2
    assert "'llama'" in error
    assert str(tmp_path / "stock") in error
    assert "unfinished" not in error
    assert [file.name for file in tmp_path.iterdir()] == ["stock"]
    assert "no config.json" in run(capsys, "export", tmp_path / "nothing", tmp_path / "out")[2]


@pytest.fixture
def training_folder(checkpoint, tmp_path):
    """The checkpoint as training leaves it: optimizer state beside the weights."""
    folder = shutil.copytree(checkpoint, tmp_path / "training")
    save_file({"0.exp_avg": torch.zeros(1000)}, folder / "optimizer.safetensors")
    (folder / "training_state.json").write_text("{}")
    return folder


def test_info_counts_the_model_only(checkpoint, training_folder, capsys):
    counted, expected = (
        json.loads(run(capsys, "info", f, "--json")[1])["parameters"] for f in (training_folder, checkpoint)
    )
    assert counted == expected


def test_export_copies_what_serving_needs(training_folder, tmp_path, capsys):
    (training_folder / "README.md").write_text("licence")
    assert run(capsys, "export", training_folder, tmp_path / "served")[0] == 0
    files = {file.name for file in (tmp_path / "served").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json", "README.md"} <= files
    assert not {"optimizer.safetensors", "training_state.json"} & files


def test_export_of_a_sharded_checkpoint(tmp_path, capsys):
    model = routed_model("llama")
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert run(capsys, "export", tmp_path / "shards", tmp_path / "out")[0] == 0
    loaded = MharForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))


@pytest.mark.parametrize("command", ["info", "export", "generate"])
@pytest.mark.parametrize("content", ["{broken", "{}", "[]"])
def test_a_broken_configuration_is_named(checkpoint, tmp_path, capsys, command, content):
    folder = shutil.copytree(checkpoint, tmp_path / "broken")
    (folder / "config.json").write_text(content)
    arguments = {"info": (), "export": (tmp_path / "out",), "generate": ("--prompt", "a")}[command]
    status, _, error = run(capsys, command, folder, *arguments)
    assert status == 2
    assert str(folder) in error


@pytest.mark.parametrize("command", ["info", "generate"])
def test_weights_that_are_cut_short_are_named(checkpoint, tmp_path, capsys, command):
    folder = shutil.copytree(checkpoint, tmp_path / "short")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    status, _, error = run(capsys, command, folder, *(("--prompt", "a") if command == "generate" else ()))
    assert status == 2
    assert "cut short" in error


@pytest.mark.parametrize("family", ["bert", "gpt2", "gemma3"])
def test_info_about_other_architectures(family, tmp_path, capsys):
    AutoConfig.for_model(family).save_pretrained(tmp_path)
    save_file({"weight": torch.zeros(2, 3)}, tmp_path / "model.safetensors")
    status, text, _ = run(capsys, "info", tmp_path, "--json")
    assert status == 0
    assert json.loads(text)["model"] == family
    assert json.loads(text)["parameters"].startswith("6 ")


@pytest.mark.parametrize("option, value", [("--device", "bogus"), ("--device", "meta"), ("--tokenizer", "/nonexist")])
def test_generate_refuses_what_is_not_there(checkpoint, capsys, option, value):
    status, _, error = run(capsys, "generate", checkpoint, "--prompt", "a", option, value)
    assert status == 2
    assert value in error
