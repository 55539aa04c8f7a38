import io
import logging
import re
import statistics
import sys
import threading
import time

import pytest
from titan_train.config.metrics import MetricsConfig
from titan_train.observe import TrainProgress, ValidationRecord
from titan_train.observe.format import short_count, short_duration, short_gib, short_loss
from titan_train.observe.terminal import LossTrail, bar_line, resolve_mode, step_parts


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines_of(total_steps, records, **options):
    stream = io.StringIO()
    config = MetricsConfig(progress="lines")
    with TrainProgress(config, total_steps=total_steps, stream=stream, **options) as progress:
        for record in records:
            progress.update(record)
    return stream.getvalue().splitlines()


def test_a_file_gets_one_key_value_line_a_step(step_record):
    lines = lines_of(10, [step_record(1, mfu=0.4123), step_record(2, skipped=True)])
    assert len(lines) == 2
    pairs = dict(pair.split("=") for pair in lines[0].split())
    assert pairs["step"] == "1/10"
    assert pairs["loss"] == "10.0000"
    assert pairs["tokens_per_s"] == "12346"
    assert pairs["mfu"] == "0.4123"
    assert "skipped=true" in lines[1].split()
    assert "mfu" not in lines[1]


def test_validation_and_messages_keep_their_place_among_the_lines(step_record):
    stream = io.StringIO()
    with TrainProgress(MetricsConfig(progress="lines"), total_steps=3, stream=stream) as progress:
        progress.message("resumed from step 1")
        progress.update(step_record(2))
        progress.validation(ValidationRecord(step=2, loss=3.25, bits_per_byte=1.125, tokens=64))
        progress.update(step_record(3))
    starts = [line.split()[0] for line in stream.getvalue().splitlines()]
    assert starts == ["resumed", "step=2/3", "step=2", "step=3/3"]
    assert "validation_loss=3.2500 bits_per_byte=1.1250 tokens=64" in stream.getvalue()


def test_a_log_gets_a_line_every_five_seconds_the_first_and_last_step_and_skipped_ones(step_record):
    now = [0.0]
    stream = io.StringIO()
    with TrainProgress(MetricsConfig(), total_steps=50, stream=stream, clock=lambda: now[0]) as progress:
        for step in range(1, 51):
            now[0] += 0.5
            progress.update(step_record(step, skipped=step == 14))
            if step == 27:
                progress.validation(ValidationRecord(step=27, loss=3.25, bits_per_byte=None, tokens=64))
                progress.sample(27, 'def main():\n    "x"')
    lines = stream.getvalue().splitlines()
    assert [line.split()[0] for line in lines] == [
        "step=1/50", "step=11/50", "step=14/50", "step=24/50", "step=27", "step=27", "step=34/50", "step=44/50", "step=50/50",
    ]  # fmt: skip
    assert lines[5] == 'step=27 sample="def main():\\n    \\"x\\""'


def test_the_block_on_a_terminal_holds_the_newest_sample_and_no_control_character(step_record, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    stream = Terminal()
    with TrainProgress(MetricsConfig(progress="bar"), total_steps=20, stream=stream) as progress:
        progress.update(step_record(4))
        progress.sample(4, "def main():\n    return \x1b[31m" + 60 * "x")
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue().split("train")[-1]).replace("\r", "").splitlines()
    assert [line.rstrip() for line in last[1:4]] == [
        "after step 4 the model writes:",
        "  def main():",
        "      return \ufffd[31m" + 20 * "x" + "…",
    ]
    assert all(len(line) <= 40 for line in last)


def test_off_prints_messages_only(step_record):
    stream = io.StringIO()
    with TrainProgress(MetricsConfig(progress="off"), total_steps=3, stream=stream) as progress:
        progress.update(step_record(1))
        progress.message("asked to stop")
    assert stream.getvalue() == "asked to stop\n"


