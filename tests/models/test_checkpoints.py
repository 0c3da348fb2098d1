"""Saving and loading: nothing is lost, left uninitialised or passed over in silence."""

import copy
import pickle
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from helpers.models import FAMILY_NAMES, base_config, routed_model, routing, stock_model, tokens
from mhar import MharConfig, MharForCausalLM, MharModel
from mhar.errors import CheckpointError, InputError


@pytest.fixture
def saved(tmp_path):
    model = routed_model("qwen3", "delta_block_mhar")
    model.save_pretrained(tmp_path)
    return model, tmp_path


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_auto_classes(family, tmp_path):
    model, ids = routed_model(family, "delta_block_mhar"), tokens(2, 7)
    model.save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is MharConfig
    causal = AutoModelForCausalLM.from_pretrained(tmp_path)
    decoder = AutoModel.from_pretrained(tmp_path)
    assert (type(causal), type(decoder)) == (MharForCausalLM, MharModel)
    with torch.no_grad():
        assert torch.equal(causal(ids).logits, model(ids).logits)
        assert torch.equal(decoder(ids).last_hidden_state, model.model(ids).last_hidden_state)


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("variant", ["mhar", "delta_block_mhar"])
def test_queries_start_at_zero_and_gains_at_one(family, variant):
    router = MharForCausalLM(MharConfig.from_base(base_config(family), routing(variant))).model.router
    for name, parameter in router.named_parameters():
        assert torch.equal(parameter, torch.full_like(parameter, float(name == "norm_weight"))), name


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_new_models_start_as_the_stock_family_does(family):
    """Standard deviations of every parameter: a norm left at random or a gain of the wrong kind would show."""
    from mhar.models.families import causal_lm_class

    base = base_config(family, initializer_range=0.02)
    torch.manual_seed(0)
    stock = dict(causal_lm_class(family)(base).named_parameters())
    torch.manual_seed(0)
    own = dict(MharForCausalLM(MharConfig.from_base(base, "mhar")).named_parameters())
    for name, parameter in stock.items():
        assert torch.allclose(own[name].std(), parameter.std(), rtol=0.3), name
        assert torch.allclose(own[name].mean(), parameter.mean(), atol=0.01), name


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_base_checkpoint_gets_untrained_routing(family, tmp_path):
    """Loaded on the meta device and then filled: parameters that the checkpoint lacks must not be left as they were."""
    model = routed_model(family, "delta_block_mhar")
    stock_model(model).save_pretrained(tmp_path)
    config = MharConfig.from_base(AutoConfig.from_pretrained(tmp_path), routing("delta_block_mhar"))
    poison = torch.empty

    def poisoned(*args, **kwargs):
        tensor = poison(*args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() and tensor.device.type != "meta" else tensor

    torch.empty = poisoned
    try:
        loaded = MharForCausalLM.from_pretrained(tmp_path, config=config, strict=False)
    finally:
        torch.empty = poison
    for name, tensor in [*loaded.named_parameters(), *loaded.named_buffers()]:
        assert tensor.device.type == "cpu", name
        assert torch.isfinite(tensor).all(), name
    for name, parameter in loaded.model.router.named_parameters():
        assert torch.equal(parameter, torch.full_like(parameter, float(name == "norm_weight"))), name
    ids = tokens(2, 7)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, stock_model(model)(ids).logits)  # closed gates


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_meta_device(family):
    with torch.device("meta"):
        model = MharForCausalLM(MharConfig.from_base(base_config(family), routing("delta_block_mhar")))
    assert all(parameter.is_meta for parameter in model.parameters())
    model = model.to_empty(device="cpu")
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point():
            tensor.data.fill_(float("nan"))
    model.init_weights()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert torch.isfinite(tensor).all(), name


def test_trained_gates_survive_a_partial_checkpoint(saved):
    """A checkpoint that lacks some of the routing keeps what it has (released code resets all of it)."""
    model, folder = saved
    file = folder / "model.safetensors"
    state = load_file(file)
    del state["model.router.null_source"]
    save_file(state, file, metadata={"format": "pt"})
    loaded = MharForCausalLM.from_pretrained(folder, strict=False).model.router
    assert torch.equal(loaded.gate, model.model.router.gate)
    assert torch.equal(loaded.query, model.model.router.query)
    assert not loaded.null_source.any()


def test_missing_and_unexpected_keys_are_all_listed(saved):
    _, folder = saved
    file = folder / "model.safetensors"
    state = load_file(file)
    missing = ["model.router.gate", "model.layers.1.mlp.up_proj.weight"]
    unexpected = {"model.router.bias": torch.zeros(3), "model.layers.9.mlp.up_proj.weight": torch.zeros(2, 2)}
    save_file({k: v for k, v in state.items() if k not in missing} | unexpected, file, metadata={"format": "pt"})
    for load in (MharForCausalLM, AutoModelForCausalLM):
        with pytest.raises(CheckpointError) as caught:
            load.from_pretrained(folder)
        for name in [*missing, *unexpected]:
            assert name in str(caught.value)


def test_a_decoder_loads_from_a_language_model_but_not_from_less(saved):
    _, folder = saved
    MharModel.from_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    del state["model.norm.weight"]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"norm\.weight"):
        MharModel.from_pretrained(folder)


def test_pickled_weights_are_refused(saved):
    _, folder = saved
    shutil.move(folder / "model.safetensors", folder / "pytorch_model.bin")
    for load in (MharForCausalLM, AutoModelForCausalLM):
        with pytest.raises(CheckpointError, match=r"safetensors.*pytorch_model\.bin"):
            load.from_pretrained(folder)


def test_loading_info_is_returned_when_asked_for(saved):
    _, folder = saved
    model, info = MharForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert isinstance(model, MharForCausalLM)
    assert not info["missing_keys"]


@pytest.mark.parametrize("strict", [True, False])
def test_a_base_checkpoint_without_a_routed_config_is_refused(strict, tmp_path):
    stock_model(routed_model("qwen3")).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"'qwen3' model, not of a routed one: convert it"):
        MharForCausalLM.from_pretrained(tmp_path, strict=strict)


def test_sharded_checkpoints(saved, tmp_path):
    model, _ = saved
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    loaded = MharForCausalLM.from_pretrained(tmp_path / "shards")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))


def test_dtype(saved):
    _, folder = saved
    model = MharForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model(tokens(1, 5)).logits.dtype == torch.bfloat16


def test_several_devices_are_refused(saved):
    pytest.importorskip("accelerate")
    _, folder = saved
    with pytest.raises(InputError, match=r"one device.*cpu, disk"):
        MharForCausalLM.from_pretrained(
            folder, device_map={"model": "cpu", "lm_head": "disk"}, offload_folder=folder / "offload"
        )


def test_copies_and_pickles_are_equal_and_apart():
    model, ids = routed_model("qwen3", "mhar"), tokens(2, 7)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            assert torch.equal(twin(ids).logits, model(ids).logits)
        assert twin.model.layers[0].self_attn.config is twin.config  # one config: set_attn_implementation reaches all
        assert twin.config is not model.config


def test_attention_implementation_can_be_changed_later():
    model, ids = routed_model("qwen3", "mhar", attention="sdpa"), tokens(2, 7)
    model.set_attn_implementation("eager")
    assert model(ids, output_attentions=True).attentions[0].shape == (2, 4, 7, 7)
    model.set_attn_implementation("sdpa")
    with pytest.raises(InputError, match="eager"):
        model(ids, output_attentions=True)
