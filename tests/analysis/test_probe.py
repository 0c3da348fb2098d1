"""The probe against a plain float64 computation from the recorded reads, for every variant; and its streaming."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from helpers.tiny_lm import tiny_llama, tiny_routed
from mhar import DepthRouter, RoutingConfig
from mhar.analysis import measures
from mhar.analysis.probe import Probe, ProbeSettings, find_router, observe_all
from mhar.analysis.probe_result import COLUMNS
from mhar.errors import InputError

VARIANTS = ["attention_residuals", "mhar", "block_mhar", "delta_mhar", "delta_block_mhar"]
EVERY_TOKEN = ProbeSettings(token_stride=1, num_null_queries=2, seed=5)


def model_and_batches(variant, num_batches=3, sequences=2):
    routing = {"block_size": 1} if "block" in variant else {}
    model = tiny_routed(variant, scale=1.0, routing=routing, layers=3)
    generator = torch.Generator().manual_seed(9)
    return model, [torch.randint(1, 300, (sequences, 10), generator=generator) for _ in range(num_batches)]


def probed(model, batches, settings=EVERY_TOKEN):
    probe = Probe(find_router(model), settings)
    observe_all(model, [probe], batches)
    return probe.result()


def recorded(model, batches):
    """(name, source names, weights [N, T, H], sources [N, T, D]) per site, all batches together, float64."""
    reads = {}

    def record(read):
        weights = read.weights.double().flatten(1, -2)
        sources = torch.stack([s.double().flatten(0, -2) for s in read.sources])
        reads.setdefault(read.name, (read.source_names, [], []))
        reads[read.name][1].append(weights)
        reads[read.name][2].append(sources)

    observe_all(model, [record], batches)
    return {name: (names, torch.cat(w, 1), torch.cat(v, 1)) for name, (names, w, v) in reads.items()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_site_values_equal_a_plain_computation(variant):
    model, batches = model_and_batches(variant)
    router = find_router(model)
    result = probed(model, batches)
    sites = {site["name"]: site for site in result["sites"]}
    reads = recorded(model, batches)
    assert sites.keys() == reads.keys()
    for name, (names, weights, sources) in reads.items():
        if len(names) == 1:
            continue
        site, row = sites[name], router.site_rows[router.site_index(name)]
        entropy = -(weights * weights.log()).sum(0)
        assert site["entropy"] == pytest.approx(float(entropy.mean()), rel=1e-4, abs=1e-6)
        assert site["relative_entropy"] == pytest.approx(float(entropy.mean()) / math.log(len(names)), rel=1e-4)
        real = sources[[n for n, source in enumerate(names) if source != "null"]]
        pairs = [torch.cosine_similarity(real[i], real[j], dim=-1).mean() for i in range(len(real)) for j in range(i)]
        if pairs:
            expected = float(torch.stack(pairs).mean())
            assert site["collinearity"] == pytest.approx(expected, rel=1e-3, abs=1e-5)
        query, gain = router.query[row].detach().double(), router.norm_weight[row].detach().double()
        random = measures.matched_random_queries(router.query, 2, 5, router.num_heads)[:, row].double()
        keys = sources * torch.rsqrt(sources.square().mean(-1, keepdim=True) + router.eps) * gain
        if router.num_heads == 1:
            check_width_disagreement(site, keys, query, random)
        else:
            check_heads(site, keys, weights, random, router.num_heads)
        if router.gate is not None:
            assert site["gate"] == pytest.approx(float(router.gate[row].detach()))


def divergence(keys, query, sharpness=1):
    logits = (keys * query).unflatten(-1, (4, -1)).sum(-1)
    whole = logits.sum(-1, keepdim=True).log_softmax(0)
    parts = (sharpness * logits).log_softmax(0)
    return float((parts.exp() * (parts - whole)).sum(0).mean())


def check_width_disagreement(site, keys, query, random):
    for sharpness, suffix in ((1, ""), (4, "_rescaled")):
        trained = divergence(keys, query, sharpness)
        null = np.mean([divergence(keys, q, sharpness) for q in random])
        assert site[f"width_disagreement{suffix}"] == pytest.approx(trained, rel=1e-4)
        assert site[f"null_width_disagreement{suffix}"] == pytest.approx(null, rel=1e-4)
        assert site[f"learned_excess{suffix}"] == pytest.approx(trained - null, rel=1e-3, abs=1e-6)


def check_heads(site, keys, weights, random, num_heads):
    def js(w):
        mean = w.mean(-1)
        return float((-(mean * mean.log()).sum(0) + (w * w.log()).sum(0).mean(-1)).mean())

    null = [(keys * q).unflatten(-1, (num_heads, -1)).sum(-1).softmax(0) for q in random]
    assert site["head_disagreement"] == pytest.approx(js(weights), rel=1e-3, abs=1e-6)
    assert site["null_head_disagreement"] == pytest.approx(np.mean([js(w) for w in null]), rel=1e-3, abs=1e-6)
    for key, w in (("deviation_rms", weights.mean(1)), ("null_deviation_rms", sum(n.mean(1) for n in null) / 2)):
        expected = float((w - w.mean(-1, keepdim=True)).square().mean().sqrt())
        assert site[key] == pytest.approx(expected, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_table_and_the_map_hold_the_mean_weights(variant):
    model, batches = model_and_batches(variant)
    result = probed(model, batches)
    reads = recorded(model, batches)
    assert len(result["rows"]) == sum(len(names) * weights.shape[-1] for names, weights, _ in reads.values())
    for row in result["rows"]:
        values = dict(zip(COLUMNS, row, strict=True))
        names, weights, _ = reads[values["site"]]
        n, head = names.index(values["source"]), values["head"]
        assert values["weight"] == pytest.approx(float(weights[n, :, head].mean()), rel=1e-5)
        share = (weights[:, :, head].argmax(0) == n).double().mean()
        assert values["top_share"] == pytest.approx(float(share), abs=1e-6)
    for site in result["routing"]["sites"]:
        assert np.sum(site["weights"], axis=0) == pytest.approx(1.0)
        assert site["num_tokens"] == 60


def test_totals_are_means_over_sites_with_a_choice():
    model, batches = model_and_batches("attention_residuals")
    result = probed(model, batches)
    mixed = [site for site in result["sites"] if site["num_sources"] > 1]
    assert len(mixed) == len(result["sites"]) - 1 == 6
    assert result["totals"]["learned_excess"] == pytest.approx(np.mean([site["learned_excess"] for site in mixed]))
    assert result["totals"]["collinearity_of_all_sources"] == mixed[-1]["collinearity"]
    assert result["totals"]["num_tokens"] == 60


def planted_router():
    """Two heads of two channels; head 0 asks for channel 0, head 1 for channel 2."""
    router = DepthRouter(3, 4, config=RoutingConfig.named("mhar", num_heads=2))
    with torch.no_grad():
        router.query.copy_(torch.tensor([8.0, 0.0, 8.0, 0.0]).expand(3, 4))
    return router


def run_planted(router, probe, batches=2):
    first, second = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([0.0, 0.0, 1.0, 0.0])
    for _ in range(batches):
        with torch.no_grad(), router.observe(probe):
            history = router.start(first.expand(2, 3, 4))
            for output in (second, second):
                history.read()
                history.append(output.expand(2, 3, 4))
            history.read()


def test_planted_heads_are_found():
    router = planted_router()
    probe = Probe(router, EVERY_TOKEN)
    run_planted(router, probe)
    result = probe.result()
    # The key norm doubles a unit vector of width four, so the asked-for source leads by a logit of 16.
    weights = {tuple(row[:3]): row[3] for row in result["rows"]}
    assert weights["layers.0.mlp", 0, "embedding"] == pytest.approx(1.0, abs=1e-6)
    assert weights["layers.0.mlp", 1, "layers.0.attn"] == pytest.approx(1.0, abs=1e-6)
    assert weights["final", 1, "layers.0.attn"] == pytest.approx(0.5, abs=1e-6)
    sites = {site["name"]: site for site in result["sites"]}
    assert sites["layers.0.mlp"]["head_disagreement"] == pytest.approx(math.log(2), abs=1e-4)
    assert sites["layers.0.mlp"]["collinearity"] == pytest.approx(0.0, abs=1e-6)
    assert sites["final"]["collinearity"] == pytest.approx(1 / 3, abs=1e-6)
    assert sites["layers.0.mlp"]["deviation_rms"] == pytest.approx(0.5, abs=1e-4)
    assert result["totals"]["split_half_correlation"] == pytest.approx(1.0)


def test_memory_does_not_grow_with_the_number_of_batches():
    model, batches = model_and_batches("mhar", num_batches=2)
    router = find_router(model)
    probe = Probe(router, EVERY_TOKEN)

    def held():
        tensors, stack, seen = 0, [probe.sums, probe.halves[0].__dict__, probe.halves[1].__dict__, probe._pass], set()
        while stack:
            item = stack.pop()
            if id(item) in seen:
                continue
            seen.add(id(item))
            if isinstance(item, torch.Tensor):
                tensors += item.nbytes
            elif isinstance(item, dict):
                stack += item.values()
            elif isinstance(item, (list, tuple)):
                stack += item
            elif hasattr(item, "__slots__"):
                stack += [getattr(item, name) for name in item.__slots__]
        return tensors

    observe_all(model, [probe], batches)
    after_two = held()
    observe_all(model, [probe], batches * 10)
    assert held() == after_two > 0
    assert probe.num_batches == 22


def test_how_tokens_are_batched_does_not_matter():
    model, batches = model_and_batches("attention_residuals", num_batches=4)
    together = [torch.cat(batches)]
    uneven = [torch.cat(batches[:3]), batches[3]]
    results = [probed(model, split)["totals"] for split in (batches, together, uneven)]
    for key, value in results[0].items():
        assert [r[key] for r in results[1:]] == pytest.approx([value] * 2, rel=1e-4, abs=1e-6), key


def test_one_forward_pass_per_batch():
    model, batches = model_and_batches("mhar")
    calls = []
    handle = model.register_forward_hook(lambda *_: calls.append(1))
    probed(model, batches)
    handle.remove()
    assert len(calls) == len(batches)


def test_a_token_stride_samples_all_but_the_mean_weights():
    model, batches = model_and_batches("mhar")
    every, sampled = probed(model, batches), probed(model, batches, ProbeSettings(token_stride=3))
    assert sampled["rows"][0][3] == every["rows"][0][3]
    assert sampled["totals"]["num_tokens"] == every["totals"]["num_tokens"]
    assert sampled["totals"]["entropy"] != every["totals"]["entropy"]
    assert sampled["totals"]["entropy"] == pytest.approx(every["totals"]["entropy"], rel=0.2)
    short = [batches[0][:1, :2]]
    assert math.isfinite(probed(model, short, ProbeSettings(token_stride=100))["totals"]["entropy"])


def test_split_halves():
    few, many = (model_and_batches("mhar", num_batches=6, sequences=n) for n in (1, 32))
    correlations = [probed(*case)["totals"]["split_half_correlation"] for case in (few, many)]
    assert correlations[0] < correlations[1]
    assert correlations[1] > 0.85
    model, batches = many
    assert "split_half_correlation" not in probed(model, batches[:1])["totals"]
    assert "split_half_correlation" not in probed(*model_and_batches("attention_residuals"))["totals"]


def test_an_untrained_router_is_uniform():
    model = tiny_routed("mhar", scale=0.0)
    totals = probed(model, [torch.arange(1, 21).view(2, 10)])["totals"]
    assert totals["relative_entropy"] == pytest.approx(1.0, abs=1e-5)
    assert totals["head_disagreement"] == pytest.approx(0.0, abs=1e-6)
    assert totals["deviation_rms"] == pytest.approx(0.0, abs=1e-6)
    single = tiny_routed("attention_residuals", scale=0.0)
    assert probed(single, [torch.arange(1, 21).view(2, 10)])["totals"]["width_disagreement"] == pytest.approx(
        0, abs=1e-6
    )


def test_models_without_routing_are_refused():
    with pytest.raises(InputError, match="LlamaForCausalLM has 0"):
        find_router(tiny_llama())
    with pytest.raises(InputError, match="no depth routing to probe: its variant is 'baseline'"):
        find_router(tiny_routed("baseline"))
    with pytest.raises(InputError, match="ModuleList has 2"):
        find_router(nn.ModuleList([planted_router(), planted_router()]))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"num_slices": 0}, "num_slices must be a positive integer, got 0"),
        ({"token_stride": -1}, "token_stride must be a positive integer, got -1"),
        ({"num_slices": 5}, "num_slices must divide the width 16, got 5"),
    ],
)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(InputError, match=message):
        Probe(find_router(tiny_routed("attention_residuals")), ProbeSettings(**settings))


def test_a_probe_that_saw_nothing_says_so():
    with pytest.raises(InputError, match="saw no forward pass"):
        Probe(find_router(tiny_routed("mhar"))).result()
