"""Run files of `mhar train`: the shipped ones are the paper's, and senseless ones are refused."""

import math
from pathlib import Path
from typing import Any

import pytest

from mhar import runfile
from mhar.errors import CheckpointError, ConfigurationError
from mhar.training.config import RunConfig
from mhar.training.model import build_model, parameter_counts

CONFIGS = Path(__file__).parents[2] / "configs"
VOCABULARY = 151_936
# d, layers, heads, KV heads, ffn, T, batch (arXiv 2607.27230)
PAPER = {
    "100m": (512, 12, 8, 4, 1536, 2048, 64),
    "350m": (1024, 24, 16, 8, 4096, 1024, 32),
    "1b": (1280, 36, 16, 8, 5120, 1024, 32),
}


def overridden(path: str, *overrides: str) -> RunConfig:
    return runfile.load(RunConfig, CONFIGS / path, overrides)


def test_every_shipped_run_file_loads() -> None:
    names = {path.stem for path in CONFIGS.glob("*.yaml")}
    assert {"demo", "100m", "350m", "1b", "8b", "midtrain-8b", "midtrain-smollm2"} <= names
    for name in names:
        overridden(f"{name}.yaml")


@pytest.mark.parametrize("name", PAPER)
def test_sizes_and_recipe_are_the_papers(name: str) -> None:
    width, layers, heads, kv, ffn, length, batch = PAPER[name]
    config = overridden(f"{name}.yaml")
    shape = config.model.shape
    fields = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    assert tuple(shape[field] for field in fields) == (width, layers, heads, kv, ffn)
    assert shape["head_dim"] * heads == width
    assert shape["vocab_size"] == VOCABULARY
    assert shape["rope_parameters"]["rope_theta"] == 1e4
    assert (config.data.sequence_length, config.batch_size, config.steps) == (length, batch, 20_000)
    o = config.optimizer
    assert (o.lr, o.betas, o.eps, o.weight_decay, o.clip, o.groups) == (1e-3, (0.9, 0.95), 1e-8, 0.1, 1.0, {})
    assert (config.schedule.kind, config.schedule.warmup_steps, config.schedule.min_ratio) == ("cosine", 1000, 0.1)
    assert config.eval.tail == 11


@pytest.mark.parametrize("name", PAPER)
def test_parameter_counts(name: str) -> None:
    """On the meta device: routing adds 2 (2L + 1) D to the additive model, which is the stock model's size."""
    width, layers, heads, kv, ffn, *_ = PAPER[name]
    head = width // heads
    layer = 2 * width * width + 2 * width * kv * head + 3 * width * ffn + 2 * width + 2 * head
    total = VOCABULARY * width + layers * layer + width
    counts = {}
    for variant in ("stock", "baseline", "attention_residuals", "mhar"):
        overrides = [f"model.variant={variant}"] + ["model.loss_chunk_size=null"] * (variant == "stock")
        counts[variant] = parameter_counts(build_model(overridden(f"{name}.yaml", *overrides).model, 0, "meta"))
    assert counts["stock"]["parameters"] == counts["baseline"]["parameters"] == total
    routing = 2 * (2 * layers + 1) * width
    for variant in ("attention_residuals", "mhar"):
        assert counts[variant]["parameters"] == total + routing
        assert counts[variant]["routing_parameters"] == routing


def test_the_8b_shape_is_llama_3_1() -> None:
    counts = parameter_counts(build_model(overridden("8b.yaml").model, 0, "meta"))
    assert counts["parameters"] - counts["routing_parameters"] == 8_030_261_248
    assert counts["routing_parameters"] == 2 * 65 * 4096


def test_mid_training_files_follow_the_papers_rule() -> None:
    for name in ("midtrain-8b.yaml", "midtrain-smollm2.yaml"):
        config = overridden(name)
        assert {group: section.weight_decay for group, section in config.optimizer.groups.items()} == dict.fromkeys(
            ("routing", "embeddings", "norms", "biases"), 0.0
        )
        assert (config.optimizer.lr, config.optimizer.weight_decay, config.ema) == (4e-4, 0.05, 0.999)
        assert config.optimizer.lr * config.schedule.min_ratio == pytest.approx(4e-6)
        assert config.model.z_loss == 1e-4
    config = overridden("midtrain-8b.yaml")
    assert config.steps == 9500
    assert config.batch_size * config.data.sequence_length == pytest.approx(1.05e6, rel=0.01)


