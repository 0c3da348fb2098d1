"""MharConfig: flat, checked, round-tripped."""

import json

import pytest
from transformers import AutoConfig, LlamaConfig

from helpers.models import FAMILY_NAMES, VARIANT_NAMES, base_config, routing
from mhar import MharConfig, MharForCausalLM, RoutingConfig
from mhar.errors import ConfigurationError, InputError


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_base_fields_stand_at_the_top_level_and_come_back(family):
    base = base_config(family)
    config = MharConfig.from_base(base, "mhar")
    own = config.to_dict()
    for name, value in base.to_dict().items():
        if name not in ("model_type", "architectures", "transformers_version"):
            assert own[name] == value, name
    back, expected = config.to_base().to_dict(), base.to_dict()
    assert type(config.to_base()) is type(base)
    assert back == expected


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("variant", VARIANT_NAMES)
def test_saved_config_is_the_same_config(family, variant, tmp_path):
    config = MharConfig.from_base(base_config(family), routing(variant), z_loss=1e-4, loss_chunk_size=64)
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "mhar"
    assert saved["base_model_type"] == family
    assert saved["routing"]["format_version"] == 1
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is MharConfig
    ignored = {"_name_or_path": None}
    assert loaded.to_dict() | ignored == config.to_dict() | ignored


def test_use_cache_and_dtype_of_the_base_are_kept():
    config = MharConfig.from_base(LlamaConfig(use_cache=False, dtype="bfloat16"), "mhar")
    assert not config.use_cache
    assert str(config.dtype) == "torch.bfloat16"


def test_routing_heads_default_to_kv_heads():
    config = MharConfig.from_base(base_config("qwen3"), "mhar")
    assert config.routing["num_heads"] == "kv"
    assert config.routing_config.num_heads == config.num_key_value_heads == 2
    assert MharConfig.from_base(base_config("qwen3"), "attention_residuals").routing_config.num_heads == 1


def test_default_variant_is_mhar():
    assert MharConfig.from_base(base_config("llama")).routing_config.name == "mhar"


def test_unknown_family_suggests_the_nearest():
    with pytest.raises(ConfigurationError, match=r"'qwen_3'; did you mean 'qwen3'\?"):
        MharConfig(base_model_type="qwen_3")
    with pytest.raises(ConfigurationError, match="gpt2"):
        MharConfig.from_base(AutoConfig.for_model("gpt2"), "mhar")


def test_unknown_variant_and_option_suggest_the_nearest():
    with pytest.raises(ConfigurationError, match="did you mean 'block_mhar'"):
        MharConfig.from_base(base_config("llama"), "blok_mhar")
    with pytest.raises(ConfigurationError, match="did you mean 'num_heads'"):
        MharConfig(routing={"num_head": 4})
    with pytest.raises(ConfigurationError, match=r"unknown backend 'tritom'.*triton"):
        MharConfig(routing_backend="tritom")
    with pytest.raises(ConfigurationError, match="schedule"):
        MharConfig(routing_schedule="dens")


def test_backend_and_schedule_reach_the_router():
    config = MharConfig.from_base(base_config("llama"), routing_backend="reference", routing_schedule=8)
    router = MharForCausalLM(config).model.router
    assert (router.backend, router.schedule) == ("reference", 8)


def test_heads_that_do_not_divide_the_width():
    with pytest.raises(InputError, match=r"num_heads 5 for width 32"):
        MharConfig.from_base(base_config("llama"), routing("mhar", num_heads=5))


def test_blocks_larger_than_the_model():
    with pytest.raises(ConfigurationError, match=r"number of layers \(3\), got 4"):
        MharConfig.from_base(base_config("llama"), routing("block_mhar", block_size=4))


@pytest.mark.parametrize("field", ["rms_norm_eps", "attention_dropout", "z_loss"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_must_be_finite(field, value):
    with pytest.raises(ConfigurationError, match=f"{field}.*(nan|inf)"):
        MharConfig.from_base(base_config("llama"), "mhar", **{field: value})


def test_a_format_of_the_future_is_refused():
    future = RoutingConfig.named("mhar").to_dict() | {"format_version": 99}
    with pytest.raises(ConfigurationError, match="99"):
        MharConfig(routing=future)


def test_bidirectional_gemma_is_refused():
    with pytest.raises(
        ConfigurationError, match="use_bidirectional_attention must be false: the decoder loop is causal"
    ):
        MharConfig.from_base(base_config("gemma3_text", use_bidirectional_attention=True), "mhar")


@pytest.mark.parametrize(
    "given", [RoutingConfig.named("delta_mhar"), "delta_mhar", RoutingConfig.named("delta_mhar").to_dict()]
)
def test_routing_is_taken_in_any_form_and_stored_as_plain_values(given):
    for config in (MharConfig(routing=given), MharConfig.from_base(base_config("llama"), given)):
        assert config.routing == RoutingConfig.named("delta_mhar").to_dict()
        json.dumps(config.to_dict())


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: MharConfig(routing=3), "routing must be a RoutingConfig.*got 3"),
        (lambda: MharConfig.from_base(base_config("llama"), 3), "routing must be a RoutingConfig.*got 3"),
        (lambda: MharConfig.from_base("qwen3", "mhar"), "base must be a configuration of transformers.*got 'qwen3'"),
        (lambda: MharConfig(routing="mharr"), "unknown variant 'mharr'; did you mean 'mhar'"),
        (lambda: MharForCausalLM(LlamaConfig()), "MharForCausalLM needs a MharConfig.*got LlamaConfig"),
    ],
)
def test_things_that_are_no_configuration_are_refused(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_a_misspelt_field_suggests_the_nearest():
    with pytest.raises(ConfigurationError, match="'routing_backnd'; did you mean 'routing_backend'"):
        MharConfig.from_base(base_config("llama"), "mhar", routing_backnd="triton")
    assert MharConfig.from_base(base_config("llama"), "mhar", my_note="kept").my_note == "kept"
