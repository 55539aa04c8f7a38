import base64
import json
import math
import re
from html.parser import HTMLParser

import pytest
from titan_train.report import build_report, summarize
from titan_train.run_folder import Lease


class Page(HTMLParser):
    """Collects a page's text, tags and attributes, and checks that tags are closed in order."""

    VOID = frozenset({"meta", "link", "input", "path", "br", "img"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text = ""
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("style", "script"):
            self.text += data + " "


def report_of(run_dir):
    path = build_report(run_dir)
    assert path == run_dir / "report.html"
    return Page(path.read_text(encoding="utf-8"))


def test_a_finished_run_shows_its_numbers_layout_configuration_and_environment(make_run):
    page = report_of(make_run(40))
    text = " ".join(page.text.split())
    for words in (
        "quickstart finished",
        "5.24M parameters · 2 × cpu",
        "Training loss 3.319 mean of the last 2 logged steps; started at 10.00",
        "Validation loss 5.000",
        "Bits per byte 2.000",
        "Steps 40 100% of 40",
        "Tokens 40.0k 1.00k per step",
        "Tokens per second 2.00k median; 1.00k per rank",
        "Peak memory 0.41 GiB",
        "10.0% of step time waiting for data",
        "checkpoint saved × 4",
        "dp_shard 2",
        "weights.a 0.5",
        "titan-train run x",
        "python",
    ):
        assert words in text, words
    assert "MFU" not in text  # unknown device


def test_the_report_asks_nothing_of_the_network(make_run):
    run_dir = make_run(3)
    page = report_of(run_dir)
    for tag, attributes in page.tags:
        for name in ("src", "href", "action", "data", "poster", "srcset"):
            assert (attributes.get(name) or "data:,").startswith("data:"), (tag, attributes)
    html = (run_dir / "report.html").read_text()
    assert re.findall(r"https?://|@import|url\(", html) == []
    policy = [a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert len(policy) == 1
    assert re.match(
        r"default-src 'none'; script-src 'sha256-[^' ]{44}'; style-src 'unsafe-inline'; img-src data:; ", policy[0]
    )


def test_text_from_the_run_is_never_markup(make_run):
    evil = "<img src=x onerror=alert(1)>'\""
    run_dir = make_run(2, name="<b>x<b>", status="failed", error=f"rank 1: {evil}")
    (run_dir / "layout.txt").write_text(evil)
    (run_dir / "config.toml").write_text('[run]\nname = "</table><script>alert(1)</script>"\n')
    page = report_of(run_dir)
    assert [a for tag, a in page.tags if tag == "img"] == []
    assert sum(tag == "script" for tag, _ in page.tags) == 1
    assert page.text.count(evil) == 3  # why it ended, the fault, the layout


@pytest.mark.parametrize("steps", [1, 2, 19, 20, 500, 3000])
def test_every_length_of_run_draws_finite_paths(make_run, steps):
    run_dir = make_run(steps)
    page = report_of(run_dir)
    paths = [a["d"] for tag, a in page.tags if tag == "path" and a["class"] != "grid"]
    assert len(paths) >= 6
    for d in paths:
        assert d
        numbers = [float(n) for n in re.findall(r"-?[\d.]+", re.sub(r"h0|v100", "", d))]
        assert all(-0.1 <= n <= 1000.1 for n in numbers), d
    assert (run_dir / "report.html").stat().st_size < 400_000


def test_a_run_that_crashed_says_why_and_keeps_its_torn_file_readable(make_run):
    run_dir = make_run(12, status="failed", error="rank 3: RuntimeError: out of memory")
    path = run_dir / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-30])
    page = report_of(run_dir)
    assert "rank 3: RuntimeError: out of memory" in page.text
    assert "1 unreadable lines left out" in page.text
    assert "rank 3: RuntimeError: out of memory" in summarize(run_dir)


def test_a_run_is_running_while_a_process_holds_its_folder_and_was_killed_otherwise(make_run):
    run_dir = make_run(2, status=None)
    assert "killed" in report_of(run_dir).text.split("Training loss")[0]
    with Lease(run_dir):
        assert "running" in report_of(run_dir).text.split("Training loss")[0]


def test_the_load_of_experts_has_a_chart_where_there_are_any(make_run):
    assert "Expert load" in report_of(make_run(4, routing={"load_max": 1.5, "load_min": 0.5})).text
    assert "Expert load" not in report_of(make_run(4, name="dense")).text


def test_steps_without_a_finite_loss_leave_a_gap_and_are_counted(make_run):
    run_dir = make_run(5, loss=math.nan, grad_norm=math.inf, skipped=True)
    page = report_of(run_dir)
    assert "Loss" not in [words.strip() for words in page.text.split("  ")]
    assert "5 steps were skipped" in summarize(run_dir)


def test_steps_that_were_left_out_are_counted_by_their_reasons(make_run):
    run_dir = make_run(6, skipped=True)
    events = [
        (1, "nonfinite"),
        (2, "spike"),
        (3, "spike"),
        (4, "nonfinite"),
        (4, "rerun"),
        (5, "nonfinite"),
        (5, "rerun"),
    ]
    verdicts = {4: {"verdict": "persistent hardware"}, 5: {"verdict": "data or numerics"}}
    with (run_dir / "metrics.jsonl").open("a") as file:
        for step, event in events:
            line = {"kind": "event", "event": event, "step": step, "time": 1.0}
            file.write(json.dumps(line | verdicts.get(step, {})) + "\n")
    text = summarize(run_dir)
    assert "3 steps were skipped because the loss or the gradient was not finite" in text  # one has no event
    assert "2 steps were skipped because the gradient was far larger than usual" in text
    assert "1 step was skipped because a rank computed wrongly" in text


@pytest.mark.parametrize("missing", ["metrics.jsonl", "run.json", "config.toml", "layout.txt"])
def test_any_file_of_the_run_may_be_missing(make_run, missing):
    run_dir = make_run(15)
    (run_dir / missing).unlink()
    assert "quickstart" in report_of(run_dir).text
    assert summarize(run_dir).startswith("quickstart: ")


@pytest.mark.parametrize("name", ["run.json", "config.toml"])
@pytest.mark.parametrize(
    "content", ["{", "[]", "attempts = 3", '{"attempts": [1, {}], "versions": 7, "command": 3}', "train = 1"]
)
def test_a_damaged_file_of_the_run_is_left_out(make_run, name, content):
    run_dir = make_run(2)
    (run_dir / name).write_text(content)
    assert "quickstart" in report_of(run_dir).text
    assert summarize(run_dir).startswith("quickstart: ")


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    for call in (build_report, summarize):
        with pytest.raises(ValueError, match=r"holds no metrics\.jsonl"):
            call(tmp_path)
        with pytest.raises(ValueError, match="is not a folder"):
            call(tmp_path / "nothing")


def test_the_report_can_be_written_elsewhere(make_run, tmp_path):
    out = tmp_path / "elsewhere.html"
    assert build_report(make_run(1), out) == out
    assert out.exists()


def test_every_setting_is_shown_under_its_section(make_run):
    run_dir = make_run(1)
    (run_dir / "config.toml").write_text(
        "top = 1\n[data]\nseed = 2\n[data.mix]\na = 0.25\n"
        '[[data.sources]]\nname = "web"\n[[data.sources]]\nname = "code"\n'
    )
    text = " ".join(report_of(run_dir).text.split())
    assert "top level top 1 data seed 2 mix.a 0.25 data.sources[0] name web data.sources[1] name code" in text


def test_mfu_appears_when_the_device_is_known(make_run):
    run_dir = make_run(5, mfu=0.4123, tflops_per_gpu=407.9)
    text = " ".join(report_of(run_dir).text.split())
    assert "MFU 41.2% median; 408 TFLOP/s per GPU" in text


def test_time_adds_up_over_attempts_whether_or_not_the_clock_begins_again(make_run):
    run_dir = make_run(40)  # half a second a step
    assert "Time               20s" in summarize(run_dir)
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    again = [re.sub(r'"elapsed_s":([\d.]+)', lambda m: f'"elapsed_s":{float(m[1]) - 12.0}', line) for line in lines]
    cut = next(i for i, line in enumerate(lines) if '"kind":"step","step":25,' in line)
    path.write_text("".join(lines[:cut] + again[cut:]))  # a second attempt from step 24, its clock from 0
    assert "Time               20s" in summarize(run_dir)


def test_tokens_between_two_logged_steps_count(make_run, tmp_path):
    run_dir = make_run(40)
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if '"kind":"step"' not in line or int(re.search(r'"step":(\d+)', line)[1]) % 10 == 0]
    (run_dir / "metrics.jsonl").write_text("".join(kept))
    assert "40.0k  (1.00k per step)" in summarize(run_dir)


