"""A second reader, written from FORMAT.md alone: json, zstandard and xxhash, nothing of this package."""

import json
import math
import struct

import torch
import xxhash
import zstandard
from ckpt_loop import build, full_state, train
from titan_ckpt import Checkpointer
from titan_ckpt.format.names import encode_header


def xxh(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def test_a_step_can_be_read_from_the_format_description_alone(tmp_path):
    state = build()
    train(state, 2)
    state.extra["large"] = torch.arange(2000.0)
    step = Checkpointer(tmp_path).save(2, state).path
    want = full_state(state)

    manifest = json.loads((step / "MANIFEST.json").read_text())
    told = manifest.pop("digest")
    assert told == xxh(json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode())
    packed = (step / "INDEX.json.zst").read_bytes()
    assert manifest["index"] == {"size": len(packed), "digest": xxh(packed)}
    index = json.loads(zstandard.ZstdDecompressor().decompress(packed))
    assert [file["name"] for file in index["files"]] == [file["name"] for file in manifest["files"]]
    contents = []
    for file, listed in zip(index["files"], manifest["files"], strict=True):
        data = (step / file["name"]).read_bytes()
        contents.append(data)
        assert len(data) == file["size"] == listed["size"]
        blocks = [xxh(data[at : at + index["block_bytes"]]) for at in range(0, len(data), index["block_bytes"])]
        assert "".join(blocks) == file["blocks"]
        assert listed["digest"] == xxh("".join(blocks).encode())
        if file["data_start"]:
            assert file["data_start"] % 4096 == 0
            assert file["data_start"] == 8 + struct.unpack("<Q", data[:8])[0]

    codes = {"F32": "f", "I64": "q"}
    seen = 0
    for section, separator in (("model", "."), ("optim", ".")):
        for name, tensor in index["tensors"][section].items():
            columns = tensor["chunks"]
            assert columns["count"] == 1
            values = [column if isinstance(column, int) else column[0] for column in columns["sizes"]]
            assert values == tensor["shape"]
            file = columns["file"] if isinstance(columns["file"], int) else columns["file"][0]
            at = columns["start"] if isinstance(columns["start"], int) else columns["start"][0]
            at += index["files"][file]["data_start"]
            code = codes[tensor["dtype"]]
            numbers = struct.unpack_from(f"<{math.prod(tensor['shape'])}{code}", contents[file], at)
            assert list(numbers) == want[f"{section}{separator}{name.replace('/', '.')}"].flatten().tolist(), name
            seen += 1
    assert seen == len(want) - len(index["tied"])
    plain = json.loads(contents[[f["name"] for f in index["files"]].index("state/state.json")])
    assert plain["extra"]["tokens"] == 48
    assert plain["extra"]["large"] == {"$stored": "extra.large"}
    assert plain["sched"][0]["milestones"] == {"$counter": [[4, 1], [9, 1]]}


def test_an_empty_header_is_still_a_whole_page():
    assert len(encode_header([], {})) == 4096
