"""Temporary folders of killed processes are swept, of these alone."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from titan_train import child_processes as temporary
from titan_train.child_processes import owned_folder

MAKE = "import sys, time; from pathlib import Path; from titan_train.child_processes import owned_folder as own; \
print(own('titan-x-', Path(sys.argv[1])), flush=True); time.sleep(600)"


@pytest.fixture
def other(tmp_path):
    """A process that made a folder, and the folder."""
    with subprocess.Popen([sys.executable, "-c", MAKE, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def names(folder):
    return {path.name for path in folder.iterdir()}


def test_the_folder_of_a_killed_process_is_swept_and_that_of_a_living_one_stays(tmp_path, other):
    process, folder = other
    (folder / "store").write_text("x")
    mine = owned_folder("titan-x-", tmp_path)
    assert names(tmp_path) == {folder.name, mine.name}
    process.kill()
    process.wait()
    second = owned_folder("titan-x-", tmp_path)
    assert names(tmp_path) == {mine.name, second.name}


@pytest.mark.parametrize(
    ("owner", "age_s", "swept"),
    [
        ({"pid": 2**22 + 1}, 0, True), ({"started": "1"}, 0, True), ({}, 0, False),
        ({"boot": "another"}, 0, False), ({"boot": "another"}, 10**9, True), ({"host": "elsewhere"}, 10**9, False),
        ({"pid": "x"}, 10**9, False),
    ],
)  # fmt: skip
def test_a_folder_goes_only_where_its_owner_is_proven_gone(tmp_path, owner, age_s, swept):
    folder = owned_folder("titan-x-", tmp_path)
    file = folder / ".owner"
    file.write_text(json.dumps(json.loads(file.read_text()) | owner))
    os.utime(file, (file.stat().st_mtime - age_s,) * 2)
    owned_folder("titan-x-", tmp_path)
    assert folder.exists() is not swept


def test_a_folder_whose_owner_cannot_be_written_does_not_stay(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        owned_folder("titan-x-", tmp_path)
    assert names(tmp_path) == set()


def test_what_names_no_owner_or_is_another_users_stays(tmp_path, monkeypatch):
    for name, content in (("titan-x-old", None), ("titan-x-torn", '{"pid"'), ("another", '{"host": ""}')):
        (tmp_path / name).mkdir()
        if content is not None:
            (tmp_path / name / ".owner").write_text(content)
    (tmp_path / "titan-x-file").write_text("")
    (tmp_path / "titan-x-link").symlink_to(tmp_path / "another")
    before = names(tmp_path)
    dead = owned_folder("titan-x-", tmp_path)
    (dead / ".owner").write_text(json.dumps(json.loads((dead / ".owner").read_text()) | {"started": "1"}))
    monkeypatch.setattr(temporary.os, "getuid", lambda: -1)
    owned_folder("titan-x-", tmp_path)
    assert before | {dead.name} < names(tmp_path)
