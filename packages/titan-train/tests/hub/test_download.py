"""Downloads from a server on loopback: only what is needed, resumed, compared with its hashes, and what is refused."""

import hashlib
import importlib
import io
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
from titan_train.config import SourceConfig
from titan_train.config.published import missing_repositories
from titan_train.data.sources.documents import list_files
from titan_train.hub.choose import RepoFile, choose_data_files, choose_model_files

pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")

module = importlib.import_module("titan_train.hub.download")
TRANSFER = module._transfer

WEIGHTS = bytes(range(256)) * 2000
MODEL = {
    "config.json": b'{"model_type": "llama"}',
    "generation_config.json": b"{}",
    "model-00001-of-00002.safetensors": WEIGHTS,
    "model-00002-of-00002.safetensors": WEIGHTS[::-1],
    "model.safetensors.index.json": b"{}",
    "tokenizer.json": b'{"version": "1.0"}',
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "README.md": b"# name",
    "pytorch_model.bin": b"\x80\x04 a pickle" * 200,
    "modeling_name.py": b"import os",
    "consolidated.safetensors": WEIGHTS,
    "original/consolidated.00.pth": b"\x80\x04" * 600,
    "onnx/model.onnx": b"x" * 2000,
}
NEEDED = {
    "config.json", "generation_config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
    "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
}  # fmt: skip


def titan(hub, *words, home, command=("data", "download"), cwd=None):
    """The command in a process of its own: the hub's library reads its environment when it is imported."""
    environment = os.environ | {
        "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DOWNLOAD_TIMEOUT": "5", "NO_PROXY": "127.0.0.1",
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, "-m", "titan_train", *command, *map(str, words)], cwd=cwd,
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def loaded(folder):
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "download.json"
    }


def test_a_model_arrives_with_what_is_needed_and_nothing_else(hub, tmp_path):
    hub.files = dict(MODEL)
    out = tmp_path / "model"
    done = titan(hub, "hf:org/name", "--out", out, home=tmp_path / "home")
    assert done.returncode == 0, done.stderr
    assert loaded(out) == NEEDED == set(hub.sent)
    assert all((out / name).read_bytes() == MODEL[name] for name in NEEDED)
    record = json.loads((out / "download.json").read_text())
    assert record["commit"] == "c" * 40
    assert {f["name"]: f["sha256"] for f in record["files"]} == {
        n: hashlib.sha256(MODEL[n]).hexdigest() for n in NEEDED
    }
    before = dict(hub.sent)
    again = titan(hub, "hf:org/name", "--out", out, home=tmp_path / "home")
    assert again.returncode == 0, again.stderr
    assert hub.sent == before  # nothing is sent twice


def test_a_broken_transfer_continues_where_it_stopped(hub, tmp_path):
    weights = WEIGHTS * 40  # the hub's library keeps what it has in pieces of 10 MB
    hub.files = {"config.json": b"{}", "model.safetensors": weights}
    hub.break_after = 12_000_000
    out = tmp_path / "model"
    failed = titan(hub, "hf:org/name", "--out", out, home=tmp_path / "home")
    assert failed.returncode == 1
    assert "continues where it stopped" in failed.stderr
    assert not (out / "download.json").exists()
    assert not (out / "model.safetensors").exists()
    assert [path.stat().st_size for path in (out / ".parts").iterdir() if not path.suffix] == [10 * 2**20]
    hub.break_after, hub.sent, hub.ranges = 0, {}, []
    done = titan(hub, "hf:org/name", "--out", out, home=tmp_path / "home")
    assert done.returncode == 0, done.stderr
    assert (out / "model.safetensors").read_bytes() == weights
    assert hub.ranges
    assert hub.sent["model.safetensors"] <= len(weights) - 10_000_000


