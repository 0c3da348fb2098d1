"""The routing benchmark: what it compares is the same function, a red gate has no time, nothing vanishes silently."""

import json
import sys
from dataclasses import replace

import pytest
import torch

from mhar.bench import routing
from mhar.bench.gate import Gate, relative, results
from mhar.bench.implementations import AUTHORS_MS, IMPLEMENTATIONS, BuildOptions, Implementation
from mhar.bench.peers import UnavailableError, users_script
from mhar.bench.problem import bare_chain, draw_problem, per_site_chain, router_chain
from mhar.bench.routing import RoutingOptions, bench_routing
from mhar.bench.shapes import ROUTING_SHAPES, RoutingShape, select
from mhar.bench.tables import routing_table
from mhar.bench.timing import Timing, copy_bandwidth
from mhar.bench.traffic import PEER_ROWS, chain_bytes, sublayer_rows
from mhar.commands.bench import main
from mhar.errors import ConfigurationError
from mhar.ops import depth_read_reference
from mhar.ops.schedule import sublayer_schedule
from mhar.routing import routing_plan

TINY = RoutingShape("tiny", 5, 16, 2, 3)
DELTA = RoutingShape("tiny-delta", 9, 16, 2, 3, "delta_block_mhar", 1)


BLOCK = RoutingShape("tiny-block", 9, 16, 2, 3, "block_mhar", 2)


@pytest.fixture(params=[TINY, DELTA, BLOCK], ids=["mhar", "delta_block_mhar", "block_mhar"])
def problem(request):
    return draw_problem(request.param, 3, "cpu", torch.float32)


def reference_read(problem):
    return lambda sources, q, g: depth_read_reference(torch.stack(sources), q, g, 2, problem.eps)[0]


def test_per_site_chain_is_the_router_chain(problem):
    """Peers run through `per_site_chain`: with the same read it must give what DepthRouter gives."""
    exact = problem.double()
    ours = results(router_chain(exact, backend="reference"), exact)
    theirs = results(per_site_chain(exact, reference_read(exact)), exact)
    for name, tensor in ours.items():
        assert relative(theirs[name], tensor) < 1e-12, name
        assert tensor.norm() > 0, f"{name} has no gradient: the chain cannot see a mistake in it"


def test_bare_chain_has_the_sublayers_and_no_routing(problem):
    x = problem.x.detach()
    expected = x.clone()
    for c in problem.scales:
        expected = expected + expected * c if problem.config.read == "add" else expected * c
    assert torch.equal(bare_chain(problem)(x), expected)
    assert len(problem.scales) == problem.shape.num_sites - 1


def test_gate_is_green_for_the_reference_and_red_for_another_function(problem):
    gate = Gate(problem)
    assert gate.check(router_chain(problem, backend="reference"), own=True).green

    def ungained(sources, query, norm_weight):
        return reference_read(problem)(sources, query, torch.ones_like(norm_weight) + 0 * norm_weight)

    result = gate.check(per_site_chain(problem, ungained), own=False)
    assert not result.green
    assert "from float64, the bound is" in result.reason


def test_gate_is_red_for_nan(problem):
    def poisoned(sources, query, norm_weight):
        return reference_read(problem)(sources, query, norm_weight) * float("nan")

    assert not Gate(problem).check(per_site_chain(problem, poisoned), own=False).green


def run(monkeypatch, *implementations, shape=TINY):
    monkeypatch.setattr(routing, "IMPLEMENTATIONS", implementations)
    return bench_routing((shape,), None, RoutingOptions("cpu", torch.float32), say=lambda _line: None)


def test_a_red_gate_prints_no_time(monkeypatch):
    def wrong(problem, _options):
        return per_site_chain(problem, lambda sources, q, g: sum(sources) + 0 * (q * g))

    right = Implementation("right", lambda problem, _options: per_site_chain(problem, reference_read(problem)))
    result = run(monkeypatch, right, Implementation("wrong", wrong))
    assert [row["implementation"] for row in result["rows"]] == ["right"]
    (entry,) = result["not_run"]
    assert entry["implementation"] == "wrong"
    assert entry["reason"].startswith("correctness gate red")


