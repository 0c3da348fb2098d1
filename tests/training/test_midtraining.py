"""Mid-training: from a converted checkpoint, its control, a frozen base, and what is logged of the gates."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from helpers.corpora import prepared_text, save_tokenizer
from helpers.training_runs import numbers, tiny_config
from mhar.conversion import convert
from mhar.errors import CheckpointError, InputError
from mhar.routing import RoutingConfig
from mhar.training.config import RunConfig
from mhar.training.recipe import train


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared_text(tmp_path_factory.mktemp("midtraining") / "data")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with random weights and untied embeddings, as a folder."""
    folder = tmp_path_factory.mktemp("base") / "base"
    torch.manual_seed(5)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=22, num_hidden_layers=4, **shape)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def converted(base: Path) -> Path:
    folder = base.with_name("converted")
    routing = RoutingConfig.named("delta_block_mhar", block_size=1)
    convert(AutoModelForCausalLM.from_pretrained(base), routing).save_pretrained(folder)
    return folder


def midtraining(data: Path, out: Path, init_from: Path, /, **sections: Any) -> RunConfig:
    undecayed = {name: {"weight_decay": 0.0} for name in ("routing", "embeddings", "norms", "biases")}
    settings: dict[str, Any] = {
        "model": {"family": None, "shape": {}, "init_from": str(init_from), "z_loss": 1e-4},
        "optimizer": {"lr": 1e-3, "weight_decay": 0.05, "groups": undecayed},
        "schedule": {"kind": "linear", "warmup_steps": 2, "min_ratio": 0.01},
        "ema": 0.999,
    }
    for name, value in sections.items():
        settings[name] = {**settings.get(name, {}), **value} if isinstance(value, dict) else value
    return tiny_config(data, out, **settings)


def losses(config: RunConfig, kind: str = "train", key: str = "loss") -> list[float]:
    return [line[key] for line in numbers(config.out, kind)]


def test_the_first_step_is_the_controls_to_the_bit_and_the_data_the_same(
    data: Path, tmp_path: Path, base: Path, converted: Path
) -> None:
    routed = midtraining(data, tmp_path / "routed", converted)
    control = midtraining(data, tmp_path / "control", converted, model={"control": True})
    plain = midtraining(data, tmp_path / "plain", base, model={"control": True})
    assert train(routed)["variant"] == "delta_block_mhar"
    assert train(control)["variant"] == train(plain)["variant"] == "baseline"
    assert numbers(control.out) == numbers(plain.out)
    assert losses(routed)[0] == losses(control)[0]
    assert losses(routed, "eval", "heldout_loss")[0] == losses(control, "eval", "heldout_loss")[0]
    assert losses(routed)[2:] != losses(control)[2:]
    assert losses(routed) == pytest.approx(losses(control), abs=2e-3)  # no spike
    assert losses(routed, "train", "z_loss")[0] > 0


def test_the_rate_warms_up_again_and_decays_to_the_floor(data: Path, tmp_path: Path, converted: Path) -> None:
    config = midtraining(data, tmp_path / "run", converted)
    train(config)
    rates = losses(config, "train", "lr")
    assert rates[:3] == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3])
    assert rates[-1] == pytest.approx(1e-5)


def test_gates_open_first_then_the_queries(data: Path, tmp_path: Path, converted: Path) -> None:
    """At the first step only the gates receive gradient; all are logged by site, with their gradients."""
    config = midtraining(data, tmp_path / "run", converted, model={"frozen_base": True})
    train(config)
    lines = numbers(config.out, "routing")
    sites = list(lines[0]["gates"])
    assert sites[0] == "layers.0.mlp"
    assert set(lines[0]["gates"].values()) == {0.0}
    assert all(value > 0 for value in lines[0]["gate_grad_norms"].values())
    assert set(lines[0]["query_norms"].values()) == set(lines[1]["query_norms"].values()) == {0.0}
    assert all(value != 0 for value in lines[1]["gates"].values())
    assert all(value > 0 for value in lines[-1]["query_norms"].values())


def test_a_frozen_base_does_not_move(data: Path, tmp_path: Path, converted: Path) -> None:
    config = midtraining(data, tmp_path / "run", converted, model={"frozen_base": True})
    summary = train(config)
    assert summary["trainable_parameters"] == summary["routing_parameters"]
    before = AutoModelForCausalLM.from_pretrained(converted).state_dict()
    after = AutoModelForCausalLM.from_pretrained(config.out / "final").state_dict()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]) == (".router." not in name)


def test_the_average_is_evaluated_exported_and_slow(data: Path, tmp_path: Path, converted: Path) -> None:
    config = midtraining(data, tmp_path / "run", converted)
    train(config)
    start, final, average = (
        AutoModelForCausalLM.from_pretrained(folder).model.router.gate
        for folder in (converted, config.out / "final", config.out / "final_ema")
    )
    assert (start == 0).all()
    assert (average != 0).any()
    assert average.abs().max() < 0.02 * final.abs().max()
    first, *_, last = losses(config, "eval", "ema_heldout_loss")
    assert 0 < abs(first - last) < abs(losses(config, "eval", "heldout_loss")[-1] - first)


def test_the_routing_rate_is_separate(data: Path, tmp_path: Path, converted: Path) -> None:
    groups = {"routing": {"weight_decay": 0.0, "lr_scale": 10.0}}
    config = midtraining(data, tmp_path / "run", converted, optimizer={"groups": groups}, steps=3)
    train(config)
    gates = numbers(config.out, "routing")[1]["gates"].values()  # after one step of Adam: the rate itself
    assert [abs(gate) for gate in gates] == pytest.approx([10 * 1e-3 / 3] * len(gates), rel=0.02)


def test_an_unconverted_base_is_refused(data: Path, tmp_path: Path, base: Path) -> None:
    with pytest.raises(CheckpointError, match="has no routing: `mhar convert` it first"):
        train(midtraining(data, tmp_path / "run", base))


def test_a_control_needs_closed_gates(data: Path, tmp_path: Path, converted: Path) -> None:
    config = midtraining(data, tmp_path / "run", converted, steps=3)
    train(config)
    with pytest.raises(CheckpointError, match="is not closed, so its base is unknown"):
        train(midtraining(data, tmp_path / "control", config.out / "final", model={"control": True}))


def test_data_of_another_tokenizer_is_refused(data: Path, tmp_path: Path, converted: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(converted)
    model.save_pretrained(tmp_path / "other")
    save_tokenizer(tmp_path / "other", ["other", "words"])
    with pytest.raises(InputError, match="is not the one the data was prepared with"):
        train(midtraining(data, tmp_path / "run", tmp_path / "other"))
