"""The split of a step's time and the causes of slowness, measured on ranks."""

import functools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import titan_testing
from tiny_run import Injecting, tiny_run, write_text
from titan_pipeline import Measurement, build_schedule
from titan_train.inputs import prepare_inputs
from titan_train.observe import read_metrics
from titan_train.report import build_report
from titan_train.train import Trainer
from titan_train.train.measure import drop_outdated

run_ranks = functools.partial(titan_testing.run_ranks, timeout_s=500.0)  # what is measured here needs no quick machine


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("measure")
    write_text(folder)
    prepare_inputs(tiny_run(folder), quiet=True)
    return str(folder)


def train(folder, name, sections, plan=""):
    """Train on this rank; what it measured of each window, the seconds of `fit`, the step times."""
    import torch.distributed as dist

    config = tiny_run(folder, name, **{"launch": {"timeout_s": 400.0}} | sections)
    rank = dist.get_rank()
    rows = []
    with Trainer(config, monitor=Injecting(plan, rank, Path(folder) / "runs" / name, 0.2)) as trainer:
        gather = trainer._measure._gather
        trainer._measure._gather = lambda row: rows.append(row) or gather(row)
        began = time.perf_counter()
        trainer.fit()
        return rows, time.perf_counter() - began


def events(folder, name, kind):
    lines = map(json.loads, (Path(folder) / "runs" / name / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line.get("event") == kind]


@pytest.mark.parametrize(
    ("axis", "parallel"), [("dp_shard", {}), ("tp", {"tp": 2}), ("pp", {"pp": 2}), ("cp", {"cp": 2})]
)
def test_the_parts_of_a_step_add_up_to_it(folder, axis, parallel):
    sections = {"parallel": parallel, "train": {"steps": 12, "global_batch": 8}}
    results = run_ranks(train, 2, folder, f"sum-{axis}", sections)
    steps = [json.loads(x) for x in (Path(folder) / "runs" / f"sum-{axis}" / "metrics.jsonl").read_text().splitlines()]
    step_times = {line["step"]: line["step_time_s"] for line in steps if line["kind"] == "step"}
    for rank, (rows, fit_s) in enumerate(results):
        assert len(rows) == 3
        for row in rows:
            steps_made, wall_s, own, (calls, sent, exposed, *_) = row[0], row[1], row[3:10], row[10:17]
            assert steps_made == 4
            # it takes part in nothing else: what another axis exposes is the same number in another column
            exposed += row[19] if len(row) > 17 else 0.0
            assert sum(own) + exposed == pytest.approx(wall_s, rel=0.03)
            assert min(own) >= 0.0
            assert calls > 0 and sent > 0 and exposed > 0  # noqa: PT018
        # between the trainer's own clock, of the steps that lie in the windows whole, and the test's
        if rank == 0:
            assert sum(4 * row[1] for row in rows) >= sum(step_times[step] for step in range(1, 12))
        assert sum(4 * row[1] for row in rows) <= fit_s
    seconds = {line["step"]: line["split"] for line in steps if line.get("split")}
    assert list(seconds) == [8, 12]
    assert f"{axis} exposed" in seconds[12]
    groups = events(folder, f"sum-{axis}", "groups")
    assert [line["step"] for line in groups] == [4, 8, 12]
    assert list(groups[0]["gradient_norms"]) == ["layers.0", "layers.1", "other"]
    whole = {line["step"]: line["grad_norm"] for line in steps if line["kind"] == "step"}
    for line in groups:  # the squares of the parts add up; float32 sums in another order
        assert sum(x * x for x in line["gradient_norms"].values()) ** 0.5 == pytest.approx(
            whole[line["step"]], rel=1e-4
        )
        assert all(0 < lr <= 1e-3 for lr in line["learning_rates"])
    splits = events(folder, f"sum-{axis}", "step_split")
    assert [split["step"] for split in splits] == [8, 12]  # the first window holds the first step
    assert all(next(iter(split["axes"])) == axis for split in splits)


def test_a_pipeline_keeps_the_last_step_of_each_window_as_its_ranks_ran_it(folder):
    # rank 0 is in one of two pipelines
    batch = {"steps": 9, "global_batch": 8, "microbatch": 1}
    sections = {"parallel": {"pp": 2}, "pipeline": {"schedule": "zb_h1"}, "train": batch}
    results = run_ranks(train, 4, folder, "kept", sections)
    run_dir = Path(folder) / "runs" / "kept"
    file = run_dir / "pipeline.json"
    assert json.loads(file.read_text())["step"] == 9
    measured = Measurement.load(file)
    assert measured.schedule.digest == build_schedule("zb_h1", 2, 4).digest
    step_s = max(row[1] for rows, _ in results for row in rows[-1:])
    assert 0 < measured.makespan < step_s
    for transfer in measured.timeline().transfers:  # one clock: no message is used before it was made
        assert transfer.arrival >= transfer.departure
    assert "step 9 as it ran" in build_report(run_dir).read_text()

    drop_outdated(run_dir, build_schedule("zb_h1", 2, 4), 9)
    assert file.exists()
    before = file.read_text()
    for schedule, step in ((build_schedule("zb_h1", 2, 4), 8), (build_schedule("1f1b", 2, 4), 9), (None, 9)):
        drop_outdated(run_dir, schedule, step)
        assert not file.exists(), (schedule, step)
        file.write_text(before)
    file.write_text(before[:100])
    drop_outdated(run_dir, build_schedule("zb_h1", 2, 4), 9)
    assert not file.exists()


def test_nothing_is_measured_when_it_is_off(folder):
    metrics = {"progress": "off", "split_every": 0, "activations_every": 2}
    run_ranks(train, 2, folder, "off", {"metrics": metrics, "train": {"steps": 3, "global_batch": 8}})
    (line,) = events(folder, "off", "activations")  # which are asked for on their own
    assert (line["step"], list(line["blocks"])) == (2, ["layers.0", "layers.1"])
    assert all(0 < block["rms"] < block["amax"] for block in line["blocks"].values())
    assert events(folder, "off", "step_split") == []


# Sleeps of half a second against steps of 50 ms: named on a machine ten times as busy too.
CAUSES = {
    "slow rank=1 factor=3.5": ("slow rank", [1], "dp_shard", {}),
    "slow-data rank=1 seconds=0.5": ("slow data", [1], "tp", {"parallel": {"tp": 2}}),
    # the link slows down while the run goes on, for both of its ends
    "slow-link rank=1 axis=tp seconds=0.05 step=9": ("slow link", [0, 1], "tp", {"parallel": {"tp": 2}}),
    "slow-link rank=1 axis=pp seconds=0.1 step=9": ("slow link", [0, 1], "pp", {"parallel": {"pp": 2}}),
    "": ("unbalanced stage", [0], "pp", {"parallel": {"pp": 2}, "pipeline": {"cuts": [7]}}),
}


# Busy now and then, as what else runs on a machine is; alone if nobody ends it.
BURN = """
import random, time
end = time.time() + 600
while time.time() < end:
    until = time.time() + random.expovariate(4)
    while time.time() < until:
        pass
    time.sleep(random.expovariate(8))
"""


@pytest.mark.slow
@pytest.mark.parametrize("plan", CAUSES)
def test_an_injected_cause_is_named_by_rank_axis_and_kind(folder, plan):
    kind, ranks, axis, sections = CAUSES[plan]
    name = f"{kind}-{axis}".replace(" ", "-")
    model = {"model": {"name": "llama3_debug", "seq_len": 32, "args": {"num_layers": 8}}} if axis == "pp" else {}
    run_ranks(train, 2, folder, name, {"train": {"steps": 20, "global_batch": 8}} | sections | model, plan)
    named = [(e["cause"], e["ranks"], e["axis"]) for e in events(folder, name, "straggler")]
    assert (kind, ranks, axis) in named


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{}, {"tp": 2}, {"pp": 2}], ids=str)
def test_no_cause_is_named_on_a_machine_that_others_keep_busy(folder, parallel):
    name = "busy-" + "".join(parallel)
    sections = {"parallel": parallel, "train": {"steps": 40, "global_batch": 8}}
    burners = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(os.cpu_count() or 1)]
    try:
        run_ranks(train, 2, folder, name, sections)
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
    assert len(events(folder, name, "step_split")) == 9
    assert events(folder, name, "straggler") == []


def test_the_clock_of_a_resumed_run_goes_on(tmp_path):
    write_text(tmp_path)
    config = tiny_run(tmp_path)
    prepare_inputs(config, quiet=True)
    for until in (6, 7):
        with Trainer(config) as trainer:
            trainer.fit(until)
            trainer.save()
    elapsed = [record.elapsed_s for record in read_metrics(tmp_path / "runs" / "run").steps]
    assert len(elapsed) == 7
    assert elapsed[6] > elapsed[5]  # step 7 is the first of its process; six steps took longer than one
