"""Stores without rename, through fsspec: the manifest, the last object of a step, is its commit."""

import os
import uuid
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ckpt_layouts import assert_equal
from ckpt_loop import build, full_state, train
from titan_ckpt import Checkpointer, CheckpointError, DamageError, Manifest, Retention, TrainState, export_hf
from titan_ckpt.background.rendezvous import give_up
from titan_ckpt.cli import main
from titan_ckpt.comm import ByteComm
from titan_ckpt.format.manifest import CommitRecord
from titan_ckpt.interop import dcp_storage, stream
from titan_ckpt.interop.views import View
from titan_ckpt.load import reader as reading
from titan_ckpt.load.reader import StepReader
from titan_ckpt.save import prepare
from titan_ckpt.save.job import SaveLayout, WriteJob, commit_job, write_job
from titan_ckpt.state.leaves import tensor_bytes
from titan_ckpt.steps import claim, commit, leftovers, listing
from titan_ckpt.steps.claim import Process
from titan_ckpt.storage.files import MappedFile, fetch_all
from titan_ckpt.storage.paths import RemotePath, as_path, shared_between_processes
from titan_testing import run_ranks
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

fsspec = pytest.importorskip("fsspec", reason="the extra titan-ckpt[fsspec]")
from fsspec.implementations.memory import MemoryFileSystem  # noqa: E402


class Objects(MemoryFileSystem):
    """Objects in memory: no rename, and the store goes away after ``writes_left`` more of them."""

    protocol = "objects"
    store: dict = {}  # noqa: RUF012 - as the class it extends
    pseudo_dirs = [""]  # noqa: RUF012
    cachable = False
    writes_left = 10**9
    failing = ""
    written: list = []  # noqa: RUF012

    def _strip(self, path):
        return self._strip_protocol(path)

    @classmethod
    def _strip_protocol(cls, path):
        return MemoryFileSystem._strip_protocol(str(path).replace("objects://", "memory://"))

    def unstrip_protocol(self, name):
        return "objects:/" + self._strip_protocol(name)

    def mv(self, *args, **kwargs):
        raise NotImplementedError("an object store cannot rename")

    def _count(self, path):
        if Objects.writes_left <= 0:
            raise OSError(5, "the store is gone")
        Objects.writes_left -= 1
        Objects.written.append(str(path))

    def _answer(self, path):
        if Objects.failing and Objects.failing in str(path):
            raise TimeoutError("503 slow down")

    def info(self, path, **kwargs):
        self._answer(path)
        return super().info(path, **kwargs)

    def cat_file(self, path, **kwargs):
        self._answer(path)
        return super().cat_file(path, **kwargs)

    def pipe_file(self, path, value, **kwargs):
        self._count(path)
        super().pipe_file(path, value, **kwargs)

    def _open(self, path, mode="rb", **kwargs):
        if "w" in mode:
            self._count(path)
        return super()._open(path, mode, **kwargs)


@pytest.fixture
def bucket():
    fsspec.register_implementation("objects", Objects, clobber=True)
    Objects.store, Objects.pseudo_dirs, Objects.writes_left, Objects.written, Objects.failing = {}, [""], 10**9, [], ""
    return f"objects://bucket-{uuid.uuid4().hex[:6]}/run"


def state_of(fill: float) -> TrainState:
    model = nn.Linear(40, 30)
    nn.init.constant_(model.weight, fill)
    return TrainState(model=model, rng=False, extra={"fill": fill})


def fill_of(root) -> tuple[int, float]:
    state = state_of(-1.0)
    step = Checkpointer(root).restore(state, verify="all")
    weight = state.model.weight.detach()
    assert bool((weight == weight[0, 0]).all())
    return step, float(weight[0, 0])


def test_a_loop_saves_resumes_and_retains_in_an_object_store(bucket):
    state = build()
    with Checkpointer(bucket, keep_last=2, compress="auto") as ck:
        for step in (1, 2, 3):
            train(state, 1)
            path = ck.save(step, state).path
    assert isinstance(path, RemotePath)
    assert str(path).startswith(bucket)
    assert ck.steps() == [2, 3]
    want, losses = full_state(state), train(state, 2)
    got = build(seed=9)
    assert Checkpointer(bucket).restore(got, verify="all") == 3
    assert_equal(full_state(got), want)
    assert train(got, 2) == losses
    notes = [name for name in Objects.store if "/." in name and not name.endswith("/run/.lock")]
    assert not notes, "notes are gone"


