"""The pages in a real browser: nothing is wider than the screen, the pointer shows values, dragging zooms all charts, a live
page follows its run, and the console stays empty."""

import base64
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
from titan_pipeline import Costs, Measurement, Slot, build_schedule, simulate
from titan_train.config import parse_config
from titan_train.config.load import dump_config
from titan_train.report import build_report, compare_runs

pytestmark = pytest.mark.timeout(400)  # a browser starts in a second, or in half a minute on a busy machine
ASK = """(() => {
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
return found;
})()"""


def look(browser, file, width=1280, dark=False):
    """Open the page, ask it, and return the answers."""
    page = browser.open(file.as_uri(), width=width, dark=dark)
    found = page.ask(ASK)
    assert page.errors == []
    page.close()
    return found


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [500, 1280])  # 500 is the narrowest window of chromium
def test_a_report_fits_its_screen_shows_values_and_zooms_all_charts_at_once(browser, make_run, width, dark):
    found = look(browser, build_report(make_run(400)), width, dark)
    assert found["wide"] <= 0
    assert found["paper"] == ("rgb(14, 16, 19)" if dark else "rgb(246, 246, 244)")
    assert re.fullmatch(r"step (19|20)\d.*training .*", found["tip"])
    assert found["brush"] is False
    assert found["button"].startswith("steps 101–300")
    assert found["ticks"][0] in ("120", "150")
    assert found["hidden"] is True
    assert found["after"] == found["before"]
    assert all(was != now for was, now in zip(found["before"], found["zoomed"], strict=True))


def test_a_comparison_zooms_too(browser, make_run, tmp_path):
    runs = [make_run(400, name="one"), make_run(300, name="two")]
    compare_runs(runs, tmp_path / "compare.html")
    found = look(browser, tmp_path / "compare.html")
    assert found["wide"] <= 0
    assert found["after"] == found["before"] != found["zoomed"]


PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGNgYPj/HwADAgH/p2nZAQAAAABJRU5ErkJggg=="


def with_all_sections(run_dir):
    """Adds to a run's folder whatever the report has a section for."""
    parts = {"parallel": {"pp": 2}, "pipeline": {"schedule": "1f1b"}, "train": {"global_batch": 4, "microbatch": 1}}
    (run_dir / "config.toml").write_text(dump_config(parse_config({"model": {"name": "llama3_debug"}, **parts})))
    plan = simulate(build_schedule("1f1b", 2, 4), Costs.uniform(2, forward=0.01))
    slots = (tuple(Slot(s.action, s.start, s.end) for s in each) for each in plan.timeline)
    Measurement(plan.schedule, tuple(slots)).save(run_dir / "pipeline.json")
    metrics = run_dir / "metrics.jsonl"
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    measured = {
        "split": {"forward": 0.2, "backward": 0.2, "pp exposed": 0.1},
        "memory": {"active_gib": 1.0, "peak_gib": 2.0},
    }
    axis = {"calls": 8, "bytes": 2**21, "exposed_ms": [1, 2, 3], "hidden_ms": [4, 5, 6], "overlapped": 0.7, "gb_s": 1.5}
    ranks = {"wall_ms": [9, 10, 11], "phases_ms": {"forward": [3, 3, 4]}, "axes": {"pp": axis | {"latency_us": 12.5}}}
    steps.append({"kind": "event", "event": "step_split", "step": 40, "time": 1.0, "steps": 20, **ranks})
    steps.append({"kind": "event", "event": "straggler", "step": 31, "time": 1.0, "rank": 2, "cause": "slow <data>"})
    metrics.write_text(
        "".join(json.dumps(line | (measured if line["kind"] == "step" else {})) + "\n" for line in steps)
    )
    ended = {"attempt": 0, "time": 1.5e9, "world_size": 2, "from_step": 0, "to_step": 22, "end": "rank 1 <b>died</b>"}
    (run_dir / "attempts.jsonl").write_text(json.dumps(ended) + "\n")
    samples = run_dir / "samples"
    samples.mkdir()
    (samples / "step_00000040.json").write_text(
        json.dumps({"step": 40, "images": 1, "captions": ["a red square"], "right": 1})
    )
    (samples / "step_00000040.png").write_bytes(base64.b64decode(PIXEL))
    (samples / "step_00000020.json").write_text(json.dumps({"step": 20, "texts": [{"prompt": "def", "text": " f():"}]}))
    return run_dir


def test_a_report_with_every_section_shows_all_of_it_and_asks_for_nothing(browser, make_run):
    page = browser.open(build_report(with_all_sections(make_run(40))).as_uri())
    page.listen(0.5)
    assert page.errors == []
    headings = page.ask("[...document.querySelectorAll('h2, h3, summary')].map((h) => h.textContent.trim()).join('|')")
    for part in ("Loss", "Samples step 40", "what the model writes", "Time of a step", "Memory", "Ranks and mesh axes", "Faults",
                 "Predicted beside measured", "Events", "as it ran", "Layout", "Configuration", "Environment"):  # fmt: skip
        assert part in headings
    assert "rank 1 <b>died</b>" in page.ask("document.body.textContent")
    assert page.ask("[...document.images].every((image) => image.complete && image.naturalWidth > 0)")
    assert page.ask("document.images.length") == 1
    page.close()


