"""What a configuration and a run's folder may make this process run."""

import importlib.util
import json
import marshal
import os
import shutil
import struct
import subprocess
import sys
import zipfile
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
from titan_train.cli import main
from titan_train.config import load_config
from titan_train.generation import load_run
from titan_train.inputs import prepare_inputs
from titan_train.train import Trainer
from titan_train.trust import use_code
from titan_train.trust.record import _source_hash as source_hash

MODULE = """
from pathlib import Path

from torch import nn

Path({marker!r}).write_text("imported")


class Tiny(nn.Module):
    def __init__(self, vocab_size: int, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, tokens):
        return self.head(self.embed(tokens))

    @classmethod
    def load(cls, vocab_size: int) -> nn.Module:
        return cls(vocab_size)


Only_imported = nn.Linear


def build(vocab_size: int) -> nn.Module:
    return Tiny(vocab_size)


def undeclared(vocab_size):
    return Tiny(vocab_size)
"""
TINY = """
[model]
name = "{model}"
seq_len = 32
[tokenizer]
kind = "bytes"
[data]
cache_dir = "{folder}/cache"
[[data.sources]]
name = "text"
kind = "text"
paths = ["{folder}/text.txt"]
[run]
dir = "{folder}/runs"
[train]
steps = 2
global_batch = 4
[launch]
device = "cpu"
nproc = 1
[metrics]
progress = "off"
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Code, a configuration and text; the state of the account is empty, and nothing of this process is left behind."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("PYTHONPATH", "TITAN_TRAIN_CODE"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # restored afterwards
    monkeypatch.setattr(sys, "path", list(sys.path))
    modules = set(sys.modules)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "foreign_model.py").write_text(MODULE.format(marker=str(tmp_path / "imported")))
    (tmp_path / "text.txt").write_text("".join(f"line {i} of {i * i}\n" for i in range(900)))
    (tmp_path / "tiny.toml").write_text(TINY.format(model="foreign_model:build", folder=tmp_path))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - modules:
        if name.startswith("foreign_model"):
            del sys.modules[name]


def forget_module():
    sys.modules.pop("foreign_model", None)


@pytest.fixture
def foreign_run(folder, monkeypatch):
    """A run's folder as another account made it."""
    monkeypatch.syspath_prepend(str(folder / "code"))
    monkeypatch.setenv("TITAN_TRAIN_CODE", "foreign_model")
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state of another account"))
    config = load_config("tiny.toml")
    prepare_inputs(config, quiet=True)
    with Trainer(config) as trainer:
        trainer.fit()
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    sys.path.remove(str(folder / "code"))
    monkeypatch.setenv("TITAN_TRAIN_CODE", "")
    forget_module()
    (folder / "imported").unlink()
    return folder / "runs" / "tiny"


ATTACKS = [
    ("os:system", '{command = "touch MARKER"}'),
    ("subprocess:getoutput", '{cmd = "touch MARKER"}'),
    ("builtins:exec", "{source = \"open('MARKER','w')\"}"),
    ("shutil:rmtree", '{path = "MARKER"}'),
    ("torch:load", '{f = "MARKER"}'),
    ("torch.hub:load", '{repo_or_dir = "MARKER", model = "x"}'),
    ("torch.utils.cpp_extension:os.system", '{command = "touch MARKER"}'),
    ("numpy:load", '{file = "MARKER", allow_pickle = true}'),
    ("titan_train.files:write_atomic", '{path = "MARKER", content = "x"}'),
    ("titan_train.files:os.system", '{command = "touch MARKER"}'),
    ("__main__:main", "{}"),
    (
        "transformers:EncoderDecoderModel.from_encoder_decoder_pretrained",
        '{encoder_pretrained_model_name_or_path = "MARKER"}',
    ),
    ("transformers:GPT2LMHeadModel", "{}"),
    ("torch.nn:Linear", "{in_features = 1, out_features = 1}"),
    ("peft:PeftModel", "{}"),
    ("diffusers.models:AutoencoderKL", "{}"),
    ("titan_train.models.llama.model:Llama", "{}"),
    ("foreign_model:build", "{}"),
    ("code.foreign_model:build", "{}"),
]


COMMANDS = ["check", "generate", "run", "check --rehearse", "export", "report"]


