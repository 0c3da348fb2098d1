"""DepthRouter and DepthHistory: every variant against a plain re-computation, order, hooks, copies and refusals."""

import copy
import pickle
import threading

import pytest
import torch
from torch import nn

from helpers.compare import assert_close
from mhar import DepthRouter, RoutingConfig, depth_read
from mhar.errors import ConfigurationError, InputError, OrderError
from mhar.routing import interventions

VARIANTS = ["attention_residuals", "mhar", "block_mhar", "delta_mhar", "delta_block_mhar"]
LAYERS, WIDTH = 5, 12


def make_router(variant, seed=0, **overrides):
    """A float64 router with random parameters: zero ones would hide mistakes."""
    heads = {} if variant in ("baseline", "attention_residuals") else {"num_heads": 3}
    config = RoutingConfig.named(variant, **{"block_size": 2, **heads, **overrides})
    router = DepthRouter(2 * LAYERS + 1, WIDTH, config=config, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    for parameter in router.parameters():
        parameter.data += 0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return router


def make_sublayers(seed=1):
    torch.manual_seed(seed)
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2 * LAYERS))


def embedding(seed=2):
    return torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def run(router, sublayers, x):
    history = router.start(x)
    for sublayer in sublayers:
        history.append(sublayer(history.read()))
    return history.read(), history


def by_hand(router, sublayers, x):
    """Every variant from its definition: source lists built anew at each site out of all sublayer outputs."""
    config, outputs = router.config, []
    per_block = 2 * config.block_size
    for index in range(len(sublayers) + 1):
        stream = [x, *outputs]
        total = sum(stream)
        if config.read == "replace" and config.sources == "sublayer":
            sources = stream
        elif config.read == "replace":
            sources = [x] + [sum(outputs[i : i + per_block]) for i in range(0, len(outputs), per_block)]
        elif index in (0, len(sublayers)):
            sources = []
        elif config.sources == "sublayer":
            sources = stream
        else:
            ends = range(per_block, index, per_block)
            sources = [x] + [sum(outputs[end - per_block : end]) for end in ends]
        hidden = total
        if sources:
            row = router.site_rows[index]
            if config.null_source:
                sources = [router.null_source[row].expand_as(x), *sources]
            out = depth_read(
                sources, router.query[row], router.norm_weight[row], num_heads=router.num_heads, eps=router.eps
            )
            hidden = (
                out if config.read == "replace" else total + (router.gate[row] if config.gate != "none" else 1) * out
            )
        if index < len(sublayers):
            outputs.append(sublayers[index](hidden))
    return hidden


@pytest.mark.parametrize("variant", VARIANTS)
def test_variant_equals_its_definition(variant):
    router, sublayers = make_router(variant), make_sublayers()
    actual, _ = run(router, sublayers, embedding())
    assert_close(variant, actual, by_hand(router, sublayers, embedding()), 1e-13)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_routing_parameter_gets_gradient_and_changes_the_output(variant):
    """A parameter that is computed but never applied is a known public bug (peers.md)."""
    router, sublayers = make_router(variant), make_sublayers()
    out, _ = run(router, sublayers, embedding())
    out.square().sum().backward()
    for name, parameter in router.named_parameters():
        for site in router.plan:
            if site.row is None or len(site.source_names) < 2:
                continue
            assert parameter.grad[site.row].abs().sum() > 0, f"{name} of {site.name} gets no gradient"
            changed = copy.deepcopy(router)
            with torch.no_grad():
                getattr(changed, name)[site.row] += 0.1 * torch.randn_like(parameter[site.row])
            assert not torch.allclose(run(changed, sublayers, embedding())[0], out), f"{name} of {site.name} is idle"


def test_baseline_is_the_sum():
    router, sublayers = make_router("baseline"), make_sublayers()
    x = stream = embedding()
    for sublayer in sublayers:
        stream = stream + sublayer(stream)
    assert torch.equal(run(router, sublayers, x)[0], stream)
    assert list(router.parameters()) == []


def test_initialisation_and_parameter_count():
    router = DepthRouter(2 * LAYERS + 1, WIDTH, 3)
    assert sum(p.numel() for p in router.parameters()) == (2 * LAYERS + 1) * 2 * WIDTH
    assert torch.equal(router.query, torch.zeros(11, WIDTH))
    assert torch.equal(router.norm_weight, torch.ones(11, WIDTH))


def test_closed_gate_leaves_the_stream_bit_for_bit():
    router = make_router("delta_block_mhar").float()
    router.gate.data.zero_()
    sublayers, x = make_sublayers().float(), embedding().float()
    stream = x
    for sublayer in sublayers:
        stream = stream + sublayer(stream)
    assert torch.equal(run(router, sublayers, x)[0], stream)


