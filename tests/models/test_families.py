"""One table for every family: what a routed model must have in common with the stock one, and with itself."""

import pytest
import torch
from torch.testing import assert_close

from helpers.models import FAMILY_NAMES, PADDING, VARIANT_NAMES, gradients, routed_model, stock_model, tokens
from mhar.models import MharForCausalLM

every_family = pytest.mark.parametrize("family", FAMILY_NAMES)
every_variant = pytest.mark.parametrize("variant", VARIANT_NAMES)
# Families whose sublayers' outputs meet every kind of source; the other variants differ only inside the router.
two_variants = pytest.mark.parametrize("variant", ["mhar", "delta_block_mhar"])

# Float32 through three layers whose routing is far from uniform, which amplifies rounding.
CLOSE = {"rtol": 1e-4, "atol": 2e-5}


@every_family
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_baseline_is_the_stock_model(family, tied, attention):
    model = routed_model(family, "baseline", attention=attention, tie_word_embeddings=tied)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    stock, ids = stock_model(model), tokens(2, 9)
    expected, actual = stock(ids, labels=ids), model(ids, labels=ids)
    assert_close(actual.logits, expected.logits, rtol=0, atol=1e-6)
    assert_close(actual.loss, expected.loss, rtol=0, atol=1e-6)
    if family == "qwen3_moe":
        assert_close(actual.aux_loss, expected.aux_loss, rtol=0, atol=1e-6)
    expected.loss.backward()
    actual.loss.backward()
    stock_gradients, own_gradients = gradients(stock), gradients(model)
    assert stock_gradients.keys() == own_gradients.keys()
    for name, gradient in stock_gradients.items():
        assert_close(own_gradients[name], gradient, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


@every_family
def test_baseline_has_the_stock_parameter_names(family):
    model = routed_model(family, "mhar")
    added = set(model.state_dict()) - set(stock_model(model).state_dict())
    assert added == {"model.router.query", "model.router.norm_weight"}


@every_family
@every_variant
def test_cached_equals_uncached(family, variant):
    model, ids = routed_model(family, variant), tokens(2, 11)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        outputs = model(ids[:, :6], use_cache=True)
        pieces = [outputs.logits]
        for position in range(6, 11):
            cache = outputs.get("cache") or outputs["past_key_values"]
            outputs = model(ids[:, position : position + 1], past_key_values=cache)
            pieces.append(outputs.logits)
    assert_close(torch.cat(pieces, dim=1), expected, **CLOSE)


@every_family
@every_variant
def test_generation_with_a_cache_gives_the_same_tokens(family, variant):
    model, ids = routed_model(family, variant), tokens(2, 6)
    arguments = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    expected = model.generate(ids, use_cache=False, **arguments)
    assert expected.shape == (2, 12)
    assert torch.equal(model.generate(ids, use_cache=True, **arguments), expected)


@every_family
@two_variants
def test_left_padding_changes_nothing(family, variant):
    model, long, short = routed_model(family, variant), tokens(1, 9), tokens(1, 6, seed=1)
    padded = torch.cat([long, torch.cat([torch.full((1, 3), PADDING), short], dim=1)])
    mask = torch.ones_like(padded)
    mask[1, :3] = 0
    positions = (mask.cumsum(dim=1) - 1).clamp_min(0)
    with torch.no_grad():
        logits = model(padded, attention_mask=mask, position_ids=positions).logits
        assert_close(logits[:1], model(long).logits, **CLOSE)
        assert_close(logits[1:, 3:], model(short).logits, **CLOSE)


@every_family
@two_variants
def test_left_padded_generation(family, variant):
    model, short = routed_model(family, variant), tokens(1, 5, seed=1)
    padded = torch.cat([torch.full((1, 3), PADDING), short], dim=1)
    batch = torch.cat([tokens(1, 8), padded])
    arguments = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    together = model.generate(batch, attention_mask=(batch != PADDING).long(), **arguments)
    alone = model.generate(short, attention_mask=torch.ones_like(short), **arguments)
    assert torch.equal(together[1, 8:], alone[0, 5:])


@every_family
@pytest.mark.parametrize(
    "variant, attention", [*((variant, "sdpa") for variant in VARIANT_NAMES), ("mhar", "eager"), ("baseline", "eager")]
)
def test_packed_sequences_equal_separate_ones(family, variant, attention):
    model = routed_model(family, variant, attention=attention)
    lengths = (7, 3, 5)
    parts = [tokens(1, length, seed=length) for length in lengths]
    positions = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
    with torch.no_grad():
        packed = model(torch.cat(parts, dim=1), position_ids=positions, use_cache=False).logits
        separate = torch.cat([model(part).logits for part in parts], dim=1)
    assert_close(packed, separate, **CLOSE)


@every_family
@two_variants
def test_round_trip(family, variant, tmp_path):
    model, ids = routed_model(family, variant), tokens(2, 9)
    model.save_pretrained(tmp_path)
    loaded = MharForCausalLM.from_pretrained(tmp_path)
    ignored = ("_name_or_path", "dtype", "architectures")
    before, after = ({k: v for k, v in m.config.to_dict().items() if k not in ignored} for m in (model, loaded))
    assert after == before
    state, again = model.state_dict(), loaded.state_dict()
    assert state.keys() == again.keys()
    for name, tensor in state.items():
        assert torch.equal(again[name], tensor), name
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


@every_family
@two_variants
@pytest.mark.parametrize("reentrant", [False, True], ids=["nonreentrant", "reentrant"])
def test_gradient_checkpointing_changes_nothing(family, variant, reentrant):
    model, ids = routed_model(family, variant).train(), tokens(2, 9)
    losses, found = [], []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        torch.manual_seed(1)  # dropout
        loss = model(ids, labels=ids).loss
        loss.backward()
        losses.append(loss.detach())
        found.append(gradients(model))
        model.zero_grad()
    assert torch.equal(losses[0], losses[1])
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        # The reentrant form adds the gradients of a tensor that is used twice in another order.
        tolerance = 1e-5 if reentrant else 0.0
        assert_close(found[1][name], gradient, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}")


@every_family
@two_variants
def test_eager_and_sdpa_agree(family, variant):
    ids = tokens(2, 9)
    with torch.no_grad():
        eager, sdpa = (routed_model(family, variant, attention=a)(ids).logits for a in ("eager", "sdpa"))
    assert_close(eager, sdpa, **CLOSE)


@every_family
@two_variants
def test_hidden_states_are_what_attention_sites_read_before_their_norm(family, variant):
    model, ids = routed_model(family, variant), tokens(2, 9)
    read: list[torch.Tensor] = []
    last: list[torch.Tensor] = []
    for layer in model.model.layers:
        norm = model.config.family.norm(layer, "attention")
        if norm is None:
            hook = lambda m, a, kwargs: read.append(kwargs["hidden_states"])  # noqa: E731
            layer.self_attn.register_forward_pre_hook(hook, with_kwargs=True)
        else:
            norm.register_forward_pre_hook(lambda m, a: read.append(a[0]))
    model.model.norm.register_forward_hook(lambda m, a, output: last.append(output))
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states
        assert len(states) == model.config.num_hidden_layers + 1
        for state, expected in zip(states, read + last, strict=True):
            assert torch.equal(state, expected)
        assert torch.equal(model.model(ids).last_hidden_state, states[-1])


@every_family
def test_hidden_states_of_the_baseline_are_the_stock_ones(family):
    model, ids = routed_model(family, "baseline"), tokens(2, 9)
    with torch.no_grad():
        expected = stock_model(model)(ids, output_hidden_states=True).hidden_states
        actual = model(ids, output_hidden_states=True).hidden_states
    for state, stock in zip(actual, expected, strict=True):
        assert_close(state, stock, rtol=0, atol=1e-6)


@every_family
def test_attentions_of_the_baseline_are_the_stock_ones(family):
    model, ids = routed_model(family, "baseline", attention="eager"), tokens(2, 9)
    with torch.no_grad():
        expected = stock_model(model)(ids, output_attentions=True).attentions
        actual = model(ids, output_attentions=True).attentions
    for weights, stock in zip(actual, expected, strict=True):
        assert_close(weights, stock, rtol=0, atol=1e-6)