@pytest.mark.parametrize(
    ("command", "name", "args"),
    [
        (command, name, args)
        for i, command in enumerate(COMMANDS)
        for name, args in ATTACKS[: None if i < 2 else 1]  # the others go the same way
    ],
)
def test_a_name_in_a_configuration_or_a_run_folder_runs_nothing(command, name, args, folder, capsys):
    marker = folder / "marker"
    text = TINY.format(model=name, folder=folder) + f"[model.args]\n{args.strip('{}').replace(', ', chr(10))}\n"
    text = text.replace("MARKER", str(marker))
    if command in ("check", "run", "check --rehearse"):
        (folder / "evil.toml").write_text(text)
        words = ["evil.toml"]
    else:
        evil = folder / "evil"
        (evil / "checkpoints" / "step-00000002").mkdir(parents=True)
        (evil / "checkpoints" / "step-00000002" / "MANIFEST.json").write_text("{}")
        (evil / "config.toml").write_text(text)
        words = {"generate": ["--prompt", "x"], "export": ["--out", str(folder / "out")], "report": []}[command]
        words = [str(evil), *words]
    code = main([*command.split(), *words])
    assert code == (0 if command == "report" else 2)
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert command == "report" or "model.name=" in err
    assert not marker.exists()
    assert not (folder / "imported").exists()
    assert not (folder / "runs").exists()


def test_a_module_of_the_working_directory_is_imported_only_if_its_folder_is_named(folder):
    shutil.copy(folder / "code" / "foreign_model.py", folder)
    command = [sys.executable, "-m", "titan_train", "check", "tiny.toml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 2
    assert "add `--code .` to import it from this folder" in done.stderr
    assert not (folder / "imported").exists()
    assert main(["check", "tiny.toml", "--code", "."]) == 0


def test_a_function_that_does_not_declare_a_module_is_not_called(folder, capsys):
    assert main(["check", "tiny.toml", "--code", "code", "--model.name", "foreign_model:undeclared"]) == 2
    assert "does not declare to return a model" in capsys.readouterr().err
    assert main(["check", "tiny.toml", "--code", "nowhere"]) == 2
    assert "--code nowhere: no such folder or file" in capsys.readouterr().err


@pytest.fixture
def encoder_with_code(folder):
    """A folder of Hugging Face whose Python writes a file when it is imported."""
    place = folder / "encoder"
    place.mkdir()
    (place / "evil.py").write_text(f"open({str(folder / 'marker')!r}, 'w').close()\nraise SystemExit(77)\n")
    auto_map = {"AutoConfig": "evil.Config", "AutoModel": "evil.Model", "AutoModelForCausalLM": "evil.Model"}
    (place / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": auto_map}))
    return place


@pytest.mark.parametrize("command", [["check"], ["run"], ["check", "--rehearse", "--devices", "2"]])
def test_a_toml_file_alone_runs_no_code_through_an_installed_package(command, folder, encoder_with_code, capsys):
    name = "transformers:EncoderDecoderModel.from_encoder_decoder_pretrained"
    args = f'encoder_pretrained_model_name_or_path = "{encoder_with_code}"\nencoder_trust_remote_code = true\n'
    (folder / "evil.toml").write_text(TINY.format(model=name, folder=folder) + f"[model.args]\n{args}")
    assert main([command[0], "evil.toml", *command[1:]]) == 2
    assert "model.name=" in capsys.readouterr().err
    assert not (folder / "marker").exists()


def test_an_installed_package_is_used_only_if_it_is_named(folder, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(folder / "code"))
    assert main(["check", "tiny.toml"]) == 2
    assert "'foreign_model' is installed, but you have not named it" in capsys.readouterr().err
    assert not (folder / "imported").exists()
    assert main(["check", "tiny.toml", "--code", "foreign_model"]) == 0
    assert (folder / "imported").exists()


@pytest.mark.parametrize("place", [".", "installed"])
def test_an_installed_package_is_named_where_a_folder_of_its_name_lies_too(place, folder, monkeypatch):
    for where in {".", place}:
        package = folder / where / "foreign_model_kit"
        package.mkdir(parents=True)
        shutil.copy(folder / "code" / "foreign_model.py", package / "__init__.py")
    monkeypatch.syspath_prepend(str(folder / place))
    assert main(["check", "tiny.toml", "--code", "foreign_model_kit", "--model.name", "foreign_model_kit:build"]) == 0
    assert Path(sys.modules["foreign_model_kit"].__file__).parent == folder / place / "foreign_model_kit"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Tiny.load", "one name must follow the colon"),
        ("nn.Linear", "one name must follow the colon"),
        ("nn", "has no 'nn'"),
        ("Only_imported", "is defined in torch.nn.modules.linear: foreign_model only imports it"),
    ],
)
def test_only_what_a_module_itself_defines_at_its_top_level_is_called(name, words, folder, capsys):
    assert main(["check", "tiny.toml", "--code", "code", "--model.name", f"foreign_model:{name}"]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("field", ["attn_implementation", "_attn_implementation", "experts_implementation"])
def test_a_published_folder_that_names_kernels_of_a_hub_is_refused(field, folder, capsys):
    pytest.importorskip("transformers")
    place = folder / "published"
    place.mkdir()
    content = {"model_type": "llama", "hidden_size": 8, "text_config": {field: "somebody/kernels"}}
    (place / "config.json").write_text(json.dumps(content))
    assert main(["check", "tiny.toml", "--model.name", f"hf:{place}"]) == 2
    assert f"text_config.{field}='somebody/kernels' names kernels on a hub" in capsys.readouterr().err


def test_a_run_folder_made_elsewhere_needs_trust_once_and_again_after_a_change(
    foreign_run, folder, capsys, monkeypatch
):
    generate = ["generate", str(foreign_run), "--prompt", "line", "--max-new-tokens", "2"]
    assert main(generate) == 2
    assert f"{foreign_run} was made elsewhere" in capsys.readouterr().err
    assert main([*generate, "--code", "code"]) == 2
    assert "--trust-code" in capsys.readouterr().err
    assert not (folder / "imported").exists()

    assert main([*generate, "--code", "code", "--trust-code"]) == 0
    forget_module()
    assert main(generate) == 0

    source = folder / "code" / "foreign_model.py"
    source.write_text(source.read_text() + "\n# another line\n")
    forget_module()
    (folder / "imported").unlink()
    capsys.readouterr()
    assert main(generate) == 2
    assert "has changed since" in capsys.readouterr().err
    assert not (folder / "imported").exists()
    sys.path.remove(str(folder / "code"))  # as in a new process
    monkeypatch.setenv("TITAN_TRAIN_CODE", "")
    assert main([*generate, "--trust-code"]) == 0
    assert (folder / "imported").exists()


def test_a_run_that_a_program_made_is_its_account_s_own(folder, monkeypatch):
    use_code(["code"])
    config = load_config("tiny.toml")
    prepare_inputs(config, quiet=True)
    with Trainer(config) as trainer:
        trainer.fit()
    sys.path.remove(str(folder / "code"))  # as in a new process
    monkeypatch.setenv("TITAN_TRAIN_CODE", "")
    forget_module()
    assert load_run(trainer.run_dir).step == 2


def test_a_folder_cannot_bring_its_own_trust(foreign_run, folder, capsys):
    generate = ["generate", str(foreign_run), "--prompt", "line", "--max-new-tokens", "2"]
    assert main([*generate, "--code", "code", "--trust-code"]) == 0
    moved = foreign_run.with_name("moved")
    shutil.copytree(foreign_run, moved)
    (record,) = (folder / "state" / "titan-train" / "code").iterdir()
    shutil.copy(record, moved / "code.json")
    forget_module()
    assert main(["generate", str(moved), "--prompt", "line"]) == 2
    assert "was made elsewhere" in capsys.readouterr().err
    record.write_text(json.dumps(json.loads(record.read_text()) | {"run": "/elsewhere"}))
    assert main(generate) == 2


def test_ones_own_run_goes_on_without_being_asked_until_its_code_changes(folder, capsys):
    command = [sys.executable, "-m", "titan_train", "run", "tiny.toml", "--code", "code"]
    first = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, timeout=100)
    assert first.returncode == 0, first.stderr
    attempt = json.loads((folder / "runs" / "tiny" / "run.json").read_text())
    assert attempt["code"]["model"] == "foreign_model:build"
    assert len(attempt["code"]["sha256"]) == 64

    check = ["check", "tiny.toml", "--train.steps", "3"]  # admits code as `run` does, without starting ranks
    assert main(check) == 0
    forget_module()
    assert main(["generate", "runs/tiny", "--prompt", "line", "--max-new-tokens", "2"]) == 0

    source = folder / "code" / "foreign_model.py"
    source.write_text(source.read_text() + "\n# another line\n")
    forget_module()
    assert main(check) == 2
    assert "has changed since" in capsys.readouterr().err
    assert main([*check, "--code", "code"]) == 0


