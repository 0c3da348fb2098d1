"""Interventions: what each does to the weights, the names they check, and that none outlives its context."""

import copy

import pytest
import torch
from torch import nn

from mhar import DepthRouter, RoutingConfig
from mhar.errors import ConfigurationError, InputError
from mhar.routing import routing_plan
from mhar.routing.interventions import (
    freeze,
    one_hot,
    only_at,
    parse,
    remove_head,
    remove_site,
    remove_source,
    swap_heads,
    uniform,
)

LAYERS, WIDTH, HEADS = 3, 12, 3
BACKENDS = ["reference", pytest.param("triton", id="triton-interpreted")]


def make_router(variant="mhar", backend="reference", **overrides):
    config = RoutingConfig.named(variant, **{"num_heads": HEADS, **overrides})
    router = DepthRouter(2 * LAYERS + 1, WIDTH, config=config, backend=backend)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in router.parameters():
            parameter += 0.7 * torch.randn_like(parameter)
    return router


@pytest.fixture(scope="module")
def sublayers():
    torch.manual_seed(1)
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2 * LAYERS))


@pytest.fixture(scope="module")
def x():
    return torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(2))


def run(router, sublayers, x):
    with torch.no_grad():
        history = router.start(x)
        for sublayer in sublayers:
            history.append(sublayer(history.read()))
        return history.read()


def observed(router, sublayers, x, *changes):
    """(output, weights by site name) under interventions."""
    reads = {}
    with router.intervene(*changes), router.observe(lambda read: reads.update({read.name: read.weights.clone()})):
        return run(router, sublayers, x), reads


def test_uniform(sublayers, x):
    _, weights = observed(make_router(), sublayers, x, uniform())
    assert all(torch.equal(w, torch.full_like(w, 1 / len(w))) for w in weights.values())


def test_uniform_is_a_zero_query(sublayers, x):
    router = make_router()
    changed, _ = observed(router, sublayers, x, uniform())
    nn.init.zeros_(router.query)
    torch.testing.assert_close(changed, run(router, sublayers, x), rtol=1e-5, atol=1e-6)


def test_one_hot_reads_one_source(sublayers, x):
    router = make_router()
    changed, weights = observed(router, sublayers, x, only_at(["final"], one_hot("embedding")))
    torch.testing.assert_close(changed, x)
    assert weights["final"][0].eq(1).all()
    assert weights["final"][1:].eq(0).all()


def test_a_removed_source_leaves_the_softmax_of_the_others(sublayers, x):
    router = make_router()
    _, before = observed(router, sublayers, x)
    _, after = observed(router, sublayers, x, only_at(["final"], remove_source("layers.1.mlp")))
    kept = [i for i in range(2 * LAYERS + 1) if i != 4]
    assert after["final"][4].eq(0).all()
    expected = before["final"][kept] / before["final"][kept].sum(dim=0)
    torch.testing.assert_close(after["final"][kept], expected)


def test_the_only_source_of_a_site_cannot_be_removed(sublayers, x):
    _, weights = observed(make_router(), sublayers, x, remove_source("embedding"))
    assert weights["layers.0.attn"].eq(1).all()
    assert weights["layers.0.mlp"][0].eq(0).all()


def test_a_removed_head_reads_zeros_in_its_channels(sublayers, x):
    changed, weights = observed(make_router(), sublayers, x, only_at(["final"], remove_head(1)))
    channels = changed.unflatten(-1, (HEADS, -1))
    assert channels[..., 1, :].eq(0).all()
    assert channels[..., 0, :].ne(0).all()
    assert weights["final"][..., 1].eq(0).all()


def test_removing_a_site_of_an_add_read_leaves_the_plain_stream(sublayers, x):
    router = make_router("delta_mhar")
    changed, _ = observed(router, sublayers, x, *(remove_site(s.name) for s in router.plan if s.source_names))
    stream = x
    with torch.no_grad():
        for sublayer in sublayers:
            stream = stream + sublayer(stream)
    torch.testing.assert_close(changed, stream)


def test_removing_a_site_of_a_replace_read_gives_zeros(sublayers, x):
    changed, _ = observed(make_router(), sublayers, x, remove_site("final"))
    assert changed.eq(0).all()