def test_auto_means_a_bar_only_on_a_terminal_that_can_draw_one(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    assert resolve_mode("auto", Terminal()) == "bar"
    assert resolve_mode("auto", io.StringIO()) == "lines"
    monkeypatch.setenv("TERM", "dumb")
    assert resolve_mode("auto", Terminal()) == "lines"
    assert resolve_mode("lines", Terminal()) == "lines"


def test_the_bar_shows_the_last_state_when_it_closes_and_leaves_the_cursor_visible(step_record, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    stream = Terminal()
    with TrainProgress(MetricsConfig(progress="bar"), total_steps=20, stream=stream) as progress:
        for step in range(1, 13):
            progress.update(step_record(step, mfu=0.412))
        progress.validation(ValidationRecord(step=12, loss=4.5, bits_per_byte=None, tokens=64))
        progress.message("[bold]saved[/bold] step 12")
    drawn = stream.getvalue()
    assert "[bold]saved[/bold] step 12" in drawn  # a message is not markup
    last = drawn.split("train")[-1]
    for piece in ("12/20", "loss 4.745", "val 4.500", "12.3k tok/s", "MFU 41.2%", "ETA"):
        assert piece in last
    assert drawn.rindex("\x1b[?25h") > drawn.rindex("\x1b[?25l")


def test_prints_and_log_lines_go_above_the_bar_and_streams_are_given_back(step_record, monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    handler = logging.StreamHandler(stream)
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    with TrainProgress(MetricsConfig(progress="bar"), total_steps=2, stream=stream) as progress:
        progress.update(step_record(1))
        while handler.stream is stream:  # until the display has taken over
            time.sleep(0.01)
        print("a print")
        logging.getLogger().warning("a log line")
    assert sys.stdout is sys.stderr is handler.stream is stream
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\n", stream.getvalue()).splitlines()]
    assert "a print" in lines
    assert "a log line" in lines


def test_eta_follows_the_last_steps_and_forgets_a_slow_first_one(step_record):
    now = [0.0]
    stream = io.StringIO()
    config = MetricsConfig(progress="lines")
    with TrainProgress(config, total_steps=1000, stream=stream, clock=lambda: now[0]) as progress:
        now[0] = 500.0  # compilation
        progress.update(step_record(1))
        for step in range(2, 101):
            now[0] += 1.0
            progress.update(step_record(step))
    lines = stream.getvalue().splitlines()
    assert "eta=138:45:00" in lines[0] or "eta=5d18h" in lines[0]
    assert "eta=15:00" in lines[-1]  # 900 steps of 1 s


def test_update_takes_under_50_us_while_the_bar_is_drawn(step_record):
    records = [step_record(step) for step in range(1, 2001)]
    with TrainProgress(MetricsConfig(progress="bar"), total_steps=2000, stream=Terminal()) as progress:
        taken = []
        for record in records:
            started = time.perf_counter()
            progress.update(record)
            taken.append(time.perf_counter() - started)
    # The median: a mean would count the machine's own pauses. Measured here: below 1 us.
    assert statistics.median(taken) < 50e-6


class StoppedTerminal(Terminal):
    """As after Ctrl-S: writing blocks until the test lets it go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def write(self, text: str) -> int:
        self.go.wait()
        return super().write(text)


@pytest.mark.parametrize("mode", ["bar", "lines"])
def test_a_terminal_that_does_not_take_output_never_blocks_the_training_loop(step_record, mode):
    stream = StoppedTerminal()
    progress = TrainProgress(MetricsConfig(progress=mode), total_steps=5_000, stream=stream)
    started = time.perf_counter()
    record = step_record(1)
    for _ in range(5_000):
        progress.update(record)
    progress.message("still here")
    assert time.perf_counter() - started < 10
    stream.go.set()
    progress.close()
    assert "still here" in stream.getvalue()


def test_a_reader_that_hung_up_does_not_stop_the_run(step_record):
    stream = io.StringIO()
    with TrainProgress(MetricsConfig(progress="lines"), total_steps=2, stream=stream) as progress:
        stream.close()
        progress.update(step_record(1))
        progress.update(step_record(2))


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 120, 200])
@pytest.mark.parametrize("total", [None, 2000.0])
def test_the_bar_line_never_wraps_and_keeps_what_matters_most(step_record, width, total):
    trail = LossTrail()
    for step in range(1, 400):
        trail.add(10.0 / step**0.3)
    validation = ValidationRecord(step=400, loss=3.0, bits_per_byte=None, tokens=1)
    parts = step_parts(step_record(412, mfu=0.41, data_wait_s=0.05), validation, 2000, 754.0, trail)
    text = bar_line("train", 412, total, parts, width).plain
    assert len(text) <= width
    if width >= 40:
        assert "loss 1.64" in text
    if width >= 80:
        assert "ETA 12:34" in text
    if width >= 120:
        assert "MFU 41.0%" in text
        assert "data 50%" in text


@pytest.mark.parametrize(("done", "cells"), [(0, 0), (25, 10), (50, 20), (100, 40), (250, 40)])
def test_the_filled_part_of_the_bar_is_the_part_that_is_done(done, cells):
    line = bar_line("x", done, 100, [], 80)
    style = "green" if done >= 100 else "cyan"
    filled = sum(span.end - span.start for span in line.spans if span.style == style)
    assert filled == cells
    assert line.plain.count("━") == 40


def test_the_loss_trail_keeps_the_whole_course_in_bounded_memory():
    trail = LossTrail()
    for step in range(100_000):
        trail.add(100_000 - step)
    assert len(trail.values) < 64
    assert trail.values[0] == 100_000
    assert trail.sparkline(8) == "█▇▆▅▄▃▂▁"
    trail.add(float("nan"))
    assert len(trail.sparkline()) == 10


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (7, "7"),
        (0.5, "0.50"),
        (812, "812"),
        (999.9, "1.00k"),
        (12345.6, "12.3k"),
        (1.24e6, "1.24M"),
        (8.03e9, "8.03B"),
    ],
)
def test_counts_are_short(value, text):
    assert short_count(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.84, "0.84s"), (42, "42s"), (59.6, "1:00"), (192, "3:12"), (3792, "1:03:12"), (183_600, "2d 03h"), (-1, "?")],
)
def test_durations_are_short(seconds, text):
    assert short_duration(seconds) == text


def test_losses_keep_four_digits_and_memory_its_unit():
    assert [short_loss(v) for v in (10.5234, 3.2141, 0.81214, 0.0, 1.5e-7, float("nan"), None)] == [
        "10.52", "3.214", "0.8121", "0.0000", "1.5e-07", "nan", "–",
    ]  # fmt: skip
    assert [short_gib(v) for v in (0.414, 3.14, 71.9)] == ["0.41 GiB", "3.1 GiB", "71.9 GiB"]