def test_a_crash_is_a_reason_and_the_rest_goes_on(monkeypatch):
    def crash(_problem, _options):
        raise RuntimeError("first line\nno kernel image is available")

    right = Implementation("right", lambda problem, _options: per_site_chain(problem, reference_read(problem)))
    result = run(monkeypatch, Implementation("theirs", crash), right)
    assert [row["implementation"] for row in result["rows"]] == ["right"]
    assert "RuntimeError" in result["not_run"][0]["reason"]
    assert "no kernel image is available" in result["not_run"][0]["reason"]


def test_row_schema(monkeypatch):
    (implementation,) = (i for i in IMPLEMENTATIONS if i.name == "eager")
    result = json.loads(json.dumps(run(monkeypatch, implementation)))
    assert {"device", "versions", "rows", "not_run", "copy_bandwidth_gb_s", "commit", "date"} <= set(result)
    (row,) = result["rows"]
    assert {"shape", "tokens", "implementation", "ms", "spread_ms", "peak_gib", "cuda_graph"} <= set(row)
    assert row["ms"] == pytest.approx(row["forward_ms"] + row["backward_ms"], abs=1e-3)
    assert set(row["errors"]) == {"out", "x", "query", "norm_weight"}


def test_every_implementation_is_measured_or_explained():
    """On a CPU: no peer runs, and each says why; the authors' figures are quoted only for the paper's shapes."""
    names = [i.name for i in IMPLEMENTATIONS if i.name not in ("mhar", "mhar-dense", "torch.compile")]
    shape = RoutingShape("tiny-h1", 3, 8, 1, 2)
    result = bench_routing((shape,), names, RoutingOptions("cpu"), say=lambda _line: None)
    measured = [row["implementation"] for row in result["rows"]]
    explained = [entry["implementation"] for entry in result["not_run"]]
    assert sorted(measured + explained) == sorted(names)
    assert measured == ["mhar-single", "eager"]
    assert all(entry["reason"] for entry in result["not_run"])


@pytest.mark.slow
def test_fused_path_on_a_tiny_shape():
    for shape in ROUTING_SHAPES["tiny"]:
        result = bench_routing((shape,), ["mhar", "mhar-dense"], RoutingOptions("cpu"), say=lambda _line: None)
        assert "mhar" in [row["implementation"] for row in result["rows"]], result["not_run"]


def test_too_large_is_not_tried(monkeypatch):
    (eager,) = (i for i in IMPLEMENTATIONS if i.name == "eager")
    result = run(monkeypatch, replace(eager, gigabytes=lambda _shape: 1e6))
    assert result["rows"] == []
    assert "needs about 1000000 GB" in result["not_run"][0]["reason"]


def test_users_script(tmp_path, problem):
    script = tmp_path / "theirs.py"
    script.write_text("from mhar.bench.problem import bare_chain\nrouting_chain = bare_chain\n")
    assert torch.equal(users_script(problem, script)(problem.x), bare_chain(problem)(problem.x))
    (authors,) = (i for i in IMPLEMENTATIONS if i.name == "authors")
    assert torch.equal(authors.build(problem, BuildOptions(authors=script))(problem.x), bare_chain(problem)(problem.x))
    with pytest.raises(UnavailableError, match="no Python file"):
        users_script(problem, tmp_path / "absent.py")
    script.write_text("")
    with pytest.raises(UnavailableError, match="does not define routing_chain"):
        users_script(problem, script)


class TestTraffic:
    def test_agrees_with_the_counts_of_the_prototype(self):
        """kernels.md counts 6,059 rows for 73 sites dense, 2,440 in blocks of 8, 2,344 in two levels of 16 and 8."""
        for schedule, counted in (((0, 0), 6059), ((8, 8), 2440), ((16, 8), 2344)):
            rows = sublayer_rows(sublayer_schedule(0, 73, "auto", schedule))
            assert rows == pytest.approx(counted, rel=0.1), schedule

    def test_peers_move_more(self):
        shape = select(ROUTING_SHAPES["paper"], ["100m-h1"])[0]
        ours = chain_bytes(shape, "mhar", (8, 8))
        assert all(chain_bytes(shape, name, None) > 2 * ours for name in PEER_ROWS)
        assert chain_bytes(shape, "eager", None) is None


