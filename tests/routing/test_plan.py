"""The visibility rules of docs/method.md, written out for small models."""

import pytest

from mhar import RoutingConfig
from mhar.errors import ConfigurationError
from mhar.routing import routing_plan


def names(variant, num_layers, **overrides):
    return [s.source_names for s in routing_plan(RoutingConfig.named(variant, **overrides), 2 * num_layers + 1)]


def test_replace_sublayer_sees_everything_before():
    assert names("mhar", 2) == [
        ("embedding",),
        ("embedding", "layers.0.attn"),
        ("embedding", "layers.0.attn", "layers.0.mlp"),
        ("embedding", "layers.0.attn", "layers.0.mlp", "layers.1.attn"),
        ("embedding", "layers.0.attn", "layers.0.mlp", "layers.1.attn", "layers.1.mlp"),
    ]


def test_replace_block_keeps_a_running_partial():
    """Three layers in blocks of two: the last block is shorter, the partial is absent right after a block ends."""
    assert names("block_mhar", 3, block_size=2) == [
        ("embedding",),
        ("embedding", "partial"),
        ("embedding", "partial"),
        ("embedding", "partial"),
        ("embedding", "block.0"),
        ("embedding", "block.0", "partial"),
        ("embedding", "block.0", "partial"),
    ]


def test_add_sublayer_has_no_first_and_no_final_read():
    assert names("delta_mhar", 2) == [
        (),
        ("embedding", "layers.0.attn"),
        ("embedding", "layers.0.attn", "layers.0.mlp"),
        ("embedding", "layers.0.attn", "layers.0.mlp", "layers.1.attn"),
        (),
    ]


def test_add_block_delta_appears_at_the_second_site_of_the_next_block():
    assert names("delta_block_mhar", 3, block_size=1) == [
        (),
        ("null", "embedding"),
        ("null", "embedding"),
        ("null", "embedding", "delta.1"),
        ("null", "embedding", "delta.1"),
        ("null", "embedding", "delta.1", "delta.2"),
        (),
    ]


def test_eight_blocks_of_four_layers_have_at_most_nine_sources():
    """docs/method.md: the last block is never a source."""
    assert max(map(len, names("delta_block_mhar", 32))) == 9


def test_parameter_rows():
    plan = routing_plan(RoutingConfig.named("mhar"), 5)
    assert [s.row for s in plan] == [0, 1, 2, 3, 4]
    plan = routing_plan(RoutingConfig.named("delta_mhar"), 5)
    assert [s.row for s in plan] == [None, 0, 1, 2, None]
    plan = routing_plan(RoutingConfig.named("delta_mhar", null_source=True, keep_empty_sites=True), 5)
    assert [s.row for s in plan] == [0, 1, 2, 3, None]
    assert plan[0].source_names == ("null",)
    assert [s.row for s in routing_plan(RoutingConfig.named("baseline"), 3)] == [None, None, None]


def test_site_names():
    assert [s.name for s in routing_plan(RoutingConfig(), 5)] == [
        "layers.0.attn",
        "layers.0.mlp",
        "layers.1.attn",
        "layers.1.mlp",
        "final",
    ]


def test_blocks_larger_than_the_model_are_refused():
    with pytest.raises(ConfigurationError, match=r"block_size must not exceed the number of layers \(3\), got 4"):
        routing_plan(RoutingConfig.named("block_mhar"), 7)
    with pytest.raises(ConfigurationError, match="num_sites must be a positive integer, got 0"):
        routing_plan(RoutingConfig(), 0)
