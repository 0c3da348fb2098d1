"""The loss and its terms."""

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from helpers.models import gradients, routed_model, tokens
from mhar.errors import ConfigurationError
from mhar.models.loss import load_balancing_loss


def with_fields(family="qwen3", **fields):
    model = routed_model(family)
    for name, value in fields.items():
        setattr(model.config, name, value)
    return model.train()


def batch():
    ids = tokens(2, 9)
    labels = ids.clone()
    labels[0, :4] = -100
    return ids, labels


def reference_terms(logits, labels):
    targets = labels[:, 1:].flatten()
    logits = logits[:, :-1].flatten(0, 1)
    cross_entropy = F.cross_entropy(logits, targets)
    return cross_entropy, logits.logsumexp(dim=-1)[targets != -100].square().mean()


def test_z_loss_is_added_in_training_and_reported_apart():
    ids, labels = batch()
    model = with_fields(z_loss=0.1)
    outputs = model(ids, labels=labels)
    cross_entropy, z = reference_terms(outputs.logits, labels)
    assert_close(outputs.z_loss, 0.1 * z)
    assert_close(outputs.loss, cross_entropy + 0.1 * z)
    evaluated = model.eval()(ids, labels=labels)
    assert evaluated.z_loss is None
    assert_close(evaluated.loss, cross_entropy)


def test_no_z_loss_by_default():
    ids, labels = batch()
    assert with_fields()(ids, labels=labels).z_loss is None


@pytest.mark.parametrize("chunk_size", [1, 5, 18, 1000], ids=["one", "odd", "all", "more"])
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("family", ["qwen3", "granite", "gemma3_text"])  # the latter scale or cap their logits
def test_chunked_loss_is_the_loss(family, z_loss, chunk_size):
    ids, labels = batch()
    model = with_fields(family, z_loss=z_loss)
    expected = model(ids, labels=labels)
    expected.loss.backward()
    expected_gradients = gradients(model)
    model.zero_grad()
    model.config.loss_chunk_size = chunk_size
    outputs = model(ids, labels=labels)
    outputs.loss.backward()
    assert outputs.logits is None
    assert_close(outputs.loss, expected.loss)
    if z_loss:
        assert_close(outputs.z_loss, expected.z_loss)
    for name, gradient in gradients(model).items():
        assert_close(gradient, expected_gradients[name], rtol=1e-4, atol=1e-6)


def test_chunked_loss_holds_one_chunk_of_logits():
    ids, labels = batch()
    model = with_fields(loss_chunk_size=4)
    rows: list[int] = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: rows.append(output[..., 0].numel()))
    model(ids, labels=labels)
    assert rows == [4, 4, 4, 4, 2]


def test_logits_are_returned_without_labels():
    assert with_fields(loss_chunk_size=4)(tokens(2, 9)).logits.shape == (2, 9, 48)


@pytest.mark.parametrize("chunk_size", [None, 4])
def test_gradient_accumulation_divides_by_the_batch(chunk_size):
    ids, labels = batch()
    model = with_fields(z_loss=0.1, loss_chunk_size=chunk_size)
    whole = model(ids, labels=labels)
    items = (labels[:, 1:] != -100).sum()
    parts = [model(ids[i : i + 1], labels=labels[i : i + 1], num_items_in_batch=items) for i in range(2)]
    assert_close(sum(part.loss for part in parts), whole.loss)
    assert_close(sum(part.z_loss for part in parts), whole.z_loss)


@pytest.mark.parametrize("chunk_size", [None, 4])
def test_shifted_labels_and_ignore_index(chunk_size):
    ids, labels = batch()
    model = with_fields(z_loss=0.1, loss_chunk_size=chunk_size)
    expected = model(ids, labels=labels).loss
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
    assert_close(model(ids, labels=labels, shift_labels=shifted).loss, expected)
    other = torch.where(labels == -100, -1, labels)
    assert_close(model(ids, labels=other, ignore_index=-1).loss, expected)


def test_bfloat16_logits_are_summed_in_float32():
    ids, labels = batch()
    model = with_fields(loss_chunk_size=4).to(torch.bfloat16)
    chunked = model(ids, labels=labels).loss
    model.config.loss_chunk_size = None
    assert chunked.dtype == torch.float32
    assert_close(chunked, model(ids, labels=labels).loss)


def test_load_balancing_ignores_padding():
    logits = torch.randn(2, 12, 4, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(3, 4)
    mask[0, :2] = 0
    kept = mask.flatten().bool()
    masked = load_balancing_loss(list(logits), 2, mask)
    assert_close(masked, load_balancing_loss([layer[kept] for layer in logits], 2, None))


def test_balanced_experts_have_loss_top_k():
    assert_close(load_balancing_loss([torch.eye(4) * 1e-6], 2, None), torch.tensor(2.0), rtol=1e-4, atol=0)


@pytest.mark.parametrize("field, value", [("z_loss", -1e-4), ("z_loss", "high"), ("loss_chunk_size", 0)])
def test_bad_loss_settings(field, value):
    from mhar import MharConfig

    with pytest.raises(ConfigurationError, match=field):
        MharConfig(base_model_type="llama", **{field: value})
