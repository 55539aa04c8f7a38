"""Steps that somebody has written to harm: digests that match, and contents that no writer of ours makes.

Every one is an error that names the file, costs no memory beyond the step's size, opens nothing outside of the step,
and does not hide an older step that is good.
"""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
import zstandard
from titan_ckpt import Checkpointer, DamageError, TrainState
from titan_ckpt.cli import main
from titan_ckpt.format.codec import block_digests, digest, root_digest, unpack_frame, unpack_json
from titan_ckpt.format.manifest import _self_digest
from titan_ckpt.format.names import is_file_name, parse_object
from titan_ckpt.format.validate import check_manifest
from titan_ckpt.interop.safetensors_folder import SafetensorsReader
from titan_ckpt.load.reader import StepReader
from titan_ckpt.state.leaves import TensorSink, decode
from titan_ckpt.steps.claim import Process
from torch import nn

STEP = "step-00000002"
MODEL = "model-r00000.safetensors"


def state_of(fill: float) -> TrainState:
    model = nn.Linear(8, 8)
    nn.init.constant_(model.weight, fill)
    return TrainState(model=model, rng=False, extra={"seen": int(fill)})


class Position:
    """State of one rank."""

    def state_dict(self):
        return {"at": 5}

    def load_state_dict(self, state):
        assert state == {"at": 5}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("saved")
    for step in (1, 2):
        Checkpointer(root).save(step, state_of(float(step)))
    return root


@pytest.fixture
def root(saved, tmp_path):
    """A good step 1, and a step 2 to rewrite."""
    shutil.copytree(saved, tmp_path / "root")
    return tmp_path / "root"


def rewrite_manifest(root, edit) -> None:
    file = root / STEP / "MANIFEST.json"
    value = json.loads(file.read_bytes())
    del value["digest"]
    value = edit(value) or value
    file.write_text(json.dumps({**value, "digest": _self_digest(value)}))


def replace_index(root, data: bytes, files: list | None = None) -> None:
    """Another index, with a manifest that vouches for it."""
    (root / STEP / "INDEX.json.zst").write_bytes(data)

    def vouch(value):
        value["index"] = {"size": len(data), "digest": digest(data)}
        if files is not None:
            value["files"] = [
                {"name": f["name"], "size": f["size"], "digest": root_digest(cut(f["blocks"]))} for f in files
            ]

    rewrite_manifest(root, vouch)


def cut(joined: str) -> list[str]:
    return [joined[i : i + 32] for i in range(0, len(joined), 32)]


def read_index(root) -> dict:
    return json.loads(zstandard.decompress((root / STEP / "INDEX.json.zst").read_bytes()))


def rewrite_index(root, edit) -> None:
    value = read_index(root)
    value = edit(value) or value
    replace_index(root, zstandard.compress(json.dumps(value).encode()), value.get("files"))


def replace_state(root, text: str, name: str = "state/state.json") -> None:
    data = text.encode()
    (root / STEP / name).write_bytes(data)

    def record(index):
        (entry,) = [file for file in index["files"] if file["name"] == name]
        entry |= {"size": len(data), "blocks": "".join(block_digests(data))}

    rewrite_index(root, record)


def check_refused(root, file: str) -> str:
    """The error of step 2, which must name ``file``; step 1 must load all the same."""
    ck, state = Checkpointer(root), state_of(-1.0)
    with pytest.raises(DamageError) as caught:
        ck.restore(state, 2)
    assert file in str(caught.value)
    assert state.extra == {"seen": -1}
    assert state.model.weight.detach().unique().tolist() == [-1.0]
    assert ck.restore(state, fallback=True) == 1
    assert state.model.weight.detach().unique().tolist() == [1.0]
    assert main(["verify", str(root)]) == 1
    assert main(["show", str(root / STEP)]) == 1
    assert main(["ls", str(root)]) in (0, 1)
    return str(caught.value)


def bomb(nbytes: int, *, declared: bool) -> bytes:
    """A few kilobytes that are ``nbytes`` when unpacked."""
    packer = zstandard.ZstdCompressor(level=1).compressobj(size=nbytes if declared else -1)
    pieces = [packer.compress(b" " * (16 << 20)) for _ in range(nbytes >> 24)]
    return b"".join([*pieces, packer.flush()])


