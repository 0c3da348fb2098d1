"""Converted models in other people's training code: PEFT, transformers' Trainer, TRL; and their first gradients."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import mhar

ROUTING = mhar.RoutingConfig.named("delta_block_mhar", block_size=2)


@pytest.fixture
def model(make_base) -> mhar.MharForCausalLM:
    return mhar.convert(make_base(), ROUTING).train()


def gradients(model, input_ids: Tensor) -> dict[str, bool]:
    """Which parameters receive a gradient that is not zero."""
    model.zero_grad(set_to_none=True)
    model(input_ids=input_ids, labels=input_ids).loss.backward()
    return {name: p.grad is not None and bool(p.grad.any()) for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("frozen", [False, True], ids=["all", "frozen-base"])
def test_gates_learn_first_then_queries(model, input_ids: Tensor, frozen: bool):
    """A closed gate hides the mixture from the loss, and its own gradient is what opens it (issue: first steps)."""
    router = model.model.router
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or ".router." in name)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for step in range(3):
        moving = gradients(model, input_ids)
        routing = {name.rpartition(".")[2] for name, moves in moving.items() if moves and ".router." in name}
        # Gains scale keys that a zero query does not read: they follow one step after the queries.
        expected = [{"gate"}, {"gate", "query", "null_source"}, {"gate", "query", "null_source", "norm_weight"}]
        assert routing == expected[step]
        assert any(moves for name, moves in moving.items() if ".router." not in name) == (not frozen)
        optimizer.step()
    assert router.gate.detach().abs().min() > 0
    if frozen:
        changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
        assert changed == {f"model.router.{name}" for name in expected[2]}


def test_lora_trains_merges_and_reloads(make_base, tmp_path: Path, input_ids: Tensor):
    peft = pytest.importorskip("peft")
    model = mhar.convert(make_base(), ROUTING)
    base_logits = model(input_ids).logits
    settings = peft.LoraConfig(
        target_modules=["q_proj", "v_proj"], modules_to_save=["router"], r=2, task_type="CAUSAL_LM"
    )
    adapted = peft.get_peft_model(model, settings).train()
    trainable = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert any("router" in name and name.endswith("gate") for name in trainable)
    assert all("lora_" in name or "router" in name for name in trainable)
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.5)
    for _ in range(3):
        adapted(input_ids=input_ids, labels=input_ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = adapted.eval()(input_ids=input_ids).logits.detach()
    assert not torch.allclose(trained, base_logits, atol=1e-3)

    adapted.save_pretrained(tmp_path / "adapter")
    fresh = mhar.convert(make_base(), ROUTING)
    reloaded = peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter").eval()
    assert torch.equal(reloaded(input_ids=input_ids).logits, trained)

    merged = reloaded.merge_and_unload()
    assert type(merged) is mhar.MharForCausalLM
    assert merged.model.router.gate.detach().abs().max() > 0
    merged.save_pretrained(tmp_path / "merged")
    again = mhar.MharForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.allclose(again(input_ids).logits, trained, atol=1e-5)


def rows(count: int) -> list[dict[str, list[int]]]:
    ids = torch.randint(3, 96, (count, 16), generator=torch.Generator().manual_seed(2)).tolist()
    return [{"input_ids": row, "labels": row} for row in ids]


def assert_took_one_step(trainer, before: dict[str, Tensor]) -> None:
    """Gates and backbone moved; queries, which had no gradient yet, did not."""
    assert trainer.state.global_step == 1
    after = dict(trainer.model.named_parameters())
    assert not torch.equal(after["model.router.gate"], before["model.router.gate"])
    assert not torch.equal(after["model.layers.0.mlp.up_proj.weight"], before["model.layers.0.mlp.up_proj.weight"])
    assert torch.equal(after["model.router.query"], before["model.router.query"])


def test_transformers_trainer(model, tmp_path: Path):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments, default_data_collator

    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    settings = TrainingArguments(
        str(tmp_path), max_steps=1, per_device_train_batch_size=2, use_cpu=True, report_to=[], weight_decay=0.0
    )
    trainer = Trainer(model, settings, train_dataset=rows(2), data_collator=default_data_collator)
    result = trainer.train()
    assert 0 < result.training_loss < 20
    assert_took_one_step(trainer, before)
    saved = mhar.MharForCausalLM.from_pretrained(tmp_path / "checkpoint-1")
    assert torch.equal(saved.model.router.gate, trainer.model.model.router.gate)


def test_trl_sft_trainer(model, tmp_path: Path):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from mhar.conversion.verify import verification_text

    tokenizer = Tokenizer(models.WordLevel(unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["?", "<s>", "</s>"]
    tokenizer.train_from_iterator(
        [verification_text()], trainers.WordLevelTrainer(vocab_size=96, special_tokens=special)
    )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="?", unk_token="?")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    settings = trl.SFTConfig(
        output_dir=str(tmp_path),
        max_steps=1,
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to=[],
        bf16=False,
        max_length=32,
        weight_decay=0.0,
    )
    data = datasets.Dataset.from_dict({"text": verification_text().split("\n\n")[:4]})
    trainer = trl.SFTTrainer(model, args=settings, train_dataset=data, processing_class=wrapped)
    result = trainer.train()
    assert 0 < result.training_loss < 20
    assert_took_one_step(trainer, before)
