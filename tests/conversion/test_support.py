"""Checkpoints that cannot be converted: each is refused with a reason and a way out."""

from typing import Any

import pytest

from mhar.conversion.graft import resolve_routing
from mhar.conversion.support import check_convertible
from mhar.errors import CheckpointError, ConfigurationError
from mhar.models.families import FAMILIES
from mhar.routing import RoutingConfig

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_accepted(family: str):
    check_convertible({"model_type": family, "architectures": [FAMILIES[family].causal_lm]})
    check_convertible({"model_type": family})


@pytest.mark.parametrize(
    "config, message",
    [
        (
            {"model_type": "mamba", "architectures": ["MambaForCausalLM"]},
            r"'mamba' .*not supported.*Valid: gemma3_text,",
        ),
        ({"model_type": "qwen_3"}, "did you mean 'qwen3'"),
        ({"model_type": None}, "not supported"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "has an encoder.*Supported: llama"),
        ({"model_type": "roberta", "architectures": ["RobertaModel"]}, "has an encoder"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "has an encoder"),
        ({"model_type": "gemma3", "vision_config": {}}, "multimodal.*Gemma3ForCausalLM"),
        ({"model_type": "qwen2_5_vl", "image_token_id": 5}, "multimodal"),
        ({"model_type": "mhar", "base_model_type": "llama"}, "converted already.*mhar revert"),
        ({**LLAMA, "quantization_config": {"quant_method": "gptq"}}, r"quantised \(gptq\).*dequantize"),
        ({**LLAMA, "quantization_config": {"load_in_4bit": True}}, "quantised .*unknown method"),
        ({**LLAMA, "architectures": ["LlamaForSequenceClassification"]}, "must hold a LlamaForCausalLM"),
        ({**LLAMA, "architectures": ["LlamaModel"]}, "must hold a LlamaForCausalLM"),
    ],
)
def test_others_are_refused_with_a_reason(config: dict[str, Any], message: str):
    with pytest.raises(CheckpointError, match=message):
        check_convertible(config)


@pytest.mark.parametrize("variant", ["attention_residuals", "mhar", "block_mhar"])
def test_routing_that_would_change_a_pretrained_model_is_refused(variant: str):
    with pytest.raises(ConfigurationError, match=f"delta_block_mhar and delta_mhar.*variant '{variant}'"):
        resolve_routing(variant)


def test_an_ungated_add_read_is_refused():
    with pytest.raises(ConfigurationError, match="gate 'none'"):
        resolve_routing(RoutingConfig(read="add"))


def test_the_default_is_the_papers_conversion_form():
    assert resolve_routing(None) == RoutingConfig.named("delta_block_mhar")
    assert resolve_routing("delta_mhar") == RoutingConfig.named("delta_mhar")
    assert resolve_routing("baseline").read == "none"
