"""`mhar revert`: exact or refused. (There and back for every family: test_stream.py.)"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import mhar
from mhar.conversion import convert_checkpoint, revert_checkpoint
from mhar.errors import CheckpointError

ROUTING = mhar.RoutingConfig.named("delta_block_mhar", block_size=2)


@pytest.fixture
def converted(make_folder, tmp_path: Path) -> Path:
    convert_checkpoint(make_folder(), tmp_path / "converted", ROUTING, verify=False)
    return tmp_path / "converted"


def test_open_gates_are_refused_by_site(converted: Path, tmp_path: Path):
    model = mhar.MharForCausalLM.from_pretrained(converted)
    model.model.router.gate.data[0] = 0.25
    model.model.router.gate.data[4] = -1e-30
    model.save_pretrained(tmp_path / "trained")
    with pytest.raises(CheckpointError, match=r"2 of 7 gates are open \(layers\.0\.mlp 0\.25, layers\.2\.mlp -1e-30\)"):
        revert_checkpoint(tmp_path / "trained", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_trained_model_with_closed_gates_reverts_to_its_own_backbone(
    converted: Path, tmp_path: Path, input_ids: Tensor
):
    """Saved again by transformers in small shards, queries trained, backbone changed, one shard of routing alone."""
    model = mhar.MharForCausalLM.from_pretrained(converted)
    model.model.router.query.data.normal_()
    model.model.layers[0].mlp.up_proj.weight.data.add_(0.5)
    model.save_pretrained(tmp_path / "trained", max_shard_size="1KB")
    base = revert_checkpoint(tmp_path / "trained", tmp_path / "back")
    assert len(list((tmp_path / "back").glob("*.safetensors"))) < len(
        list((tmp_path / "trained").glob("*.safetensors"))
    )
    assert not any("router" in name for name in base.names)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert type(stock).__name__ == "LlamaForCausalLM"
    assert torch.equal(stock(input_ids).logits, model(input_ids).logits)
    for file in (tmp_path / "back").glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            assert torch.equal(model.state_dict()[name], tensor), name


def test_routing_without_gates_is_refused(make_base, tmp_path: Path):
    config = mhar.MharConfig.from_base(make_base().config, "mhar")
    mhar.MharForCausalLM(config).save_pretrained(tmp_path / "routed")
    with pytest.raises(CheckpointError, match="variant 'mhar' has no gates"):
        revert_checkpoint(tmp_path / "routed", tmp_path / "back")


def test_a_baseline_reverts(make_folder, tmp_path: Path):
    base = make_folder(dtype=torch.bfloat16)
    convert_checkpoint(base, tmp_path / "out", "baseline")
    revert_checkpoint(tmp_path / "out", tmp_path / "back")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (base / "model.safetensors").read_bytes()


def test_bad_input_is_refused(converted: Path, tmp_path: Path):
    with pytest.raises(CheckpointError, match="model_type is 'llama', not 'mhar'"):
        revert_checkpoint(tmp_path / "base", tmp_path / "back")
    with pytest.raises(CheckpointError, match="must not exist or be empty"):
        revert_checkpoint(converted, tmp_path / "base")
    with pytest.raises(CheckpointError, match="not a hub name"):
        revert_checkpoint(tmp_path / "nothing", tmp_path / "back")