def test_only_what_is_missing_must_fit_on_the_disk(tmp_path, monkeypatch):
    content = {"config.json": b"{}", "model.safetensors": bytes(100_000)}
    siblings = [
        SimpleNamespace(rfilename=name, size=len(data), lfs={"sha256": hashlib.sha256(data).hexdigest()}, blob_id="")
        for name, data in content.items()
    ]
    found = SimpleNamespace(sha="c" * 40, siblings=siblings)
    monkeypatch.setattr("huggingface_hub.HfApi.repo_info", lambda *_, **__: found)
    disk = SimpleNamespace(free=200_000)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: disk)
    most, sent = 60_000, {}

    def transfer(hub, url, size, part, errors):
        name = url.rpartition("/")[2]
        have = part.stat().st_size if part.exists() else 0
        with part.open("ab") as file:
            sent[name] = file.write(content[name][have:most])
        if size > most:
            raise OSError("broken off")

    monkeypatch.setattr(module, "_transfer", transfer)
    with pytest.raises(RuntimeError, match="broken off"):
        module.download("org/name", tmp_path)
    disk.free, most = 50_000, 100_000
    assert module.download("org/name", tmp_path).size == 100_002
    assert sent["model.safetensors"] == 40_000
    sent.clear()
    assert module.download("org/name", tmp_path).size == 100_002
    assert sent == {}
    (tmp_path / "model.safetensors").write_bytes(bytes(99_999))
    with pytest.raises(ValueError, match="GB free, but what is missing"):
        module.download("org/name", tmp_path)


@pytest.fixture
def holds(monkeypatch):
    """Say what the repository holds at a commit, and which of its files break off on their way."""

    def set_to(commit, content, broken=()):
        siblings = [
            SimpleNamespace(
                rfilename=name, size=len(data), lfs={"sha256": hashlib.sha256(data).hexdigest()}, blob_id=""
            )
            for name, data in content.items()
        ]
        found = SimpleNamespace(sha=commit * 40, siblings=siblings)
        monkeypatch.setattr("huggingface_hub.HfApi.repo_info", lambda *_, **__: found)

        def transfer(hub, url, size, part, errors):
            name = url.rpartition("/")[2]
            part.write_bytes(content[name][: 1 if name in broken else None])
            if name in broken:
                raise OSError("broken off")

        monkeypatch.setattr(module, "_transfer", transfer)

    return set_to


def test_one_file_that_fails_ends_the_others(tmp_path, holds, monkeypatch):
    names = [f"train-{i}.parquet" for i in range(5)]
    holds("a", dict.fromkeys(names, b"content"))
    begun, all_begun = [], threading.Barrier(4)

    def http_get(url, file, **_):
        begun.append(url.rpartition("/")[2])
        all_begun.wait(30)
        if url.endswith(names[0]):
            raise OSError("no such host")
        while True:
            file.write(b"c")
            time.sleep(0.01)

    monkeypatch.setattr("huggingface_hub.file_download.http_get", http_get)
    monkeypatch.setattr(module, "_transfer", TRANSFER)
    with pytest.raises(RuntimeError, match="no such host"):
        module.download("datasets/org/name", tmp_path)
    assert sorted(begun) == names[:4]


def test_one_file_that_fails_ends_the_comparison_of_those_that_are_there(tmp_path, holds, monkeypatch):
    holds("a", {"there.parquet": b"content", "train.parquet": b"content"}, broken=["train.parquet"])
    (tmp_path / "there.parquet").write_bytes(b"content")
    compared, breaks_off, begun = [], module._transfer, threading.Event()

    class Slow(io.BytesIO):
        def read(self, _):
            begun.set()
            time.sleep(0.01)
            compared.append(1)
            return b"c" if len(compared) < 2000 else b""

    monkeypatch.setattr(module, "open_file", lambda _: Slow())
    monkeypatch.setattr(module, "_transfer", lambda *args: begun.wait(30) and breaks_off(*args))
    with pytest.raises(RuntimeError, match="broken off"):
        module.download("datasets/org/name", tmp_path)
    assert 0 < len(compared) < 2000