def test_the_manifest_is_the_last_object_of_a_step(bucket):
    Checkpointer(bucket).save(1, state_of(1.0))
    names = list(dict.fromkeys(name.rpartition("/")[2] for name in Objects.written))
    assert names[0] in (".lock", ".owner.json")
    assert names[-2:] == ["INDEX.json.zst", "MANIFEST.json"]


def test_a_store_that_goes_away_at_any_write_leaves_the_previous_step(bucket):
    ck = Checkpointer(bucket, keep_last=1)
    ck.save(1, state_of(1.0))
    for writes in range(5):
        Objects.writes_left = writes
        with pytest.raises(CheckpointError, match=r"cannot write below .*Earlier steps are intact"):
            ck.save(2, state_of(2.0))
        Objects.writes_left = 10**9
        assert fill_of(bucket) == (1, 1.0), writes
    ck.save(2, state_of(2.0))
    assert fill_of(bucket) == (2, 2.0)
    assert ck.steps() == [2]


def test_an_unfinished_save_is_no_step_and_swept_when_its_owner_is_dead(bucket):
    Checkpointer(bucket).save(1, state_of(1.0))
    root = as_path(bucket)
    alive, _ = commit.begin_save(root, 2, Process.of(os.getpid()))
    dead = replace(Process.of(os.getpid()), pid=2**30, started="1")
    gone, _ = commit.begin_save(root, 2, dead)
    (gone / "model-r00000.safetensors").write_bytes(b"half")
    abroad, _ = commit.begin_save(root, 2, Process("elsewhere", 1, "1"))
    assert len({alive.name, gone.name, abroad.name}) == 3
    assert Checkpointer(bucket).steps() == [1]
    assert [path.name for path in leftovers.sweep(root)] == [gone.name]
    assert not gone.exists()
    assert alive.exists()
    assert abroad.exists()


def test_a_save_that_is_committed_during_a_sweep_is_kept(bucket, monkeypatch):
    Checkpointer(bucket).save(1, state_of(1.0))
    root = as_path(bucket)
    manifest = Checkpointer(bucket).path(1) / "MANIFEST.json"
    data = manifest.read_bytes()
    manifest.unlink()
    claim.name_owner(manifest.parent, Process.of(os.getpid()))

    def looks_late(folder):
        manifest.write_bytes(data)
        claim.disown(folder)
        return claim.owner_alive(folder)

    monkeypatch.setattr(leftovers, "owner_alive", looks_late)
    assert leftovers.sweep(root) == []
    assert fill_of(bucket) == (1, 1.0)


@pytest.mark.parametrize("began", ['"x"', "null", "1" + "0" * 400])
def test_an_unfinished_save_in_a_store_whose_owner_is_malformed_is_swept(bucket, began):
    folder, _ = commit.begin_save(as_path(bucket), 1, Process.of(os.getpid()))
    owner = '{"host": "x", "pid": 1, "started": "1", "boot": "b", "namespace": 1, "began": %s}'
    (folder / ".owner.json").write_bytes((owner % began).encode())
    assert leftovers.sweep(as_path(bucket)) == [folder]


def test_saves_go_on_after_the_newest_steps_were_removed_by_hand(bucket):
    for step in (1, 2, 3):
        with Checkpointer(bucket) as ck:
            ck.save(step, state_of(float(step)))
    for step in (2, 3):
        commit.discard(Checkpointer(bucket).path(step))
    for step in (2, 3):
        with Checkpointer(bucket) as ck:
            ck.save(step, state_of(float(step)))
    assert Checkpointer(bucket).steps() == [1, 2, 3]
    serials = [CommitRecord.read(path).serial for _, path in listing.step_folders(as_path(bucket))]
    assert serials == [1, 4, 5]
    turns = [path.name for path in as_path(bucket).iterdir() if path.name.startswith("commit-")]
    assert turns == ["commit-00000005.json"]


