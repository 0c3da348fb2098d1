"""Checkpoints converted folder to folder and back, for every family."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

from mhar import MharForCausalLM, RoutingConfig
from mhar.conversion import convert_checkpoint, revert_checkpoint
from mhar.conversion import stream as stream_module
from mhar.conversion.checkpoint import hub_revision
from mhar.errors import CheckpointError
from mhar.models.families import FAMILIES

ROUTING = RoutingConfig.named("delta_block_mhar", block_size=2)


def all_tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("shards", ["5GB", "20KB"], ids=["one-file", "sharded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back(make_folder, tmp_path: Path, family: str, shards: str):
    """Converted: the base's tensors and `router.*`, proved on logits. Reverted: the base's files, byte for byte."""
    base, out, back = make_folder(family, shards, dtype=torch.bfloat16), tmp_path / "out", tmp_path / "back"
    report = convert_checkpoint(base, out, ROUTING)
    before, after = all_tensors(base), all_tensors(out)
    assert {name for name in after if name not in before} == {
        f"model.router.{name}" for name in ("query", "norm_weight", "gate", "null_source")
    }
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        assert torch.equal(after[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert report.verification is not None
    assert [(c.dtype, c.identical) for c in report.verification.comparisons] == [("float32", True), ("bfloat16", True)]

    revert_checkpoint(out, back)
    files = sorted(path.name for path in base.iterdir())
    assert sorted(path.name for path in back.iterdir()) == files
    for name in files:
        assert (back / name).read_bytes() == (base / name).read_bytes(), name


@pytest.mark.parametrize("family", FAMILIES)
def test_auto_classes_load_the_result(make_folder, tmp_path: Path, input_ids: Tensor, family: str):
    convert_checkpoint(make_folder(family, "20KB", tie_word_embeddings=True), tmp_path / "out", ROUTING, verify=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype="auto")
    assert type(model) is MharForCausalLM
    assert torch.equal(model(input_ids).logits, base(input_ids).logits)
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype="auto")
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


REMOTE = """
import sys, torch
sys.modules["mhar"] = None  # not installed
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True, dtype=torch.float32)
torch.save(model(torch.arange(1, 30)[None]).logits, sys.argv[2])
"""


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_the_result_runs_where_the_library_is_not_installed(
    make_folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
):
    """Through `trust_remote_code`, in a new process: the code beside the weights is enough, experts included."""
    convert_checkpoint(make_folder(family), tmp_path / "out", ROUTING, verify=False)
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    command = [sys.executable, "-c", REMOTE, str(tmp_path / "out"), str(tmp_path / "logits")]
    subprocess.run(command, check=True, capture_output=True)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "base")(torch.arange(1, 30)[None]).logits
    assert torch.equal(torch.load(tmp_path / "logits"), expected)


def test_the_report_is_stored_and_printed(make_folder, tmp_path: Path):
    report = convert_checkpoint(make_folder(dtype=torch.bfloat16), tmp_path / "out", ROUTING)
    stored = json.loads((tmp_path / "out" / "conversion_report.json").read_text())
    assert stored == json.loads(json.dumps(report.to_dict()))
    assert stored["verification"]["passed"] is True
    assert stored["base"] == {"name": "base", "revision": None, "model_type": "llama", "num_parameters": 37152}
    assert stored["routing"]["num_heads"] == 2
    # Layer 0's attention reads nothing and the end is no site: 7 of 9 sites; query, gain and null source of 32, a gate.
    assert stored["num_routing_parameters"] == 7 * (3 * 32 + 1)
    lines = "\n".join(report.lines())
    assert "+679 parameters" in lines
    assert "float32                    0         100.00%" in lines


def test_the_proof_fails_for_another_function(make_folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A router that does not start closed is caught, and nothing is left behind."""

    def opened(config, checkpoint):
        tensors = closed_router(config, checkpoint)
        tensors["model.router.gate"].fill_(1e-3)
        return tensors

    closed_router = stream_module._closed_router
    monkeypatch.setattr(stream_module, "_closed_router", opened)
    base = make_folder()
    with pytest.raises(CheckpointError, match=r"float32 logits differ.*max_abs_difference=\d"):
        convert_checkpoint(base, tmp_path / "out", ROUTING)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base"]


