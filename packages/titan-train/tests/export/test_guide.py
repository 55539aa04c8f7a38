"""The guide's sequence of commands, run as a reader would: every artefact continues the prompt with the same text."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from exported_runs import trained
from titan_train.cli import main
from titan_train.config import load_config
from titan_train.generation import generate, load_run
from titan_train.models.arguments import model_args

ROOT = Path(__file__).parents[4]
GUIDE = ROOT / "docs" / "guides" / "export.md"


def commands() -> list[list[str]]:
    """The commands of the guide's section on several targets."""
    section = GUIDE.read_text().partition("## Out: every target")[2].partition("\n## ")[0]
    return [shlex.split(line[2:]) for line in re.findall(r"^\$ titan-train .*", section, re.M)]


@pytest.fixture(scope="module")
def runs(folder: Path) -> Path:
    """A folder that holds ``quickstart``, a run of the quick start's kind: SentencePiece, tied, in a minute's hundredth."""
    args = {"tied_embeddings": True, "num_kv_heads": 2}
    tokenizer = {"kind": "sentencepiece", "train": True, "vocab_size": 300}
    return trained(folder, "llama3_debug", run="quickstart", steps=40, tokenizer=tokenizer, **args).parent


@pytest.mark.timeout(900)  # the package is compiled twice
@pytest.mark.parametrize("targets", ["hf,onnx,gguf", pytest.param("hf,onnx,aoti,gguf", marks=pytest.mark.slow)])
def test_every_target_of_the_guide_continues_the_prompt_alike(
    targets: str, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in ("transformers", "onnxscript", "onnxruntime", "gguf"):
        pytest.importorskip(module)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").symlink_to(runs)
    assert commands()[0] == ["titan-train", "run", "quickstart"]  # which the fixture has done, smaller
    texts: dict[str, str] = {}
    for command in commands()[1:]:
        words = [targets if word == "hf,onnx,aoti,gguf" else word for word in command[1:]]
        if words[0] == "generate" and words[1].partition("/")[2] not in (*targets.split(","), "quickstart"):
            continue
        capsys.readouterr()
        assert main(words) == 0
        if words[0] == "generate":
            texts[words[1]] = capsys.readouterr().out
    assert len(texts) == len(targets.split(",")) + 1
    assert len(set(texts.values())) == 1, texts
    assert len(next(iter(texts.values()))) > 20
    for target in targets.split(","):
        parity = json.loads((tmp_path / "quickstart-model" / target / "parity.json").read_text())
        assert [check["passed"] for check in parity["checks"]] == [True] * 4


def test_the_cpp_example_s_command_has_the_shape_of_the_quick_start_s_caches() -> None:
    command = re.search(r"generate \S+/model\.pt2 (.*)", (ROOT / "examples" / "12_aoti_cpp" / "README.md").read_text())
    assert command is not None
    args = model_args(load_config("quickstart").model, vocab_size=None)
    width = args.dim // args.num_heads
    assert [int(word) for word in command[1].split()][:4] == [args.num_layers, args.num_kv_heads, width, width]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_cpp_program_continues_the_prompt_as_the_run_does(runs: Path, tmp_path: Path) -> None:
    run_dir = runs / "quickstart"
    assert main(["export", str(run_dir), "--to", "aoti", "--dtype", "fp32", "--out", str(tmp_path / "model")]) == 0
    from torch.utils.cpp_extension import include_paths, library_paths

    (libraries,) = library_paths()
    abi = int(torch.compiled_with_cxx11_abi())
    command = ["g++", "-std=c++20", "-O1", f"-D_GLIBCXX_USE_CXX11_ABI={abi}", "-o", str(tmp_path / "generate")]
    command += [str(ROOT / "examples" / "12_aoti_cpp" / "generate.cpp"), *(f"-I{path}" for path in include_paths())]
    command += [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10"]
    subprocess.run(command, check=True, timeout=600)
    cache = json.loads((tmp_path / "model" / "export.json").read_text())["cache"]
    shape = [str(cache[name]) for name in ("layers", "kv_heads", "key_dim", "value_dim")]
    run = load_run(run_dir, device="cpu")
    prompt = run.tokenizer.encode("def f0(x):\n").tolist()
    words = [str(tmp_path / "generate"), str(tmp_path / "model" / "model.pt2"), *shape, "20", *map(str, prompt)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert [int(word) for word in done.stdout.split()] == generate(run.model, [prompt], max_new_tokens=20)[0]
