"""What the page's script does, seen in a browser; without chromium these tests are left out."""

import json
import re
import shutil
import subprocess
from html import unescape

import pytest

from resroute.analysis import find_runs
from resroute.experiments.report import make_report
from resroute.experiments.report.data import Links
from resroute.experiments.report.page import render_page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")

DRAWING = b'<svg viewBox="0 0 9 9"><path d="M0 0"/></svg>'

# moves the pointer over figures, sorts a table, hides a series, and writes down what is there then
PROBE = """
const found = {};
const figure = (name) => document.querySelector(`figure[data-figure=${name}]`);
const point = (target, x, y, type) => {
  const box = target.getBoundingClientRect();
  const at = { clientX: box.left + x * box.width, clientY: box.top + y * box.height };
  target.dispatchEvent(new PointerEvent(type, { bubbles: true, ...at }));
};
const told = (name) => figure(name).querySelector("output").textContent;
const count = (name, css) => figure(name).querySelectorAll(css).length;
found.width = window.innerWidth;
found.overflow = document.documentElement.scrollWidth - window.innerWidth;
found.figures = document.querySelectorAll("figure .plot svg").length;
found.lines = count("curves", ".line");
found.bands = count("curves", ".band");
point(figure("trend").querySelector(".plot"), 0.99, 0.99, "pointermove");
found.trend = told("trend");
found.links = [...figure("trend").querySelectorAll("output a")].map((a) => a.getAttribute("href"));
point(figure("trend").querySelector(".plot"), 0.99, 0.99, "click");
point(figure("trend").querySelector(".plot"), 0.01, 0.01, "pointermove");
found.held = told("trend") === found.trend;
const key = new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true });
figure("gap").querySelector(".plot").dispatchEvent(key);
found.gap = told("gap");
point(figure("differences").querySelectorAll(".rows > div:nth-child(even)")[0], 0.5, 0.5,
  "pointerenter");
found.difference = told("differences");
point(figure("depth_weights").querySelector(".plot"), 0.26, 0.05, "pointermove");
found.map = told("depth_weights");
const boxes = [...figure("curves").querySelectorAll("input")];
const box = (text) => boxes.find((input) => input.parentNode.textContent === text);
["single runs", "log loss", "log training tokens", "last third", "training loss"]
  .forEach((text) => box(text).click());
found.thin = count("curves", ".thin");
found.odd = document.querySelector("main").innerHTML.match(/NaN|Infinity|undefined/);
const select = figure("curves").querySelector("select");
found.panels = [...select.options].map((option) => option.textContent);
const wav = [...figure("curves").querySelectorAll(".legend button")].at(-1);
wav.click();
found.hidden = [count("curves", ".line"), count("trend", ".line"), count("gap", ".line")];
found.pressed = figure("curves").querySelectorAll(".legend button[aria-pressed=false]").length;
const table = document.querySelector("#comparison table");
const head = [...table.tHead.rows[0].cells].findIndex((c) => c.textContent.startsWith("mean loss"));
const cells = () => [...table.tBodies[0].rows].map((row) => row.cells[head].textContent);
const button = table.tHead.rows[0].cells[head].querySelector("button");
button.click();
found.up = cells();
found.sorted = table.tHead.rows[0].cells[head].getAttribute("aria-sort");
button.click();
found.down = cells();
parent.postMessage(JSON.stringify(found), "*");
"""

# a window is never narrower than 500 pixels, a frame may be
FRAME = """<body><iframe src="inner.html" width="{0}" height="1400" style="border: 0"></iframe>
<script>onmessage = (event) => document.body.replaceChildren(event.data);</script></body>"""


@pytest.fixture(scope="module")
def page(study_folder, plan, tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    report = make_report(find_runs(study_folder), title="A study", plan=plan)
    names = [*(chart.name for chart in report.charts), "differences", "depth_weights"]
    text = render_page(report, dict.fromkeys(names, DRAWING), Links(out=folder))
    return folder, text


def dumped(folder, text):
    path = folder / "page.html"
    path.write_text(text)
    answer = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--window-size=1400,1400", "--virtual-time-budget=3000", "--dump-dom",
            f"--user-data-dir={folder / 'profile'}", path.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return answer.stdout


def probed(folder, text, width):
    # the page lets no other script run: the probe takes the place of its policy
    text = re.sub(r"<meta http-equiv[^>]*>", "", text)
    text = text.replace("</body>", f"<script>{{{PROBE}}}</script></body>")
    (folder / "inner.html").write_text(text)
    body = re.search(r"<body>(.*)</body>", dumped(folder, FRAME.format(width)), re.DOTALL)
    return json.loads(unescape(body[1]))


def test_the_script_runs_under_its_own_policy(page):
    folder, text = page
    assert text.count('class="static"') == 5
    shown = dumped(folder, text)
    assert 'class="static"' not in shown
    assert shown.count("<figure") == 5
    # two bytes of another script, and nothing runs
    other = dumped(folder, text.replace('"use strict";', '"use strict"; ', 1))
    assert other.count('class="static"') == 5


@pytest.mark.parametrize("width", [1280, 390])
def test_what_the_script_shows(page, width):
    folder, text = page
    found = probed(folder, text, width)
    assert found["width"] == width
    assert found["overflow"] <= 0
    assert found["figures"] > 5
    assert (found["lines"], found["bands"], found["thin"]) == (3, 3, 26)
    assert found["odd"] is None
    # the lowest point on the right: five seeds of WAV at 8 layers, each with its configuration
    assert re.match(
        r"WAV: 0\.\d{4} \(0\.\d{4} \.\. 0\.\d{4}\) nats/char, layers 8 \u2013 seed 0, ",
        found["trend"],
    )
    assert len(found["links"]) == 5
    assert all(link.endswith("/config.json") for link in found["links"])
    assert found["held"]
    assert "\u2212 PreNorm: " in found["gap"] or "\u2212 Block AttnRes: " in found["gap"]
    assert "training tokens 0" in found["gap"]
    assert found["difference"].startswith("WAV \u2212 Block AttnRes, 8 layers: \u22120.0")
    assert "better" in found["difference"]
    assert found["map"].startswith(
        "Block AttnRes, storyworld, 8 layers, mean of 5 seeds: 0 attention takes 1.000 from"
    )
    assert found["panels"] == [
        f"{c}, {n} layers" for c in ("storyworld", "tinystories") for n in (4, 8)
    ]
    # hidden in one figure, hidden in all that have it
    assert found["hidden"] == [2, 2, 3]
    assert found["pressed"] == 1
    assert found["up"] == sorted(found["up"])
    assert found["down"] == found["up"][::-1]
    assert found["sorted"] == "ascending"