def test_processes_that_a_command_starts_import_nothing_from_the_working_directory(folder):
    for name in ("multiprocessing", "selectors", "random", "torch"):
        (folder / f"{name}.py").write_text(f"open({str(folder / 'imported')!r}, 'w').close()\nraise ImportError\n")
    start = "from titan_train.launch.node.agent import NodeAgent as S; from titan_train.config import load_config"
    words = [sys.executable, "-P", "-c", f"{start}; S(1).validate(load_config('debug'), 1); print('valid')"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=folder)
    assert done.stdout == "valid\n", done.stderr
    assert not (folder / "imported").exists()


def test_bytecode_beside_the_source_is_not_run(folder):
    source = folder / "code" / "foreign_model.py"
    text = source.read_text()
    cache = Path(importlib.util.cache_from_source(str(source)))
    cache.parent.mkdir()
    evil = compile(text.replace("imported", "evil"), str(source), "exec")
    stat = source.stat()
    header = importlib.util.MAGIC_NUMBER + struct.pack("<III", 0, int(stat.st_mtime), stat.st_size)
    cache.write_bytes(header + marshal.dumps(evil))  # as Python itself writes it for this source
    assert main(["check", "tiny.toml", "--code", "code"]) == 0
    assert (folder / "imported").exists()
    assert not (folder / "evil").exists()


