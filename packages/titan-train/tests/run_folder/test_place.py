"""Whether a run can use its folder, found before anything is started."""

import os

import pytest
from titan_train.run_folder import Lease, check_run_folder


@pytest.mark.parametrize("name", ["checkpoints", "logs", "staged", "tokenizer", "failures"])
def test_a_file_where_a_run_keeps_a_folder_is_named_at_start(tmp_path, name):
    (tmp_path / name).write_text("")
    for call in (check_run_folder, Lease):
        with pytest.raises(
            ValueError, match=rf"{name} is not a folder, but a run keeps a folder under this name. Move it away"
        ):
            call(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.toml", "run.json", "lease.json", "attempts.jsonl"])
def test_a_folder_where_a_run_keeps_a_file_is_named_at_start(tmp_path, name):
    (tmp_path / name).mkdir()
    for call in (check_run_folder, Lease):
        with pytest.raises(ValueError, match=rf"{name} is a folder, but a run keeps a file under this name"):
            call(tmp_path)


def test_a_run_folder_below_a_file_or_a_dead_link_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"run.dir and run.name: .*file/a cannot be a folder: .*file is a file"):
        check_run_folder(tmp_path / "file" / "a")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(ValueError, match="is a link to nothing"):
        check_run_folder(tmp_path / "link")
    check_run_folder(tmp_path / "new" / "run")
    assert not (tmp_path / "new").exists()


def test_what_this_user_may_not_write_is_refused(tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    (run_dir / "checkpoints").mkdir(parents=True)
    (run_dir / "metrics.jsonl").write_text("")
    check_run_folder(run_dir)
    access = os.access  # root may write anywhere
    for locked, message in (
        (tmp_path, None), (run_dir, "may not write to"), (run_dir / "checkpoints", "may not write to"),
        (run_dir / "metrics.jsonl", "cannot be read and written by this user"),
    ):  # fmt: skip
        monkeypatch.setattr(os, "access", lambda path, mode, locked=locked: path != locked and access(path, mode))
        if message is None:
            check_run_folder(run_dir)
            with pytest.raises(ValueError, match=r"may not write to .*, where .*other would be made"):
                check_run_folder(tmp_path / "other")
        else:
            with pytest.raises(ValueError, match=message):
                check_run_folder(run_dir)
