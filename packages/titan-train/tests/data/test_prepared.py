"""Prepared folders: those that 0.1.0 wrote are read, one process at a time, a damaged state is named."""

import json
import os
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
from titan_train.config import DataConfig, SourceConfig, parse_config
from titan_train.data.prepared import PreparedFolder, one_process
from titan_train.data.shards.prepare import source_folder
from titan_train.data.stream.token_stream import TokenStream
from titan_train.models.vision_language.args import QWEN3_VL_CONFIGS
from titan_train.tasks.diffusion.shards.features import SampleSizes
from titan_train.tasks.diffusion.shards.prepare import shards_key
from titan_train.tasks.vision.jsonl import index_folder


@dataclass
class State:
    done: int
    names: list[str]


def written(name, text):
    Path(name).write_text(text)
    os.utime(name, ns=(10**18, 10**18))
    return Path(name)


def test_the_keys_of_folders_are_those_of_the_first_release(tmp_path, tokenizer, monkeypatch):
    """The literals were computed by 0.1.0: a cache, and shards of diffusion, outlive an upgrade."""
    monkeypatch.chdir(tmp_path)  # the keys of streams and of vision hold paths
    written("a.jsonl", "".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(20)))
    source = SourceConfig(name="web", kind="jsonl", paths=("a.jsonl",))
    config = DataConfig(sources=(source,), validation_fraction=0.2, shard_tokens=100, num_threads=1)
    assert source_folder(source, config, tokenizer, Path("cache")).name == "web-31b4b452db531a8f"
    streamed = SourceConfig(name="web", kind="jsonl", paths=("a.jsonl",), stream=True, stream_window=4)
    stream = TokenStream(streamed, config, tokenizer, Path("cache"), seq_len=8, seed=1)
    stream.require(1)
    stream.close()
    assert [path.name for path in Path("cache").iterdir()] == ["web-stream-f1ee1a242f50081d"]
    vision = {"source": "jsonl", "paths": ["v.jsonl"], "held_out": 0}
    seeing = parse_config({"model": {"name": "qwen3_vl_debug"}, "vision": vision, "data": {"cache_dir": "cache"}})
    lines = written("v.jsonl", '{"prompt": "a", "answer": "b"}\n')
    index = index_folder(seeing, QWEN3_VL_CONFIGS["qwen3_vl_debug"], [lines])
    assert index.name == "vision-3eca39aee206d8fc"
    images = written("i.jsonl", "{}\n")
    Path("e/vae").mkdir(parents=True)
    Path("e/vae/config.json").write_text("{}")
    diffusion = {"source": "shards", "path": "s", "images": "i.jsonl", "encoders": "e"}
    drawing = parse_config({"model": {"name": "flux_tiny"}, "diffusion": diffusion})
    sizes = SampleSizes(grid=2, channels=8, text_tokens=3, text_dim=5, pooled_dim=4)
    key = shards_key(drawing, sizes, [images], Path("e"))
    assert key == "ba49b75745e2e209f97685256bd2d123aab4d1e11ab0fe23f13422757bf07537"


def test_blocks_of_a_stream_that_the_first_release_wrote_are_not_made_again(tmp_path, tokenizer, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written("a.jsonl", "".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(20)))
    source = SourceConfig(name="web", kind="jsonl", paths=("a.jsonl",), stream=True, stream_window=4)
    options = {"seq_len": 8, "seed": 1}
    stream = TokenStream(source, DataConfig(sources=(source,)), tokenizer, Path("cache"), **options)
    stream.require(1)
    stream.close()
    (folder,) = Path("cache").iterdir()
    for path in folder.glob("block-00000000-*"):
        path.rename(folder / f"block-00000000{path.suffix}")  # its name then
    record = {
        "block": 0,
        "begins": None,
        "next": {
            "epoch": 0, "file": "a.jsonl", "line": 3, "byte": 46, "skip": 10, "before": "4f53cda18c2baa0c0354bb5f9a3ecbe5",
        },
        "files": [["a.jsonl", 470, 10**18]],
        "shard": {
            "name": "block-00000000", "tokens": 33, "documents": 3,
            "tokens_sha256": "6c6b4e5f640bf895c6e455e19bfeec7b5f3249c5d94597e2316c14812f231e7a",
            "index_sha256": "9357e9bb2a76ed5872f09c0e11cb677a0af2b01af70950c388dcac6e10563592",
        },
    }  # fmt: skip
    (folder / "blocks.json").write_text(json.dumps([record]))
    made = (folder / "block-00000000.tok").stat().st_mtime_ns
    again = TokenStream(source, DataConfig(sources=(source,)), tokenizer, Path("cache"), **options)
    assert again.read(0).tokens.size == 9
    assert (folder / "block-00000000.tok").stat().st_mtime_ns == made
    again.close()


def test_a_state_is_read_back_and_a_damaged_one_is_named(tmp_path, caplog):
    folder = PreparedFolder(tmp_path / "f", "state.json", State)
    assert folder.read() is None
    folder.write(State(3, ["a"]))
    assert folder.read() == State(3, ["a"])
    folder.state_path.write_text('{"done": "many"}')
    with pytest.raises(ValueError, match=r"state\.json is damaged. Remove the folder"):
        folder.read()
    assert folder.read_or_restart() is None
    assert "preparing from the beginning" in caplog.text


def test_one_process_prepares_and_others_wait(tmp_path):
    order = []
    inside = threading.Event()

    def second():
        inside.wait()
        with one_process(tmp_path / "f"):
            order.append("second")

    thread = threading.Thread(target=second)
    thread.start()
    with one_process(tmp_path / "f"):
        inside.set()
        thread.join(0.1)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