def test_every_folder_of_a_namespace_package_and_compiled_modules_count_as_source(folder, monkeypatch):
    for name in ("one", "two"):
        (folder / name / "foreign_space").mkdir(parents=True)
        monkeypatch.syspath_prepend(str(folder / name))
    model = folder / "one" / "foreign_space" / "model.py"
    shutil.copy(folder / "code" / "foreign_model.py", model)
    monkeypatch.setenv("TITAN_TRAIN_CODE", "foreign_space")
    before = source_hash("foreign_space.model:build", ())
    model.write_text(model.read_text() + "# another line\n")
    changed = source_hash("foreign_space.model:build", ())
    (folder / "two" / "foreign_space" / f"fast{EXTENSION_SUFFIXES[0]}").write_bytes(b"machine code")
    assert len({before, changed, source_hash("foreign_space.model:build", ())}) == 3


def test_folders_that_a_package_links_to_count_as_source(folder, monkeypatch):
    (folder / "one" / "foreign_linked").mkdir(parents=True)
    (folder / "elsewhere").mkdir()
    monkeypatch.syspath_prepend(str(folder / "one"))
    monkeypatch.setenv("TITAN_TRAIN_CODE", "foreign_linked")
    package = folder / "one" / "foreign_linked"
    shutil.copy(folder / "code" / "foreign_model.py", package / "model.py")
    (package / "layers").symlink_to(folder / "elsewhere")
    (folder / "elsewhere" / "round").symlink_to(package)  # a circle
    before = source_hash("foreign_linked.model:build", ())
    (folder / "elsewhere" / "attention.py").write_text("a = 1\n")
    added = source_hash("foreign_linked.model:build", ())
    (folder / "elsewhere" / "attention.py").write_text("a = 2\n")
    assert len({before, added, source_hash("foreign_linked.model:build", ())}) == 3


def test_a_package_in_an_archive_is_refused(folder, monkeypatch, capsys):
    with zipfile.ZipFile(folder / "code.zip", "w") as archive:
        archive.writestr("foreign_zipped/__init__.py", MODULE.format(marker=str(folder / "imported")))
    monkeypatch.syspath_prepend(str(folder / "code.zip"))
    assert main(["check", "tiny.toml", "--model.name", "foreign_zipped:build", "--code", "foreign_zipped"]) == 2
    assert "Unpack its archive" in capsys.readouterr().err
    assert not (folder / "imported").exists()


def test_machine_code_in_an_exported_folder_is_loaded_only_if_this_account_wrote_it(folder, capsys, monkeypatch):
    from titan_train.export.load import load_exported
    from titan_train.trust import remember_machine_code

    export = folder / "export"
    export.mkdir()
    (export / "model.pt2").write_bytes(b"machine code")
    loaded = []
    monkeypatch.setattr("titan_train.export.load.read_exported", loaded.append)
    for words in (
        ["generate", "export", "--prompt", "a", "--temperature", "0"],
        ["eval", "export", "--text", "text.txt"],
    ):
        assert main(words) == 2
    assert "model.pt2 is machine code, and this account did not export it" in capsys.readouterr().err
    assert loaded == []
    load_exported(export, trust_code=True)  # once
    load_exported(export)
    assert loaded == [export] * 2
    (export / "model.pt2").write_bytes(b"other machine code")
    with pytest.raises(ValueError, match="--trust-code"):
        load_exported(export)
    remember_machine_code(export, export / "model.pt2")  # as `export` does
    load_exported(export)
    (folder / "sent").mkdir()
    shutil.copy(export / "model.pt2", folder / "sent")
    with pytest.raises(ValueError, match="--trust-code"):
        load_exported(folder / "sent")


def test_an_exported_folder_s_own_python_and_pickles_are_not_read(folder, capsys):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    export = folder / "export"
    settings = {
        "vocab_size": 16,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    config = transformers.LlamaConfig(**settings)
    transformers.LlamaForCausalLM(config).save_pretrained(export)
    torch.save({}, export / "pytorch_model.bin")
    (export / "model.safetensors").rename(export / "other.safetensors")
    from titan_train.export.load import load_exported

    with pytest.raises(ValueError, match=r"cannot be used .*model\.safetensors"):
        load_exported(export)
    (export / "other.safetensors").rename(export / "model.safetensors")
    load_exported(export)
    (export / "evil.py").write_text(f"open({str(folder / 'marker')!r}, 'w')")
    written = json.loads((export / "config.json").read_text())
    written |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}}
    (export / "config.json").write_text(json.dumps(written))
    with pytest.raises(ValueError, match="auto_map names Python code in the folder"):
        load_exported(export)
    assert not (folder / "marker").exists()