def test_swapped_heads(sublayers, x):
    router = make_router()
    _, before = observed(router, sublayers, x)
    _, after = observed(router, sublayers, x, only_at(["final"], swap_heads(0, 2)))
    torch.testing.assert_close(after["final"], before["final"][..., [2, 1, 0]])


def test_freezing_a_recorded_routing(sublayers, x):
    router = make_router()
    plain, recorded = observed(router, sublayers, x)
    frozen, _ = observed(router, sublayers, x, freeze(recorded))
    torch.testing.assert_close(frozen, plain)
    other = torch.randn_like(x)
    _, weights = observed(router, sublayers, other, freeze(recorded))
    assert all(torch.equal(weights[name], recorded[name]) for name in recorded)
    mean = {"final": recorded["final"].mean(dim=(1, 2))}
    _, weights = observed(router, sublayers, other, freeze(mean))
    assert torch.equal(weights["final"], mean["final"][:, None, None].expand_as(weights["final"]))
    assert not torch.equal(weights["layers.1.mlp"], recorded["layers.1.mlp"])


def test_a_recording_of_other_tokens_is_refused(sublayers, x):
    router = make_router()
    _, recorded = observed(router, sublayers, x)
    with pytest.raises(
        InputError, match=r"recorded at layers\.0\.attn has shape \[1, 2, 4, 3\], this read \[1, 2, 3, 3\]"
    ):
        observed(router, sublayers, x[:, :3], freeze(recorded))


def test_changes_apply_only_where_they_say(sublayers, x):
    router = make_router()
    _, before = observed(router, sublayers, x)
    _, after = observed(router, sublayers, x, only_at(["layers.1.attn", 6], uniform()))
    changed = {name for name in before if not torch.allclose(before[name], after[name])}
    # Later sites see other sources, so their weights change as well; earlier ones must not.
    assert "layers.1.attn" in changed
    assert not changed & {"layers.0.attn", "layers.0.mlp"}
    assert after["layers.1.attn"].eq(1 / 3).all()
    assert after["final"].eq(after["final"][0]).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", ["mhar", "block_mhar", "delta_mhar", "delta_block_mhar"])
def test_nothing_remains_after_the_context(variant, backend, sublayers, x):
    router = make_router(variant, backend, block_size=1)
    state = copy.deepcopy(router.state_dict())
    before = run(router, sublayers, x)
    changed, _ = observed(router, sublayers, x, uniform())
    with pytest.raises(RuntimeError, match="on purpose"), router.intervene(remove_head(0)):
        raise RuntimeError("on purpose")
    assert not torch.allclose(changed, before)
    assert torch.equal(run(router, sublayers, x), before)
    assert not router.hooks.active()
    assert all(torch.equal(value, state[name]) for name, value in router.state_dict().items())