def test_a_download_needs_no_locks_of_files(tmp_path, holds, monkeypatch):
    holds("a", {"train.parquet": b"content"})
    monkeypatch.setitem(sys.modules, "fcntl", None)  # as on Windows, where a folder cannot be opened either
    assert module.download("datasets/org/name", tmp_path).size == 7


def test_two_downloads_into_one_folder_load_each_file_once(tmp_path, holds, monkeypatch):
    holds("a", {"train.parquet": b"content"})
    quick, begun, told = module._transfer, [], []

    def transfer(*args):
        begun.append(args[1])
        while not any("waiting for another command" in text for text in told):
            time.sleep(0.01)
        quick(*args)

    monkeypatch.setattr(module, "_transfer", transfer)
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(module.download, "datasets/org/name", tmp_path, tell=told.append) for _ in range(2)]
        assert [one.result(60).size for one in both] == [7, 7]
    assert len(begun) == 1
    assert loaded(tmp_path) == {"train.parquet"}


def recorded(folder):
    return [file["name"] for file in json.loads((folder / "download.json").read_text())["files"]]


def test_files_that_the_repository_no_longer_has_are_not_mixed_with_new_ones(tmp_path, holds):
    holds("a", {"train-1.parquet": b"old", "test.parquet": b"t"})
    module.download("datasets/org/name", tmp_path)
    holds("b", {"train-2.parquet": b"new", "test.parquet": b"t"})
    with pytest.raises(ValueError, match=r"holds train-1.parquet of an earlier commit"):
        module.download("datasets/org/name", tmp_path)
    (tmp_path / "train-1.parquet").unlink()
    assert module.download("datasets/org/name", tmp_path).commit == "b" * 40


def test_a_second_selection_leaves_what_broke_off_unfinished(tmp_path, holds):
    content = {"train-1.jsonl": b"one", "train-2.jsonl": b"two", "test.jsonl": b"test"}
    holds("a", content, broken=("train-2.jsonl",))
    with pytest.raises(RuntimeError, match="broken off"):
        module.download("datasets/org/name", tmp_path, include=["train-*"])
    told = []
    module.download("datasets/org/name", tmp_path, include=["test.jsonl"], tell=told.append)
    assert "still lacks train-2.jsonl of a download that broke off" in told[-1]
    assert [path.stat().st_size for path in (tmp_path / ".parts").iterdir() if not path.suffix] == [1]
    assert not (tmp_path / "download.json").exists()
    with pytest.raises(ValueError, match=r"broke off.*remove"):
        list_files(SourceConfig(name="a", kind="jsonl", paths=(str(tmp_path),)))
    with pytest.raises(ValueError, match="holds datasets/org/name, not datasets/org/more"):
        module.download("datasets/org/more", tmp_path)
    holds("a", content)
    module.download("datasets/org/name", tmp_path, include=["train-*"])
    assert recorded(tmp_path) == sorted(content)
    assert not (tmp_path / ".parts").exists()


def test_the_record_keeps_what_earlier_calls_loaded_if_it_is_of_the_same_commit(tmp_path, holds):
    content = {"model.safetensors": b"weights", "config.json": b"{}", "tokenizer.json": b"t"}
    holds("a", content)
    module.download("org/name", tmp_path)
    for commit, tokenizer in (("a", b"t"), ("b", b"other")):  # the weights are the same in both
        holds(commit, content | {"tokenizer.json": tokenizer})
        told = []
        module.download("org/name", tmp_path, parts=["tokenizer"], tell=told.append)
        assert told[:-1] == ([] if commit == "a" else ["comparing 2 files of earlier calls, 0.0 MB"])
        assert recorded(tmp_path) == sorted(content)
        assert json.loads((tmp_path / "download.json").read_text())["commit"] == commit * 40
    holds("c", content | {"model.safetensors": b"retrained", "tokenizer.json": b"third"})
    with pytest.raises(ValueError, match=r"holds model.safetensors of another commit.*--revision"):
        module.download("org/name", tmp_path, parts=["tokenizer"])
    assert (tmp_path / "tokenizer.json").read_bytes() == b"other"