def test_read_with_norm_is_the_norm_of_the_read():
    router, norm = make_router("mhar"), nn.RMSNorm(WIDTH, dtype=torch.float64)
    history, plain = router.start(embedding()), router.start(embedding())
    assert torch.equal(history.read(norm=norm), norm(plain.read()))


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_by_index_and_name(variant):
    router, sublayers = make_router(variant), make_sublayers()
    _, history = run(router, sublayers, embedding())
    for site in router.plan:
        weights = history.weights(site.name)
        if not site.source_names:
            assert weights is None
            continue
        assert weights.shape == (len(site.source_names), 2, 3, router.num_heads)
        assert not weights.requires_grad
        assert torch.equal(weights, history.weights(site.index))
        assert_close("sum", weights.sum(0), torch.ones(2, 3, router.num_heads, dtype=torch.float64), 1e-14)


def test_weights_of_a_partial_sum_without_gradients():
    router, sublayers = make_router("block_mhar"), make_sublayers()
    with torch.no_grad():
        _, history = run(router, sublayers, embedding())
    assert history.weights(4) is not None
    with pytest.raises(OrderError, match=r"layers.0.mlp is not kept without gradients.*observe"):
        history.weights("layers.0.mlp")


@pytest.mark.parametrize("variant", VARIANTS)
def test_observers_see_each_read_and_change_nothing(variant):
    router, sublayers = make_router(variant), make_sublayers()
    plain, history = run(router, sublayers, embedding())
    reads = []
    with router.observe(reads.append):
        observed, _ = run(router, sublayers, embedding())
    assert_close("out", observed, plain, 1e-14)
    assert [r.name for r in reads] == [s.name for s in router.plan if s.source_names]
    for read in reads:
        assert torch.equal(read.weights, history.weights(read.site))
        assert len(read.sources) == len(read.source_names) == read.weights.shape[0]
        assert not read.weights.requires_grad
    run(router, sublayers, embedding())
    assert len(reads) == sum(bool(s.source_names) for s in router.plan), "the observer outlived its context"


def test_hooks_bind_to_histories_started_inside():
    router, reads = make_router("mhar"), []
    outside = router.start(embedding())
    with router.observe(reads.append):
        outside.read()
        assert reads == []
        inside = router.start(embedding())
    inside.read()
    assert len(reads) == 1


def test_interventions_change_the_weights_and_leave_the_model_alone():
    router, sublayers = make_router("mhar"), make_sublayers()
    plain, _ = run(router, sublayers, embedding())
    reads = []
    with router.intervene(interventions.uniform()), router.observe(reads.append):
        changed, _ = run(router, sublayers, embedding())
    zero = make_router("mhar")
    zero.query.data.zero_()
    assert_close("uniform equals zero queries", changed, run(zero, sublayers, embedding())[0], 1e-13)
    assert all(torch.allclose(r.weights, torch.full_like(r.weights, 1 / len(r.sources))) for r in reads)
    assert torch.equal(run(router, sublayers, embedding())[0], plain)


def test_hooks_are_per_thread_and_end_with_an_exception():
    router, reads = make_router("mhar"), []

    def other_thread():
        router.start(embedding()).read()

    def failing():
        with router.observe(reads.append):
            raise RuntimeError

    with router.observe(reads.append):
        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join()
    assert reads == []
    with pytest.raises(RuntimeError):
        failing()
    router.start(embedding()).read()
    assert reads == []


def test_copies_and_pickles_carry_no_hooks():
    router, reads = make_router("mhar"), []
    with router.observe(reads.append):
        clones = [copy.deepcopy(router), pickle.loads(pickle.dumps(router))]
        for clone in clones:
            clone.start(embedding()).read()
            assert torch.equal(clone.query, router.query)
    assert reads == []


def test_two_interleaved_models_do_not_disturb_each_other():
    routers, sublayers = [make_router("mhar", seed) for seed in (0, 7)], make_sublayers()
    alone = [run(r, sublayers, embedding())[0] for r in routers]
    histories = [r.start(embedding()) for r in routers]
    for sublayer in sublayers:
        for history in histories:
            history.append(sublayer(history.read()))
    assert all(torch.equal(h.read(), a) for h, a in zip(histories, alone, strict=True))


