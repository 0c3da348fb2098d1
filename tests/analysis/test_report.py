"""The report: one file, no network, well formed, complete; and the charts that it draws."""

import importlib.abc
import json
import re
import sys
from html.parser import HTMLParser

import pytest

from helpers.evaluations import evaluation, records
from helpers.runs import routing, write_experiment, write_run
from mhar.analysis import depthmap, svg
from mhar.analysis.report import write_report
from mhar.cli import main
from mhar.errors import InputError
from mhar.evaluation.compare import compare
from mhar.evaluation.records import save

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """Checks nesting and collects text, ids and references."""

    def __init__(self, text):
        super().__init__()
        self.stack, self.text, self.ids, self.references = [], [], [], []
        self.feed(text)
        assert not self.stack, f"unclosed {self.stack}"

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.stack.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href"):
                self.references.append(value)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.stack.pop()

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    root = write_experiment(tmp_path_factory.mktemp("runs") / "experiment")
    pair = [
        evaluation(name, {"piqa": records(scores)}, available=1838) for name, scores in (("a", [0, 1]), ("b", [1, 1]))
    ]
    for one in pair:
        save(one, root / f"evaluation-{one.name}")
    (root / "comparison.json").write_text(json.dumps(compare(pair).to_dict()))
    sites = [{"name": f"layers.{i}.mlp", "gate": 0.25 * i, "entropy": 0.5} for i in range(3)]
    probe = {"totals": {"learned_excess": 0.125}, "sites": sites}
    (root / "multi" / "probe.json").write_text(json.dumps(probe))
    effects = {"rows": [{"intervention": "uniform", "loss_change": 0.31, "low": 0.2, "high": 0.4, "n": 64}]}
    (root / "multi" / "interventions.json").write_text(json.dumps(effects))
    return root


@pytest.fixture(scope="module")
def page(experiment, tmp_path_factory):
    return write_report(tmp_path_factory.mktemp("report") / "report.html", [experiment]).read_text()


def test_the_page_is_well_formed_and_its_ids_are_unique(page):
    parsed = Page(page)
    assert len(parsed.ids) == len(set(parsed.ids))


def test_the_page_asks_for_nothing_from_outside(page):
    assert set(Page(page).references) == {"data:,"}
    assert not re.search(r"https?://|@import|url\((?!#)", page)


def test_every_part_is_there(page):
    text = "\n".join(Page(page).text)
    for heading in (
        "Runs",
        "Training",
        "Cost",
        "Depth maps",
        "What each head does differently",
        "Probe",
        "Interventions",
        "Evaluation",
        "Paired comparisons",
        "Resolved configurations",
    ):
        assert f"\n{heading}\n" in text, heading
    assert "variant: attention_residuals" in text  # a resolved configuration
    assert "Gates of multi" in text
    assert "PARTIAL: 2 of 1,838" in text  # the evaluation
    assert "2 (PARTIAL: 2 of 1838)" in text  # the comparison
    assert "0.125" in text
    assert "gate: 0.5 at 2" in text  # a point of the probe's chart
    assert "0.31" in text
    assert "lm_eval 0.4.13" in text


def test_the_embedded_maps_are_the_weights(experiment, page):
    content = re.search(r'<script type="application/json" id="depth-maps">(.*?)</script>', page).group(1)
    maps = json.loads(content)["maps"]
    stored = json.loads((experiment / "multi" / "routing.json").read_text())
    assert len(maps) == 2
    for shown, site in zip(maps[0]["sites"], stored["sites"], strict=True):
        assert [maps[0]["columns"][i] for i in shown["columns"]] == site["source_names"]
        for row, expected in zip(shown["weights"], site["weights"], strict=True):
            assert row == pytest.approx(expected, abs=1e-5)


def test_names_cannot_break_out_of_the_page(tmp_path):
    name = '</script><img src=x onerror="alert(1)">'
    table = routing()
    table["sites"][0]["name"] = name
    table["sites"][1]["source_names"] = [name, "<b>"]
    write_run(tmp_path / "run", routing_map=table, note=name)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    (tmp_path / "run" / "summary.json").write_text(json.dumps({**summary, "name": name, "variant": name}))
    page = write_report(tmp_path / "report.html", [tmp_path / "run"], title=name).read_text()
    assert "<img" not in page
    assert set(Page(page).references) == {"data:,"}


