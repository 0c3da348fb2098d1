"""Print figures: drawn from what is there, the same bytes for the same input, refused where there is nothing."""

import json

import pytest

pytest.importorskip("matplotlib")

from helpers.runs import write_experiment, write_run
from mhar.analysis.figures import write_figures
from mhar.analysis.report import write_report
from mhar.errors import InputError


def probed_run(folder, width, excess):
    """A probed single-head model."""
    folder.mkdir(parents=True)
    sites = [
        {
            "name": f"layers.{i}.mlp",
            "width_disagreement": 0.1 * i + excess,
            "null_width_disagreement": 0.1 * i,
            "gate": 0.1,
        }
        for i in range(4)
    ]
    totals = {"width_disagreement": excess, "learned_excess": excess}
    (folder / "probe.json").write_text(json.dumps({"model": {"width": width}, "totals": totals, "sites": sites}))


def test_disagreement_by_site_and_against_width(tmp_path):
    for name, width, excess in (("small", 128, 0.2), ("large", 256, 0.4)):
        probed_run(tmp_path / "probes" / name, width, excess)
    names = {path.name for path in write_figures([tmp_path / "probes"], tmp_path / "out")}
    assert {"disagreement-small.svg", "disagreement-large.pdf", "disagreement-against-width.svg"} <= names
    assert "gates-small.svg" in names
    text = (tmp_path / "out" / "disagreement-against-width.svg").read_text()
    assert "learned excess (nats)" in text  # text is kept as text


def test_the_report_draws_disagreement_against_width_as_well(tmp_path):
    for name, width, excess in (("large", 256, 0.4), ("small", 128, 0.2)):
        probed_run(tmp_path / "probes" / name, width, excess)
    page = write_report(tmp_path / "report.html", [tmp_path / "probes"]).read_text()
    assert "Width disagreement against width" in page
    assert page.index("learned excess: 0.2 at 128") < page.index("learned excess: 0.4 at 256")


def test_one_width_makes_no_curve_against_width(tmp_path):
    probed_run(tmp_path / "probes" / "only", 128, 0.2)
    assert not [p for p in write_figures([tmp_path / "probes"], tmp_path / "out") if "against-width" in p.name]


def test_equal_input_gives_equal_files(tmp_path):
    write_experiment(tmp_path / "runs")
    files = [write_figures([tmp_path / "runs"], tmp_path / name) for name in ("one", "two")]
    for first, second in zip(*files, strict=True):
        assert first.read_bytes() == second.read_bytes(), first.name


def test_vector_files_are_what_they_say(tmp_path):
    write_experiment(tmp_path / "runs")
    for path in write_figures([tmp_path / "runs"], tmp_path / "out"):
        head = path.read_bytes()[:200]
        assert head.startswith(b"%PDF") if path.suffix == ".pdf" else b"<svg" in path.read_bytes()[:1000], path


def test_nothing_to_draw(tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "metrics.jsonl").unlink()
    with pytest.raises(InputError, match="nothing to draw"):
        write_figures([folder], tmp_path / "out")
