"""The commands, as a person types them."""

import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomli_w
from titan_train.cli import main
from titan_train.config import load_config
from titan_train.planner import Setup, load_machine
from titan_train.planner.hardware.measure import MeasuredRates, hardware_table
from titan_train.planner.translate import config_toml, setup_of_config


def test_estimate_prints_terms_and_writes_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "e.svg"
    assert main(["check", "llama3_70b", "--hardware", "h100", "--devices", "512", "--svg", str(picture)]) == 0
    text = capsys.readouterr().out
    assert "tokens/s/device (80 % interval" in text
    assert "attention" in text
    assert "GiB allocated" in text
    assert picture.read_text().startswith("<svg")


def test_a_batch_that_ranks_could_not_share_is_refused_before_it_is_predicted(capsys):
    words = ["--devices", "2", "--train.global_batch", "12", "--train.microbatch", "4"]
    assert main(["check", "llama3_1b", "--hardware", "h100", *words]) == 2
    assert (
        "cannot be cut evenly over 2 data-parallel ranks in micro-batches of train.microbatch=4"
        in capsys.readouterr().err
    )


def test_what_a_prediction_leaves_out_is_said(capsys):
    words = ["check", "llama3_1b", "--hardware", "h100", "--devices", "8", "--train.global_batch", "64"]
    assert main(words) == 0
    assert "note " not in capsys.readouterr().out
    words += ["--parallel.accumulate", "unsharded", "--activations.checkpoint", "budget", "--compile.enabled", "true"]
    words += ["--parallel.tp", "2", "--parallel.sequence-parallel", "false", "--parallel.compress", "bf16"]
    words += ["--float8.recipe", "tensorwise", "--float8.skip", '["layers.1.*"]']
    assert main([*words, "--parallel.reshard", "4", "--train.freeze", "layers.0"]) == 0
    said = capsys.readouterr().out.partition("note      ")[2]
    lines = [line.strip() for line in said.splitlines()]
    assert [line.partition(":")[0] for line in lines] == [
        "parallel.accumulate='unsharded'", "parallel.reshard=4", "parallel.sequence_parallel=false", "parallel.compress='bf16'",
        "float8.skip", "activations.checkpoint='budget'", "train.freeze",
    ]  # fmt: skip
    assert all(line.endswith(" predicted") for line in lines)


def test_estimate_refuses_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "llama3_70b", "--hardware", "h100", "--devices", "8", "--train.global_batch", "64"]) == 2
    assert "does not fit: " in capsys.readouterr().out


def test_plan_writes_configuration_picture_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stem = tmp_path / "plan"
    assert main(["plan", "qwen3_0.6b", "--devices", "8", "--global-batch", "64", "--out", str(stem)]) == 0
    said = capsys.readouterr().out
    assert "GPU-hours are for 1 B tokens" in said
    for number in "123":  # as it will run, the first three need what is planned
        sizes = re.search(rf"rehearsed {number}: ([\d.]+) GiB, planned ([\d.]+)", said)
        assert sizes is not None
        assert float(sizes[1]) == pytest.approx(float(sizes[2]), rel=0.05)
    config = tomllib.loads((tmp_path / "plan.toml").read_text())
    assert config["model"]["name"] == "qwen3_0.6b"
    assert "const DATA" in (tmp_path / "plan.html").read_text()
    assert (tmp_path / "plan.svg").exists()


def test_plan_takes_a_configuration_a_measured_machine_and_constants_of_ones_own(tmp_path: Path, capsys) -> None:
    rates = MeasuredRates("NVIDIA Z900", 1.4e15, 2.4e15, 6e12, 1e11, 2**37)
    hardware, constants, stem = tmp_path / "z900.toml", tmp_path / "constants.toml", tmp_path / "plan"
    hardware.write_text(tomli_w.dumps(hardware_table(rates, [])))
    constants.write_text("matmul = 0.35\nmatmul8 = 0.3\n")
    words = [
        "plan",
        "--rehearse",
        "0",
        "quickstart",
        "--devices",
        "2",
        "--global-batch",
        "8",
        "--hardware",
        str(hardware),
    ]
    assert main([*words, "--out", str(stem)]) == 0
    assert "8 sequences of 128 tokens" in capsys.readouterr().out
    assert "on NVIDIA Z900 x 2, 8 sequences of 128 tokens" in (tmp_path / "plan.html").read_text()
    written = tomllib.loads((tmp_path / "plan.toml").read_text())
    assert written["extends"] == "quickstart"
    assert "name" not in written["model"]
    assert main(["check", f"{stem}.toml"]) == 0
    again = [
        "plan",
        "--rehearse",
        "0",
        f"{stem}.toml",
        "--devices",
        "2",
        "--global-batch",
        "8",
        "--out",
        str(tmp_path / "again"),
    ]
    assert main(again) == 0
    assert main(["check", str(tmp_path / "again.toml")]) == 0

    def best(*more: str) -> float:
        capsys.readouterr()
        assert (
            main(
                [
                    "plan",
                    "--rehearse",
                    "0",
                    "llama3_8b",
                    "--devices",
                    "8",
                    "--global-batch",
                    "64",
                    "--hardware",
                    str(hardware),
                    *more,
                ]
            )
            == 0
        )
        row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  1 "))
        return float(row.split()[1].replace(",", ""))

    assert best("--constants", str(constants)) < 0.8 * best()


