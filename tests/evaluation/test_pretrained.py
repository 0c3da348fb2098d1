"""A real checkpoint on real items: scores far from chance, and none lost by converting it."""

import pytest

from helpers.smollm2 import smollm2_folder
from mhar import RoutingConfig
from mhar.conversion import convert
from mhar.evaluation import harness
from mhar.evaluation.compare import compare
from mhar.evaluation.harness import HarnessSettings
from mhar.evaluation.loading import LoadedModel, load_model

pytestmark = pytest.mark.pretrained
pytest.importorskip("lm_eval")


def test_smollm2_scores_and_its_conversion_scores_the_same(shared_data, tmp_path):
    folder = smollm2_folder(tmp_path)
    settings = HarnessSettings(data=shared_data / "eval", limit=24)
    specs = harness.resolve(["piqa", "arc_easy"], settings)
    base = load_model(str(folder), device="cpu", dtype="float32")
    before = harness.evaluate_tasks(base, specs, settings)
    scores = {(r.task, r.metric): r.value for r in before.results}
    assert scores["piqa", "acc"] > 0.5
    assert scores["arc_easy", "acc"] > 0.35  # chance: a quarter
    routed = convert(base.model, RoutingConfig.named("delta_block_mhar"))
    info = {**base.info, "name": "converted"}
    after = harness.evaluate_tasks(LoadedModel(routed.eval(), base.tokenizer, info), specs, settings)
    assert {task: [r.scores for r in items] for task, items in after.records.items()} == {
        task: [r.scores for r in items] for task, items in before.records.items()
    }
    assert all((row.only_a, row.only_b, row.p_value) == (0, 0, 1.0) for row in compare([before, after]).rows)