def test_tokens_of_a_branch_are_its_own(make_run):
    run_dir = make_run(40)
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] > 30))
    (run_dir / "run.json").write_text(json.dumps({"parent": {"run": "runs/a", "step": 30}}))
    assert "10.0k  (1.00k per step; those of runs/a@30 come before)" in summarize(run_dir)


def test_the_newest_samples_that_can_be_read_are_on_the_page(make_run):
    run_dir = make_run(40)
    folder = run_dir / "samples"
    folder.mkdir()
    for step in (10, 20, 30):
        found = {"step": step, "right": 3, "images": 4, "captions": ["a red disc <b>", "an orange ring"]}
        (folder / f"step_{step:08}.json").write_text(json.dumps(found))
        (folder / f"step_{step:08}.png").write_bytes(b"\x89PNG of step %d" % step)
    (folder / "step_00000030.json").write_text("{")
    page = report_of(run_dir)
    shown = "step 20: 3 of 4 show their caption's colour and place; 3 of 4 at step 10"
    assert shown in " ".join(page.text.split())
    (image,) = [attributes for tag, attributes in page.tags if tag == "img"]
    assert base64.b64decode(image["src"].removeprefix("data:image/png;base64,")) == b"\x89PNG of step 20"
    assert "a red disc <b>; an orange ring" in image["alt"]