MINIMAL: dict[str, Any] = {
    "out": "x",
    "steps": 10,
    "batch_size": 1,
    "micro_batch_size": 1,
    "model": {"family": "qwen3"},
    "data": {"train": ["d"]},
    "schedule": {"warmup_steps": 0},
}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"steps": 0}, "steps must be positive, received 0"),
        ({"schedule": {"warmup_steps": 10}}, "warmup_steps must be below steps, received 10 of 10"),
        ({"schedule": {"warmup_steps": -1}}, "warmup_steps >= 0"),
        ({"schedule": {"kind": "cosin"}}, "unknown value 'cosin'; did you mean 'cosine'"),
        ({"optimizer": {"lr": 0}}, "optimizer.lr must be positive, received 0"),
        ({"optimizer": {"lr": -1e-3}}, "optimizer.lr must be positive"),
        ({"optimizer": {"lr": float("nan")}}, "optimizer.lr must be positive, received nan"),
        ({"optimizer": {"lr": 3}}, "lr above 1 makes no sense"),
        ({"optimizer": {"betas": [0.9]}}, "betas are two numbers"),
        ({"optimizer": {"weight_decay": -1}}, "weight_decay must not be negative"),
        ({"optimizer": {"groups": {"router": {}}}}, "unknown parameter group 'router'"),
        ({"optimizer": {"groups": {"norms": {"decay": 1}}}}, r"unknown key 'optimizer\.groups\.norms\.decay'"),
        ({"model": {}}, "`family` .* or `init_from`"),
        ({"model": {"family": "qwen3", "init_from": "x"}}, "one of the two"),
        ({"model": {"family": "qwen3", "control": True}}, "control continues a pretrained base"),
        ({"model": {"init_from": "x", "control": True, "frozen_base": True}}, "no routing to train"),
        ({"model": {"family": "qwen3", "variant": "stock", "z_loss": 1e-4}}, "stock takes no z_loss"),
        ({"data": {"train": []}}, "at least one prepared folder"),
        ({"data": {"train": ["d"], "workers": -1}}, "workers must not be negative"),
        ({"ema": 1.0}, "ema is a decay between 0 and 1"),
        ({"max_seconds": 0}, "max_seconds must be positive"),
        ({"max_seconds": math.nan}, "max_seconds must be positive"),
        ({"max_loss": math.nan}, "max_loss must be positive"),
        ({"seed": 2**64}, r"seed must be from 0 to below 2\*\*63"),
        ({"data": {"train": ["d"], "weights": [math.nan]}}, "weights are finite"),
        ({"optimizer": {"weight_decay": math.nan}}, "weight_decay must not be negative"),
        ({"optimizer": {"groups": {"norms": {"lr_scale": -1}}}}, "lr_scale must be finite and not negative"),
        ({"optimizer": {"groups": {"norms": {"weight_decay": math.nan}}}}, "weight_decay must be finite"),
        ({"parallel": {"compile_mode": "foo"}}, "unknown value 'foo'"),
        ({"eval": {"every": 0}}, "eval.every must be positive"),
        ({"checkpoint": {"keep": 0}}, "keep and keep_every are positive"),
        ({"logging": {"every": 0}}, "logging.every must be positive"),
        ({"parallel": {"shard": 2}}, "shard belongs to mode hsdp"),
        ({"parallel": {"mode": "hsdp"}}, "shard belongs to mode hsdp"),
        ({"parallel": {"dtype": "float16"}}, "unknown value 'float16'"),
        ({"learning_rate": 1}, "unknown key 'learning_rate'"),
    ],
)
def test_senseless_settings_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        runfile.from_mapping(RunConfig, {**MINIMAL, **change})


@pytest.mark.parametrize(
    "model, message",
    [
        ({"family": "qwen33"}, "did you mean 'qwen3'"),
        ({"family": "qwen3", "variant": "mahr"}, "did you mean 'mhar'"),
        ({"family": "qwen3", "routing": {"num_head": 2}}, "did you mean 'num_heads'"),
        ({"family": "qwen3", "routing": {"gate": "scalar"}}, "a gate needs"),
        ({"family": "qwen3", "shape": {"num_hidden_layer": 9}}, "did you mean 'num_hidden_layers'"),
        ({"family": "qwen3", "shape": {"hidden_sise": 3}}, "did you mean 'hidden_size'"),
        ({"family": "qwen3", "shape": {"hidden_size": -4}}, "hidden_size must be a positive integer, received -4"),
        ({"family": "qwen3", "shape": {"num_hidden_layers": 0}}, "num_hidden_layers must be a positive integer"),
        ({"family": "qwen3", "attention": "foo"}, "'qwen3' cannot be built: .*foo"),
        ({"init_from": "no/such/folder"}, "'no/such/folder' cannot be built"),
    ],
)
def test_models_that_do_not_exist_are_refused(model: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigurationError, CheckpointError), match=message):
        build_model(runfile.from_mapping(RunConfig, {**MINIMAL, "model": model}).model, 0, "meta")
