"""Real checkpoints: stories260K (with the experiment data) and SmolLM2-135M (marker `pretrained`).

Each converts with exact identity, generates the same text, survives save and reload through the Auto classes, and
takes three training steps whose gradients are those that closed gates allow.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from helpers.smollm2 import smollm2_folder
from mhar import MharForCausalLM
from mhar.conversion import convert_checkpoint, revert_checkpoint
from mhar.conversion.verify import verification_text


@pytest.fixture(scope="module", params=["stories260K", pytest.param("smollm2", marks=pytest.mark.pretrained)])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "smollm2":
        return smollm2_folder(tmp_path_factory.getbasetemp())
    return request.getfixturevalue("shared_data") / "models" / "stories260K"


@pytest.fixture(scope="module")
def converted(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The converted folder; its conversion already proved the float32 logits on text."""
    out = tmp_path_factory.mktemp("converted") / base.name
    report = convert_checkpoint(base, out)
    assert report.verification is not None
    assert report.verification.text == "English prose (Jane Austen)"
    assert report.verification.num_tokens == 512
    assert all(c.identical and c.max_abs_difference == 0 for c in report.verification.comparisons)
    print("\n".join(report.lines()))
    return out


def greedy(folder: Path, prompt: str) -> str:
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    return tokenizer.decode(model.generate(**inputs, max_new_tokens=40, do_sample=False)[0])


def test_the_same_greedy_text(base: Path, converted: Path):
    prompt = "The capital of France is"
    text = greedy(base, prompt)
    assert len(text) > len(prompt) + 20
    assert greedy(converted, prompt) == text
    large = AutoConfig.from_pretrained(base).num_hidden_layers == 30
    assert ("Paris" in text) == large  # stories260K knows no capitals


def test_saved_and_reloaded_through_auto_classes(converted: Path, tmp_path: Path):
    model = AutoModelForCausalLM.from_pretrained(converted)
    assert type(model) is MharForCausalLM
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    expected, received = model.state_dict(), again.state_dict()
    assert expected.keys() == received.keys()
    assert all(torch.equal(received[name], tensor) for name, tensor in expected.items())


def test_reverts_to_the_same_file(base: Path, converted: Path, tmp_path: Path):
    revert_checkpoint(converted, tmp_path / "back")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (base / "model.safetensors").read_bytes()


def text_batch(folder: Path) -> Tensor:
    return AutoTokenizer.from_pretrained(folder)(verification_text(), return_tensors="pt")["input_ids"][:, :64]


@pytest.mark.parametrize("frozen", [False, True], ids=["all", "frozen-base"])
def test_three_training_steps(converted: Path, frozen: bool):
    """Step 1: of the routing only gates receive gradient; from step 2 on queries too. Frozen: nothing else moves."""
    model = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32).train()
    router = model.model.router
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or ".router." in name)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, weight_decay=0.0)
    input_ids, losses = text_batch(converted), []
    for step in range(3):
        optimizer.zero_grad()
        loss = model(input_ids=input_ids, labels=input_ids).loss
        loss.backward()
        losses.append(float(loss.detach()))
        assert router.gate.grad.abs().min() > 0
        assert bool(router.query.grad.any()) == (step > 0)
        assert bool(router.null_source.grad.any()) == (step > 0)
        assert bool(router.norm_weight.grad.any()) == (step > 1)
        optimizer.step()
    assert losses[2] < losses[0]
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    routing = {f"model.router.{name}" for name in ("query", "norm_weight", "gate", "null_source")}
    assert moved == routing if frozen else moved > routing
