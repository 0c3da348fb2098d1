"""Schedules, parameter groups, averages, FLOPs, pruning, metrics, devices: the parts of the recipe by themselves."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.training_runs import SHAPE, tiny_config
from mhar.errors import ConfigurationError, DependencyError
from mhar.training import distributed
from mhar.training.checkpoint import prunable
from mhar.training.config import (
    CheckpointSection,
    GroupSection,
    ModelSection,
    OptimizerSection,
    ParallelSection,
    ScheduleSection,
)
from mhar.training.distributed import World, check_spread, pick_device, resolve_mode
from mhar.training.flops import flops_per_token
from mhar.training.metrics import Metrics, read_metrics
from mhar.training.model import build_model
from mhar.training.optimizer import WeightAverage, build_optimizer, group_of, set_lr
from mhar.training.schedule import lr_factor

CPU = torch.device("cpu")


def schedule(**fields: Any) -> list[float]:
    section = ScheduleSection(**{"warmup_steps": 4, "min_ratio": 0.1, **fields})
    return [lr_factor(section, step, 101) for step in range(101)]


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd", "one_minus_sqrt"])
def test_every_schedule_warms_up_to_the_peak_and_ends_at_the_floor(kind: str) -> None:
    factors = schedule(kind=kind)
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factors[-1] == pytest.approx(0.1)
    assert sorted(factors[4:], reverse=True) == factors[4:]


def test_schedules_follow_their_formulas() -> None:
    middle = 4 + 48  # half of the steps after the warm-up
    assert schedule(kind="cosine")[middle] == pytest.approx(0.1 + 0.9 * 0.5)
    assert schedule(kind="cosine")[4 + 24] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    assert schedule(kind="linear")[4 + 24] == pytest.approx(0.1 + 0.9 * 0.75)
    wsd, root = schedule(kind="wsd"), schedule(kind="one_minus_sqrt")
    assert set(wsd[4:81]) == set(root[4:81]) == {1.0}
    assert wsd[85] == pytest.approx(0.1 + 0.9 * 0.75)
    assert root[85] == pytest.approx(0.1 + 0.9 * (1 - math.sqrt(0.25)))
    assert schedule(warmup_steps=0)[0] == 1.0


def tiny(variant: str = "delta_block_mhar", **fields: Any) -> Any:
    routing = {"block_size": 1} if "block" in variant else {}
    return build_model(ModelSection(family="qwen3", shape=SHAPE, variant=variant, routing=routing, **fields), 0)


def test_groups_cover_every_parameter_by_role() -> None:
    groups: dict[str, list[str]] = {}
    for name, parameter in tiny().named_parameters():
        groups.setdefault(group_of(name, parameter), []).append(name)
    assert groups["embeddings"] == ["model.embed_tokens.weight"]
    assert {name.rsplit(".", 1)[1] for name in groups["routing"]} == {"query", "norm_weight", "gate", "null_source"}
    assert len(groups["norms"]) == 2 * 4 + 1
    assert len(groups["matrices"]) == 2 * 7
    assert group_of("model.layers.0.self_attn.q_proj.bias", torch.zeros(3)) == "biases"
    assert group_of("lm_head.weight", torch.zeros(3, 3)) == "matrices"


def test_the_default_decays_everything_and_groups_override_it() -> None:
    plain = build_optimizer(tiny(), OptimizerSection(), CPU)
    assert {group["weight_decay"] for group in plain.param_groups} == {0.1}
    chosen = {"routing": GroupSection(lr_scale=3.0, weight_decay=0.0), "norms": GroupSection(weight_decay=0.0)}
    optimizer = build_optimizer(tiny(), OptimizerSection(groups=chosen), CPU)
    set_lr(optimizer, 0.5)
    assert sorted((group["lr"], group["weight_decay"]) for group in optimizer.param_groups) == [
        (0.5, 0.0),
        (0.5, 0.1),
        (0.5, 0.1),
        (1.5, 0.0),
    ]


def test_a_frozen_base_trains_routing_only() -> None:
    model = build_model(ModelSection(family="qwen3", shape=SHAPE, variant="delta_mhar", frozen_base=True), 0)
    optimizer = build_optimizer(model, OptimizerSection(), CPU)
    assert [len(group["params"]) for group in optimizer.param_groups] == [3]
    with pytest.raises(ConfigurationError, match="no parameter is trainable"):
        build_optimizer(tiny("baseline", frozen_base=True), OptimizerSection(), CPU)


def test_every_variant_starts_from_the_same_backbone() -> None:
    models = {name: tiny(name).state_dict() for name in ("baseline", "attention_residuals", "mhar", "delta_block_mhar")}
    stock = tiny("stock").state_dict()
    for state in models.values():
        assert all(torch.equal(state[name], stock[name]) for name in stock)
    other = build_model(ModelSection(family="qwen3", shape=SHAPE, variant="mhar"), 1).state_dict()
    assert not torch.equal(other["model.layers.0.mlp.up_proj.weight"], stock["model.layers.0.mlp.up_proj.weight"])


def test_the_average_is_the_formula_and_is_swapped_back() -> None:
    model = nn.Linear(2, 1, bias=False)
    average = WeightAverage(model, 0.75)
    first = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.add_(1.0)
    average.update()
    torch.testing.assert_close(average.averages["weight"], 0.75 * first + 0.25 * (first + 1))
    with average.swapped():
        torch.testing.assert_close(model.weight.detach(), first + 0.25)
    assert torch.equal(model.weight.detach(), first + 1)
    torch.testing.assert_close(average.averages["weight"], first + 0.25)


def test_a_float32_average_moves_where_bfloat16_would_not() -> None:
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    average = WeightAverage(model, 0.999)
    with torch.no_grad():
        model.weight.fill_(1.01)
    average.update()
    assert average.averages["weight"].dtype == torch.float32
    assert average.averages["weight"].item() > 1.0
    assert torch.lerp(torch.tensor(1.0).bfloat16(), torch.tensor(1.01).bfloat16(), 1e-3).item() == 1.0


def test_flops_count_matrices_and_causal_attention() -> None:
    model = tiny("mhar")
    matrices = sum(p.numel() for n, p in model.named_parameters() if "router" not in n)
    assert flops_per_token(model, model.config, 100) == 6 * matrices + 6 * 2 * 2 * 8 * 100
    untied = build_model(ModelSection(family="qwen3", shape={**SHAPE, "tie_word_embeddings": False}), 0)
    assert flops_per_token(untied, untied.config, 100) == flops_per_token(model, model.config, 100)


def test_flops_count_the_active_experts() -> None:
    shape = {**SHAPE, "num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
    model = build_model(ModelSection(family="qwen3_moe", shape=shape, variant="baseline"), 0)
    experts = sum(p.numel() for n, p in model.named_parameters() if "experts" in n)
    others = sum(p.numel() for p in model.parameters()) - experts
    assert flops_per_token(model, model.config, 0) == 6 * (others + experts / 4)


def test_pruning_keeps_the_last_and_the_milestones() -> None:
    steps = list(range(10, 101, 10))
    assert prunable(steps, CheckpointSection(keep=2)) == steps[:-2]
    assert prunable(steps, CheckpointSection(keep=1, keep_every=30)) == [10, 20, 40, 50, 70, 80]
    assert prunable([10], CheckpointSection(keep=1)) == []


def test_metrics_survive_half_a_line_and_drop_what_is_redone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [{"kind": "train", "step": step, "loss": 1.0} for step in (1, 2, 3)]
    path.write_text("\n".join(map(json.dumps, lines)) + '\n{"kind": "tra')
    with Metrics(tiny_config(tmp_path, tmp_path), 2, is_main=True) as log:
        log.write("eval", 2, heldout_loss=0.5)
    assert [(line["kind"], line["step"]) for line in read_metrics(path)] == [("train", 1), ("train", 2), ("eval", 2)]


def test_metrics_reach_tensorboard_and_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    calls: list[Any] = []

    class Tracker:
        def init(self, **options: Any) -> None:
            calls.append(options)

        def log(self, values: dict[str, float], step: int) -> None:
            calls.append((values, step))

        def finish(self) -> None:
            calls.append("finished")

    monkeypatch.setitem(sys.modules, "wandb", Tracker())
    config = tiny_config(tmp_path, tmp_path / "run", logging={"tensorboard": True, "wandb": "project"})
    config.out.mkdir()
    with Metrics(config, 0, is_main=True) as log:
        log.write("routing", 1, gates={"layers.0.mlp": 0.25})
        log.write("train", 1, loss=2.5, mfu=None)
    board = events.EventAccumulator(str(config.out / "tensorboard")).Reload()
    assert [event.value for event in board.Scalars("train/loss")] == [2.5]
    assert [event.value for event in board.Scalars("routing/gates/layers.0.mlp")] == [0.25]
    assert calls[0]["project"] == "project"
    assert calls[1:] == [({"routing/gates/layers.0.mlp": 0.25}, 1), ({"train/loss": 2.5}, 1), "finished"]


def test_a_missing_tracker_is_named(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, tmp_path, logging={"trackio": "p"})
    if __import__("importlib.util").util.find_spec("trackio") is not None:
        pytest.skip("trackio is installed")
    with pytest.raises(DependencyError, match="needs the package trackio"):
        Metrics(config, 0, is_main=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_a_device_that_is_not_there_is_refused() -> None:
    assert pick_device("auto").type == "cpu"
    with pytest.raises(ConfigurationError, match="no CUDA device is there"):
        pick_device("cuda")


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(distributed.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(ConfigurationError, match="process 1 of this host has no GPU of its own: 1 there"):
        pick_device("cuda")


@pytest.mark.parametrize(
    "mode, shard, size, outcome",
    [
        ("auto", None, 1, "none"),
        ("auto", None, 4, "fsdp"),
        ("fsdp", None, 1, "fsdp"),
        ("hsdp", 2, 4, "hsdp"),
        ("ddp", None, 1, ConfigurationError),
        ("none", None, 2, ConfigurationError),
        ("hsdp", 3, 4, ConfigurationError),
        ("hsdp", 2, 1, ConfigurationError),
    ],
)
def test_modes_need_their_processes(mode: Any, shard: int | None, size: int, outcome: Any) -> None:
    section = ParallelSection(mode=mode, shard=shard)
    if isinstance(outcome, str):
        assert resolve_mode(section, size) == outcome
    else:
        with pytest.raises(outcome, match="process"):
            resolve_mode(section, size)


@pytest.mark.parametrize("mode", ["fsdp", "hsdp", "ddp"])
def test_a_parallelism_that_was_not_obtained_is_an_error(mode: str) -> None:
    world = World(0, 2, CPU, mode, None)
    with pytest.raises(ConfigurationError, match=f"{mode} was asked for, but"):
        check_spread(tiny("mhar"), world, 2)