def test_images_of_captions_that_nothing_scores_are_on_the_page(make_run):
    run_dir = make_run(40)
    folder = run_dir / "samples"
    folder.mkdir()
    for step in (20, 50):  # 50 is of an earlier attempt that came further
        found = {"step": step, "images": 1, "captions": ["a photo"]}
        (folder / f"step_{step:08}.json").write_text(json.dumps(found))
        (folder / f"step_{step:08}.png").write_bytes(b"\x89PNG of step %d" % step)
    page = report_of(run_dir)
    assert "Samples step 20 " in " ".join(page.text.split()) + " "
    (image,) = [attributes for tag, attributes in page.tags if tag == "img"]
    assert base64.b64decode(image["src"].removeprefix("data:image/png;base64,")) == b"\x89PNG of step 20"


def test_the_loss_of_a_diffusion_model_is_not_in_nats(make_run):
    run_dir = make_run(40)
    assert "nats per token" in report_of(run_dir).text
    config = run_dir / "config.toml"
    config.write_text('[model]\nname = "flux_tiny"\n')
    assert "nats per token" not in report_of(run_dir).text


def test_texts_that_were_sampled_are_shown_newest_first_and_never_as_markup(make_run):
    run_dir = make_run(40)
    folder = run_dir / "samples"
    folder.mkdir()
    for step in (10, 20, 30, 50):  # 50 is of an earlier attempt that came further
        found = {"step": step, "texts": [{"prompt": "def <b>", "text": f"def <b>main_{step}():"}]}
        (folder / f"step_{step:08}.json").write_text(json.dumps(found))
    (folder / "step_00000030.json").write_text('{"step": 30, "texts": [{}]}')
    page = report_of(run_dir)
    text = " ".join(page.text.split())
    assert "step 20 def <b> main_20(): step 10 def <b> main_10():" in text
    assert "main_50" not in text
    assert "step 30" not in text
    assert not any(tag == "b" for tag, _ in page.tags)


def test_of_many_samples_the_first_and_the_last_are_shown(make_run):
    run_dir = make_run(40)
    (run_dir / "samples").mkdir()
    for step in range(1, 41):
        found = {"step": step, "texts": [{"prompt": "x", "text": f"x number-{step}."}]}
        (run_dir / "samples" / f"step_{step:08}.json").write_text(json.dumps(found))
    shown = [int(n) for n in re.findall(r"number-(\d+)", report_of(run_dir).text)]
    assert shown == [*range(40, 28, -1), *range(12, 0, -1)]
