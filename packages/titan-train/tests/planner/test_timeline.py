"""What a step does over time: its memory as a picture and as torch's snapshot, and its predicted trace."""

import json
import pickle
import pickletools
from pathlib import Path

import pytest
from titan_pipeline import build_schedule
from titan_train.cli import main
from titan_train.config import load_config
from titan_train.models import build_model
from titan_train.parallel.layout.run import plan_run
from titan_train.planner import Setup, estimate, find_shape, load_machine
from titan_train.planner.memory.peak import WORKSPACE
from titan_train.planner.memory.ranks import rehearse
from titan_train.planner.memory.timeline import step_timeline
from titan_train.planner.view.timeline import timeline_snapshot, timeline_svg
from titan_train.planner.view.trace import step_trace
from torch.cuda import _memory_viz

# what the reader of torch's MemoryViz.js knows
VIEWER = {
    "PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT", "BININT", "BININT1", "BININT2",
    "LONG1", "BINFLOAT", "NONE", "NEWTRUE", "NEWFALSE", "SHORT_BINUNICODE", "BINUNICODE", "EMPTY_DICT", "EMPTY_LIST",
    "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "LIST", "DICT",
}  # fmt: skip


def configured(world: int, **settings: object):
    given = {"model.name": "llama3_debug", "model.seq_len": 2048, "train.dtype": "bf16", "train.global_batch": 16}
    given |= {"model.args.dim": 512, "model.args.ffn_dim": 1536, "model.args.num_layers": 4}
    given |= {"train.microbatch": 2, "launch.nproc": world, "launch.device": "cpu", "parallel.mode": "fsdp"}
    given |= {name.replace("__", "."): value for name, value in settings.items()}
    return load_config("debug", [word for key, value in given.items() for word in (f"--{key}", str(value).lower())])