def test_a_writer_that_looked_before_later_commits_takes_no_turn_that_is_over(bucket):
    ck = Checkpointer(bucket, keep_last=1)
    for step in (1, 2, 3):
        ck.save(step, state_of(float(step)))
    folder, _ = commit.begin_save(as_path(bucket), 9, Process.of(os.getpid()))
    with pytest.raises(FileExistsError, match="another writer"):
        commit.take_turn(folder, 2)
    turns = [path.name for path in as_path(bucket).iterdir() if path.name.startswith("commit-")]
    assert turns == ["commit-00000003.json"]


def test_a_store_that_fails_to_answer_is_an_error_and_nothing_is_deleted(bucket):
    ck = Checkpointer(bucket)
    for step in (1, 2, 3):
        ck.save(step, state_of(float(step)))
    before = sorted(Objects.store)
    for failing in ("MANIFEST", "step-00000002", "run"):
        Objects.failing = failing
        with pytest.raises(CheckpointError, match=r"cannot be read: 503 slow down"):
            Checkpointer(bucket).restore(state_of(0.0))
        with pytest.raises(OSError, match=r"cannot be read: 503 slow down"):
            ck.latest()
        with pytest.raises(CheckpointError, match="Earlier steps are intact"):
            ck.save(4, state_of(4.0))
        Objects.failing = ""
        assert {name for name in Objects.store if "step-00000004" not in name} >= set(before)
        leftovers.sweep(as_path(bucket))
        assert sorted(Objects.store) == before, "and what was begun is swept once the store answers"
    assert ck.steps() == [1, 2, 3]


def fail_after(monkeypatch, module, name: str) -> None:
    """Have ``module.name`` do its work and then fail."""
    real = getattr(module, name)

    def late(*args, **kwargs):
        real(*args, **kwargs)
        raise RuntimeError("too late")

    monkeypatch.setattr(module, name, late)


def save_directly(root: str) -> None:
    Checkpointer(root, keep_last=1).save(2, state_of(2.0))


def save_with_dcp(root: str) -> None:
    writer = dcp_storage.TitanStorageWriter(root, 2)
    try:
        dcp.save({"weight": torch.ones(4)}, storage_writer=writer)
    finally:
        writer.reset()


class Ones(View):
    def fill(self, box, into) -> None:
        into.fill_(1)


def write_views(root: str) -> None:
    stream.write_step(as_path(root), 2, {"model": {"weight": Ones("F32", (4,))}}, {}, lambda _: None)


@pytest.mark.parametrize(
    ("module", "save"),
    [(prepare, save_directly), (dcp_storage, save_with_dcp), (stream, write_views)],
    ids=["save", "dcp", "import"],
)
def test_a_save_that_fails_after_its_commit_keeps_the_step(bucket, monkeypatch, module, save):
    with Checkpointer(bucket) as ck:
        ck.save(1, state_of(1.0))
    fail_after(monkeypatch, module, "commit_now")
    with pytest.raises((RuntimeError, CheckpointException), match="too late"):
        save(bucket)
    assert Checkpointer(bucket).steps()[-1] == 2
    Manifest.open(Checkpointer(bucket).path(2))


def test_a_save_that_fails_before_its_commit_leaves_nothing(bucket, monkeypatch):
    fail_after(monkeypatch, prepare, "write_job")
    with Checkpointer(bucket) as ck, pytest.raises(RuntimeError, match="too late"):
        ck.save(1, state_of(1.0))
    assert not leftovers.folders_below(as_path(bucket))


def test_a_saver_that_ends_after_its_commit_keeps_the_step(bucket):
    ck = Checkpointer(bucket, keep_last=1)
    ck.save(1, state_of(1.0))
    comm = ByteComm()
    preparer = prepare.SavePreparer(comm, compress=False)
    planned = preparer.plan(2, state_of(2.0))
    job = preparer.begin(ck.root, planned, retention=Retention(last=1), owner=Process.of(os.getpid()))
    commit_job(job, write_job(job, map(tensor_bytes, planned.views())))
    assert give_up(job, "the saver process ended")
    assert fill_of(bucket) == (2, 2.0)


