import json
import time

import pytest
from titan_train.launch.rank.failure import (
    clear_failures,
    describe_exit,
    describe_failure,
    first_failure,
    write_failure,
)


def test_the_earliest_failure_is_the_one_that_is_told(tmp_path):
    write_failure(tmp_path, 3, KeyError("cause"))
    time.sleep(0.01)
    write_failure(tmp_path, 0, RuntimeError("Connection closed by peer"))
    found = first_failure(tmp_path)
    assert found is not None
    assert found.rank == 3
    assert "rank 3 of 4 failed: KeyError: 'cause'" in describe_failure(found, 4)
    clear_failures(tmp_path)
    assert first_failure(tmp_path) is None


def test_a_broken_connection_is_no_cause_though_its_machine_has_a_clock_that_is_behind(tmp_path):
    write_failure(tmp_path, 0, RuntimeError("Connection closed by peer"))
    time.sleep(0.01)
    write_failure(tmp_path, 3, KeyError("cause"))
    assert first_failure(tmp_path).rank == 3


def test_a_users_mistake_is_its_message_and_nothing_else(tmp_path):
    mistake = write_failure(tmp_path, 1, ValueError("seq_len=3 is odd: use 4."))
    assert describe_failure(mistake, 2) == "rank 1 of 2 failed: ValueError: seq_len=3 is odd: use 4."


def test_another_error_keeps_its_traceback(tmp_path):
    try:
        raise RuntimeError("disk")
    except RuntimeError as err:
        failure = write_failure(tmp_path, 0, err)
    text = describe_failure(failure, 2)
    assert text.startswith("Traceback")
    assert text.endswith("rank 0 of 2 failed: RuntimeError: disk")


def test_an_exit_without_a_word_names_the_signal():
    assert "rank 1 of 2 was ended by SIGKILL" in describe_exit(1, 2, -9)
    assert "was ended by signal 40" in describe_exit(1, 2, -40)  # a real-time one
    assert "exited with code 7" in describe_exit(0, 2, 7)


@pytest.mark.parametrize(
    ("error", "trained", "mistake"),
    [
        (ValueError("lr=-1 must be > 0"), False, True),
        (ValueError("a torn file, read in mid-run"), True, False),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), False, False),
        (json.JSONDecodeError("Expecting value", "", 0), False, False),
        (KeyError("x"), False, False),
    ],
)
def test_only_a_value_error_before_the_first_step_is_the_users_mistake(tmp_path, error, trained, mistake):
    assert write_failure(tmp_path, 0, error, trained=trained).users_mistake is mistake


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        '{"rank": 1}',
        "\x00",
        "[" * 9999,
        '{"rank": 0, "time_s": "x", "kind": 1, "message": 2, "traceback": 3, "users_mistake": true}',
        '{"rank": 0, "time_s": null, "kind": "a", "message": "b", "traceback": "c", "users_mistake": false}',
    ],
)
def test_a_damaged_failure_file_says_nothing(tmp_path, content):
    write_failure(tmp_path, 1, ValueError("real"))
    (tmp_path / "failures" / "rank-0.json").write_text(content)
    found = first_failure(tmp_path)
    assert found is not None
    assert found.rank == 1


@pytest.mark.parametrize(
    ("error", "world"),
    [
        (OSError(5, "Input/output error"), True),
        (RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("connect"), False),
    ],
)
def test_errors_of_the_disk_and_the_network_are_told_apart(tmp_path, error, world):
    write_failure(tmp_path, 0, error, trained=True)
    found = first_failure(tmp_path)
    assert found is not None
    assert (found.from_world, found.in_step) == (world, True)


def test_a_failure_that_cannot_be_written_is_still_returned(tmp_path):
    (tmp_path / "failures").write_text("a file in the way")
    assert write_failure(tmp_path, 1, ValueError("real")).message == "real"
