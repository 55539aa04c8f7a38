"""The commands around a run, called in this process as the command line calls them."""

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest
import titan_train
import torch
from titan_ckpt import Process
from titan_fp8.dispatch import BackendReport
from titan_train.cli import COMMANDS, REMOVED, main
from titan_train.cli.doctor import _torch
from titan_train.config import load_config
from titan_train.inputs import prepare_inputs
from titan_train.launch.place.machines import Leader
from titan_train.train import Trainer
from titan_train.trust import use_code

EXAMPLES = Path(__file__).parents[4] / "examples"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A finished run of a few steps, made in this process."""
    folder = tmp_path_factory.mktemp("commands")
    (folder / "text.txt").write_text("".join(f"def f{i % 9}(x):\n    return x + {i}\n" for i in range(900)))
    (folder / "tiny.toml").write_text(
        f'[model]\nname = "llama3_debug"\nseq_len = 32\n[tokenizer]\nkind = "bytes"\n[data]\ncache_dir = "{folder}/cache"\n'
        f'[[data.sources]]\nname = "text"\nkind = "text"\npaths = ["{folder}/text.txt"]\n'
        f'[run]\ndir = "{folder}/runs"\n[train]\nsteps = 4\nglobal_batch = 4\n'
        '[launch]\ndevice = "cpu"\n[metrics]\nprogress = "off"\n'
    )
    config = load_config(str(folder / "tiny.toml"))
    prepare_inputs(config, quiet=True)
    with Trainer(config) as trainer:
        trainer.fit()
    return folder / "runs" / "tiny"


def test_generate_continues_the_prompt_and_the_seed_decides(run_dir, capsys):
    def sample(seed):
        assert main(["generate", str(run_dir), "--prompt", "def f", "--max-new-tokens", "12", "--seed", str(seed)]) == 0
        return capsys.readouterr().out

    assert sample(1).startswith("def f")
    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_generate_says_what_is_wrong_with_a_folder(tmp_path, run_dir, capsys):
    assert main(["generate", str(tmp_path), "--prompt", "a"]) == 2
    assert "is not a run's folder" in capsys.readouterr().err
    shutil.copy(run_dir / "config.toml", tmp_path)
    assert main(["generate", str(tmp_path), "--prompt", "a"]) == 2
    assert "has no finished checkpoint yet" in capsys.readouterr().err
    assert main(["generate", str(run_dir), "--prompt", ""]) == 2
    assert "--prompt is empty" in capsys.readouterr().err


def test_report_writes_one_page(run_dir, tmp_path, capsys):
    assert main(["report", str(run_dir), "--out", str(tmp_path / "page.html")]) == 0
    assert "<html" in (tmp_path / "page.html").read_text()
    assert "Training loss" in capsys.readouterr().out


def test_check_explains_405b_without_memory(capsys):
    assert main(["check", "llama3_405b", "--parallel", "pp8 dp8 tp8"]) == 0
    out = capsys.readouterr().out
    assert "pp=8 x dp_shard=8 x tp=8 · 512 ranks · 64 nodes of 8" in out
    assert "405,853,388,800 parameters" in out
    assert "16 stages on 8 ranks" in out
    assert "bubble 2.7%" in out  # (p - 1) / (m v + p - 1) = 7 / 263 of interleaved 1F1B
    rows = {line.split()[0]: line.split()[1:9] for line in out.splitlines() if line.startswith("  ")}
    # 16 of 126 layers on a rank in the middle, cut in 8 by tensor parallelism: 16 x 3,187,703,808 / 8 elements
    assert rows["billions"][1] == "6.376"
    # float32 and sharded over 8
    assert rows["parameters"][1] == "2.97"
    assert "the configuration is valid" in out
    assert not torch.cuda.is_initialized()


def test_check_and_generate_import_neither_the_compiler_nor_what_shards(run_dir):
    """Each of them takes longer than the command itself; and where arguments decide, `check` does without torch."""
    code = (
        "import sys; from titan_train.cli import main; "
        "assert main(['check', 'quickstart', '--launch.device', 'cpu']) == 0; "
        "assert 'torch' not in sys.modules; "
        "assert main(['check', 'llama3_405b', '--parallel', 'pp8 dp8 tp8']) == 0; "
        f"assert main(['generate', {str(run_dir)!r}, '--prompt', 'def ', '--max-new-tokens', '4']) == 0; "
        "print([name for name in ('torch._dynamo', 'torch.distributed.tensor', 'torch.distributed.fsdp', 'sympy') "
        "if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "[]"


def test_check_refuses_what_does_not_fit(capsys):
    assert main(["check", "llama3_8b", "--parallel.dp-shard", "3"]) == 2
    assert "dp_shard=3" in capsys.readouterr().err.replace(" ", "")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["--launch.elastic", "true", "--launch.min-ranks", "5"], "launch.min_ranks=5 is more than the 2 ranks"),
        (
            ["--data.cache-dir", "{folder}/text.txt/cache"],
            r"data.cache_dir: .* cannot be a folder: .*text.txt is a file",
        ),
        (["--run.dir", "{folder}/text.txt"], r"run.dir and run.name: .*text.txt is a file"),
        (["--run.name", "used"], r"metrics.jsonl is a folder, but a run keeps a file under this name"),
        (["--tokenizer.kind", "tiktoken", "--tokenizer.path", "{folder}/none"], r"none"),
    ],
)
def test_check_refuses_what_a_run_would_refuse_at_its_start(tmp_path, capsys, settings, message):
    (tmp_path / "text.txt").write_text("a line\n" * 99)
    (tmp_path / "used" / "metrics.jsonl").mkdir(parents=True)
    file = tmp_path / "tiny.toml"
    file.write_text(
        f'[run]\ndir = "{tmp_path}"\n[model]\nname = "llama3_debug"\nseq_len = 32\n[tokenizer]\nkind = "bytes"\n[data]\n'
        f'cache_dir = "{tmp_path}/cache"\n[[data.sources]]\nname = "a"\nkind = "text"\npaths = ["{tmp_path}/text.txt"]\n'
        '[launch]\ndevice = "cpu"\nnproc = 2\n[train]\nglobal_batch = 4\n'
    )
    before = sorted(tmp_path.rglob("*"))
    words = [word.format(folder=tmp_path) for word in settings]
    for command in ("check", "run"):
        assert main([command, str(file), *words]) == 2, command
        assert re.search(message, capsys.readouterr().err), command
    assert sorted(tmp_path.rglob("*")) == before
    assert main(["check", str(file)]) == 0
    (tmp_path / "text.txt").unlink()
    assert main(["check", str(file)]) == 2
    assert "text.txt" in capsys.readouterr().err


def test_check_knows_copies_whose_sequences_are_cut(capsys):
    words = ["--launch.nproc", "4", "--parallel", "cp2 dp_replicate2", "--parallel.mode", "ddp"]
    assert main(["check", "debug", *words]) == 0, capsys.readouterr().err
    assert "the configuration is valid" in capsys.readouterr().out


def test_data_tokenizer_writes_a_tokenizer_that_loads(tmp_path, capsys):
    text = tmp_path / "text.JSONL"
    rows = [f"value_{i} = compute({i * i}, name='{i % 13}')\n" for i in range(4000)]
    text.write_text("".join(json.dumps({"text": "".join(rows[i : i + 40])}) + "\n" for i in range(0, 4000, 40)))
    out = tmp_path / "tokenizer"
    assert main(["data", "tokenizer", "--out", str(out), "--vocab-size", "310", str(text)]) == 0

    from titan_train.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(out)
    assert tokenizer.decode(tokenizer.encode("value_7 = compute(49)\n")) == "value_7 = compute(49)\n"
    assert tokenizer.encode('{"text": "').size > 8  # the lines' own words were not learned
    assert "310 pieces" in capsys.readouterr().out


def test_data_prepare_fills_the_cache(run_dir, tmp_path, capsys):
    config = run_dir.parent.parent / "tiny.toml"
    assert main(["data", "prepare", str(config), "--data.cache-dir", str(tmp_path / "cache")]) == 0
    assert list((tmp_path / "cache").glob("text-*/manifest.json"))


def test_list_names_configurations_and_models(capsys):
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    for word in ("quickstart", "llama3_405b", "zbv", "blockwise", "titan-cp", "next: titan-train run quickstart"):
        assert word in out


def test_doctor_finds_what_training_needs(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for word in ("torch", "gloo", "nccl", "stdlib corpus", "everything that training needs is installed"):
        assert word in out
    for package in ("titan-train", "titan-mesh", "titan-fsdp", "titan-pipeline", "titan-cp", "titan-fp8", "titan-ckpt"):
        assert re.search(rf"^ok +{package} ", out, re.MULTILINE)
    assert out.splitlines()[-1] == "next    titan-train run quickstart"


@pytest.mark.parametrize(
    ("chosen", "skipped", "expected"),
    [
        ("cuda", {}, "ok      float8 cast      the cuda kernel"),
        (
            "triton",
            {"cuda": "cannot be compiled"},
            "note    float8 cast      the triton kernel; cuda cannot be compiled",
        ),
    ],
)
def test_doctor_names_the_kernel_of_float8_casts(capsys, monkeypatch, chosen, skipped, expected):
    device = SimpleNamespace(name="a GPU", total_memory=2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    monkeypatch.setattr("titan_fp8.backends", lambda: [BackendReport("cast_block_dual", chosen, skipped)])
    assert main(["doctor"]) == 0
    assert f"{expected}\n" in capsys.readouterr().out


def test_doctor_says_which_nccl_torch_has(monkeypatch):
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 27, 5))
    assert [found.text for found in _torch() if found.name == "nccl"] == ["2.27.5, GPU process groups"]
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: False)
    assert [found.level for found in _torch() if found.name == "nccl"] == ["note"]


def test_doctor_names_every_extra_that_the_package_declares(capsys):
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    main(["doctor"])
    named = re.findall(r"^(?:ok|note) +\[([a-z0-9]+)\]", capsys.readouterr().out, re.MULTILINE)
    assert sorted(named) == sorted(project["optional-dependencies"])


def test_doctor_says_what_to_install_first_where_a_package_is_missing(capsys, monkeypatch):
    def version(name):
        if name == "titan-cp":
            raise PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr("titan_train.cli.doctor.version", version)
    assert main(["doctor"]) == 0
    assert "titan-cp         not installed, read from" in capsys.readouterr().out
    find = importlib.util.find_spec
    absent = lambda name, package=None: None if name == "titan_cp" else find(name, package)  # noqa: E731
    monkeypatch.setattr("titan_train.cli.doctor.importlib.util.find_spec", absent)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "not installed: uv pip install titan-cp" in out
    assert out.splitlines()[-1].startswith("next    install what is missing")


def completed(script, *words):
    """What bash offers for the last of these words."""
    line = " ".join(map(shlex.quote, words))
    ask = f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _titan_train; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_options_configurations_and_settings(capsys):
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert completed(script, "titan-train", "qu") == []
    assert completed(script, "titan-train", "ev") == ["eval"]
    assert completed(script, "titan-train", "run", "qui") == ["quickstart"]
    assert completed(script, "titan-train", "check", "--train.global") == ["--train.global-batch"]
    assert completed(script, "titan-train", "generate", "--max") == ["--max-new-tokens"]
    assert completed(script, "titan-train", "data", "to") == ["tokenizer"]
    assert completed(script, "titan-train", "data", "tokenizer", "--mod") == ["--model-type"]
    assert completed(script, "titan-train", "generate", "--train") == []


def test_zsh_and_fish_scripts_name_every_command_and_another_shell_is_refused(capsys):
    assert main(["completion", "fish"]) == 0
    fish = capsys.readouterr().out
    assert main(["completion", "zsh"]) == 0
    zsh = capsys.readouterr().out
    for name in COMMANDS:
        assert f"-a {name.split()[0]} " in fish
        assert re.search(rf"^    '{name} '\*\)", zsh, re.MULTILINE)
    assert main(["completion", "tcsh"]) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generat"], "unknown command 'generat'. Did you mean 'generate'?"),
        (["data", "shwo"], "unknown command 'data shwo'. Did you mean 'data show'?"),
        *[([word, "x"], f"`titan-train {word}` is now `titan-train {new}`.") for word, new in REMOVED.items()],
        (["plan", "llama3_8b", "--gpus", "8"], "unknown option '--gpus'. Did you mean '--devices'?"),
        (["run", "debug", "--gpus", "8"], "unknown option '--gpus'. Did you mean '--devices'?"),
        (["check", "debug", "--world", "8"], "unknown option '--world'. Did you mean '--devices'?"),
        (["check", "debug", "--svg", "x.svg"], "--constants, --trace and --svg go with --hardware"),
        (["check", "debug", "--hardware", "h100", "--rehearse"], "--rehearse and --hardware are two commands"),
        (["check", "debug", "--hardware", "h100", "--coordinates"], "--coordinates and --hardware are two commands"),
        (["report", "a", "b", "--trace"], "--trace takes one run, and 2 were given"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_word_is_answered_in_one_line_with_the_right_one(words, message, capsys):
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {message}")


def test_removed_words_lead_to_commands_that_exist():
    for word, new in REMOVED.items():
        assert word not in COMMANDS
        assert any(new.startswith(f"{command} ") for command in COMMANDS)


def test_a_command_that_imported_triton_ends_without_a_word_about_leaks():
    pytest.importorskip("triton", reason="triton is not installed")
    code = (
        "import sys, triton._C.libtriton; from titan_train.cli import main; sys.argv = ['titan-train', 'list']; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_names_the_nearest_option(name, capsys):
    with pytest.raises(SystemExit):
        main(["help", *name.split()])
    page = capsys.readouterr().out
    assert page.startswith(f"usage: titan-train {name}")
    options = sorted(set(re.findall(r"^  (--[a-z-]+)", page, re.MULTILINE)))
    for option in options:
        # without what the command needs: the misspelt option is named first
        config = ["debug"] if "CONFIG" in page.splitlines()[0] else []
        assert main([*name.split(), *config, f"{option}x"]) == 2
        err = capsys.readouterr().err
        assert f"{option}x" in err
        assert option in err.replace(f"{option}x", "")


def test_the_version_and_the_help_of_a_group_of_commands(capsys):
    assert main(["-V"]) == 0
    assert capsys.readouterr().out == f"titan-train {titan_train.__version__}\n"
    for words in (["data"], ["data", "--help"], ["help", "data"]):
        assert main(words) == 0
        assert "  data show       show samples" in capsys.readouterr().out


def test_a_complete_run_is_over_on_every_machine(run_dir, monkeypatch, capsys):
    monkeypatch.setattr("titan_train.cli.run._follow", lambda *_: pytest.fail("it waits for the first machine"))
    words = ["run", str(run_dir.parents[1] / "tiny.toml"), "--launcher", "machines", "--launch.nnodes", "2"]
    words += ["--launch.nproc", "1", "--launch.endpoint", "127.0.0.1:29577", "--launch.node-rank"]
    assert [main([*words, rank]) for rank in ("1", "0")] == [0, 0]
    assert capsys.readouterr().out.count("is complete: step 4 of 4") == 2


def test_a_run_that_may_not_resume_is_refused_on_every_machine(tmp_path, run_dir, monkeypatch, capsys):
    runs = tmp_path / "runs" / "tiny"
    shutil.copytree(run_dir, runs)
    monkeypatch.setattr("titan_train.launch.place.machines.NodeAgent", SimpleNamespace(sharing_cores=lambda *_: None))
    words = ["run", str(run_dir.parents[1] / "tiny.toml"), "--run.dir", str(runs.parent)]
    words += ["--checkpoint.resume", "never", "--launcher", "machines", "--launch.nnodes", "2", "--launch.nproc", "1"]
    assert main([*words, "--launch.endpoint", "127.0.0.1:29577"]) == 2
    assert "checkpoint.resume='never'" in capsys.readouterr().err
    assert json.loads((runs / "machines.json").read_text())["exit_code"] == 1  # what the others wait for
    follower = [*words, "--launch.endpoint", "127.0.0.1:29577", "--launch.node-rank", "1"]
    monkeypatch.setattr("titan_train.cli.run._follow", lambda *_: 0)
    assert main(follower) == 2  # what machine 0 said was said before it listened
    Leader(runs, 2).attempt(0, (0, 1))
    lease = asdict(Process.of(os.getppid())) | {"since": 0, "attempt": 0, "chain": ""}
    (runs / "lease.json").write_text(json.dumps(lease))
    assert main(follower) == 0  # it comes back to a run that is under way


def test_a_users_own_module_trains_by_dotted_path(tmp_path, monkeypatch, run_dir):
    shutil.copy(EXAMPLES / "03_your_own_model" / "my_model.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    for variable in ("PYTHONPATH", "TITAN_TRAIN_CODE"):
        monkeypatch.setenv(variable, "")
    use_code([str(tmp_path)])
    config = load_config(
        str(run_dir.parent.parent / "tiny.toml"),
        [
            "--model.name",
            "my_model:Recurrent",
            "--run.dir",
            str(tmp_path),
            "--train.steps",
            "6",
            "--optimizer.lr",
            "0.01",
        ],
    )
    with Trainer(config) as trainer:
        trainer.fit()
    assert trainer.losses[-1] < trainer.losses[0]


def test_bf16_trains_near_float32_in_one_process_without_a_group(run_dir, tmp_path):
    losses = {}
    for dtype in ("fp32", "bf16"):
        config = load_config(
            str(run_dir.parent.parent / "tiny.toml"),
            ["--train.dtype", dtype, "--run.dir", str(tmp_path), "--run.name", dtype],
        )
        with Trainer(config) as trainer:
            trainer.fit()
        assert not torch.distributed.is_initialized()
        losses[dtype] = trainer.losses
    # bfloat16 keeps eight bits: a relative error of a few 1e-3 in each activation, of losses near 5
    assert max(abs(a - b) for a, b in zip(losses["fp32"], losses["bf16"], strict=True)) < 0.05
    assert losses["fp32"] != losses["bf16"]