@pytest.mark.parametrize("committed", [True, False])
def test_a_save_given_up_while_the_store_fails_to_answer_is_kept_if_it_is_committed_else_swept(bucket, committed):
    folder, _ = commit.begin_save(as_path(bucket), 1, Process.of(os.getpid()))
    (folder / "model-r00000.safetensors").write_bytes(b"x")
    if committed:
        (folder / "MANIFEST.json").write_bytes(b"{}")
    Objects.failing = "MANIFEST"
    with pytest.raises(OSError, match="503"):
        commit.discard_unfinished(folder)
    Objects.failing = ""
    assert (folder / "model-r00000.safetensors").exists()
    leftovers.sweep(as_path(bucket))
    assert folder.exists() == committed


class ClientError(Exception):
    """As botocore raises: no `OSError`."""


def test_an_error_of_the_stores_own_kind_is_no_damage_and_names_the_path(bucket, monkeypatch):
    ck = Checkpointer(bucket)
    ck.save(1, state_of(1.0))

    def unreachable(self, path, **kwargs):
        raise ClientError("Could not connect to the endpoint")

    with monkeypatch.context() as patch:
        patch.setattr(Objects, "cat_file", unreachable)
        with pytest.raises(CheckpointError, match=r"run.*ClientError: Could not connect"):
            Checkpointer(bucket).restore(state_of(0.0))
        with pytest.raises(OSError, match=r"step-00000001.*ClientError: Could not connect"):
            ck.steps()
    assert fill_of(bucket) == (1, 1.0)


def test_a_request_that_fails_while_older_steps_are_retired_leaves_them_for_the_next_save(bucket, monkeypatch):
    ck = Checkpointer(bucket, keep_last=1)
    ck.save(1, state_of(1.0))
    real = commit.purge

    def purge(*args):
        Objects.failing = "step-00000001"
        try:
            return real(*args)
        finally:
            Objects.failing = ""

    with monkeypatch.context() as patch:
        patch.setattr(commit, "purge", purge)
        ck.save(2, state_of(2.0))
    assert ck.steps() == [1, 2]
    ck.save(3, state_of(3.0))
    assert ck.steps() == [3]


def test_a_look_at_a_store_that_meets_a_deleted_step_finds_the_one_that_replaced_it(bucket, monkeypatch):
    ck = Checkpointer(bucket, keep_last=1)
    ck.save(1, state_of(1.0))
    real, left = listing._look, [2, 3]

    def look(path):
        if left:
            with monkeypatch.context() as patch:
                patch.setattr(listing, "_look", real)
                ck.save(left.pop(0), state_of(0.0))
        return real(path)

    monkeypatch.setattr(listing, "_look", look)
    assert [step for step, _ in listing.step_folders(as_path(bucket))] == [3]
    assert listing.step_folder(as_path(bucket), 3).name.startswith("step-00000003.r0.")
    assert listing.step_folder(as_path(bucket), 1) is None


def test_a_file_of_the_users_in_a_store_is_no_step(bucket):
    ck = Checkpointer(bucket)
    ck.save(1, state_of(1.0))
    for name in ("notes.txt", ".tmp-mine/x", "step-00000002-best/x", "step-00000007.r0.0123456789abcdef"):
        (as_path(bucket) / name).write_bytes(b"mine")
    assert Checkpointer(bucket).steps() == [1]
    assert len([name for name in Objects.store if Objects.store[name].getvalue() == b"mine"]) == 4


def test_a_path_spelled_unlike_the_store_spells_it_keeps_the_step_just_saved(bucket):
    fs = fsspec.filesystem("objects")
    ck = Checkpointer(RemotePath(fs, bucket), keep_last=1)
    for step in (1, 2):
        path = ck.save(step, state_of(float(step))).path
    assert ck.steps() == [2]
    assert (path / "MANIFEST.json").exists()


class Endpoint(Objects):
    """A store with an option that tells where it is."""

    protocol = "endpoint"

    def __init__(self, endpoint: str = "default", **options) -> None:
        super().__init__(**options)
        self.endpoint = endpoint


def job_in(folder) -> WriteJob:
    return WriteJob(folder, 1, "0" * 16, 0, 1, SaveLayout(()), (), None)


