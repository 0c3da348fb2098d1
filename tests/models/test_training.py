"""What training code does with a model: autocast, half precision, adapters, frozen parts, compiled steps."""

import pytest
import torch
from torch.testing import assert_close

from helpers.models import FAMILY_NAMES, gradients, routed_model, tokens


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_every_parameter_is_trained(family):
    """One step from generic weights reaches every parameter, embeddings of unused tokens aside."""
    model, ids = routed_model(family, "delta_block_mhar").train(), tokens(2, 9)
    model(ids, labels=ids).loss.backward()
    found = gradients(model)
    for name, parameter in model.named_parameters():
        if "experts" not in name:  # a batch this small need not reach every expert
            assert found[name].abs().sum() > 0, name
        assert torch.isfinite(found[name]).all(), name
        assert found[name].shape == parameter.shape


@pytest.mark.parametrize("variant", ["mhar", "block_mhar", "delta_block_mhar"])
def test_autocast(variant):
    model, ids = routed_model("qwen3", variant), tokens(2, 9)
    expected = model(ids, labels=ids).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(ids, labels=ids).loss
    loss.backward()
    assert_close(loss, expected, rtol=0.05, atol=0.05)
    assert {gradient.dtype for gradient in gradients(model).values()} == {torch.float32}


def test_bfloat16_and_float64():
    ids = tokens(2, 9)
    expected = routed_model("qwen3")(ids, labels=ids).loss
    for dtype, tolerance in ((torch.bfloat16, 0.05), (torch.float64, 1e-5)):
        model = routed_model("qwen3").to(dtype)
        outputs = model(ids, labels=ids)
        outputs.loss.backward()
        assert outputs.logits.dtype == dtype
        assert_close(outputs.loss.float(), expected, rtol=tolerance, atol=tolerance)
        assert {gradient.dtype for gradient in gradients(model).values()} == {dtype}


def test_routing_alone_can_be_trained():
    model, ids = routed_model("qwen3", "delta_block_mhar").train(), tokens(2, 9)
    model.requires_grad_(False)
    model.model.router.requires_grad_(True)
    model(ids, labels=ids).loss.backward()
    assert set(gradients(model)) == {f"model.router.{n}" for n in ("query", "norm_weight", "gate", "null_source")}


def test_low_rank_adapters():
    peft = pytest.importorskip("peft")
    model, ids = routed_model("qwen3", "mhar"), tokens(2, 9)
    expected = model(ids).logits.detach()
    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], modules_to_save=["router"])
    adapted = peft.get_peft_model(model, settings)
    assert_close(adapted(ids).logits, expected)
    optimizer = torch.optim.SGD(adapted.parameters(), lr=0.5)
    losses = []
    for _ in range(4):
        loss = adapted(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    trained = adapted(ids).logits.detach()
    assert_close(adapted.merge_and_unload()(ids).logits, trained, rtol=1e-4, atol=1e-4)


def test_training_step_compiles_as_one_graph():
    model, ids = routed_model("qwen3", "delta_block_mhar").train(), tokens(2, 9)
    expected = model(ids, labels=ids).loss
    expected.backward()
    eager = gradients(model)
    model.zero_grad()
    loss = torch.compile(model, backend="aot_eager", fullgraph=True)(ids, labels=ids).loss
    loss.backward()
    assert_close(loss, expected)
    for name, gradient in gradients(model).items():
        assert_close(gradient, eager[name], rtol=1e-4, atol=1e-5)