@pytest.mark.parametrize("variant", ["mhar", "delta_block_mhar"])
def test_the_fused_path_is_changed_as_the_eager_one(variant, sublayers, x):
    changes = (remove_source("embedding"), only_at(["layers.2.mlp"], swap_heads(0, 1)), only_at([3], uniform()))
    outputs = [
        observed(make_router(variant, backend, block_size=1), sublayers, x, *changes)
        for backend in ("reference", "triton")
    ]
    torch.testing.assert_close(outputs[0][0], outputs[1][0], rtol=1e-4, atol=1e-5)
    for name, weights in outputs[0][1].items():
        torch.testing.assert_close(weights, outputs[1][1][name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_observing_changes_no_bit(backend, sublayers, x):
    router = make_router(backend=backend)
    seen, _ = observed(router, sublayers, x)
    torch.testing.assert_close(seen, run(router, sublayers, x), rtol=1e-5, atol=1e-6)
    if backend == "reference":
        with router.observe(lambda read: None):
            assert torch.equal(run(router, sublayers, x), run(make_router(), sublayers, x))


@pytest.mark.parametrize(
    "change, message",
    [
        (only_at(["layers.3.mlp"], uniform()), r"no routed site 'layers.3.mlp'; did you mean"),
        (only_at([7], uniform()), "no routed site 7"),
        (only_at([-1], uniform()), "no routed site -1"),
        (remove_site("layer.0.mlp"), r"did you mean 'layers\.0\.mlp'"),
        (remove_source("embeding"), r"no source 'embeding'; did you mean 'embedding'"),
        (one_hot("layers.2.mlp"), None),
        (one_hot("layers.9.mlp"), "no source 'layers.9.mlp'"),
        (only_at([1, 6], one_hot("layers.2.mlp")), "site layers.0.mlp does not see the source 'layers.2.mlp'; it sees"),
        (only_at(["layers.0.attn"], remove_source("layers.0.mlp")), "layers.0.attn does not see"),
        (only_at(["final"], one_hot("layers.2.mlp")), None),
        (remove_head(3), "a routing head must be an index below 3, got 3"),
        (swap_heads(0, -1), "an index below 3, got -1"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_names_and_indices_are_checked_when_the_context_is_entered(change, message):
    router = make_router()
    if message is None:
        with router.intervene(change):
            return
    with pytest.raises(InputError, match=message), router.intervene(change):
        pytest.fail("the context was entered")
    assert not router.hooks.active()


def test_a_site_without_sources_is_no_routed_site():
    router = make_router("delta_mhar")
    with pytest.raises(InputError, match="no routed site 0"), router.intervene(remove_site(0)):
        pass


@pytest.mark.parametrize(
    "text",
    [
        "uniform",
        "uniform@layers.0.mlp,final",
        "one_hot:embedding",
        "remove_source:embedding@final",
        "remove_head:2",
        "remove_site:layers.1.attn",
        "swap_heads:0,2",
    ],
)
def test_spelling_round_trips(text):
    name = parse(text).name
    assert name == ("remove_site@layers.1.attn" if text.startswith("remove_site") else text)


@pytest.mark.parametrize("text, site", [("uniform@6", 6), ("uniform@layers.0.mlp,6", 6), ("remove_site:6", 6)])
def test_sites_may_be_given_by_index(text, site):
    change = parse(text)
    assert change.sites[-1] == site
    with make_router().intervene(change):
        pass


@pytest.mark.parametrize(
    "text, error, message",
    [
        ("unifrom", ConfigurationError, "unknown intervention 'unifrom'; did you mean 'uniform'"),
        ("uniform:3", InputError, "uniform takes no argument"),
        ("remove_head", InputError, "remove_head takes an argument"),
        ("remove_head:first", InputError, "remove_head needs an index, got 'first'"),
        ("swap_heads:1", InputError, "two heads such as 0,1, got '1'"),
        ("remove_site:final@final", InputError, "names its site as its argument"),
    ],
)
def test_spelling_mistakes(text, error, message):
    with pytest.raises(error, match=message):
        parse(text)


def test_an_intervention_must_keep_the_shape(sublayers, x):
    with pytest.raises(InputError, match="must keep the weights' shape"):
        observed(make_router(), sublayers, x, lambda site, weights: weights[:1])


def test_a_change_in_place_is_not_lost(sublayers, x):
    router = make_router()
    in_place, _ = observed(router, sublayers, x, lambda site, weights: weights.fill_(1 / len(weights)))
    assert torch.equal(in_place, observed(router, sublayers, x, uniform())[0])


def test_a_source_with_all_the_weight_leaves_it_to_the_others() -> None:
    """The others' weights underflow to zero in float32: what a masked softmax would give cannot be told from them."""
    site = routing_plan(RoutingConfig.named("mhar", num_heads=1), 5)[2]
    weights = torch.tensor([[1.0], [0.0], [0.0]])
    assert remove_source("embedding")(site, weights).flatten().tolist() == [0.0, 0.5, 0.5]


def test_restrictions_add_up() -> None:
    plan = routing_plan(RoutingConfig.named("mhar", num_heads=1), 5)
    weights = torch.tensor([[0.5], [0.3], [0.2]])
    both = only_at([2, "final"], only_at(["layers.1.attn"], uniform()))
    assert torch.equal(both(plan[4], weights), weights)
    assert torch.equal(both(plan[2], weights), torch.full_like(weights, 1 / 3))