UNPACK = """
import resource, sys
from titan_ckpt.format.codec import unpack_frame, unpack_json
data = open(sys.argv[1], "rb").read()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for unpack in (unpack_json, lambda data: unpack_frame(data, 4 << 20, 4)):
    try:
        unpack(data)
    except ValueError as err:
        print(err)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


@pytest.mark.parametrize("declared", [True, False], ids=["size-declared", "size-hidden"])
def test_a_frame_that_unpacks_to_a_gigabyte_takes_no_more_memory_than_is_allowed(tmp_path, declared):
    data = bomb(1 << 30, declared=declared)
    assert len(data) < 200_000
    (tmp_path / "bomb").write_bytes(data)
    done = subprocess.run(
        [sys.executable, "-c", UNPACK, str(tmp_path / "bomb")], capture_output=True, text=True, check=True
    )
    *errors, mebibytes = done.stdout.splitlines()
    assert len(errors) == 2
    assert all("expected" in error for error in errors)
    # 64 MiB are allowed, as pieces and, had it ended there, joined
    assert int(mebibytes) < (10 if declared else 200)


def test_an_index_that_unpacks_to_a_gigabyte_is_damage_of_the_index(root):
    replace_index(root, bomb(1 << 30, declared=True))
    assert "1073741824 bytes" in check_refused(root, "INDEX.json.zst")


def test_what_legitimate_writers_make_is_unpacked_whether_or_not_its_size_is_declared():
    text = json.dumps({f"layers.{i}.weight": [i, 2 * i] for i in range(50_000)}).encode()
    for declared in (True, False):
        packer = zstandard.ZstdCompressor().compressobj(size=len(text) if declared else -1)
        assert unpack_json(packer.compress(text) + packer.flush()) == text
    packer = zstandard.ZstdCompressor().compressobj()
    assert bytes(unpack_frame(packer.compress(bytes(64)) + packer.flush(), 64, 1)) == bytes(64)
    with pytest.raises(ValueError, match="cannot be read"):
        unpack_json(text)


def lie_outside(tmp_path, root) -> dict[str, str]:
    """Names that lead to a copy of the model's file outside of the step."""
    outside = tmp_path / "outside.safetensors"
    shutil.copy(root / STEP / MODEL, outside)
    shutil.copy(outside, root / "beside.safetensors")
    (root / STEP / "deeper").mkdir()
    shutil.copy(outside, root / STEP / "deeper" / MODEL)
    shutil.copy(outside, root / STEP / ".hidden")
    return {
        "absolute": str(outside),
        "parent": "../beside.safetensors",
        "inside": "optim/../../beside.safetensors",
        "other-folder": f"deeper/{MODEL}",
        "hidden": ".hidden",
    }


@pytest.mark.parametrize("kind", ["absolute", "parent", "inside", "other-folder", "hidden"])
def test_a_name_that_leads_out_of_the_step_is_refused(root, tmp_path, kind):
    name = lie_outside(tmp_path, root)[kind]

    def rename(index):
        for file in index["files"]:
            file["name"] = name if file["name"] == MODEL else file["name"]

    rewrite_index(root, rename)
    assert name in check_refused(root, "")


def test_the_names_that_saving_makes_are_names_of_the_format(saved):
    names = [file["name"] for file in read_index(saved)["files"]]
    assert {MODEL, "state/state.json"} <= {*names}
    assert all(is_file_name(name) for name in [*names, "INDEX.json.zst", "optim/optim-r00000.safetensors"])
    led_out = ["", "/etc/passwd", "..", ".", "a/../b", "optim/", "optim//a", "optim/../a", "a\0b", "a\nb", "\\a"]
    assert not [name for name in [*led_out, 5, None] if is_file_name(name)]


@pytest.mark.parametrize("what", [MODEL, "state/state.json", "INDEX.json.zst", "state"])
def test_a_link_out_of_the_step_is_refused(root, tmp_path, what):
    place = root / STEP / what
    moved = tmp_path / "outside"
    shutil.move(place, moved)
    place.symlink_to(moved)
    assert "out of the step's folder" in check_refused(root, what)


def test_a_linked_folder_of_steps_and_links_within_a_step_are_read(root, tmp_path):
    (tmp_path / "link").symlink_to(root)
    (root / STEP / MODEL).rename(root / STEP / "other.safetensors")
    (root / STEP / MODEL).symlink_to("other.safetensors")
    assert Checkpointer(tmp_path / "link").restore(state_of(0.0)) == 2
    (tmp_path / "moved").mkdir()
    shutil.move(root / STEP, tmp_path / "moved" / STEP)
    (root / STEP).symlink_to(tmp_path / "moved" / STEP)
    assert Checkpointer(root).restore(state_of(0.0)) == 2