def test_a_file_that_changed_on_the_way_is_refused_and_removed(hub, tmp_path):
    hub.files = {"config.json": b"{}", "model.safetensors": WEIGHTS}
    hub.corrupt = True
    out = tmp_path / "model"
    failed = titan(hub, "hf:org/name", "--out", out, home=tmp_path / "home")
    assert failed.returncode == 2
    assert "that the hub states" in failed.stderr
    assert not (out / "model.safetensors").exists()
    assert not (out / "download.json").exists()


def test_the_tokenizer_alone_and_a_data_set(hub, tmp_path):
    hub.files = dict(MODEL)
    done = titan(hub, "hf:org/name", "--only", "tokenizer", "--out", tmp_path / "t", home=tmp_path / "home")
    assert done.returncode == 0, done.stderr
    assert loaded(tmp_path / "t") == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    hub.files = {
        "data/train-0.parquet": WEIGHTS,
        "data/test-0.parquet": b"t",
        "README.md": b"x",
        "load.py": b"import os",
    }
    done = titan(
        hub, "hf:datasets/org/name", "--include", "data/train-*", "--out", tmp_path / "d", home=tmp_path / "home"
    )
    assert done.returncode == 0, done.stderr
    assert loaded(tmp_path / "d") == {"data/train-0.parquet"}


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["hf:org/nothing"], 2, "org/nothing"),
        (["hf:org/gated"], 2, "accepted its terms"),
        (["hf:org/name", "--revision", "v9"], 2, "org/name"),
        (["org/name"], 2, "Write hf:org/name"),
        (["hf:a b/c"], 2, "a b/c"),
    ],
)
def test_what_is_not_there_is_said(hub, tmp_path, words, code, message):
    hub.files = dict(MODEL)
    failed = titan(hub, *words, "--out", tmp_path / "x", home=tmp_path / "home")
    assert failed.returncode == code, failed.stderr
    assert message in failed.stderr
    assert "Traceback" not in failed.stderr


def test_a_server_that_does_not_answer_and_a_folder_of_another_model(hub, tmp_path):
    from types import SimpleNamespace

    failed = titan(
        SimpleNamespace(endpoint="http://127.0.0.1:9"), "hf:org/name", "--out", tmp_path / "x", home=tmp_path
    )
    assert failed.returncode == 1
    assert "could not be loaded" in failed.stderr
    (tmp_path / "y").mkdir()
    (tmp_path / "y" / "download.json").write_text('{"repository": "org/other"}')
    failed = titan(hub, "hf:org/name", "--out", tmp_path / "y", home=tmp_path)
    assert failed.returncode == 2
    assert "holds org/other, not org/name" in failed.stderr


def files(*names):
    return [RepoFile(name, 1, "", "") for name in names]


@pytest.mark.parametrize("name", ["../../x.safetensors", "/etc/x.json", "a\\..\\x.json", "data/../../x.parquet"])
def test_names_that_lead_out_of_the_folder_are_refused(name):
    with pytest.raises(ValueError, match="lies outside it"):
        choose_data_files(files(name), ["*"])


@pytest.mark.parametrize("name", ["pytorch_model.bin", "x.pkl", "run.py", "w.PT", "a.npy", "b.bin.gz"])
def test_what_may_run_code_is_never_loaded(name):
    with pytest.raises(ValueError, match="never loaded"):
        choose_model_files(files("model.safetensors", name), ["weights"], [name])


def test_named_chat_templates_belong_to_the_tokenizer():
    named = files(
        "tokenizer.json", "additional_chat_templates/tool_use.jinja", "additional_chat_templates/a/b.jinja", "x.jinja"
    )
    assert choose_model_files(named, ["tokenizer"], []) == sorted(named[:2], key=lambda file: file.name)


@pytest.mark.parametrize("name", ["tekken.json", "tiktoken.model", "qwen.tiktoken"])
def test_a_vocabulary_by_another_name_is_the_tokenizer_too(name):
    assert choose_model_files(files(name, "config.json"), ["tokenizer"], []) == files(name)