def test_order_is_enforced():
    router, sublayers = make_router("mhar"), make_sublayers()
    history = router.start(embedding())
    with pytest.raises(OrderError, match=r"append\(\) needs a read\(\) first: site layers.0.attn"):
        history.append(embedding())
    history.read()
    with pytest.raises(OrderError, match=r"layers.0.attn was already done: append"):
        history.read()
    with pytest.raises(OrderError, match=r"layers\.0\.mlp has not been read"):
        history.weights("layers.0.mlp")
    _, history = run(router, sublayers, embedding())
    with pytest.raises(OrderError, match=r"final was already done: it was the last site \(num_sites is 11\)"):
        history.read()
    with pytest.raises(OrderError, match=r"after the last of 10 sublayers"):
        history.append(embedding())


def test_a_source_modified_in_place_is_detected():
    router, sublayers = make_router("mhar"), make_sublayers()
    history = router.start(embedding())
    history.read()
    output = sublayers[0](embedding()).detach()
    history.append(output)
    output.mul_(2)
    with pytest.raises(InputError, match="source 1 was modified in place"):
        history.read()


@pytest.mark.parametrize(
    "bad, message",
    [
        (torch.zeros(2, 4, WIDTH, dtype=torch.float64), r"shape \[2, 3, 12\], got \[2, 4, 12\]"),
        (torch.zeros(2, 3, WIDTH), "dtype torch.float64.*got torch.float32"),
        (torch.zeros(2, 3, WIDTH, dtype=torch.float64, device="meta"), "must be on cpu, got meta"),
    ],
)
def test_append_refusals(bad, message):
    history = make_router("mhar").start(embedding())
    history.read()
    with pytest.raises(InputError, match=message):
        history.append(bad)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (dict(num_heads=5), InputError, "num_heads 5 for width 12"),
        (dict(num_heads=3, eps=float("nan")), ConfigurationError, "eps must be a finite number >= 0, got nan"),
        (dict(num_heads=3, eps=-1.0), ConfigurationError, "eps.*-1.0"),
        (dict(), ConfigurationError, '"kv" can only be resolved by a model'),
        (dict(num_heads=3, backend="fast"), ConfigurationError, "unknown backend 'fast'"),
        (dict(num_heads=3, width=0), ConfigurationError, "width must be a positive integer, got 0"),
    ],
)
def test_router_refusals(arguments, error, message):
    with pytest.raises(error, match=message):
        DepthRouter(**{"num_sites": 5, "width": WIDTH, **arguments})


def test_a_variant_may_be_given_by_name():
    assert DepthRouter(5, WIDTH, 3, config="delta_mhar").config == RoutingConfig.named("delta_mhar")


def test_meta_tensors_pass_through():
    """A forward pass on the meta device gives shapes without memory; it has no autocast."""
    router = DepthRouter(5, WIDTH, 3, device="meta")
    assert router.start(torch.zeros(2, WIDTH, device="meta")).read().shape == (2, WIDTH)


def test_append_takes_tensors_only():
    history = make_router("mhar").start(embedding())
    history.read()
    with pytest.raises(InputError, match="must be a tensor, got NoneType"):
        history.append(None)


def test_embedding_refusals():
    router = make_router("mhar")
    with pytest.raises(InputError, match=r"\[..., 12\], got torch.float64 \[2, 3, 11\]"):
        router.start(embedding()[..., :11])
    with pytest.raises(InputError, match="router's device cpu, got meta"):
        router.start(torch.zeros(2, 3, WIDTH, device="meta"))
    with pytest.raises(InputError, match=r"one of layers.0.attn.*got 'layers.9.attn'"):
        router.site_index("layers.9.attn")


def test_autocast_keeps_the_history_in_its_dtype():
    router, sublayers = DepthRouter(2 * LAYERS + 1, WIDTH, 3), make_sublayers().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, history = run(router, sublayers, embedding().float())
    assert out.dtype == torch.bfloat16
    assert history.weights("final").dtype == torch.float32


class Stack(nn.Module):
    """Router and sublayers in one module, to compile as a whole."""

    def __init__(self, variant):
        super().__init__()
        self.router, self.sublayers = make_router(variant), make_sublayers()

    def forward(self, x):
        return run(self.router, self.sublayers, x)[0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_compiles_without_graph_breaks(variant):
    """fullgraph=True refuses any break; other token counts reuse one graph with a dynamic size."""
    torch.compiler.reset()
    model, frames = Stack(variant), []

    def backend(graph, _):
        frames.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for tokens in (3, 5, 7, 9):
        x = torch.randn(2, tokens, WIDTH, dtype=torch.float64)
        assert_close(f"{tokens} tokens", compiled(x), model(x), 1e-13)
    assert len(frames) <= 2