def test_plan_of_a_diffusion_model_has_its_own_number_of_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "flux_schnell", "--rehearse", "0", "--devices", "8", "--global-batch", "64"]) == 0
    assert "64 sequences of 4,352 tokens" in capsys.readouterr().out


def test_a_plan_of_another_stack_is_not_written_as_a_configuration(tmp_path: Path, capsys) -> None:
    words = ["plan", "llama3_8b", "--devices", "64", "--global-batch", "256", "--stack", "te", "--precision", "delayed"]
    assert main([*words, "--out", str(tmp_path / "plan")]) == 0
    assert "no configuration: the trainer has no --stack te" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.html", "plan.svg"]


def test_what_is_not_searched_is_planned_as_the_configuration_has_it(tmp_path: Path, monkeypatch) -> None:
    planned: list[Setup] = []

    def written(name: str, setup: Setup, **rest: Any) -> str:
        planned.append(setup)
        return config_toml(name, setup, **rest)

    monkeypatch.setattr("titan_train.planner.translate.config_toml", written)
    base = tmp_path / "base.toml"
    base.write_text(
        'extends = "lora"\n[parallel]\nreduce_dtype = "bf16"\n[float8]\nmin_speedup = 0.5\n[launch]\ndevice = "auto"\n'
    )
    words = ["plan", str(base), "--devices", "2", "--global-batch", "8", "--rehearse", "0"]
    assert main([*words, "--out", str(tmp_path / "plan")]) == 0
    (setup,) = planned
    assert setup_of_config(load_config(str(tmp_path / "plan.toml")), 2) == setup
    assert (setup.task, setup.grad_bytes, setup.min_speedup, setup.states) == ("lora", 2, 0.5, "fp32")


def test_plan_compares_two_of_its_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "llama3_8b", "--devices", "8", "--global-batch", "64", "--explain", "1", "2"]
    assert main([*words, "--rehearse", "0", "--out", str(tmp_path / "plan")]) == 0
    assert "B - A" in capsys.readouterr().out
    assert (tmp_path / "plan.toml").exists()


def test_plan_refuses_a_missing_folder_before_it_searches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "plan",
        "--rehearse",
        "0",
        "llama3_8b",
        "--devices",
        "8",
        "--global-batch",
        "64",
        "--out",
        str(tmp_path / "no" / "plan"),
    ]
    assert main(words) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_plan_refuses_what_cannot_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama3_405b", "--devices", "8", "--global-batch", "64"]) == 2
    assert "Smallest number of devices that fits" in capsys.readouterr().out


def test_an_unknown_machine_is_an_error_with_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama3_8b", "--devices", "8", "--global-batch", "64", "--hardware", "h101"]) == 2
    assert "Did you mean 'h100'" in capsys.readouterr().err


def test_doctor_measures_a_machine_that_the_planner_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "my.toml"
    assert main(["doctor", "--bench", str(file)]) == 0
    machine = load_machine(str(file))
    assert machine.source.startswith("measured by ")
    assert machine.bf16 > 1e9
    lines = capsys.readouterr().out.split("between ranks here")[1].splitlines()
    rows = {line[:20].strip(): line[20:].split() for line in lines[1:]}
    assert list(rows) == ["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send and recv", "stage to stage"]
    assert all(float(latency) > 0 and float(rate) > 0 for latency, _, rate, *_ in rows.values())
    axes = {axis.strip(",") for _, _, _, *names in rows.values() for axis in names}
    assert axes == {"dp_replicate", "dp_shard", "tp", "cp", "ep", "pp"}


def test_a_rehearsal_shows_the_memory_of_each_pipeline_rank_and_the_transfers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["check", "debug", "--rehearse", "--devices", "16", "--parallel.pp", "2", "--train.global_batch", "64"]
    assert main([*words, "--train.microbatch", "1"]) == 0
    text = capsys.readouterr().out
    assert "memory per rank, GiB:      pp 0      pp 1\n" in text
    assert "reduce_scatter" in text