LAYOUTS = {
    "full": (2, {"activations__checkpoint": "full"}),
    "tp2 selective": (2, {"parallel__tp": 2, "activations__checkpoint": "selective"}),
    "pp2 zbv": (2, {"parallel__pp": 2, "pipeline__schedule": "zbv"}),
    "compiled": (2, {"compile__enabled": True}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_over_time_peaks_where_the_account_says_and_torch_reads_its_snapshot(layout: str) -> None:
    world, settings = LAYOUTS[layout]
    config = configured(world, **settings)
    plan, ranks = plan_run(config, world), rehearse(config, world)
    timeline = step_timeline(config, plan, build_model(config.model, vocab_size=None), ranks)
    _, peak = timeline.peak
    account = max(ranks, key=lambda rank: rank.peak)
    assert peak - WORKSPACE == pytest.approx(account.memory.allocated - WORKSPACE, rel=0.15), account.memory.parts
    picture = timeline_svg(timeline)
    assert picture.startswith("<svg")
    assert "activations: " in picture

    written = timeline_snapshot(timeline)
    assert {opcode.name for opcode, _, _ in pickletools.genops(written)} <= VIEWER
    snapshot = pickle.loads(written)
    level = most = 0
    live: dict[int, int] = {}
    for entry in snapshot["device_traces"][0]:
        if entry["action"] == "alloc":
            assert entry["addr"] not in live
            live[entry["addr"]] = entry["size"]
            level += entry["size"]
            most = max(most, level)
        elif entry["action"] == "free_completed":
            level -= live.pop(entry["addr"])
    assert most == peak
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    assert {b["address"]: b["size"] for b in blocks if b["state"] == "active_allocated"} == live
    assert {s["address"]: s["total_size"] for s in snapshot["segments"]} == live
    assert "unknown" in {entry["category"] for entry in snapshot["device_traces"][0]}
    assert "GiB" in _memory_viz.segsum(snapshot)
    assert "b = a[0:" in _memory_viz.trace(snapshot)


def test_a_rehearsal_writes_picture_and_snapshot(tmp_path: Path, monkeypatch, capsys) -> None:
    recorded = []

    def record(config, plan, whole, ranks):
        recorded.append(whole)
        return step_timeline(config, plan, whole, ranks)

    monkeypatch.setattr("titan_train.planner.memory.timeline.step_timeline", record)
    stem = tmp_path / "memory"
    words = [
        "check",
        "debug",
        "--rehearse",
        "--devices",
        "2",
        "--parallel.mode",
        "fsdp",
        "--memory-timeline",
        str(stem),
    ]
    assert main(words) == 0
    assert "snapshot: " in capsys.readouterr().out
    assert recorded[0].tok_embeddings.num_embeddings == 259  # of the tokenizer
    assert (tmp_path / "memory.svg").exists()
    assert (tmp_path / "memory.pickle").exists()
    assert main(["check", "debug", "--memory-timeline", str(stem)]) == 2
    assert "goes with --rehearse" in capsys.readouterr().err
    assert main([*words[:-1], str(tmp_path / "no" / "memory")]) == 2
    assert "there is no folder" in capsys.readouterr().err


SETUPS = {
    "fsdp": ("llama3_1b", Setup(seq_len=2048, global_batch=16, microbatch=1, dp_shard=4, recompute="full")),
    "interleaved, tp": (
        "llama3_8b",
        Setup(
            seq_len=4096,
            global_batch=32,
            dp_shard=2,
            tp=2,
            pp=4,
            schedule="interleaved_1f1b",
            stages_per_rank=2,
            async_tp=True,
        ),
    ),
    "zbv, experts": (
        "qwen3_30b_a3b",
        Setup(
            seq_len=4096, global_batch=64, dp_shard=8, ep=8, pp=2, schedule="zbv", stages_per_rank=2, recompute="full"
        ),
    ),
    "thousands of ranks": ("llama3_70b", Setup(seq_len=8192, global_batch=4096, dp_shard=512, tp=8)),
}


@pytest.mark.parametrize("name", SETUPS)
def test_a_predicted_trace_lasts_as_long_as_the_estimate_and_its_slices_nest(name: str) -> None:
    model, setup = SETUPS[name]
    e = estimate(find_shape(model), load_machine("h100"), setup)
    trace = json.loads(step_trace(e))
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    ranks = {event["pid"] for event in slices}
    assert len(ranks) == setup.world_size or (setup.world_size > 1000 and len(ranks) == setup.pp)
    whole = 1e6 * e.time.total
    for rank in (min(ranks), max(ranks)):
        mine = [event for event in slices if event["pid"] == rank]
        assert max(event["ts"] + event["dur"] for event in mine) == pytest.approx(whole, rel=1e-3)
        open_until: list[float] = []
        for event in mine:  # outer before inner, as Perfetto nests them
            while open_until and event["ts"] >= open_until[-1] - 0.1:
                open_until.pop()
            assert not open_until or event["ts"] + event["dur"] <= open_until[-1] + 0.1, event
            open_until.append(event["ts"] + event["dur"])
        actions = [event for event in mine if event["cat"] in ("F", "B", "I", "W")]
        assert len(actions) >= 2 * setup.microbatches
    if setup.pp > 1:
        # the closed form of the bubble is near what is simulated with the layers' own costs
        names = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
        stretch = float(names[0].partition("schedule x ")[2].rstrip(")"))
        assert stretch == pytest.approx(1, abs=0.15)
        assert any(event["ph"] == "f" for event in trace["traceEvents"])


def test_plan_and_check_write_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.json"
    assert (
        main(["plan", "llama3_1b", "--rehearse", "0", "--devices", "8", "--global-batch", "64", "--trace", str(file)])
        == 0
    )
    assert "ui.perfetto.dev" in capsys.readouterr().out
    assert json.loads(file.read_text())["titan"]["seconds"] > 0
    assert main(["check", "llama3_1b", "--hardware", "h100", "--devices", "8", "--trace", str(file)]) == 0
    assert main(["check", "llama3_1b", "--trace", str(file)]) == 2
    assert "go with --hardware" in capsys.readouterr().err


def test_a_trace_of_a_schedule_from_a_file(tmp_path):
    file = tmp_path / "schedule.json"
    file.write_text(build_schedule("1f1b", 2, 4).to_json())
    setups = [Setup(seq_len=2048, global_batch=4, pp=2, schedule=name) for name in ("1f1b", str(file))]
    shape, machine = find_shape("llama3_1b"), load_machine("h100")
    of_family, of_file = (json.loads(step_trace(estimate(shape, machine, setup))) for setup in setups)
    assert len(of_family["traceEvents"]) == len(of_file["traceEvents"])
