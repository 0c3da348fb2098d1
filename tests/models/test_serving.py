"""What servers that run transformers models (vLLM, SGLang) ask of a model, and generation's corners."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close
from transformers import AttentionInterface, AutoModel, AutoModelForCausalLM, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from helpers.models import FAMILY_NAMES, base_config, routed_model, routing, tokens
from mhar import MharConfig, MharForCausalLM, MharModel
from mhar.errors import InputError
from mhar.models.compat import CACHE_NAME, cache_argument, either_cache

every_family = pytest.mark.parametrize("family", FAMILY_NAMES)


@every_family
def test_keywords_reach_a_registered_attention_function(family):
    """A server registers its attention and hands it state through the model's keywords."""
    seen = []

    def attention(module, query, key, value, attention_mask, serving_state=None, **kwargs):
        seen.append((module.layer_idx, serving_state))
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register("recording", attention)
    assert MharModel._supports_attention_backend
    assert MharForCausalLM._supports_attention_backend
    model = routed_model(family, "mhar", attention="recording")
    state = object()
    model(tokens(1, 5), serving_state=state)
    assert seen == [(layer, state) for layer in range(3)]


@every_family
def test_flattened_batch_and_tuple_output(family):
    """vLLM calls the decoder with one row of all tokens, no cache, and takes element 0."""
    model = routed_model(family, "delta_block_mhar").model
    parts = [tokens(1, 5), tokens(1, 3, seed=1)]
    positions = torch.cat([torch.arange(5), torch.arange(3)]).unsqueeze(0)
    with torch.no_grad():
        hidden = model(torch.cat(parts, dim=1), use_cache=False, position_ids=positions, return_dict=False)[0]
        separate = torch.cat([model(part).last_hidden_state for part in parts], dim=1)
    assert hidden.shape == (1, 8, 32)
    assert_close(hidden, separate, rtol=1e-4, atol=2e-5)


@every_family
def test_the_decoder_has_one_module_list(family):
    decoder = AutoModel.from_config(MharConfig.from_base(base_config(family), routing("mhar")))
    assert type(decoder) is MharModel
    lists = [name for name, module in decoder.named_modules() if isinstance(module, nn.ModuleList)]
    assert lists == ["layers"]


@every_family
def test_tensor_parallel_plan_names_modules_that_exist(family):
    model = routed_model(family, "mhar")
    names = {name.replace(f".{i}.", ".*.") for name, _ in model.named_modules() for i in range(3)}
    names |= {name.replace(f".{i}.", ".*.") for name, _ in model.named_parameters() for i in range(3)}
    assert "model.layers.*.self_attn.o_proj" in model.tp_plan
    assert "lm_head" in model.tp_plan
    if family != "qwen3_moe":  # its plan also names what only other expert layouts have
        assert set(model.tp_plan) <= names | {"model.embed_tokens"}


