"""`benchmarks/report_runs.py`: runs of both layouts are probed, baselines only reported."""

import importlib.util
import json
from pathlib import Path

import pytest

from helpers.runs import routing, write_run
from helpers.tiny_lm import save_checkpoint, tiny_routed

pytest.importorskip("matplotlib")
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "report_runs.py"


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("report_runs", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_runs_are_probed_and_reported(script, tmp_path, monkeypatch):
    runs = tmp_path / "runs"
    write_run(runs / "trained")
    save_checkpoint(tiny_routed("mhar"), runs / "trained" / "final")
    write_run(runs / "demo", routing_map=routing())
    save_checkpoint(tiny_routed("attention_residuals"), runs / "demo" / "checkpoint-90")
    save_checkpoint(tiny_routed("attention_residuals", seed=1), runs / "demo" / "checkpoint-200")
    write_run(runs / "plain", variant="baseline")
    save_checkpoint(tiny_routed("baseline"), runs / "plain" / "final")
    (tmp_path / "text.txt").write_text("It is a truth universally acknowledged. " * 20)
    out = tmp_path / "out"
    command = ["report_runs.py", str(runs), "--data", str(tmp_path / "text.txt"), "--output", str(out)]
    monkeypatch.setattr("sys.argv", [*command, "--context", "16", "--sequences", "16"])
    script.main()
    assert sorted(path.name for path in (out / "probes").iterdir()) == ["demo-probe", "trained-probe"]
    probed = json.loads((out / "probes" / "demo-probe" / "probe.json").read_text())
    assert probed["model"]["name"].endswith("checkpoint-200")
    assert not (out / "probes" / "demo-probe" / "routing.json").exists()  # the run has a map of its own
    rows = json.loads((out / "probes" / "trained-probe" / "interventions.json").read_text())["rows"]
    assert [row["intervention"] for row in rows][-2:] == ["remove_head:0", "remove_head:1"]
    assert "trained-probe" in (out / "report.html").read_text()
    assert (out / "figures" / "depth-map-demo.svg").is_file()
