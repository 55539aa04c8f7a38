"""The pages in a real browser: nothing is wider than the screen, the pointer shows values, dragging zooms all charts."""

import json
import os
import re
import shutil
import subprocess

import pytest
from titan_train.report import build_report, compare_runs

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = [
    pytest.mark.slow,  # a browser starts in seconds, or in half a minute on a busy machine
    pytest.mark.skipif(BROWSER is None, reason="needs chromium or chrome"),
]

ASK = """<script>
const fire = (target, kind, x, extra = {}) => {
  const box = target.getBoundingClientRect();
  const at = { clientX: box.left + x * box.width, clientY: box.top + 5 };
  target.dispatchEvent(new PointerEvent(kind, { bubbles: true, ...at, ...extra }));
};
const view = () => [...document.querySelectorAll(".plot .canvas svg")].map((svg) => svg.getAttribute("viewBox"));
const shown = [...document.querySelectorAll(".canvas")].find((c) => c.getBoundingClientRect().width > 0);
const found = { wide: document.documentElement.scrollWidth - innerWidth, before: view() };
found.paper = getComputedStyle(document.body).backgroundColor;
fire(shown, "pointermove", 0.5);
found.tip = shown.querySelector(".tip").textContent;
fire(shown, "pointerdown", 0.25, { button: 0 });
fire(shown, "pointermove", 0.5);
found.brush = shown.querySelector(".brush").hidden;
fire(shown, "pointerup", 0.75);
found.zoomed = view();
found.button = document.querySelector(".reset").textContent;
found.ticks = [...shown.closest(".plot").querySelectorAll(".x-axis span")].map((s) => s.textContent);
document.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape" }));
found.after = view();
found.hidden = document.querySelector(".reset").hidden;
document.body.insertAdjacentHTML("beforeend", "<pre id=found></pre>");
document.querySelector("#found").textContent = JSON.stringify(found);
</script></body>"""


def look(page, width=1280, dark=False):
    """Open the page with the questions in it, and return the answers."""
    asking = page.with_suffix(".asked.html")
    asking.write_text(page.read_text().replace("</body>", ASK))
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--window-size={width},900",
        f"--user-data-dir={page.parent / 'profile'}", "--virtual-time-budget=5000", "--dump-dom",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}", asking.as_uri(),
    ]  # fmt: skip
    environment = os.environ | {"HOME": str(page.parent)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, env=environment, check=True)
    answers = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert answers is not None, done.stderr[-2000:]
    return json.loads(answers[1].replace("&amp;", "&"))


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [500, 1280])  # 500 is the narrowest window of chromium
@pytest.mark.timeout(400)
def test_a_report_fits_its_screen_shows_values_and_zooms_all_charts_at_once(make_run, width, dark):
    found = look(build_report(make_run(400)), width, dark)
    assert found["wide"] <= 0
    assert found["paper"] == ("rgb(14, 16, 19)" if dark else "rgb(246, 246, 244)")
    assert re.fullmatch(r"step (19|20)\d.*training .*", found["tip"])
    assert found["brush"] is False
    assert found["button"].startswith("steps 101–300")
    assert found["ticks"][0] in ("120", "150")
    assert found["hidden"] is True
    assert found["after"] == found["before"]
    assert all(was != now for was, now in zip(found["before"], found["zoomed"], strict=True))


@pytest.mark.timeout(400)
def test_a_comparison_zooms_too(make_run, tmp_path):
    runs = [make_run(400, name="one"), make_run(300, name="two")]
    compare_runs(runs, tmp_path / "compare.html")
    found = look(tmp_path / "compare.html")
    assert found["wide"] <= 0
    assert found["after"] == found["before"] != found["zoomed"]
