"""The Triton backend inside the models (interpreted where there is no GPU): families differ in what follows a read."""

import pytest
import torch
from torch.testing import assert_close

from helpers.models import gradients, routed_model, tokens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def step(family, variant, backend, checkpointing=False):
    model, ids = routed_model(family, variant, resid_pdrop=0.0, routing_backend=backend), tokens(1, 4)
    model, ids = model.to(DEVICE), ids.to(DEVICE)
    assert model.model.router.backend == backend
    if checkpointing:
        model.train().gradient_checkpointing_enable()
    outputs = model(ids, labels=ids)
    outputs.loss.backward()
    return outputs, gradients(model)


@pytest.mark.parametrize(
    "family, variant, checkpointing",
    [
        ("llama", "mhar", False),
        ("llama", "delta_block_mhar", True),
        ("gemma3_text", "block_mhar", False),  # norms that add one to their weight
        ("olmo2", "mhar", False),  # no norm after a read
        ("granite", "delta_mhar", False),  # scaled outputs as sources
        ("qwen3_moe", "mhar", True),
    ],
)
def test_triton_agrees_with_the_reference(family, variant, checkpointing):
    expected, expected_gradients = step(family, variant, "reference")
    outputs, found = step(family, variant, "triton", checkpointing)
    assert_close(outputs.logits, expected.logits, rtol=1e-4, atol=1e-4)
    assert found.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        scale = float(gradient.abs().max())
        assert_close(found[name], gradient, rtol=0, atol=1e-4 * scale + 1e-6, msg=lambda m, n=name: f"{n}: {m}")