DEEP = "[" * 200_000


def test_an_index_nested_too_deep_to_be_read_is_damage(root):
    replace_index(root, zstandard.compress(DEEP.encode()))
    check_refused(root, "INDEX.json.zst")


def box(**columns):
    def edit(index):
        index["tensors"]["model"]["weight"]["chunks"] |= columns

    return edit


def tensor(**fields):
    def edit(index):
        index["tensors"]["model"]["weight"] |= fields

    return edit


def file(**fields):
    def edit(index):
        (entry,) = [entry for entry in index["files"] if entry["name"] == MODEL]
        entry |= fields

    return edit


def without(*path):
    def edit(index):
        for key in path[:-1]:
            index = index[key]
        del index[path[-1]]

    return edit


def test_a_malformed_manifest_is_a_plain_error_that_says_what_is_wrong(saved):
    manifest = json.loads((saved / STEP / "MANIFEST.json").read_bytes())
    check_manifest(manifest)
    for key in ("format", "step", "world_size", "serial", "versions", "metrics", "files", "index", "saved_at"):
        for wrong in ({**manifest, key: None}, {k: v for k, v in manifest.items() if k != key}):
            with pytest.raises(ValueError, match=f"'{key}'"):
                check_manifest(wrong)
    (first, *_) = manifest["files"]
    for entry in ({**first, "name": "/etc/passwd"}, {**first, "size": "5"}, {**first, "digest": None}):
        with pytest.raises(ValueError, match=r"passwd|size or digest"):
            check_manifest({**manifest, "files": [entry]})
    with pytest.raises(ValueError, match="'step' is not of the type"):
        check_manifest({**manifest, "step": -1})


WRONG_MANIFEST = {
    "no format": lambda value: value.pop("format") and None,
    "format is text": lambda value: value.update(format="1"),
    "step is null": lambda value: value.update(step=None),
    "files is a number": lambda value: value.update(files=5),
    "files are numbers": lambda value: value.update(files=[5]),
    "index is a number": lambda value: value.update(index=5),
    "metrics is null": lambda value: value.update(metrics=None),
    "serial is text": lambda value: value.update(serial="x"),
    "a file outside": lambda value: value["files"][0].update(name="../outside"),
    "a name with a zero byte": lambda value: value["files"][0].update(name="a\0b"),
}


@pytest.mark.parametrize("wrong", WRONG_MANIFEST)
def test_a_malformed_manifest_is_damage_and_hides_no_other_step(root, wrong):
    rewrite_manifest(root, WRONG_MANIFEST[wrong])
    check_refused(root, "MANIFEST.json")
    ck = Checkpointer(root, keep_last=1)
    assert ck.latest() == 1
    ck.save(3, state_of(3.0))
    assert ck.latest() == 3


@pytest.mark.parametrize(
    "wrong", [{"serial": "2"}, {"serial": True}, {"serial": -1}, {"serial": None}, {"step": 2.0}], ids=str
)
def test_a_malformed_commit_record_hides_no_step(root, wrong):
    file = root / STEP / "COMMIT.json"
    value = {key: found for key, found in json.loads(file.read_bytes()).items() if key != "digest"} | wrong
    file.write_text(json.dumps({**value, "digest": _self_digest(value)}))
    ck, state = Checkpointer(root, keep_last=2), state_of(0.0)
    assert ck.steps() == [1, 2]
    assert ck.restore(state, fallback=True) == 2
    assert main(["ls", str(root)]) == 0
    ck.save(3, state_of(3.0))
    assert ck.steps() == [2, 3]