def test_a_rehearsal_of_a_model_that_the_planner_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "vlm_shapes", "--rehearse", "--devices", "2"]) == 0
    assert re.search(r"transfers of a step, first rank.*\n  replicate +all_reduce", capsys.readouterr().out)
    assert main(["check", "vlm_shapes", "--rehearse", "--devices", "2", "--parallel.tp", "2"]) == 2
    assert "the patches of images are not split" in capsys.readouterr().err


def test_plan_names_the_precisions_it_knows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama3_8b", "--devices", "8", "--global-batch", "64", "--precision", "fp9"]) == 2
    assert "Use one of fp32, bf16" in capsys.readouterr().err


def test_a_layout_that_does_not_fit_as_rehearsed_leaves_every_list_and_the_next_takes_its_place(
    monkeypatch, capsys
) -> None:
    asked = []

    def rehearse(config, devices, counted, folder, vocab_size):
        asked.append(config)
        peak = 2**50 if len(asked) == 1 else 2**30
        return [SimpleNamespace(peak=peak, left_out="")]

    monkeypatch.setattr("titan_train.planner.memory.ranks.rehearse", rehearse)
    words = [
        "plan",
        "llama3_1b",
        "--devices",
        "8",
        "--global-batch",
        "64",
        "--precision",
        "bf16",
        "--top",
        "1",
        "--rehearse",
        "1",
    ]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    (left,) = [line for line in lines if line.startswith("left out: ")]
    gone = left.removeprefix("left out: ").partition(" does not fit")[0]
    assert not [line for line in lines if line.endswith(gone)]
    assert any(line.startswith("  1 ") for line in lines)
    assert any(line.startswith("rehearsed 1: ") for line in lines)


def test_a_plan_leaves_out_what_a_run_refuses(tmp_path: Path, capsys) -> None:
    base, stem = tmp_path / "base.toml", tmp_path / "plan"
    base.write_text('extends = "debug"\n[model]\nname = "qwen3_moe_debug"\n[launch]\ndevice = "auto"\n')
    words = ["plan", str(base), "--devices", "2", "--global-batch", "4", "--seq-len", "2048", "--precision", "bf16"]
    words += [
        "--states",
        "fp32",
        "--stack",
        "eager",
        "--top",
        "1",
        "--rehearse",
        "1",
        "--out",
        str(stem),
        "--fix",
        "cp=2",
    ]
    assert main([*words, "--fix", "microbatch=2"]) == 2
    (said,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("left out: ")]
    assert re.search(r"^left out: cp2 .* more, which a run refuses: parallel.cp=2, .*Set train.microbatch=1.$", said)
    assert not list(tmp_path.glob("plan.*"))
    assert main(words) == 0
    assert "rehearsed 1: " in capsys.readouterr().out
    assert main(["check", f"{stem}.toml"]) == 0


def test_a_plan_extends_its_base_or_the_shipped_configuration_of_the_models_name(tmp_path: Path) -> None:
    setup, file = Setup(seq_len=1280, global_batch=4, dp_shard=2, loss="chunked"), tmp_path / "plan.toml"
    file.write_text(config_toml("flux_tiny", setup, nproc=2, base="flux_shapes"))
    config = load_config(str(file))
    assert (config.diffusion.grid, config.diffusion.text_tokens) == (32, 256)  # the base's are of 20 tokens
    assert config.diffusion.source == "shapes"
    file.write_text(config_toml("deepseek_v3", setup, nproc=2))
    assert (
        load_config(str(file)).optimizer == load_config("deepseek_v3").optimizer != load_config("llama3_1b").optimizer
    )


def test_recipes_that_the_trainer_lacks_are_refused(capsys) -> None:
    words = [
        "plan",
        "llama3_1b",
        "--devices",
        "8",
        "--global-batch",
        "64",
        "--hardware",
        "b200",
        "--precision",
        "nvfp4",
    ]
    assert main(words) == 2
    assert "is a recipe of TransformerEngine" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--parallel.mode", "ddp", "--parallel.compress", "bf16"], "parallel.compress='bf16'"),
        (["--parallel.tp", "2", "--parallel.sequence_parallel", "false"], "parallel.sequence_parallel=false"),
        (
            ["--parallel.tp=2", "--activations.checkpoint=pattern", "--activations.patterns=layers.*"],
            "activations.checkpoint='pattern'",
        ),
        (["--parallel.cp=2", "--context.dynamic=true"], "context.dynamic=true"),
        (["--parallel.cp=2", "--context.method=usp"], "the method 'usp' of context parallelism"),
    ],
)
def test_transfers_that_are_not_counted_are_said_not_to_be(more: list[str], said: str, capsys) -> None:
    words = ["check", "debug", "--rehearse", "--devices", "2", "--train.global_batch", "8", *more]
    assert main(words) == 0
    assert f"transfers of a step: not computed with {said}." in capsys.readouterr().out
