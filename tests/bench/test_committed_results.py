"""The committed result files keep their schemas, and their tables are those of the files."""

import json
from pathlib import Path

import pytest

from mhar.bench.tables import routing_table, step_table

FOLDER = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("routing-*.json")), ids=lambda path: path.name)
def test_routing(path):
    result = json.loads(path.read_text())
    assert {"device", "versions", "rows", "not_run", "commit"} <= set(result)
    for row in result["rows"]:
        assert {"shape", "tokens", "implementation", "ms", "spread_ms", "peak_gib"} <= set(row)
        assert row["ms"] > 0
    assert path.with_suffix(".md").read_text() == routing_table(result)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("step-*.json")), ids=lambda path: path.name)
def test_step(path):
    result = json.loads(path.read_text())
    keys = {"shape", "variant", "backend", "tokens", "tokens_per_s", "peak_gib", "compiled", "cuda_graph"}
    for row in result["rows"]:
        assert keys <= set(row)
        assert row["variant"] in ("baseline", "mhar")
        assert row["tokens_per_s"] == pytest.approx(1e3 * row["tokens"] / row["ms"], rel=1e-3)
    assert path.with_suffix(".md").read_text() == step_table(result)