@pytest.mark.parametrize(
    "family, variant",
    [*((family, "mhar") for family in FAMILY_NAMES), ("llama", "block_mhar"), ("llama", "delta_block_mhar")],
)
def test_shapes_without_data(family, variant):
    """Compilers and memory planners run a model on fake tensors: every operator must have a fake kernel."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        # Grouped matrix products of sparse families have a fake kernel in bfloat16 only.
        config = MharConfig.from_base(base_config(family), routing(variant))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        assert model(torch.zeros(2, 7, dtype=torch.long)).logits.shape == (2, 7, 48)


def test_units_of_sharding_are_the_sublayers():
    assert routed_model("qwen3_moe")._no_split_modules == {
        "Qwen3MoeAttention",
        "Qwen3MoeMLP",
        "Qwen3MoeSparseMoeBlock",
    }


def test_both_names_of_the_cache():
    model, ids = routed_model("qwen3"), tokens(2, 6)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits[:, 5:]
        for name in ("cache", "past_key_values"):
            cache = model(ids[:, :5], use_cache=True)[CACHE_NAME]
            assert cache.get_seq_length() == 5
            assert_close(model(ids[:, 5:], **{name: cache}).logits, expected, rtol=1e-4, atol=2e-5)
            assert cache.get_seq_length() == 6


def test_two_different_caches_are_refused():
    first, second = DynamicCache(), DynamicCache()
    assert either_cache(first, None) is either_cache(None, first) is either_cache(first, first) is first
    with pytest.raises(InputError, match="two names of one argument"):
        either_cache(first, second)
    with pytest.raises(InputError, match="two names of one argument"):
        routed_model("llama")(tokens(1, 3), cache=first, past_key_values=second)


def test_cache_argument_is_the_one_that_attention_takes():
    import inspect

    attention = routed_model("llama").model.layers[0].self_attn
    while hasattr(attention, "forward"):
        attention = attention.forward
    assert set(cache_argument(None)) <= set(inspect.signature(attention).parameters)


def test_no_cache_in_training_or_with_labels():
    model, ids = routed_model("qwen3"), tokens(2, 6)
    assert model(ids)[CACHE_NAME] is not None
    assert model(ids, labels=ids).get(CACHE_NAME) is None
    assert model.train()(ids).get(CACHE_NAME) is None


def test_a_cache_under_gradient_checkpointing_is_refused():
    model, ids = routed_model("qwen3").train(), tokens(2, 6)
    model.gradient_checkpointing_enable()
    with pytest.raises(InputError, match="gradient checkpointing"):
        model(ids, use_cache=True)


def test_neither_or_both_inputs_are_refused():
    model, ids = routed_model("qwen3"), tokens(2, 6)
    with pytest.raises(InputError, match="exactly one of input_ids and inputs_embeds, got neither"):
        model()
    with pytest.raises(InputError, match="got both"):
        model(ids, inputs_embeds=model.get_input_embeddings()(ids))


@every_family
def test_inputs_embeds(family):
    model, ids = routed_model(family), tokens(2, 6)
    with torch.no_grad():
        assert torch.equal(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, model(ids).logits)


def test_logits_to_keep():
    model, ids = routed_model("qwen3"), tokens(2, 6)
    with torch.no_grad():
        logits = model(ids).logits
        assert_close(model(ids, logits_to_keep=2).logits, logits[:, 4:])
        assert_close(model(ids, logits_to_keep=torch.tensor([1, 3])).logits, logits[:, [1, 3]])


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3_text", "smollm3"])
def test_static_cache(family):
    model, ids = routed_model(family), tokens(2, 6)
    arguments = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    static = model.generate(ids, cache_implementation="static", **arguments)
    assert torch.equal(static, model.generate(ids, **arguments))


@pytest.mark.parametrize("settings", [{"num_beams": 3}, {"do_sample": True, "top_k": 5}], ids=["beams", "sampling"])
def test_other_decoding(settings):
    model, ids = routed_model("qwen3"), tokens(2, 6)
    torch.manual_seed(0)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, min_new_tokens=4, **settings)
    assert out.shape == (2, 10)


def test_longrope_recomputes_the_cache_where_frequencies_change():
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.0, 1.0, 1.0],
        "long_factor": [4.0, 5.0, 6.0, 7.0],
        "original_max_position_embeddings": 9,
    }
    model, ids = routed_model("phi3", rope_parameters=rope, original_max_position_embeddings=9), tokens(2, 6)
    arguments = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    expected = model.generate(ids, use_cache=False, **arguments)
    assert torch.equal(model.generate(ids, use_cache=True, **arguments), expected)
    assert model._rope_changes(9, 10)
    assert not model._rope_changes(10, 11)
    assert not model._rope_changes(8, 9)


def test_generation_from_embeddings():
    model, ids = routed_model("qwen3"), tokens(2, 6)
    arguments = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    embedded = model.generate(inputs_embeds=model.get_input_embeddings()(ids), **arguments)
    assert torch.equal(embedded, model.generate(ids, **arguments)[:, 6:])


def test_resized_embeddings_keep_working():
    model = routed_model("qwen3", tie_word_embeddings=True)
    model.resize_token_embeddings(60)
    assert model(tokens(1, 4)).logits.shape == (1, 4, 60)


def test_compiles_as_one_graph():
    model, ids = routed_model("qwen3", "mhar"), tokens(2, 7)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert_close(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