OWNER = {"host": "x", "pid": 1, "started": "1", "boot": "b", "namespace": 1, "began": 1.0}
WRONG_OWNER = {
    "pid is without end": json.dumps(OWNER).replace('"pid": 1', '"pid": 1e999'),
    "pid is a fraction": json.dumps(OWNER | {"pid": 1.5}),
    "pid is true": json.dumps(OWNER | {"pid": True}),
    "pid is text": json.dumps(OWNER | {"pid": "1"}),
    "began is text": json.dumps(OWNER | {"began": "x"}),
    "began is too large": json.dumps(OWNER | {"began": 10**400}),
    "a list": "[]",
    "deep": "[" * 200_000,
    "a pipe": "",
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("wrong", WRONG_OWNER)
def test_a_malformed_file_that_names_a_process_stops_nothing(root, wrong):
    left = root / ".tmp-00000003-0123456789abcdef"
    left.mkdir()
    for file in (left / ".owner.json", root / ".lock"):
        if wrong == "a pipe":
            os.mkfifo(file)
        else:
            file.write_text(WRONG_OWNER[wrong])
    os.utime(left, (1, 1))
    assert Checkpointer(root).restore(state_of(0.0)) == 2
    assert main(["gc", "--dry-run", str(root)]) == 0
    with Checkpointer(root) as ck:
        ck.save(3, state_of(3.0))
    assert sorted(path.name for path in root.iterdir()) == ["step-00000001", STEP, "step-00000003"]


@pytest.mark.parametrize("holders", ["1e999", '"x"', "null"])
def test_a_claim_with_a_malformed_count_is_taken_over(root, holders):
    (root / ".lock").write_text(json.dumps(OWNER)[:-1] + f', "holders": {holders}}}')
    with Checkpointer(root) as ck:
        ck.save(3, state_of(3.0))
    assert not (root / ".lock").exists()


@pytest.mark.parametrize("value", [{"pid": 1.0}, {"pid": "1"}, {"pid": True}], ids=str)
def test_a_process_id_that_is_no_integer_is_refused(value):
    with pytest.raises(ValueError, match="process id"):
        Process.decode(OWNER | value)


WRONG_INDEX = {
    "a list": lambda index: [1],
    "a number": lambda index: 5,
    "no tensors": without("tensors"),
    "no format": without("format"),
    "format is text": lambda index: {**index, "format": "1"},
    "no section": without("tensors", "optim"),
    "no shape": without("tensors", "model", "weight", "shape"),
    "no boxes": without("tensors", "model", "weight", "chunks"),
    "no start": without("tensors", "model", "weight", "chunks", "start"),
    "section is a list": lambda index: {**index, "tensors": {"model": [], "optim": {}, "extra": {}}},
    "tensor is text": lambda index: index["tensors"]["model"].update(weight="x"),
    "dtype is a list": tensor(dtype=["F32"]),
    "dtype is unknown": tensor(dtype="F3"),
    "shape is text": tensor(shape="88"),
    "shape is negative": tensor(shape=[-8, -8]),
    "shape is fractions": tensor(shape=[8.0, 8.0]),
    "shape has too few": tensor(shape=[64]),
    "more boxes than memory": box(count=10**15),
    "boxes without end": box(count=10**15, file=0, start=0, offsets=[0, 0], sizes=[0, 0]),
    "count is negative": box(count=-1),
    "count is true": box(count=True),
    "too few starts": box(count=2, start=[0]),
    "start is negative": box(start=-4096),
    "start past the end": box(start=1 << 40),
    "file is none": box(file=99),
    "file is negative": box(file=-1),
    "box outside of the shape": box(offsets=[4, 0]),
    "a hole": box(sizes=[4, 8]),
    "no boxes at all": box(count=0),
    "the upper half twice": box(count=2, file=[0, 0], start=[0, 0], offsets=[[0, 0], 0], sizes=[[4, 4], 8]),
    "the whole twice": box(count=2, file=[0, 0], offsets=[[0, 0], 0], sizes=[[8, 8], 8]),
    "an overlap as large as the hole": box(
        count=3, file=[0, 0, 0], offsets=[[0, 0, 3], [0, 4, 4]], sizes=[[8, 4, 4], 4]
    ),
    "box larger than the file": lambda index: (tensor(shape=[8, 8 << 30])(index), box(sizes=[8, 8 << 30])(index))[2:],
    "offset is null": box(offsets=[None, 0]),
    "a packed column that is not there": box(start="#0"),
    "a column of text": box(start="5"),
    "columns without data": lambda index: {**index, "columns": [[8, 100]]},
    "columns of an unknown width": lambda index: {**index, "columns": [[3, 0]]},
    "columns are a number": lambda index: {**index, "columns": 5},
    "frames are a number": box(frames=5),
    "too many frames": box(frames=[[1, 1]]),
    "a frame is negative": box(frames=[[-1]]),
    "data past the end": file(data_start=1 << 40),
    "data at a fraction": file(data_start=0.5),
    "blocks are a number": file(blocks=5),
    "tied is a list": lambda index: {**index, "tied": [1]},
    "tied to nothing": lambda index: {**index, "tied": {"head": "nowhere"}},
    "frames of weights": box(frames=[[100]]),
    "files twice": lambda index: index["files"].append(index["files"][0]),
}


@pytest.mark.parametrize("wrong", WRONG_INDEX)
def test_a_malformed_index_is_damage_of_the_index(root, wrong):
    value = read_index(root)
    value = WRONG_INDEX[wrong](value) or value
    files = value["files"] if isinstance(value, dict) and isinstance(value["files"][0]["blocks"], str) else None
    try:
        replace_index(root, zstandard.compress(json.dumps(value).encode()), files)
    except TypeError:
        replace_index(root, zstandard.compress(json.dumps(value).encode()))
    check_refused(root, "INDEX.json.zst")


GOOD_STATE = {"step": 2, "dp": [[0, 1]], "has": ["model"], "model": {}, "sched": [], "extra": {}}
GOOD_STATE["optim"] = {"groups": [], "leaves": {}}
WRONG_STATE = {
    "deep": DEEP,
    "too deep to follow": json.dumps(GOOD_STATE | {"extra": {"a": json.loads("[" * 900 + "]" * 900)}}),
    "not JSON": "\x00\xff",
    "a list": "[]",
    "empty": "{}",
    "no extra": json.dumps({key: value for key, value in GOOD_STATE.items() if key != "extra"}),
    "no optimizer": json.dumps(GOOD_STATE | {"optim": {}}),
    "no ranks": json.dumps(GOOD_STATE | {"dp": []}),
    "groups without parameters": json.dumps(GOOD_STATE | {"optim": {"groups": [{}], "leaves": {}}}),
    "bytes of a number": json.dumps(GOOD_STATE | {"extra": {"a": {"$bytes": 5}}}),
    "unhashable": json.dumps(GOOD_STATE | {"extra": {"a": {"$set": [[]]}}}),
    "wrong types": '{"step": 2, "dp": 1, "has": 1, "model": 1, "optim": 1, "sched": 1, "extra": 1}',
}


@pytest.mark.parametrize("wrong", WRONG_STATE)
def test_a_malformed_state_file_is_damage_of_that_file(root, wrong):
    replace_state(root, WRONG_STATE[wrong])
    check_refused(root, "state/state.json")


@pytest.mark.parametrize(
    "value",
    [
        {"$tensor": ["F32", [3], "AAAA"]},
        {"$tensor": ["F32", [3], "AAAAAA=="]},
        {"$device": "fast"},
        {"$ndarray": ["<U0", [200_000_000], ""]},
        {"$ndarray": ["<U0", [10**14], ""]},
        {"$numpy": ["<U0", [3, -1], ""]},
        {"$stored": "gone"},
        {"$later": 1},
    ],
    ids=["bytes", "shape", "device", "empty texts", "no end of empty texts", "negative shape", "no tensor", "new tag"],
)
def test_a_malformed_value_in_a_state_file_is_damage_of_that_file(root, value):
    replace_state(root, json.dumps(GOOD_STATE | {"extra": {"seen": value}}))
    ck, state = Checkpointer(root), state_of(-1.0)
    with pytest.raises(DamageError, match=r"state/state\.json"):
        ck.restore(state, 2)
    assert ck.restore(state, fallback=True) == 1
    assert state.extra == {"seen": 1}
    if not {"$device", "$ndarray", "$numpy"} & value.keys():  # which `verify` would need torch and numpy for
        assert main(["verify", str(root)]) == 1


def test_empty_texts_are_read_back():
    value = {"one": np.str_(""), "some": np.ndarray((3,), "U0"), "none": np.ndarray((0, 5), "U0")}
    read = decode(TensorSink().encode(value, "extra"), lambda key: torch.empty(0))
    assert read["one"] == ""
    assert read["some"].tolist() == [""] * 3
    assert read["none"].shape == (0, 5)


@pytest.mark.parametrize("text", [DEEP, "[]", "\x00\xff"], ids=["deep", "a list", "not JSON"])
def test_a_malformed_state_file_of_a_rank_is_damage_of_that_file(tmp_path, text):
    for step in (1, 2):
        Checkpointer(tmp_path).save(step, TrainState(model=nn.Linear(8, 8), data=Position(), rng=False))
    replace_state(tmp_path, text, "state/rank-r00000.json")
    state = TrainState(model=nn.Linear(8, 8), data=Position(), rng=False)
    with pytest.raises(DamageError, match=r"state/rank-r00000\.json"):
        Checkpointer(tmp_path).restore(state)
    assert Checkpointer(tmp_path).restore(state, fallback=True) == 1
    assert main(["verify", str(tmp_path)]) == 1


@pytest.mark.timeout(20)
def test_a_state_file_that_is_a_pipe_is_damage_and_no_wait(root):
    replace_state(root, "")
    (root / STEP / "state" / "state.json").unlink()
    os.mkfifo(root / STEP / "state" / "state.json")
    assert "is no regular file" in check_refused(root, "state/state.json")


def test_frames_that_are_not_compressed_are_damage_of_their_file(tmp_path):
    def state(fill: float) -> TrainState:
        model = nn.Linear(8, 8)
        nn.init.constant_(model.weight, fill)
        optim = torch.optim.AdamW(model.parameters())
        model.weight.grad = torch.full((8, 8), fill)
        optim.step()
        return TrainState(model=model, optim=optim, rng=False)

    for step in (1, 2):
        Checkpointer(tmp_path).save(step, state(float(step)))

    def compress(index):
        index["format"] = 2
        index["tensors"]["optim"]["weight/exp_avg"]["chunks"]["frames"] = [[100]]

    rewrite_index(tmp_path, compress)
    rewrite_manifest(tmp_path, lambda value: value.update(format=2))
    with pytest.raises(DamageError, match=r"optim/optim-r00000\.safetensors: .*frame"):
        Checkpointer(tmp_path).restore(state(0.0))
    assert main(["verify", str(tmp_path)]) == 1
    restored, want = state(0.0), state(1.0)
    assert Checkpointer(tmp_path).restore(restored, fallback=True) == 1
    assert torch.equal(restored.model.weight, want.model.weight)
    moments = [next(iter(each.optim.state.values()))["exp_avg"] for each in (restored, want)]
    assert torch.equal(*moments)


def test_a_good_step_passes_every_check(root):
    reader = StepReader(root / STEP)
    assert reader.shared_state()["extra"] == {"seen": 2}
    assert reader.rank_state(7) == {}


def test_json_of_others_is_an_object_or_a_plain_error():
    assert parse_object(b'{"a": 1}', "x") == {"a": 1}
    for data in (DEEP.encode(), b"[1]", b"{", b"\xff\xfe", b"", b"1" * 10_000):
        with pytest.raises(ValueError, match="the header"):
            parse_object(data, "the header")


HEADERS = {
    "deep": DEEP,
    "a list": "[]",
    "tensor is text": '{"w": "x"}',
    "no dtype": '{"w": {"shape": [4], "data_offsets": [0, 16]}}',
    "negative shape": '{"w": {"dtype": "F32", "shape": [-2, -2], "data_offsets": [0, 16]}}',
    "shape of text": '{"w": {"dtype": "F32", "shape": "4", "data_offsets": [0, 16]}}',
    "fractions": '{"w": {"dtype": "F32", "shape": [4], "data_offsets": [0.0, 16.0]}}',
    "dtype is a number": '{"w": {"dtype": 5, "shape": [4], "data_offsets": [0, 16]}}',
    "outside": '{"w": {"dtype": "F32", "shape": [400], "data_offsets": [0, 1600]}}',
}


@pytest.mark.parametrize("wrong", HEADERS)
def test_a_malformed_safetensors_header_is_a_plain_error_that_names_the_file(tmp_path, wrong):
    text = HEADERS[wrong].encode()
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    with pytest.raises(ValueError, match=r"x\.safetensors"):
        SafetensorsReader(tmp_path)


def test_a_state_file_cut_short_after_it_was_opened_is_damage_and_no_bus_error(root):
    reader = StepReader(root / STEP)
    (root / STEP / "state" / "state.json").write_bytes(b"")
    with pytest.raises(DamageError, match=r"state/state\.json"):
        reader.shared_state()


def test_a_step_of_another_writer_whose_boxes_are_in_any_order_is_read(root):
    """The checks refuse nothing that the format allows: boxes listed backwards, columns written out."""

    def split(index):
        start = index["tensors"]["model"]["weight"]["chunks"]["start"]
        index["tensors"]["model"]["weight"]["chunks"] |= {
            "count": 2,
            "file": [index["tensors"]["model"]["weight"]["chunks"]["file"]] * 2,
            "start": [start + 128, start],
            "offsets": [[4, 0], [0, 0]],
            "sizes": [4, [8, 8]],
        }

    rewrite_index(root, split)
    state = state_of(0.0)
    assert Checkpointer(root).restore(state, 2) == 2
    assert torch.equal(state.model.weight, torch.full((8, 8), 2.0))