@pytest.mark.parametrize("which", ["report", "comparison", "plan"])
def test_a_script_that_got_past_the_escaping_does_not_run(which, browser, make_run, tmp_path):
    from titan_train.planner import Setup, estimate, find_shape, load_machine
    from titan_train.planner.view.page import Plan
    from titan_train.planner.view.page import page as plan_page

    file = tmp_path / "page.html"
    if which == "report":
        build_report(make_run(5), file)
    elif which == "comparison":
        compare_runs([make_run(5, name="one"), make_run(5, name="two")], file)
    else:
        setup = Setup(seq_len=8192, global_batch=8, dp_shard=8)
        found = estimate(find_shape("llama3_8b"), load_machine("h100"), setup)
        file.write_text(plan_page(Plan(found, found.machine.memory_bytes)))
    framed = "<iframe srcdoc='<script>parent.evil = 1</script>'></iframe>"
    evil = f"<script>window.evil = 1</script><img src=x onerror='window.evil = 1'>{framed}"
    for marker, expected in (("", False), (evil, True)):
        (tmp_path / "opened.html").write_text(file.read_text().replace("</body>", f"{marker}</body>"))
        page = browser.open((tmp_path / "opened.html").as_uri())
        page.listen(0.3)
        assert page.ask("window.evil === undefined")
        assert bool(page.errors) == expected  # the browser says what it did not run
        page.close()


@contextmanager
def served(run_dir, every_s=0.1):
    """The address of a run's live page."""
    uvicorn = pytest.importorskip("uvicorn")
    pytest.importorskip("starlette")
    from titan_train.report.live import build_live_app

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()  # from here on a request waits for the server instead of being refused
        app = build_live_app(run_dir, every_s=every_s)
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
        finally:
            server.should_exit = True
            thread.join()


def test_a_live_page_follows_its_run_by_itself_and_keeps_its_place(browser, make_run):
    run_dir = make_run(40, status=None)
    with served(run_dir) as address:
        page = browser.open(address)
        assert "9 of 40" not in page.ask("document.body.innerText")
        page.ask("scrollTo(0, 300), window.before = true")
        metrics = run_dir / "metrics.jsonl"
        metrics.write_bytes(b"".join(metrics.read_bytes().splitlines(keepends=True)[:9]))
        page.wait_until("!window.before && document.readyState === 'complete'", 30)
        page.wait_until("scrollY === 300", 30)
        assert page.errors == []
        page.close()


def test_a_server_that_ends_while_a_browser_watches_says_nothing(browser, make_run, capfd):
    with served(make_run(5, status=None)) as address:
        page = browser.open(address)
        page.listen(0.3)
    assert capfd.readouterr() == ("", "")
    page.close()


def test_a_live_page_of_a_folder_that_cannot_be_read_says_so_and_comes_back(browser, make_run, tmp_path):
    run_dir = make_run(10)
    with served(run_dir) as address:
        page = browser.open(address)
        run_dir.rename(tmp_path / "away")
        page.wait_until("document.body.innerText.includes('is not a folder')", 30)
        (tmp_path / "away").rename(run_dir)
        page.wait_until("document.body.innerText.includes('Configuration')", 30)
        assert [error for error in page.errors if "503" not in error] == []  # how the browser tells of the first page
        page.close()


@pytest.mark.slow  # the quick start itself
def test_the_quick_start_is_watched_from_its_first_step_to_its_report(browser, tmp_path):
    titan_train = [sys.executable, "-m", "titan_train"]
    run_dir = tmp_path / "runs" / "quickstart"
    words = ["run", "quickstart", "--train.steps", "30", "--metrics.progress", "lines"]
    run = subprocess.Popen([*titan_train, *words], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    watch = None
    try:
        for line in run.stdout:
            if line.startswith("step="):
                break
        watch = subprocess.Popen(
            [*titan_train, "watch", str(run_dir), "--web", "--port", "0"], stderr=subprocess.PIPE, text=True
        )
        page = browser.open(watch.stderr.readline().split(": ")[1].strip())
        assert "running" in page.ask("document.querySelector('.status').textContent")
        run.stdout.read()
        assert run.wait() == 0
        page.wait_until("document.querySelector('.status').textContent.includes('finished')")
        assert page.errors == []
        page.close()
    finally:
        run.kill()
        run.communicate()
        if watch is not None:
            watch.send_signal(signal.SIGINT)
            said = watch.communicate()[1]
    assert said == "stopped\n"
    report = browser.open((run_dir / "report.html").as_uri())
    assert report.ask("document.querySelector('.status').textContent") == "finished"
    assert report.ask("document.querySelectorAll('.plot').length") >= 5
    assert report.errors == []
    report.close()