def test_a_job_keeps_the_options_of_its_store(bucket):
    fsspec.register_implementation("endpoint", Endpoint, clobber=True)
    path = RemotePath(Endpoint(endpoint="http://minio:9000"), "/opt/run")
    told = WriteJob.decode(job_in(path).encode(), SaveLayout(()))
    assert told.folder == path
    assert told.folder.fs.endpoint == "http://minio:9000"


def test_a_store_below_a_folder_of_another_is_saved_to_and_told(tmp_path):
    from fsspec.implementations.dirfs import DirFileSystem
    from fsspec.implementations.local import LocalFileSystem

    (tmp_path / "deep").mkdir()
    for fs in (DirFileSystem(str(tmp_path / "deep")), DirFileSystem(path=str(tmp_path / "deep"), fs=LocalFileSystem())):
        path = RemotePath(fs, "bk")
        told = WriteJob.decode(job_in(path).encode(), SaveLayout(())).folder
        assert shared_between_processes(path)
        (told / "x").mkdir()
        (told / "x" / "y").write_bytes(b"1")
        assert [child.path for child in path.iterdir()] == ["bk/x"]
        assert (tmp_path / "deep" / "bk" / "x" / "y").read_bytes() == b"1"


def test_a_store_with_options_that_are_no_plain_data_is_refused(tmp_path):
    from fsspec.implementations.local import LocalFileSystem

    path = RemotePath(LocalFileSystem(auto_mkdir=True, hook=object()), str(tmp_path))
    assert not shared_between_processes(path)
    with pytest.raises(ValueError, match="Make it with options that are plain data"):
        job_in(path).encode()


def test_stores_of_one_process_are_told_from_those_that_all_reach(bucket, tmp_path):
    from fsspec.implementations.dirfs import DirFileSystem

    assert shared_between_processes(tmp_path)
    assert shared_between_processes(as_path(f"file://{tmp_path}"))
    assert shared_between_processes(RemotePath(fsspec.filesystem("file", auto_mkdir=True), str(tmp_path)))
    assert not shared_between_processes(as_path("memory://run"))
    assert not shared_between_processes(RemotePath(DirFileSystem("run", fs=fsspec.filesystem("memory")), "a"))
    assert not shared_between_processes(as_path(bucket)), "registered in this process only"


def test_a_step_saved_again_replaces_the_one_before(bucket):
    ck = Checkpointer(bucket)
    ck.save(1, state_of(1.0))
    ck.save(1, state_of(5.0))
    assert fill_of(bucket) == (1, 5.0)
    assert len([path for path in as_path(bucket).iterdir() if path.is_dir()]) == 1


def test_damage_in_a_store_is_found_and_named(bucket):
    path = Checkpointer(bucket).save(1, state_of(1.0)).path
    file = path / "model-r00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-9] ^= 2
    file.write_bytes(bytes(data))
    with pytest.raises(DamageError, match=r"model-r00000.safetensors block 0"):
        Checkpointer(bucket).restore(state_of(0.0))
    file.write_bytes(bytes(data[:-1]))
    with pytest.raises(DamageError, match=r"bytes, .* were written"):
        Manifest.open(str(path))
    assert Checkpointer(bucket).latest() is None


def test_only_the_blocks_that_are_needed_are_fetched(bucket, monkeypatch):
    path = as_path(bucket) / "big"
    data = bytes(range(256)) * (80 << 12)  # 80 MiB
    path.write_bytes(data)
    asked = []
    real = RemotePath.read_range

    def read_range(self, begin, end):
        asked.append((begin >> 20, end >> 20))
        return real(self, begin, end)

    monkeypatch.setattr(RemotePath, "read_range", read_range)
    file = MappedFile(path, len(data))
    fetch_all([(file, 5 << 20, 6 << 20)])
    fetch_all([(file, 0, 1)])
    fetch_all([(file, 0, len(data))])
    assert asked[:2] == [(4, 8), (0, 4)]
    assert sorted(asked[2:]) == [(8, 72), (72, 80)], "at the same time, in any order"
    assert bytes(file.view) == data


