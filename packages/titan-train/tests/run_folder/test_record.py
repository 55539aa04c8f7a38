"""A run whose settings changed says so wherever one looks: run.json, config.toml, attempts, report, comparison."""

import json
import re

import pytest
from titan_train.config import Config, parse_config
from titan_train.config.patterns import PATTERN_TABLES
from titan_train.config.words import settings_of
from titan_train.observe import JsonlTracker, RunInfo, StepRecord, read_run_info
from titan_train.observe.run_info import settings_spans
from titan_train.report import build_report, compare_runs, summarize
from titan_train.run_folder import changes, read_config, record_return, stage, take_effect


def configure(**optimizer):
    return parse_config({"train": {"steps": 24}, "optimizer": optimizer})


def make_run(run_dir, *parts):
    """A run of parts, each (from step, to step, learning rate), recorded as ranks record it."""
    for first, last, lr in parts:
        config = configure(lr=lr)
        info = RunInfo(run_dir, device="cpu", world_size=1, resume_step=first, staged=stage(config, run_dir))
        changed = take_effect(run_dir, config, first)
        tracker = JsonlTracker(run_dir, resume_step=first)
        if changed:
            tracker.log_event("settings_changed", step=first, changed=changed)
        for step in range(first + 1, last + 1):
            tracker.log_step(
                StepRecord(
                    step=step, loss=5.0 - step / 10, grad_norm=1.0, lr=lr, tokens=64, samples_consumed=step, tokens_per_s=9.0,
                    tokens_per_s_per_rank=9.0, tflops_per_gpu=None, mfu=None, peak_mem_gib=0.1, data_wait_s=0.0, step_time_s=0.1,
                    skipped=False, elapsed_s=step / 10,
                )
            )  # fmt: skip
        tracker.close()
        info.finish("finished" if last == 24 else "stopped", step=last)
    return run_dir


def test_a_resume_with_another_learning_rate_is_on_record_by_steps(tmp_path):
    changed = make_run(tmp_path / "changed", (0, 18, 0.003), (18, 24, 0.0001))
    assert settings_spans(read_run_info(changed)) == [
        (0, {"train.steps": 24, "optimizer.lr": 0.003}),
        (18, {"train.steps": 24, "optimizer.lr": 0.0001}),
    ]
    head = (changed / "config.toml").read_text().splitlines()[:2]
    assert head == [
        "# Settings changed during this run. Those below hold after step 18.",
        "# Steps 1 to 18: optimizer.lr = 0.003",
    ]
    assert read_config(changed).optimizer.lr == 0.0001

    page = build_report(changed).read_text()
    table = page[page.index("Settings that changed") :]
    assert re.findall(r"<th>([^<]*)</th>|<td>([^<]*)</td>", table)[:6] == [
        ("", ""), ("1–18", ""), ("19–end", ""), ("", "optimizer.lr"), ("", "0.003"), ("", "0.0001"),
    ]  # fmt: skip
    assert "0.003 to step 18, then 0.0001" in page
    assert page.count('class="mark adjusted"') >= 4  # under the loss and under every other chart
    assert "settings changed after step 18: optimizer.lr 0.003 -> 0.0001" in summarize(changed)

    other = make_run(tmp_path / "other", (0, 24, 0.0001))
    assert re.search(
        r"^optimizer.lr +0.003 to step 18, then 0.0001 +0.0001$",
        compare_runs([changed, other], tmp_path / "c.html"),
        re.M,
    )
    assert "Settings that changed" not in build_report(other).read_text()


def test_another_order_of_patterns_is_on_record_since_the_first_that_fits_counts(tmp_path):
    one, other = {"norm": 0.5, r"layers\.0\.": 2.0}, {r"layers\.0\.": 2.0, "norm": 0.5}
    take_effect(tmp_path, configure(lr_scales=one), 0)
    assert changes(configure(lr_scales=one), tmp_path) == []
    assert changes(configure(lr_scales=other), tmp_path) == [f"optimizer.lr_scales: {[*one]} -> {[*other]}"]
    assert take_effect(tmp_path, configure(lr_scales=other), 5) == {"optimizer.lr_scales": [[*one], [*other]]}
    tables = {".".join(keys) for keys, _, hint in settings_of(Config) if str(hint).startswith("dict")}
    assert tables - {"model.args"} == {*PATTERN_TABLES}


def test_an_order_of_patterns_that_an_older_version_recorded_has_not_changed(tmp_path):
    scales = {"norm": 0.5, r"layers\.0\.": 2.0}
    take_effect(tmp_path, configure(lr_scales=scales), 0)
    text = (tmp_path / "run.json").read_text()
    recorded = json.loads(text)
    del recorded["settings"][0]["values"]["optimizer.lr_scales"]
    (tmp_path / "run.json").write_text(json.dumps(recorded))
    assert take_effect(tmp_path, configure(lr_scales=scales), 5) == {}


def test_steps_that_are_made_again_are_of_the_attempt_that_made_them_last(tmp_path):
    run = make_run(tmp_path / "a", (0, 18, 0.003), (18, 20, 0.0001), (10, 20, 0.002), (20, 24, 3e-4))
    spans = [(after, values.get("optimizer.lr")) for after, values in settings_spans(read_run_info(run))]
    assert spans == [(0, 0.003), (10, 0.002), (20, None)]  # the default is left out
    assert "optimizer.lr 0.002 -> 0.0003" in summarize(run)
    assert make_run(tmp_path / "a", (0, 24, 0.003)) == run  # begun again
    assert len(settings_spans(read_run_info(run))) == 1


def test_a_run_that_goes_back_beyond_a_change_has_its_settings_from_there_on(tmp_path):
    run = make_run(tmp_path / "a", (0, 18, 0.003), (18, 20, 0.0001))
    body = (run / "config.toml").read_text().partition("\n\n")[2]
    assert record_return(run, 18) == {}
    assert record_return(run, 10) == {"optimizer.lr": [0.003, 0.0001]}
    spans = [(after, values["optimizer.lr"]) for after, values in settings_spans(read_run_info(run))]
    assert spans == [(0, 0.003), (10, 0.0001)]
    text = (run / "config.toml").read_text()
    assert text.splitlines()[:2] == [
        "# Settings changed during this run. Those below hold after step 10.",
        "# Steps 1 to 10: optimizer.lr = 0.003",
    ]
    assert text.partition("\n\n")[2] == body
    assert record_return(run, 0) == {}
    assert (run / "config.toml").read_text() == body


def test_a_run_of_an_older_version_begins_its_record_with_its_configuration(tmp_path):
    run = make_run(tmp_path / "a", (0, 18, 0.003))
    file = run / "run.json"
    file.write_text(file.read_text().replace('"settings"', '"other"'))
    make_run(run, (18, 24, 0.0001))
    assert [values["optimizer.lr"] for _, values in settings_spans(read_run_info(run))] == [0.003, 0.0001]


@pytest.mark.parametrize(
    ("setting", "before", "now"),
    [
        ("launch.launcher", "torchrun", "machines"),
        ("compile.mode", "reduce-overhead", "default"),
        ("compile.mode", "max-autotune", "max-autotune-no-cudagraphs"),
    ],
)
def test_a_run_with_a_value_of_an_earlier_version_can_be_read(tmp_path, setting, before, now):
    section, name = setting.split(".")
    (tmp_path / "config.toml").write_text(f'[{section}]\n{name} = "{before}"\n')
    assert getattr(getattr(read_config(tmp_path), section), name) == now
