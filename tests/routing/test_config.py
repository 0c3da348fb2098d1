"""RoutingConfig: the named variants of the paper and the combinations that are refused."""

import json

import pytest

from mhar import RoutingConfig
from mhar.errors import ConfigurationError
from mhar.routing.config import VARIANTS


@pytest.mark.parametrize(
    "name, fields",
    [
        ("baseline", dict(read="none")),
        ("attention_residuals", dict(read="replace", sources="sublayer", num_heads=1)),
        ("mhar", dict(read="replace", sources="sublayer", num_heads="kv")),
        ("block_mhar", dict(read="replace", sources="block", block_size=4, num_heads="kv")),
        ("delta_mhar", dict(read="add", sources="sublayer", gate="scalar", null_source=False, num_heads="kv")),
        (
            "delta_block_mhar",
            dict(read="add", sources="block", block_size=4, gate="scalar", null_source=True, num_heads="kv"),
        ),
    ],
)
def test_named_variants(name, fields):
    config = RoutingConfig.named(name)
    assert {field: getattr(config, field) for field in fields} == fields
    assert config.name == name


@pytest.mark.parametrize("name", VARIANTS)
def test_round_trip_through_json(name):
    config = RoutingConfig.named(name)
    saved = json.loads(json.dumps(config.to_dict()))
    assert saved["format_version"] == 1
    assert RoutingConfig.from_dict(saved) == config


def test_overrides():
    config = RoutingConfig.named("mhar", num_heads=8)
    assert config.num_heads == 8
    assert config.with_num_heads(2).num_heads == 8
    assert RoutingConfig.named("mhar").with_num_heads(2).num_heads == 2


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(read="replacing"), "unknown read 'replacing'; did you mean 'replace'"),
        (dict(sources="sublayers"), "unknown sources 'sublayers'; did you mean 'sublayer'"),
        (dict(gate="scaler"), "unknown gate 'scaler'; did you mean 'scalar'"),
        (dict(gate="scalar"), "gate needs read \"add\".*'scalar'"),
        (dict(null_source=True), 'null source needs read "add"'),
        (dict(read="none", gate="scalar"), 'gate needs read "add"'),
        (dict(block_size=0), "block_size must be a positive integer, got 0"),
        (dict(block_size=2.0), "block_size must be a positive integer, got 2.0"),
        (dict(num_heads=float("nan")), "num_heads must be a positive integer.*nan"),
        (dict(num_heads=True), "num_heads.*True"),
        (dict(num_heads="all"), "num_heads.*'all'"),
        (dict(null_source=1), "null_source must be true or false, got 1"),
        (dict(legacy_delta_recursion=True), "legacy_delta_recursion needs"),
        (dict(keep_empty_sites=True), "keep_empty_sites needs"),
    ],
)
def test_refusals(fields, message):
    with pytest.raises(ConfigurationError, match=message):
        RoutingConfig(**fields)


def test_unknown_names_suggest_the_nearest():
    with pytest.raises(ConfigurationError, match="unknown variant 'mhra'; did you mean 'mhar'"):
        RoutingConfig.named("mhra")
    with pytest.raises(ConfigurationError, match="unknown routing option 'num_head'; did you mean 'num_heads'"):
        RoutingConfig.named("mhar", num_head=2)


def test_other_format_version_is_refused():
    with pytest.raises(ConfigurationError, match="format 1, got format 2"):
        RoutingConfig.from_dict({"format_version": 2})
