"""The probe and interventions on a GPU, where reads go through the kernels: the same numbers as on a CPU."""

import copy

import pytest
import torch

from helpers.tiny_lm import tiny_routed
from mhar.analysis import intervention
from mhar.analysis.probe import Probe, ProbeSettings, find_router, observe_all
from mhar.routing.interventions import remove_source, uniform

pytestmark = pytest.mark.gpu
VARIANTS = ["attention_residuals", "mhar", "block_mhar", "delta_block_mhar"]


@pytest.fixture(params=VARIANTS)
def models(request):
    """(CPU model, the same on the GPU)."""
    routing = {"block_size": 1} if "block" in request.param else {}
    model = tiny_routed(request.param, scale=1.0, routing=routing, layers=3)
    return model, copy.deepcopy(model).to("cuda")


@pytest.fixture
def batches():
    return [torch.randint(1, 300, (4, 24), generator=torch.Generator().manual_seed(i)) for i in range(3)]


def test_probe(models, batches):
    totals = []
    for model in models:
        probe = Probe(find_router(model), ProbeSettings(token_stride=1))
        observe_all(model, [probe], [batch.to(model.device) for batch in batches])
        totals.append(probe.result()["totals"])
    for key, value in totals[0].items():
        assert totals[1][key] == pytest.approx(value, rel=5e-3, abs=1e-4), key


def test_interventions(models, batches):
    changes = [uniform(), remove_source("embedding"), "freeze"]
    before = intervention.sequence_losses(models[1], batches)
    cpu, gpu = (intervention.effects(model, batches, changes) for model in models)
    for a, b in zip(cpu, gpu, strict=True):
        assert b.loss_change == pytest.approx(a.loss_change, rel=1e-2, abs=1e-4), a.intervention
    assert (intervention.sequence_losses(models[1], batches) == before).all()
