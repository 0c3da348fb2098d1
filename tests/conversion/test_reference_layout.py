"""The public code's checkpoints and numbers: `pytest tests/conversion/test_reference_layout.py -s` prints the table."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.utils.logging import disable_progress_bar, enable_progress_bar

from helpers.golden import CASES, ROOT, config, measure, tolerances
from mhar import MharConfig, MharForCausalLM, RoutingConfig
from mhar.conversion import from_reference
from mhar.conversion.reference_layout import released_name
from mhar.errors import CheckpointError

COLUMNS = ("logits", "loss", "weights", "gradients")


@pytest.fixture(scope="module")
def table():
    disable_progress_bar()
    print(f"\n{'golden case':<46}" + "".join(f"{c:>11}" for c in COLUMNS), end="")
    yield
    enable_progress_bar()
    print("\nLargest errors: absolute; gradients relative to the tensor's maximum + 0.01.")


@pytest.mark.parametrize("case", CASES)
def test_golden_case(case, table):
    measured, allowed = dataclasses.asdict(measure(case)), dataclasses.asdict(tolerances(case))
    print("\n" + f"{case:<46}" + "".join(f"{measured[c]:>11.1e}" for c in COLUMNS), end="  ")
    for column in COLUMNS:
        assert measured[column] <= allowed[column], f"{column}: {measured[column]:.2e} > {allowed[column]:.0e}"


def test_every_public_case_is_here():
    assert len(CASES) == 17
    assert {config(case)["mode"] for case in CASES} == {"baseline", "full", "block", "delta", "delta_block"}


def released_folder(tmp_path: Path, case: str, mode: str, **keys) -> Path:
    """A golden case saved as the public code saves a model: one file, `attnres_*` keys, gates of shape [1]."""
    golden = config(case)
    model = golden["model"]
    state = load_file(ROOT / case / golden["backbone_file"]) | load_file(ROOT / case / "model.safetensors")
    state = {name: t.reshape(1) if name.endswith("_alpha") else t.contiguous() for name, t in state.items()}
    values = {
        **{k: v for k, v in model.items() if k not in ("arch", "qk_norm")},
        "model_type": "qwen3_attnres",
        "architectures": ["Qwen3AttnResForCausalLM"],
        "torch_dtype": "float32",
        "attnres_mode": mode,
        "attnres_num_heads": golden["num_routing_heads"],
        "attnres_num_blocks": golden["num_blocks_requested"] or 8,
        "attnres_gate_type": "learnable_alpha" if golden["gate_type"].startswith("scalar") else "bias",
        "attnres_use_null_source": golden["null_source"],
        **keys,
    }
    folder = tmp_path / "released"
    folder.mkdir()
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize(
    "case, mode",
    [
        ("a_full", "full"),  # one head, although the released config always carries attnres_num_heads
        ("b_mhar_h8", "full_mh"),
        ("a_block_mh2_nb2", "block_mh"),
        ("b_block_nb4", "block"),
        ("b_delta_null_alpha", "delta"),
        ("b_delta_block_ref_mh2_null_alpha_nb5", "delta_mh"),  # the 8B checkpoint's mode; gates of shape [1]
    ],
)
def test_released_folder_has_the_golden_logits(tmp_path, case, mode):
    folder = released_folder(tmp_path, case, mode, **({} if mode.endswith("_mh") else {"attnres_num_heads": 8}))
    expected = load_file(ROOT / case / "io.safetensors")
    logits = from_reference(folder)(expected["input_ids"]).logits.detach()
    assert float((logits - expected["logits"]).abs().max()) <= tolerances(case).logits


def llama_folder(tmp_path: Path, dtype=torch.bfloat16) -> tuple[Path, MharForCausalLM]:
    """A random llama_attnres folder as it would be released, and the model it came from."""
    from transformers import LlamaConfig

    base = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    routing = RoutingConfig.named(
        "delta_block_mhar", num_heads=4, block_size=2, legacy_delta_recursion=True, keep_empty_sites=True
    )
    model = MharForCausalLM(MharConfig.from_base(base, routing)).to(dtype).eval()
    router = model.model.router
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.normal_()
    state = {k: v.contiguous() for k, v in model.state_dict().items() if ".router." not in k}
    for site in router.plan:
        if site.row is not None:
            for kind, parameter in router.named_parameters():
                row = parameter[site.row].detach()
                state[released_name(site, kind)] = (row.unsqueeze(0) if kind == "query" else row).clone()
    # The public class always makes a final site, which delta modes never use.
    state["model.final_res_proj.weight"], state["model.final_res_norm.weight"] = torch.ones(1, 16), torch.ones(16)
    folder = tmp_path / "llama"
    folder.mkdir()
    save_file(state, folder / "model.safetensors")
    values = base.to_dict() | {
        "model_type": "llama_attnres", "dtype": "bfloat16", "attnres_mode": "delta_mh", "attnres_num_heads": 4,
        "attnres_num_blocks": 2, "attnres_gate_type": "learnable_alpha", "attnres_use_null_source": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(values))
    return folder, model


def test_llama_folder(tmp_path):
    folder, model = llama_folder(tmp_path)
    loaded = from_reference(folder)
    assert loaded.dtype == torch.bfloat16
    assert loaded.config.base_model_type == "llama"
    assert loaded.config.routing == model.config.routing
    ids = torch.arange(12).reshape(2, 6)
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_dtype_can_be_chosen_and_the_model_saves(tmp_path):
    folder, _ = llama_folder(tmp_path)
    model = from_reference(folder, dtype=torch.float32)
    assert model.dtype == torch.float32
    model.save_pretrained(tmp_path / "saved")
    again = MharForCausalLM.from_pretrained(tmp_path / "saved")
    assert again.config.routing_config.legacy_delta_recursion
    ids = torch.arange(12).reshape(2, 6)
    assert torch.equal(again(ids).logits, model(ids).logits)


def edited(folder: Path, **keys) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))
    return folder


@pytest.mark.parametrize("mode", ["delta_v", "full_hw", "hyper_connection", "fulll"])
def test_mode_that_we_do_not_have_is_named(tmp_path, mode):
    folder, _ = llama_folder(tmp_path)
    with pytest.raises(CheckpointError, match=f"mode '{mode}'.*Valid: baseline, block"):
        from_reference(edited(folder, attnres_mode=mode))


def test_gate_that_we_do_not_have_is_named(tmp_path):
    folder, _ = llama_folder(tmp_path)
    with pytest.raises(CheckpointError, match="gate type 'sigmoid_vector'"):
        from_reference(edited(folder, attnres_gate_type="sigmoid_vector"))


def test_other_model_type_and_missing_config(tmp_path):
    folder, _ = llama_folder(tmp_path)
    with pytest.raises(CheckpointError, match=r"qwen3_attnres, llama_attnres.*'llama'"):
        from_reference(edited(folder, model_type="llama"))
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json"):
        from_reference(folder)


def test_missing_and_unexpected_routing_parameters_are_all_listed(tmp_path):
    folder, _ = llama_folder(tmp_path)
    state = load_file(folder / "model.safetensors")
    gone = [name for name in state if name.endswith("mlp_res_alpha")]
    assert len(gone) == 3
    state = {name: tensor for name, tensor in state.items() if name not in gone}
    state["model.layers.7.attn_res_alpha"] = torch.zeros(1)
    save_file(state, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        from_reference(folder)
    for name in (*gone, "model.layers.7.attn_res_alpha"):
        assert name in str(caught.value)


def test_missing_backbone_parameter_is_listed(tmp_path):
    folder, _ = llama_folder(tmp_path)
    state = load_file(folder / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        from_reference(folder)


def test_pickled_weights_are_refused(tmp_path):
    folder, _ = llama_folder(tmp_path)
    shutil.move(folder / "model.safetensors", folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"safetensors.*pytorch_model\.bin"):
        from_reference(folder)