def test_weights_only_as_pickles_and_empty_repositories_are_refused():
    with pytest.raises(ValueError, match=r"only as pytorch_model.bin.*--only tokenizer"):
        choose_model_files(files("config.json", "pytorch_model.bin"), ["weights"], [])
    with pytest.raises(ValueError, match="no tokenizer files"):
        choose_model_files(files("config.json"), ["tokenizer"], [])
    with pytest.raises(ValueError, match="no files that a source can read"):
        choose_data_files(files("a.csv"), [])
    with pytest.raises(ValueError, match="matches no file"):
        choose_data_files(files("a.parquet"), ["b*"])


def test_a_configuration_loads_what_it_names_and_says_how_where_it_may_not(hub, tmp_path):
    chats = [{"prompt": f"What is {n}?", "completion": f"It is {n}."} for n in range(40)]
    hub.files = {"chats.jsonl": "".join(json.dumps(row) + "\n" for row in chats).encode()}
    words = ["sft", "--data.sources.0.paths", "hf:datasets/org/name"]
    told = titan(hub, *words, home=tmp_path / "home", command=("data", "prepare"), cwd=tmp_path)
    assert told.returncode == 2
    assert "titan-train data download hf:datasets/org/name --out datasets/org/name" in told.stderr
    done = titan(hub, *words, "--download", home=tmp_path / "home", command=("data", "prepare"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "datasets/org/name/chats.jsonl").is_file()


def test_a_download_that_broke_off_is_missing_and_its_files_are_not_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "datasets/org/name"
    (folder / ".parts").mkdir(parents=True)
    (folder / "a.jsonl").write_text('{"text": "a"}\n')
    tree = {"data": {"sources": [{"paths": ["hf:datasets/org/name"]}]}}
    assert [*missing_repositories(tree)] == [("data.sources.paths", "hf:datasets/org/name")]
    sources = [
        SourceConfig(name="a", kind="jsonl", paths=(path,)) for path in ("hf:datasets/org/name", f"{folder}/*.jsonl")
    ]
    for source in sources:
        with pytest.raises(ValueError, match="broke off"):
            list_files(source)
    (folder / ".parts").rmdir()
    assert [*missing_repositories(tree)] == []
    more = {"data": {"validation_sources": [{"paths": ["hf:datasets/org/more"]}]}}
    assert [*missing_repositories(more)] == [("data.validation_sources.paths", "hf:datasets/org/more")]
    assert [file.path.name for source in sources for file in list_files(source)] == ["a.jsonl", "a.jsonl"]


def test_a_download_that_broke_off_below_a_folder_or_a_glob_is_not_read(tmp_path):
    for name in ("x/a.jsonl", "x/.parts/wanted.json", "y/b.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('{"text": "a"}\n')
    for path in (tmp_path, tmp_path / "*/*.jsonl"):
        source = SourceConfig(name="a", kind="jsonl", paths=(str(path),))
        with pytest.raises(ValueError, match=rf"{tmp_path}/x, whose download broke off.*{tmp_path}/x/\.parts"):
            list_files(source)
        assert [file.path.name for file in list_files(replace(source, exclude=("x/*", "*/x/*")))] == ["b.jsonl"]


def test_a_folder_that_was_loaded_for_its_tokenizer_lacks_the_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "org/name"
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").touch()

    def missing(**model):
        tree = {"model": model, "tokenizer": {"path": "hf:org/name"}}
        return [key for key, _ in missing_repositories(tree)]

    assert missing() == []
    assert missing(init="hf:org/name") == ["model.init"]
    assert missing(name="hf:org/name") == ["model.name"]
    (folder / "config.json").touch()
    assert (missing(init="hf:org/name"), missing(name="hf:org/name")) == (["model.init"], [])
    (folder / "model.safetensors").touch()
    assert missing(init="hf:org/name", name="hf:org/name") == []
