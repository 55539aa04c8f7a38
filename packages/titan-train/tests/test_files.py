import os

import pytest
from titan_train.files import open_file, parse_json, read_bytes, read_text, read_toml, write_atomic


@pytest.mark.parametrize("sync", [False, True])
def test_a_file_is_replaced_whole_and_its_folder_made(tmp_path, sync):
    file = tmp_path / "new" / "a.txt"
    write_atomic(file, "one", sync=sync)
    write_atomic(file, b"two", sync=sync)
    assert file.read_bytes() == b"two"
    assert list(file.parent.iterdir()) == [file]


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    file = tmp_path / "a.txt"
    write_atomic(file, "old")

    def no_space(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space") as caught:
        write_atomic(file, "new", sync=True)
    assert caught.value.filename == str(file)  # not a temporary name
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("text", ["{", "[" * 99_999, "x = " + "[" * 99_999])
def test_a_text_that_is_nested_too_deeply_is_damaged_like_any_other(text, tmp_path):
    with pytest.raises(ValueError, match=r"\w"):
        parse_json(text)
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(ValueError, match=r"\w"):
        read_toml(tmp_path / "a.toml")


def test_only_what_ends_by_itself_is_opened(tmp_path):
    (tmp_path / "empty").touch()
    assert read_bytes(tmp_path / "empty") == b""
    (tmp_path / "text").write_bytes("a\r\nb\rç".encode())
    assert read_text(tmp_path / "text") == (tmp_path / "text").read_text(encoding="utf-8")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero", "/proc/self/status"):
        with pytest.raises(OSError, match="a pipe, a device or a file of the kernel"):
            open_file(path)
    with pytest.raises(IsADirectoryError):
        open_file(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_file(tmp_path / "missing")
