"""The report's section that puts the planner's prediction beside what a run measured."""

import json
from importlib import resources
from pathlib import Path

import pytest
import tomli_w
from titan_train.config import parse_config
from titan_train.planner import estimate, load_machine
from titan_train.planner.cost.constants import load_constants, prior, save_constants
from titan_train.planner.hardware.machine import machine_of_device
from titan_train.planner.shapes import shape_of_config
from titan_train.planner.translate import setup_of_config
from titan_train.report import build_report
from titan_train.report.folder import read_folder
from titan_train.report.foresight import predicted_beside_measured

TREE = {
    "run": {"name": "a"}, "model": {"name": "llama3_1b", "seq_len": 512}, "parallel": {"dp_shard": 2},
    "train": {"global_batch": 8, "microbatch": 1, "steps": 8},
}  # fmt: skip


def run_folder(folder: Path, *, device: str = "cpu", split: bool = True, slower: float = 1.0) -> Path:
    """A run on two ranks whose parts last as long as the planner says, times ``slower``."""
    config = parse_config(TREE)
    shape, setup = shape_of_config(config), setup_of_config(config, 2)
    time = estimate(shape, load_machine("cpu"), setup, prior("eager")).time
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(tomli_w.dumps(TREE))
    info = {"parameters": shape.parameters(), "world_size": 2, "device": device}
    (folder / "run.json").write_text(json.dumps(info))
    step = {
        "kind": "step", "loss": 2.0, "grad_norm": 1.0, "lr": 1e-3, "tokens": 4096, "samples_consumed": 8, "elapsed_s": 1.0,
        "tokens_per_s": 200.0, "tokens_per_s_per_rank": 100.0, "peak_mem_gib": 30.0, "data_wait_s": 0.0, "skipped": False,
        "tflops_per_gpu": None, "mfu": None, "step_time_s": slower * time.total,
    }  # fmt: skip
    if split:
        compute = sum(time.terms[name] for name in ("products", "attention", "pointwise", "head", "recompute"))
        step["split"] = {
            "forward": slower * compute / 3, "backward": slower * compute * 2 / 3, "dp_shard exposed": slower * time.terms["dp"],
            "optimizer": slower * time.terms["optimizer"],
        }  # fmt: skip
    lines = [json.dumps({**step, "step": n}) for n in range(1, 9)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_each_measured_part_stands_beside_its_predicted_terms(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "runs" / "a", slower=2.0)
    save_constants(prior("eager"), folder / "constants.toml")
    found = predicted_beside_measured(read_folder(folder))
    assert found is not None
    measured = {row.label: row.ratio for row in found.seconds if row.measured is not None}
    # a number of two digits behind the point
    assert measured == {
        "whole step": "2.00", "forward and backward": "2.00", "data-parallel transfers, exposed": "2.00",
        "optimizer and host copies": "2.00",
    }  # fmt: skip
    assert "constants.toml" in found.source
    page = build_report(folder).read_text()
    assert "Predicted beside measured" in page
    assert "dense matrix products" in page


def test_every_data_parallel_axis_counts(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "runs" / "a")
    file = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        line["split"] |= dict.fromkeys(["dp_shard exposed", "fsdp exposed", "efsdp exposed", "loss exposed"], 0.25)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = predicted_beside_measured(read_folder(folder))
    assert found is not None
    assert {row.measured for row in found.seconds if row.label == "data-parallel transfers, exposed"} == {1.0}


def test_the_runs_own_hardware_file_is_used_from_the_folder_above(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "runs" / "a", device="some new device", split=False)
    assert predicted_beside_measured(read_folder(folder)) is None
    shipped = resources.files("titan_train.planner.hardware").joinpath("b200.toml").read_text()
    (folder.parent / "hardware.toml").write_text(shipped.replace("B200 180 GB", "our own machine"))
    found = predicted_beside_measured(read_folder(folder))
    assert found is not None
    assert found.source.startswith("our own machine (measured: hardware.toml)")
    assert [row.label for row in found.seconds if row.measured is not None] == ["whole step"]
    assert found.memory[0].measured == 30.0


def test_a_model_that_the_planner_does_not_know_has_no_section(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "a")
    (folder / "config.toml").write_text(tomli_w.dumps(TREE | {"model": {"name": "my.module:build", "seq_len": 512}}))
    assert predicted_beside_measured(read_folder(folder)) is None
    assert "Predicted beside measured" not in build_report(folder).read_text()


def test_a_damaged_hardware_file_leaves_the_report_without_the_section(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "a")
    (folder / "hardware.toml").write_text("name = ")
    assert predicted_beside_measured(read_folder(folder)) is None
    (folder / "hardware.toml").write_text("[compute]\nbf16_tflops = 'many'\n")
    assert predicted_beside_measured(read_folder(folder)) is None


def test_constants_that_nothing_can_have_are_refused_and_leave_the_report_without_the_section(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "runs" / "a")
    file = folder / "constants.toml"
    for text in ("matmul = 0.0", "bandwidth = -1.0", "spread = 1e6"):
        file.write_text(text)
        with pytest.raises(ValueError, match="must be a number from"):
            load_constants(file)
        assert predicted_beside_measured(read_folder(folder)) is None
    for values in (prior("te_graphs"), prior("eager")):
        save_constants(values, file)
        assert load_constants(file) == values


def test_devices_are_known_by_the_names_that_pytorch_reports() -> None:
    names = {
        "NVIDIA H100 80GB HBM3": "h100", "NVIDIA A100-SXM4-40GB": "a100_40", "NVIDIA A100-SXM4-80GB": "a100",
        "NVIDIA B200": "b200", "NVIDIA GeForce RTX 4090": "rtx4090", "NVIDIA GB200": "gb200", "cpu": "cpu",
    }  # fmt: skip
    for device, machine in names.items():
        found = machine_of_device(device)
        assert found is not None
        assert found.name == machine
    assert machine_of_device("Tesla T4") is None
