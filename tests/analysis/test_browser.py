"""The report in headless Chromium: figures render, the depth map answers, the console is silent, a phone can read it.

pytest -m browser tests/analysis/test_browser.py      (Debian: apt-get install chromium)
"""

import json
import os
import re
import shutil
import subprocess

import pytest

from helpers.runs import write_experiment
from mhar.analysis.report import write_report

pytestmark = pytest.mark.browser

# Runs in the page after load and leaves its findings in the document, which --dump-dom prints.
PROBE_SCRIPT = """
<script>
window.addEventListener("load", () => {
  const found = {errors: window.seenErrors, maps: []};
  for (const figure of document.querySelectorAll(".depth-map")) {
    const svg = figure.querySelector("svg");
    const cells = figure.querySelector(".cells");
    const at = new DOMPoint(0.5, 1.5).matrixTransform(cells.getScreenCTM());
    svg.dispatchEvent(new PointerEvent("pointermove", {clientX: at.x, clientY: at.y, bubbles: true}));
    const hovered = figure.querySelector(".readout").textContent;
    const before = cells.innerHTML;
    const button = figure.querySelector('button[data-head="1"]');
    if (button) button.click();
    const ofHead = figure.querySelector(".readout").textContent;
    svg.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowDown", bubbles: true}));
    const relative = figure.querySelector("button[data-relative]");
    if (relative) relative.click();
    found.maps.push({hovered, ofHead, stepped: figure.querySelector(".readout").textContent,
      redrawn: cells.innerHTML !== before});
  }
  const drawn = [...document.querySelectorAll("svg")].map((svg) => svg.getBoundingClientRect());
  found.empty = drawn.filter((box) => box.width < 20 || box.height < 10).length;
  found.figures = drawn.length;
  found.overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  found.smallest = Math.min(...[...document.querySelectorAll("p, td, th, button, .legend")]
    .map((element) => parseFloat(getComputedStyle(element).fontSize)));
  const scale = (matrix) => Math.sqrt(Math.abs(matrix.a * matrix.d - matrix.b * matrix.c));
  found.chartText = Math.min(...[...document.querySelectorAll("svg text")]
    .map((text) => parseFloat(getComputedStyle(text).fontSize) * scale(text.getScreenCTM())));
  const out = document.createElement("script");
  out.type = "application/json";
  out.id = "findings";
  out.textContent = JSON.stringify(found);
  document.body.append(out);
});
</script>
"""
CATCH_SCRIPT = """<script>window.seenErrors = [];
addEventListener("error", (event) => seenErrors.push(event.message));
const log = console.error; console.error = (...words) => { seenErrors.push(words.join(" ")); log(...words); };</script>
"""


@pytest.fixture(scope="module")
def chromium():
    found = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if not found:
        pytest.skip("no Chromium: apt-get install chromium, or name it in CHROMIUM")
    return found


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    root = tmp_path_factory.mktemp("browser")
    return write_report(root / "report.html", [write_experiment(root / "runs")])


def browse(chromium, page, *options):
    common = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=3000"]
    command = [chromium, *common, "--enable-logging=stderr", *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def findings(chromium, report, folder, width):
    """What the page reports about itself in a window of `width` pixels, and Chromium's console lines."""
    page = folder / f"probed-{width}.html"
    text = report.read_text().replace("<head>", f"<head>{CATCH_SCRIPT}").replace("</body>", f"{PROBE_SCRIPT}</body>")
    page.write_text(text)
    # A frame gives the page a phone's width, which is less than a window may have.
    frame = folder / f"frame-{width}.html"
    frame.write_text(
        f'<!doctype html><iframe src="{page.name}" style="width:{width}px;height:900px;border:0" id="f"></iframe>'
        "<script>addEventListener('load', () => setTimeout(() => document.body.append("
        "document.getElementById('f').contentDocument.getElementById('findings').cloneNode(true)), 500))</script>"
    )
    done = browse(chromium, frame, "--allow-file-access-from-files", "--window-size=1300,1000", "--dump-dom")
    content = re.search(r'id="findings">(.*?)</script>', done.stdout, re.DOTALL)
    assert content, done.stdout[-2000:] + done.stderr[-2000:]
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(content.group(1)), console


@pytest.mark.parametrize("width", [1200, 360])
def test_the_report_renders_without_errors(chromium, report, tmp_path, width):
    found, console = findings(chromium, report, tmp_path, width)
    assert found["errors"] == []
    assert console == []
    assert found["figures"] >= 8
    assert found["empty"] == 0


def test_the_depth_map_answers_pointer_buttons_and_keys(chromium, report, tmp_path):
    found, _ = findings(chromium, report, tmp_path, 1200)
    multi, single = found["maps"]
    assert re.match(r"site layers\.0\.mlp · source embedding · weight 0\.\d{4} \(mean of 2 heads\)", multi["hovered"])
    assert "(head 1)" in multi["ofHead"]
    assert "site layers.1.attn" in multi["stepped"]
    assert "deviation from the heads' mean" in multi["stepped"]
    assert multi["redrawn"]
    assert "weight" in single["hovered"]
    assert "heads" not in single["hovered"]


def test_a_phone_shows_it_without_sideways_scrolling(chromium, report, tmp_path):
    found, _ = findings(chromium, report, tmp_path, 360)
    assert found["overflow"] <= 0
    assert found["smallest"] >= 12
    assert found["chartText"] >= 10


def test_a_screenshot_is_not_blank(chromium, report, tmp_path):
    target = tmp_path / "page.png"
    browse(chromium, report, f"--screenshot={target}", "--window-size=800,1200")
    assert target.stat().st_size > 30_000
