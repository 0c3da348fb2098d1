"""Models converted in memory: the function is unchanged to the last bit, in every family and dtype."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForMaskedLM, BertConfig, LlamaForCausalLM, LlamaModel

import mhar
from mhar.errors import CheckpointError, ConfigurationError, InputError
from mhar.models.families import FAMILIES

VARIANTS = ["delta_block_mhar", "delta_mhar", "baseline"]


@torch.no_grad()
def logits(model, input_ids: Tensor) -> Tensor:
    return model(input_ids=input_ids).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_base(make_base, input_ids: Tensor, family: str, dtype: torch.dtype):
    base = make_base(family, dtype)
    expected = logits(base, input_ids)
    assert expected.float().std() > 0.1
    for variant in VARIANTS:
        model = mhar.convert(
            base, variant if variant == "baseline" else mhar.RoutingConfig.named(variant, block_size=2)
        )
        assert {p.dtype for p in model.parameters()} == {dtype}
        assert torch.equal(logits(model, input_ids), expected), variant


@pytest.mark.parametrize("family", FAMILIES)
def test_an_open_gate_changes_the_logits(make_base, input_ids: Tensor, family: str):
    """The identity above is not that of a router that is never read."""
    base = make_base(family)
    model = mhar.convert(base, mhar.RoutingConfig.named("delta_block_mhar", block_size=2))
    model.model.router.gate.data.fill_(0.5)
    assert not torch.allclose(logits(model, input_ids), logits(base, input_ids), atol=1e-3)


def test_a_converted_model_shares_the_weights_and_keeps_mode_and_flags(make_base, input_ids: Tensor):
    base = make_base(tie_word_embeddings=True)
    base.model.layers[1].requires_grad_(False)
    base.generation_config.temperature = 0.25
    model = mhar.convert(base.train())
    assert model.training
    assert model.generation_config.temperature == 0.25
    assert model.lm_head.weight is base.model.embed_tokens.weight
    theirs, ours = dict(base.named_parameters()), dict(model.named_parameters())
    assert ours.keys() - theirs.keys() == {f"model.router.{n}" for n in ("query", "norm_weight", "gate", "null_source")}
    for name, weight in theirs.items():
        assert ours[name] is weight
        assert weight.requires_grad == (".layers.1." not in name)
    assert not any(t.is_meta for t in [*model.parameters(), *model.buffers()])


def test_the_base_is_still_usable(make_base, input_ids: Tensor):
    base = make_base("gemma3_text")
    before = logits(base, input_ids)
    model = copy.deepcopy(mhar.convert(base, mhar.RoutingConfig.named("delta_block_mhar", block_size=2)))
    model.model.router.gate.data.fill_(1.0)
    assert torch.equal(logits(base, input_ids), before)


def test_a_folder_converts_to_a_model(make_folder, input_ids: Tensor):
    folder = make_folder("qwen3", dtype=torch.bfloat16)
    model = mhar.convert(folder, "delta_mhar")
    assert model.dtype == torch.bfloat16
    assert model.config.routing_config.name == "delta_mhar"
    assert torch.equal(logits(model, input_ids), logits(mhar.convert(str(folder), "baseline"), input_ids))


def test_generation_equals_the_bases(make_base, input_ids: Tensor):
    base = make_base("qwen3")
    wanted = base.generate(input_ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(mhar.convert(base).generate(input_ids, max_new_tokens=12, do_sample=False), wanted)


@pytest.mark.parametrize(
    "routing, error, message",
    [
        ({"block_size": 5}, ConfigurationError, r"block_size must not exceed the number of layers \(4\), got 5"),
        ({"num_heads": 5}, InputError, r"num_heads 5 for width 32 \(divisors near it: 4, 8\)"),
    ],
)
def test_routing_that_does_not_fit_is_refused(make_base, routing, error, message: str):
    with pytest.raises(error, match=message):
        mhar.convert(make_base(), mhar.RoutingConfig.named("delta_block_mhar", **routing))


def test_key_value_heads_that_do_not_divide_the_width_are_refused(make_base):
    """Qwen3 heads have a width of their own."""
    base = make_base("qwen3", num_attention_heads=3, num_key_value_heads=3)
    with pytest.raises(InputError, match=r"num_heads 3 for width 32 \(divisors near it: 2, 4\)"):
        mhar.convert(base)


def test_weights_that_are_not_finite_are_named(make_base):
    base = make_base()
    base.model.layers[2].mlp.up_proj.weight.data[3, 4] = float("nan")
    base.model.norm.weight.data[0] = float("inf")
    with pytest.raises(
        CheckpointError, match=r"2 tensors.*model\.layers\.2\.mlp\.up_proj\.weight, model\.norm\.weight"
    ):
        mhar.convert(base)


class Subclass(LlamaForCausalLM):
    """Code of its own, which the decoder loop would not run."""


def test_models_that_are_not_plain_language_models_are_refused(make_base, tmp_path: Path):
    base = make_base()
    with pytest.raises(CheckpointError, match=r"must hold a LlamaForCausalLM.*got LlamaModel"):
        mhar.convert(LlamaModel(base.config))
    with pytest.raises(CheckpointError, match=r"LlamaForCausalLM.*got Subclass"):
        mhar.convert(Subclass(base.config))
    with pytest.raises(CheckpointError, match="encoder"):
        mhar.convert(AutoModelForMaskedLM.from_config(BertConfig(num_hidden_layers=1, hidden_size=24)))
    with pytest.raises(CheckpointError, match="converted already"):
        mhar.convert(mhar.convert(base))
    with pytest.raises(CheckpointError, match=r"got Linear.*merge_and_unload"):
        mhar.convert(torch.nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match="revision belongs to a hub name"):
        mhar.convert(base, revision="main")
    with pytest.raises(CheckpointError, match=r"no folder .*not a hub name"):
        mhar.convert(tmp_path / "missing")


def test_a_quantised_model_is_refused(make_base):
    base = make_base()
    base.config.quantization_config = {"quant_method": "awq"}
    with pytest.raises(CheckpointError, match=r"quantised \(awq\)"):
        mhar.convert(base)


def test_adapters_and_weights_that_are_not_in_memory_are_refused(make_base):
    peft = pytest.importorskip("peft")
    adapted = peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["q_proj"]), make_base())
    with pytest.raises(CheckpointError, match=r"adapters\? merge them first.*q_proj"):
        mhar.convert(adapted)
    with torch.device("meta"):
        empty = LlamaForCausalLM(adapted.config)
    with pytest.raises(CheckpointError, match=r"weights must be in memory: model\.embed_tokens\.weight"):
        mhar.convert(empty)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_attention_implementation_is_kept(make_base, input_ids: Tensor, attention: str):
    base = make_base()
    base.set_attn_implementation(attention)
    model = mhar.convert(base)
    assert model.config._attn_implementation == attention
    assert torch.equal(logits(model, input_ids), logits(base, input_ids))


def test_the_experts_implementation_is_kept(make_base, input_ids: Tensor):
    base = make_base("qwen3_moe")
    base.set_experts_implementation("eager")
    model = mhar.convert(base)
    assert model.config._experts_implementation == "eager"
    assert torch.equal(logits(model, input_ids), logits(base, input_ids))


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing")
@pytest.mark.parametrize("enabled", [True, False])
def test_gradient_checkpointing_is_kept(make_base, input_ids: Tensor, enabled: bool):
    base = make_base().train()
    if enabled:
        base.gradient_checkpointing_enable({"use_reentrant": False})
    model = mhar.convert(base)
    assert model.is_gradient_checkpointing == enabled
    calls: list[int] = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    model(input_ids=input_ids, labels=input_ids).loss.backward()
    assert len(calls) == (2 if enabled else 1)  # recomputed in the backward pass


def test_routing_is_taken_in_any_form(make_base):
    with pytest.raises(ConfigurationError, match=r"routing must be a RoutingConfig.*got 3"):
        mhar.convert(make_base(), 3)
    fields = mhar.RoutingConfig.named("delta_mhar").to_dict()
    assert mhar.convert(make_base(), fields).config.routing == fields
