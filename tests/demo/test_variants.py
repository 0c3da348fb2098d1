"""The compared models start from one backbone; the memory measure counts what is alive."""

import pytest
import torch

from mhar.demo.data import load_data
from mhar.demo.memory import LiveStorages, peak_bytes, state_bytes
from mhar.demo.settings import VARIANTS, preset
from mhar.demo.variants import backbone, build_variant

MIB = 2**20


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return load_data(preset("tiny"), tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def base(data):
    return backbone(preset("tiny"), data.tokenizer)


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_have_the_backbone_bit_for_bit_and_a_fresh_router(name, base):
    state = build_variant(name, base).state_dict()
    router = {key.removeprefix("model.router."): state.pop(key) for key in list(state) if "router" in key}
    assert state.keys() == base.state_dict().keys()
    assert all(torch.equal(state[key], value) for key, value in base.state_dict().items())
    assert router.keys() == (set() if name == "baseline" else {"query", "norm_weight"})
    assert all(bool((value == (key == "norm_weight")).all()) for key, value in router.items())


def test_the_baseline_is_the_stock_model(base, data):
    ids = data.held_out[:2]
    with torch.no_grad():
        ours = build_variant("baseline", base).eval()(input_ids=ids).logits
        assert torch.equal(ours, base.eval()(input_ids=ids).logits)


def test_the_backbone_depends_on_the_seed_and_leaves_the_generator_alone(data):
    before = torch.get_rng_state()
    first, again = (backbone(preset("tiny", seed=3), data.tokenizer) for _ in range(2))
    other = backbone(preset("tiny", seed=4), data.tokenizer)
    assert torch.equal(torch.get_rng_state(), before)
    weights = [model.model.layers[0].mlp.up_proj.weight for model in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_live_storages_follow_allocation_and_release():
    given = torch.ones(MIB // 4)
    with LiveStorages() as storages:
        a = given * 2
        view = a.view(2, -1)
        given.add_(1.0)
        assert storages.live == MIB
        b = a + 1
        del a
        assert storages.live == 2 * MIB  # `view` still holds the first
        del view, b
        assert storages.live == 0
    assert storages.peak == 2 * MIB


def test_peak_counts_what_backward_keeps(base, data):
    """Against the allocator's own log: the peak of a forward and backward pass agrees within 5 %."""
    model = build_variant("mhar", base).train()
    ids = data.order.batch(0)

    def step():
        model.zero_grad(set_to_none=True)
        model(input_ids=ids, labels=ids).loss.backward()

    step()
    model.zero_grad(set_to_none=True)
    measured = peak_bytes(step, torch.device("cpu"))
    model.zero_grad(set_to_none=True)
    assert measured == pytest.approx(allocator_peak(step), rel=0.05)


def allocator_peak(step) -> int:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = profiler.profiler.kineto_results.events()
    live = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def test_state_is_parameters_and_moments(base):
    model = build_variant("mhar", base)
    optimizer = torch.optim.AdamW(model.parameters())
    before = state_bytes(model, optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    num_parameters, num_tensors = sum(p.numel() for p in model.parameters()), len(list(model.parameters()))
    assert state_bytes(model, optimizer) - before == 8 * num_parameters + 4 * num_tensors  # two moments and a step each
