"""Calibration: constants that made-up runs were made with are found again, and other layouts are predicted by them."""

import dataclasses
import json
from pathlib import Path

import pytest
import tomli_w
from titan_train.config import load_config, parse_config
from titan_train.planner import estimate, load_machine
from titan_train.planner.calibrate.runs import calibrate, read_run
from titan_train.planner.cost.constants import load_constants, prior, save_constants
from titan_train.planner.documents import described, described_run
from titan_train.planner.shapes import shape_of_config
from titan_train.planner.translate import setup_of_config
from titan_train.run_folder import read_config

TRUTH = dataclasses.replace(prior("eager"), matmul=0.31, kernel_s=40e-6, local=0.3, step_s=0.05)
LAYOUTS = [
    (1, {}, 512, 8), (2, {"dp_shard": 2}, 512, 8), (2, {"tp": 2, "dp_shard": 1}, 1024, 8), (4, {"dp_shard": 4}, 2048, 16),
    (1, {}, 64, 2),
]  # fmt: skip


def run_folder(folder: Path, ranks: int, parallel: dict, seq_len: int, batch: int) -> Path:
    """A run folder whose steps last as long as the true constants say."""
    tree = {
        "run": {"name": folder.name}, "model": {"name": "llama3_1b", "seq_len": seq_len}, "parallel": parallel,
        "train": {"global_batch": batch, "microbatch": 1},
    }  # fmt: skip
    config = parse_config(tree)
    shape = shape_of_config(config)
    seconds = estimate(shape, load_machine("cpu"), setup_of_config(config, ranks), TRUTH).time.total
    folder.mkdir()
    (folder / "config.toml").write_text(tomli_w.dumps(tree))
    (folder / "run.json").write_text(json.dumps({"parameters": shape.parameters()}))
    rates = {"tokens_per_s": 100.0 * ranks, "tokens_per_s_per_rank": 100.0}
    lines = [{"kind": "step", "step": n, "step_time_s": 9.0 if n < 2 else seconds} | rates for n in range(1, 9)]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return folder


def test_a_layout_that_was_not_fitted_is_predicted_better_after_calibration(tmp_path: Path) -> None:
    machine = load_machine("cpu")
    rows = [read_run(run_folder(tmp_path / str(n), *layout), machine) for n, layout in enumerate(LAYOUTS)]
    found = calibrate([row for n, row in enumerate(rows) if n != 3])
    held = rows[3]
    before = estimate(held.shape, machine, held.setup, prior("eager")).tokens_per_s / held.tokens_per_s
    after = estimate(held.shape, machine, held.setup, found.constants).tokens_per_s / held.tokens_per_s
    assert abs(before - 1) > 0.3
    # the pull towards the prior leaves a few percent of what the runs identify weakly
    assert abs(after - 1) < 0.1


def test_constants_survive_their_file(tmp_path: Path) -> None:
    save_constants(TRUTH, tmp_path / "c.toml")
    assert load_constants(tmp_path / "c.toml") == TRUTH
    older = tmp_path / "older.toml"
    older.write_text((tmp_path / "c.toml").read_text() + "software = 1.0\nmicrobatch_s = 0.0\n")
    assert load_constants(older) == TRUTH
    older.write_text("software = 1.2\n")
    with pytest.raises(ValueError, match="unknown constants software"):
        load_constants(older)


def test_a_folder_without_steps_is_refused(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "a", *LAYOUTS[0])
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="0 timed steps"):
        read_run(folder, load_machine("cpu"))


def test_a_run_is_predicted_as_check_predicts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_folder(tmp_path / "run", *LAYOUTS[1])
    monkeypatch.setattr("titan_train.inputs.prepared_rows", lambda config, rows: [[256, 256]] * rows)
    shape, setup = described_run(folder, 2)
    _, predicted, work = described(read_config(folder), 2)
    assert work is not None
    assert setup == predicted
    assert shape.vocab == 128_256  # of run.json: its tokenizer is not read again
    assert setup.attention_share == pytest.approx(0.5)


def test_a_shape_has_the_vocabulary_of_the_tokenizer() -> None:
    shape, _, _ = described(load_config("debug"), 1)
    assert shape.vocab == 259
    padded, _, _ = described(load_config("debug", ["--model.args.vocab_size", "320"]), 1)
    assert padded.vocab == 320