def test_the_demo_can_write_a_report_without_any_extra(experiment, tmp_path, monkeypatch):
    class Blocked(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name.split(".")[0] in ("matplotlib", "scipy", "pyarrow", "lm_eval", "datasets", "tyro"):
                raise ModuleNotFoundError(name)

    for module in [m for m in sys.modules if m.startswith(("mhar.analysis", "matplotlib", "scipy", "pyarrow"))]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "meta_path", [Blocked(), *sys.meta_path])
    from mhar.analysis.report import write_report as fresh

    assert fresh(tmp_path / "report.html", [experiment]).stat().st_size > 10_000


def test_of_many_gates_the_furthest_open_are_drawn(tmp_path):
    run = write_run(tmp_path / "run")
    lines = [json.dumps({"step": step, "gates": {f"site{i}": i * step for i in range(-10, 10)}}) for step in (0, 1)]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    page = write_report(tmp_path / "report.html", [run]).read_text()
    assert "Gates of run (7 of 20, the furthest open)" in page
    assert "site-10<" in page
    assert "site0<" not in page


def test_a_failed_report_leaves_the_old_one(tmp_path):
    write_run(tmp_path / "run", routing_map=routing())
    target = write_report(tmp_path / "report.html", [tmp_path / "run"])
    before = target.read_text()
    (tmp_path / "run" / "routing.json").write_text('{"sites": [')
    with pytest.raises(InputError, match=r"routing\.json is not valid JSON"):
        write_report(target, [tmp_path / "run"])
    assert target.read_text() == before
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["report.html"]


def test_a_map_with_missing_weights_is_refused():
    table = routing()
    table["sites"][2]["weights"].pop()
    with pytest.raises(InputError, match=r"site layers\.1\.attn needs one row of head weights per source \(3\)"):
        depthmap.map_data(table)


@pytest.mark.parametrize("variant", ["block_mhar", "delta_block_mhar"])
def test_sources_that_change_from_site_to_site_have_one_column_each(variant):
    data = depthmap.map_data(routing(variant, layers=4))
    assert len(data["columns"]) == len(set(data["columns"]))
    if variant == "block_mhar":
        assert data["columns"][-1] == "partial"
    cells = depthmap.matrix(data)
    for site, row in zip(data["sites"], cells, strict=True):
        assert sum(cell is not None for cell in row) == len(site["columns"])
        assert sum(cell for cell in row if cell is not None) == pytest.approx(1.0, abs=1e-3)


def test_deviations_of_the_heads_cancel():
    data = depthmap.map_data(routing(num_heads=3))
    maps = [depthmap.matrix(data, head, relative=True) for head in range(3)]
    for cells in zip(*([c for row in m for c in row] for m in maps), strict=True):
        assert cells[0] is None or sum(cells) == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize(
    "start, stop, expected",
    [(0, 10, [0, 2, 4, 6, 8, 10]), (2.03, 2.98, [2.2, 2.4, 2.6, 2.8]), (0, 0, [0]), (-1, 1, [-1, -0.5, 0, 0.5, 1])],
)
def test_ticks_are_round_and_inside(start, stop, expected):
    assert svg.nice_ticks(start, stop) == pytest.approx(expected)


@pytest.mark.parametrize(
    "value, text",
    [
        (1234567, "1,234,567"),
        (0.12345678, "0.1235"),
        (54321.4, "54,321"),
        (1498.4, "1,498"),
        (3.0, "3"),
        (1e-9, "1e-09"),
    ],
)
def test_numbers_for_people(value, text):
    assert svg.number(value) == text


def test_a_chart_keeps_nan_out_of_its_paths():
    chart = svg.line_chart([svg.Series("a", [0, 1, 2], [1.0, float("nan"), 2.0])], x_label="step", y_label="loss")
    assert "nan" not in chart
    assert "1 at 0" in chart


def test_colours_run_from_end_to_end():
    assert svg.colour(svg.SEQUENTIAL, 0) == "#f7fbff"
    assert svg.colour(svg.SEQUENTIAL, 1) == "#08306b"
    assert svg.colour(svg.SEQUENTIAL, 7) == "#08306b"


def test_the_command_writes_report_and_figures(experiment, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out = tmp_path / "page.html"
    assert main(["report", str(experiment), "--output", str(out), "--figures", str(tmp_path / "figures")]) == 0
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    stems = ("heldout-loss", "training-loss", "cost", "depth-map-multi", "head-deviations-multi", "gates-multi")
    assert {f"{stem}.{kind}" for stem in stems for kind in ("svg", "pdf")} <= names
    assert str(out) in capsys.readouterr().out
    assert main(["report", str(tmp_path / "nowhere")]) == 2