def test_a_model_too_large_for_memory_is_not_compared_unless_asked(make_folder, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(stream_module, "available_bytes", lambda device: 1000)
    base = make_folder()
    report = convert_checkpoint(base, tmp_path / "a", ROUTING)
    assert report.verification is None
    assert "0.0 GB of memory are free" in "\n".join(report.lines())
    assert convert_checkpoint(base, tmp_path / "b", ROUTING, verify=True).verification is not None
    report = convert_checkpoint(base, tmp_path / "c", ROUTING, verify=False)
    assert json.loads((tmp_path / "c" / "conversion_report.json").read_text())["verification"] == {
        "skipped": "not asked for"
    }


def test_side_files_licence_and_card(make_folder, tmp_path: Path):
    base = make_folder()
    GenerationConfig(temperature=0.5, do_sample=True).save_pretrained(base)
    (base / "tokenizer_config.json").write_text("{}")
    (base / "LICENSE.txt").write_text("terms")
    (base / "chat_template.jinja").write_text("{{ messages }}")
    (base / "optimizer.pt").write_bytes(b"large")
    (base / "README.md").write_text(
        "---\nlicense: other\nlicense_name: llama3.1\nlicense_link: LICENSE\nlanguage: en\n---\nx"
    )
    report = convert_checkpoint(base, tmp_path / "out", ROUTING, verify=False)
    for name in ("generation_config.json", "tokenizer_config.json", "LICENSE.txt", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (base / name).read_bytes()
    assert not (tmp_path / "out" / "optimizer.pt").exists()
    card = (tmp_path / "out" / "README.md").read_text()
    for line in ("license: other", "license_name: llama3.1", "license_link: LICENSE", "language: en", "- mhar"):
        assert line in card.splitlines()
    assert "Base licence: llama3.1" in card
    assert report.base["license_name"] == "llama3.1"


def test_a_base_without_a_card_has_an_unknown_licence(make_folder, tmp_path: Path):
    convert_checkpoint(make_folder(), tmp_path / "out", ROUTING, verify=False)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "license: unknown" in card.splitlines()
    assert "Base licence: not stated" in card
    assert "- Routing: variant `delta_block_mhar`, 2 heads, blocks of 2 layers, all gates zero, 679 parameters" in card


def test_the_control_has_no_routing(make_folder, tmp_path: Path):
    report = convert_checkpoint(make_folder(), tmp_path / "out", "baseline")
    assert "routing   baseline, no parameters" in report.lines()
    assert all_tensors(tmp_path / "out").keys() == all_tensors(tmp_path / "base").keys()
    assert "- Routing: none (the additive baseline), 0 parameters" in (tmp_path / "out" / "README.md").read_text()


def test_a_hub_name_brings_its_revision(make_folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Through the hub client, offline, from a cache laid out as the client lays it out."""
    commit, cache = "0123456789abcdef0123456789abcdef01234567", tmp_path / "hub"
    snapshots = cache / "models--someone--tiny" / "snapshots"
    snapshots.mkdir(parents=True)
    make_folder(shards="20KB").rename(snapshots / commit)
    (cache / "models--someone--tiny" / "refs").mkdir()
    (cache / "models--someone--tiny" / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    report = convert_checkpoint("someone/tiny", tmp_path / "out", ROUTING)
    assert report.base["name"] == "someone/tiny"
    assert report.base["revision"] == commit
    card = (tmp_path / "out" / "README.md").read_text()
    assert "base_model: someone/tiny" in card.splitlines()
    assert f"Base revision: `{commit}`" in card
    with pytest.raises(CheckpointError, match="the hub did not give it"):
        convert_checkpoint("someone/other", tmp_path / "other", ROUTING)


def test_the_revision_of_a_folder_from_the_download_command(make_folder, tmp_path: Path):
    base, commit = make_folder(), "f" * 40
    record = base / ".cache" / "huggingface" / "download" / "config.json.metadata"
    record.parent.mkdir(parents=True)
    record.write_text(f"{commit}\netag\n1700000000.0\n")
    assert convert_checkpoint(base, tmp_path / "out", ROUTING, verify=False).base["revision"] == commit


def remove_shard(base: Path) -> None:
    (base / "model-00002-of-00004.safetensors").unlink()


def truncate_shard(base: Path) -> None:
    shard = base / "model-00002-of-00004.safetensors"
    shard.write_bytes(shard.read_bytes()[:-4])


def swap_shards(base: Path) -> None:
    (base / "model-00001-of-00004.safetensors").write_bytes((base / "model-00002-of-00004.safetensors").read_bytes())


def poison(base: Path) -> None:
    shard = base / "model-00003-of-00004.safetensors"
    tensors = load_file(shard)
    tensors[sorted(tensors)[0]].view(-1)[-1] = float("nan")
    save_file(tensors, shard, metadata={"format": "pt"})


def drop_tensor(base: Path) -> None:
    shard, index = base / "model-00002-of-00004.safetensors", base / "model.safetensors.index.json"
    tensors, content = load_file(shard), json.loads(index.read_text())
    name = sorted(tensors)[0]
    del tensors[name], content["weight_map"][name]
    save_file(tensors, shard)
    index.write_text(json.dumps(content))


def only_pickles(base: Path) -> None:
    for path in base.glob("*.safetensors*"):
        path.unlink()
    (base / "pytorch_model.bin").write_bytes(b"PK")


def only_gguf(base: Path) -> None:
    for path in base.glob("*.safetensors*"):
        path.unlink()
    (base / "model.Q4_1.gguf").write_bytes(b"GGUF")


def remove_index(base: Path) -> None:
    (base / "model.safetensors.index.json").unlink()


def remove_config(base: Path) -> None:
    (base / "config.json").unlink()


def break_config(base: Path) -> None:
    (base / "config.json").write_text("{")


@pytest.mark.parametrize(
    "damage, message",
    [
        (remove_shard, r"1 of 4 shards are missing .*model-00002-of-00004\.safetensors"),
        (truncate_shard, "cut short"),
        (swap_shards, "which the index promises there"),
        (poison, r"1 tensors hold NaN or infinity: model\.layers"),
        (drop_tensor, r"lacks 1 tensors of its architecture: model\.layers"),
        (only_pickles, r"must be safetensors, got pytorch_model\.bin"),
        (only_gguf, r"quantised \(model\.Q4_1\.gguf\)"),
        (remove_index, "incomplete"),
        (remove_config, r"has no config\.json"),
        (break_config, "not JSON"),
    ],
)
def test_damaged_bases_are_refused_and_leave_nothing(make_folder, tmp_path: Path, damage, message: str):
    base = make_folder(shards="40KB")
    assert len(list(base.glob("*.safetensors"))) == 4
    damage(base)
    with pytest.raises(CheckpointError, match=message):
        convert_checkpoint(base, tmp_path / "out", ROUTING)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base"]


def test_too_little_disk_is_found_before_anything_is_written(make_folder, tmp_path: Path, monkeypatch):
    base = make_folder()
    size = (base / "model.safetensors").stat().st_size
    usage = type("Usage", (), {"free": size})  # room for the base, not for the routing
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    monkeypatch.setattr(stream_module, "new_folder", lambda out: pytest.fail("started writing"))
    with pytest.raises(CheckpointError, match="not enough disk space"):
        convert_checkpoint(base, tmp_path / "out", ROUTING)


def test_an_interruption_between_shards_leaves_nothing(make_folder, tmp_path: Path):
    def interrupt(line: str) -> None:
        if line.startswith("weights 3/"):
            raise KeyboardInterrupt

    base = make_folder(shards="20KB")
    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(base, tmp_path / "out", ROUTING, progress=interrupt)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base"]
    assert convert_checkpoint(base, tmp_path / "out", ROUTING).verification is not None


def test_a_converted_base_and_an_occupied_target_are_refused(make_folder, tmp_path: Path):
    base = make_folder()
    convert_checkpoint(base, tmp_path / "out", ROUTING, verify=False)
    with pytest.raises(CheckpointError, match="converted already"):
        convert_checkpoint(tmp_path / "out", tmp_path / "twice", ROUTING)
    with pytest.raises(CheckpointError, match="must not exist or be empty"):
        convert_checkpoint(base, tmp_path / "out", ROUTING)
    with pytest.raises(CheckpointError, match="must not exist or be empty"):
        convert_checkpoint(base, base, ROUTING)


def test_only_a_commit_is_a_revision(tmp_path: Path):
    for name, revision in (("latest", None), ("0123456789" * 4, "0123456789" * 4)):
        folder = tmp_path / "snapshots" / name
        folder.mkdir(parents=True)
        assert hub_revision(folder) == revision
