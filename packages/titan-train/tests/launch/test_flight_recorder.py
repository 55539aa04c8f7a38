"""Torch's flight recorder is private: this holds what is used of it. Checked on torch 2.11 and 2.15."""

import json
import tracemalloc
from types import SimpleNamespace

import pytest
from titan_testing import run_ranks
from titan_train.launch.rank import flight_recorder
from titan_train.launch.rank.flight_recorder import read_dumps, record_collectives, wait_for_dumps, write_dump
from titan_train.launch.rank.monitor import set_collective_timeout


def one_rank_stays_away(folder):
    import time

    import torch
    import torch.distributed as dist

    dist.destroy_process_group()
    record_collectives()
    import os

    store = dist.FileStore(f"{folder}/store", 3)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    dist.all_reduce(torch.ones(4))
    work = dist.all_reduce(torch.ones(4), async_op=True) if rank != 2 else None
    write_dump(folder / "dumps", rank)
    if rank == 2:
        while not all((folder / f"dumps/rank-{peer}.json").exists() for peer in (0, 1)):
            time.sleep(0.01)
        dist.all_reduce(torch.ones(4))
    else:
        work.wait()


def test_the_rank_that_did_not_come_is_named(tmp_path):
    run_ranks(one_rank_stays_away, 3, tmp_path)
    found = read_dumps(tmp_path / "dumps", 3)
    assert found.missing == (2,)
    assert "rank 2 did not enter gloo:all_reduce number 2 of group 'default_pg'" in found.text
    assert "where ranks 0, 1 are waiting; rank 2 is at" in found.text
    assert "in write_dump" in found.text  # where its main thread stood


def write_newest(folder, rank, number, **words):
    entry = {
        "process_group": ["0", "x"],
        "collective_seq_id": number,
        "profiling_name": "all_reduce",
        "input_sizes": [],
    }
    (folder / f"rank-{rank}.stacks.txt").touch()
    (folder / f"rank-{rank}.newest.json").write_text(json.dumps([entry | words]))


def test_a_rank_that_does_not_answer_is_the_missing_one(tmp_path):
    for rank in (0, 2):
        write_newest(tmp_path, rank, 1, retired=True)
    found = read_dumps(tmp_path, 3)
    assert found.missing == (1,)
    assert found.text == "rank 1 did not respond: stopped, or stuck below Python"
    assert "ranks 1, 3, 4, 5, 6, 7, 8, 9 and 590 more did not respond" in read_dumps(tmp_path, 600).text


def test_the_rank_that_did_not_come_is_named_though_another_is_silent(tmp_path):
    for rank, number in ((0, 5), (2, 4), (3, 5)):
        write_newest(tmp_path, rank, number)
    found = read_dumps(tmp_path, 4)
    assert found.missing == (1, 2)
    assert (
        "rank 1 did not respond: stopped, or stuck below Python; rank 2 did not enter all_reduce number 5" in found.text
    )


def test_dumps_are_waited_for_while_more_arrive(tmp_path, monkeypatch):
    now, late = [0.0], iter(range(10))

    def sleep(_):
        now[0] += 0.8
        if (rank := next(late, None)) is not None:
            write_newest(tmp_path, rank, 4 if rank == 9 else 5)

    monkeypatch.setattr(flight_recorder, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    wait_for_dumps(tmp_path, 10, quiet_s=0.9)
    assert read_dumps(tmp_path, 10).missing == (9,)
    for quiet_s, most_s, waited in ((30.0, 2.0, 2.4), (2.0, 30.0, 2.4)):
        began = now[0]
        wait_for_dumps(tmp_path, 13, quiet_s, most_s)
        assert now[0] - began == pytest.approx(waited)


def test_a_comparison_reads_the_newest_collectives_alone(tmp_path):
    for rank in range(4):
        write_newest(tmp_path, rank, 5)
        (tmp_path / f"rank-{rank}.json").write_text(json.dumps([{"collective_seq_id": 1}] * 100_000))
    tracemalloc.start()
    try:
        read_dumps(tmp_path, 4)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_ranks_that_are_level_tell_nothing(tmp_path):
    for rank in (0, 1):
        (tmp_path / f"rank-{rank}.newest.json").write_text("[]")
    assert read_dumps(tmp_path, 2).missing == ()


def time_out_after_tightening(folder):
    import time

    import pytest
    import torch
    import torch.distributed as dist

    dist.barrier()
    set_collective_timeout(0.5)
    if dist.get_rank() == 0:
        started = time.monotonic()
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1))
        (folder / "seconds").write_text(str(time.monotonic() - started))
    else:
        while not (folder / "seconds").exists():
            time.sleep(0.05)
    import os

    os._exit(0)


def test_a_tightened_time_out_holds_from_the_next_collective(tmp_path):
    run_ranks(time_out_after_tightening, 2, tmp_path, allow_death=True)
    assert float((tmp_path / "seconds").read_text()) < 40  # 60 s before


def test_damaged_dumps_never_raise(tmp_path):
    good = json.dumps([{"process_group": ["0", "x"], "collective_seq_id": 1, "profiling_name": "a", "input_sizes": []}])
    for content in ("", "{", "[1]", '[{"process_group": []}]', '{"a": 1}', "null"):
        (tmp_path / "rank-0.newest.json").write_text(good)
        (tmp_path / "rank-1.newest.json").write_text(content)
        assert read_dumps(tmp_path, 2).text
    (tmp_path / "rank-1.newest.json").write_text(good.replace("1,", "2,", 1))
    assert read_dumps(tmp_path, 2).text  # the stacks are missing