@pytest.mark.skipif(
    not Path("/proc/sys/vm/overcommit_memory").exists() or Path("/proc/sys/vm/overcommit_memory").read_text() == "2\n",
    reason="a kernel that promises no more memory than it has",
)
def test_a_file_larger_than_memory_is_mapped_and_its_view_is_writable(bucket, tmp_path):
    path = tmp_path / "large"
    path.touch()
    memory = dict(line.split()[:2] for line in Path("/proc/meminfo").read_text().splitlines())
    size = (int(memory["MemTotal:"]) + int(memory["SwapTotal:"]) + (1 << 20)) * 1024
    try:
        os.truncate(path, size)
    except OSError as err:
        pytest.skip(f"no sparse file of {size} bytes: {err}")
    for place in (path, as_path(f"{bucket}/large")):  # nothing is fetched
        view = MappedFile(place, size).view
        view[5] = 1
        assert bytes(view[4:7]) == b"\0\1\0"
    with path.open("rb") as file:
        assert file.read(8) == bytes(8), "the file is as it was"


def test_the_command_line_takes_urls(bucket, capsys, tmp_path):
    Checkpointer(bucket).save(1, state_of(1.0))
    step = str(Checkpointer(bucket).path(1))
    assert main(["ls", bucket]) == 0
    assert main(["verify", bucket]) == 0
    assert main(["show", step]) == 0
    assert "1 valid steps, 0 invalid" in capsys.readouterr().out
    assert len(export_hf(step, tmp_path / "hf")) == 1
    assert main(["diff", step, step]) == 0


def test_an_unknown_store_says_what_to_install():
    with pytest.raises(ValueError, match=r"nowhere|Protocol not known"):
        as_path("nowhere://x")


def save_files(url: str) -> list[int]:
    """Savers of several ranks meet in a store: files behind fsspec, without rename."""
    model = nn.Linear(64, 64)
    torch.nn.init.constant_(model.weight, 3.0)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    with Checkpointer(url, keep_last=1, async_=True) as ck:
        for step in (1, 2):
            ck.save(step, TrainState(model=model, rng=False))
    return ck.steps()


def test_asynchronous_saves_of_two_ranks_commit_in_a_store(tmp_path):
    url = f"file://{tmp_path}/run"
    assert run_ranks(save_files, 2, url) == [[2], [2]]
    state = TrainState(model=nn.Linear(64, 64), rng=False)
    assert Checkpointer(url).restore(state) == 2
    assert bool((state.model.weight == 3.0).all())


def test_a_look_at_a_whole_step_in_a_store_holds_a_few_megabytes_of_it(bucket, tmp_path, monkeypatch):
    paths = [
        Checkpointer(bucket).save(step, TrainState(model=nn.Linear(1024, 3072, bias=False), rng=False)).path
        for step in (1, 2)
    ]
    readers, held, init, real = [], [], StepReader.__init__, MappedFile.read

    def opened(reader, path):
        init(reader, path)
        readers.append(reader)

    def fetched(file, at, stop):
        real(file, at, stop)
        files = [mapped for reader in readers for mapped in reader._maps.values()]
        held.append(sum(len(mapped.fetched) for mapped in files))

    monkeypatch.setattr(reading, "HELD_BLOCKS", 0)  # of a small step
    monkeypatch.setattr(StepReader, "__init__", opened)
    monkeypatch.setattr(MappedFile, "read", fetched)
    assert main(["verify", str(paths[0])]) == 0
    assert max(held) == 1, "one block at a time"
    held.clear()
    assert main(["diff", *map(str, paths)]) == 1
    assert max(held) <= 6, "of each step 8 MiB, which may begin in the middle of a block"
    held.clear()
    export_hf(paths[0], tmp_path / "out")
    assert not readers[-1]._maps


def test_small_tensors_of_one_block_are_fetched_once(bucket, monkeypatch):
    model = nn.ParameterDict({f"w{i}": nn.Parameter(torch.ones(8)) for i in range(50)})
    paths = [Checkpointer(bucket).save(step, TrainState(model=model, rng=False)).path for step in (1, 2)]
    requests, real = [], MappedFile.read
    monkeypatch.setattr(MappedFile, "read", lambda *args: requests.append(args) or real(*args))
    assert main(["diff", *map(str, paths)]) == 0
    assert len(requests) == 2, "one block of each step"