class TestShapes:
    def test_the_papers(self):
        found = {shape.key: shape for shape in ROUTING_SHAPES["paper"]}
        assert (found["1b:4096"].num_sites, found["1b:4096"].width, found["1b:4096"].num_heads) == (73, 1280, 8)
        assert set(AUTHORS_MS) == set(found) - {"100m-block-h1:4096"}
        delta = found["8b-delta:8192"]
        plan = routing_plan(delta.config, delta.num_sites)
        assert max(len(site.source_names) for site in plan) == 9
        assert len(plan) == 65

    def test_select(self):
        shapes = ROUTING_SHAPES["paper"]
        assert [s.key for s in select(shapes, ["1b", "350m:1024"])] == ["350m:1024", "1b:1024", "1b:4096"]
        with pytest.raises(ConfigurationError, match=r"unknown shape '1b:1042'; did you mean '1b:1024'"):
            select(shapes, ["1b:1042"])


def test_timing():
    assert Timing.of([3.0, 1.0, 2.0, 9.0, 2.5]) == Timing(2.5, 8.0)
    assert copy_bandwidth("cpu") > 1e8


RESULT = {
    "device": "a GPU", "date": "today", "commit": "abc", "versions": {"torch": "2"}, "copy_bandwidth_gb_s": 4280.0,
    "rows": [
        {"shape": "1b", "tokens": 1024, "num_heads": 8, "implementation": "mhar", "ms": 2.0, "forward_ms": 0.8,
         "backward_ms": 1.2, "spread_ms": 0.1, "eager_ms": 9.0, "launch_ms": 7.0, "peak_gib": 1.5, "model_gb": 6.2,
         "share_of_copy_bandwidth": 0.72, "cuda_graph": True},
        {"shape": "1b", "tokens": 1024, "num_heads": 8, "implementation": "authors", "ms": 39.01, "spread_ms": None,
         "peak_gib": None, "source": "kernels.md"},
    ],
    "not_run": [{"shape": "1b", "tokens": 1024, "implementation": "fla", "reason": "one head only"}],
}  # fmt: skip


def test_table():
    table = routing_table(RESULT)
    assert "| 1b | 1,024 | 8 | mhar | 2.000 | 0.800 | 1.200 | 0.100 | 9.00 | 7.00 | 19.5 | 1.50 | 6.20 | 72% |" in table
    assert "authors (kernels.md) | 39.010" in table
    assert "4.28 TB/s" in table
    assert "read with care" in routing_table({**RESULT, "notes": ["read with care"]})
    assert "| 1b | 1,024 | fla | one head only |" in table


class TestCommand:
    def test_report_writes_table_and_figure(self, tmp_path, capsys):
        path = tmp_path / "routing.json"
        path.write_text(json.dumps(RESULT))
        assert main(["report", str(path)]) == 0
        assert capsys.readouterr().out.split() == [str(tmp_path / "routing.md"), str(tmp_path / "routing.svg")]
        assert (tmp_path / "routing.md").read_text() == routing_table(RESULT)
        assert "authors" in (tmp_path / "routing.svg").read_text()

    def test_without_matplotlib_the_table_remains(self, tmp_path, capsys, monkeypatch):
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        path = tmp_path / "routing.json"
        path.write_text(json.dumps(RESULT))
        assert main(["report", str(path)]) == 0
        written = capsys.readouterr()
        assert written.out.split() == [str(tmp_path / "routing.md")]
        assert 'pip install "mhar[bench]"' in written.err

    def test_routing_on_a_cpu(self, tmp_path):
        path = tmp_path / "new" / "routing.json"
        arguments = ["routing", "--device", "cpu", "--preset", "tiny", "--shapes", "tiny-h1", "--output", str(path)]
        assert main([*arguments, "--implementations", "eager", "fla"]) == 0
        result = json.loads(path.read_text())
        assert [row["implementation"] for row in result["rows"]] == ["eager"]
        assert [entry["implementation"] for entry in result["not_run"]] == ["fla"]
        assert not list(path.parent.glob("*.tmp"))

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_no_gpu(self):
        with pytest.raises(ConfigurationError, match="PyTorch sees no GPU; --device cpu --preset tiny"):
            main(["routing"])

    def test_unknown_names(self):
        with pytest.raises(ConfigurationError, match="unknown implementation 'flaa'; did you mean 'fla'"):
            main(["routing", "--device", "cpu", "--implementations", "flaa"])
        with pytest.raises(ConfigurationError, match="unknown shape '2b'"):
            main(["step", "--device", "cpu", "--shapes", "2b"])

    def test_not_a_result(self, tmp_path):
        path = tmp_path / "other.json"
        for content in ("[]", "{"):
            path.write_text(content)
            with pytest.raises(ConfigurationError, match="is not a result of mhar bench"):
                main(["report", str(path)])
