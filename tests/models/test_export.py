"""Exported folders run without this package."""

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.models import FAMILY_NAMES, routed_model, tokens
from mhar import MharForCausalLM
from mhar.errors import CheckpointError, InputError
from mhar.models.export import AUTO_MAP, add_remote_code, export_model, remote_code, serving_problems

WITHOUT_MHAR = """
import sys
sys.modules["mhar"] = None  # importing it now raises
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
folder, ids = sys.argv[1], load_file(sys.argv[2])["ids"]
config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
decoder = AutoModel.from_pretrained(folder, trust_remote_code=True)
assert type(config).__name__ == "MharConfig" and not any(name.startswith("mhar.") for name in sys.modules)
with torch.no_grad():
    logits, hidden = model(ids).logits, decoder(ids).last_hidden_state
generated = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
save_file({"logits": logits, "hidden": hidden, "generated": generated}, sys.argv[2])
"""


@pytest.mark.parametrize("family, variant", [("qwen3", "delta_block_mhar"), ("qwen3_moe", "mhar")])
def test_exported_folder_runs_without_mhar(family, variant, tmp_path):
    from safetensors.torch import load_file, save_file

    model, ids = routed_model(family, variant), tokens(2, 6)
    export_model(model, tmp_path / "exported")
    save_file({"ids": ids}, tmp_path / "numbers.safetensors")
    environment = os.environ | {"HF_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", WITHOUT_MHAR, str(tmp_path / "exported"), str(tmp_path / "numbers.safetensors")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    got = load_file(tmp_path / "numbers.safetensors")
    with torch.no_grad():
        torch.testing.assert_close(got["logits"], model(ids).logits)
        torch.testing.assert_close(got["hidden"], model.model(ids).last_hidden_state)
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    assert torch.equal(got["generated"], expected)


def test_auto_map_names_all_three_classes(tmp_path):
    export_model(routed_model("llama"), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"] == AUTO_MAP
    assert set(AUTO_MAP) == {"AutoConfig", "AutoModel", "AutoModelForCausalLM"}
    for target in AUTO_MAP.values():
        assert (tmp_path / f"{target.split('.')[0]}.py").is_file()


def test_exported_folder_still_loads_here_and_saves_without_the_code(tmp_path):
    model, ids = routed_model("llama"), tokens(1, 5)
    export_model(model, tmp_path / "exported")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert type(loaded) is MharForCausalLM
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    loaded.save_pretrained(tmp_path / "plain")
    assert "auto_map" not in json.loads((tmp_path / "plain" / "config.json").read_text())


def test_code_is_complete_and_imports_nothing_of_mhar():
    sources = remote_code()
    assert {"configuration_mhar.py", "modeling_mhar.py", "mhar_ops_reference.py", "mhar_routing_router.py"} <= set(
        sources
    )
    for name, text in sources.items():
        assert "from mhar" not in text, name
        assert "import mhar" not in text, name
        compile(text, name, "exec")


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_every_family_can_be_served(family):
    assert serving_problems(routed_model(family, "delta_block_mhar")) == []


def test_problems_are_listed(tmp_path):
    model = routed_model("llama")
    model.model.extra = torch.nn.ModuleList([torch.nn.Identity()])
    with pytest.raises(InputError, match="one ModuleList, its layers; got layers, extra"):
        export_model(model, tmp_path)


def test_code_is_added_to_routed_models_only(tmp_path):
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        add_remote_code(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match="'llama'"):
        add_remote_code(tmp_path)
