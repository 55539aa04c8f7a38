"""Schedules are data: they survive every format, and the formats refuse what they cannot mean."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from titan_pipeline import (
    FAMILIES,
    Action,
    Costs,
    Kind,
    Link,
    Schedule,
    ScheduleError,
    build_schedule,
    from_torch_csv,
    lower,
    placement_from,
    simulate,
    to_torch_csv,
    v_placement,
    verify,
)
from titan_pipeline.families import one_f_one_b


def test_core_imports_nothing_but_the_standard_library():
    code = (
        "import sys, titan_pipeline, titan_pipeline.cli; "
        "bad = {'torch', 'numpy', 'scipy'} & set(sys.modules); sys.exit(f'imported {bad}' if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@given(
    name=st.sampled_from(sorted(FAMILIES)),
    p=st.integers(1, 6),
    k=st.integers(2, 4),
    communication=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_every_format_reads_back_what_it_wrote(name, p, k, communication):
    schedule = build_schedule(name, p, p * k)
    if communication:
        schedule = lower(schedule)
    assert Schedule.from_json(schedule.to_json()) == schedule
    assert Schedule.from_text(schedule.to_text()) == schedule
    plain = schedule.compute_only()
    assert from_torch_csv(to_torch_csv(schedule)).digest == plain.digest


def test_files_are_read_by_content(tmp_path):
    schedule = build_schedule("zbv", 2, 4)
    schedule.save(tmp_path / "a.json")
    (tmp_path / "b.txt").write_text(schedule.to_text())
    assert Schedule.load(tmp_path / "a.json") == Schedule.load(tmp_path / "b.txt") == schedule


def test_digest_ignores_the_name_and_nothing_else():
    a = build_schedule("1f1b", 2, 4)
    renamed = Schedule("other", a.num_microbatches, a.placement, a.ranks)
    assert renamed.digest == a.digest
    assert build_schedule("1f1b", 2, 5).digest != a.digest
    swapped = Schedule(a.name, 4, a.placement, (a.ranks[0], a.ranks[1][::-1]))
    assert swapped.digest != a.digest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.replace("titan-pipeline/schedule", "other"), "expected 'titan-pipeline/schedule'"),
        (lambda s: s.replace('"version": 1', '"version": 2'), "Upgrade"),
        (lambda s: s.replace("0F0", "0F9"), "digest does not match"),
        (lambda s: s.replace("0F0", "0F0xyz"), "not an action"),
        (lambda s: s.replace('"placement"', '"placements"'), "unknown keys"),
        (lambda s: "[1, 2]", "one JSON object"),
        (lambda s: s[:-5], "not JSON"),
    ],
)
def test_json_refuses_files_that_do_not_mean_a_schedule(change, message):
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_json(change(build_schedule("1f1b", 2, 2).to_json()))


def test_text_refuses_a_missing_rank():
    text = build_schedule("1f1b", 2, 2).to_text()
    with pytest.raises(ScheduleError, match="rank 1"):
        Schedule.from_text("\n".join(text.splitlines()[:-1]))


def test_torch_csv_cells_must_match_whole():
    with pytest.raises(ScheduleError, match="2F0xyz"):
        from_torch_csv("0F0,2F0xyz\n")


def test_torch_csv_skips_fsdp_actions_and_keeps_overlapped_pairs():
    text = "0UNSHARD,0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2,0REDUCE_GRAD,0RESHARD\n"
    schedule = from_torch_csv(text)
    assert [str(a) for a in schedule.ranks[0]] == ["0F0", "0F1", "0F2", "0B0", "0B1", "0B2"]
    assert schedule.overlaps == ((2,),)
    verify(schedule)
    assert "(0F2;0B0)OVERLAP_F_B" in to_torch_csv(schedule)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: build_schedule("zbb", 4, 8), "Use one of gpipe"),
        (lambda: build_schedule("dualpipe_v", 4, 7), "num_microbatches >= 8"),
        (lambda: build_schedule("zbv", 4, 8, num_chunks=3), "exactly 2 stage"),
        (lambda: build_schedule("1f1b", 0, 8), "at least 1"),
        (lambda: build_schedule("1f1b", 4, 8, mem_limit=3), "only zb_auto"),
        (lambda: build_schedule("zb_auto", 4, 8, mem_limit=0.5), "less than one microbatch"),
        (lambda: build_schedule("zb_auto", 4, 8, costs=Costs.uniform(3)), "describe 3 stages"),
        (lambda: placement_from("w", 4, 2), "Use 'loop', 'v'"),
        (lambda: placement_from([0, 2], 3, 1), "without a stage"),
        (lambda: Schedule("x", 2, (0, 1), ()), "one program per rank"),
        (lambda: Costs.uniform(2, forward=-1), "not negative"),
        (lambda: Link(latency=-1), "latency"),
        (lambda: simulate(one_f_one_b(2, 2), overlap=0), "overlap=0"),
    ],
)
def test_impossible_requests_say_what_would_work(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_costs_survive_json_with_links():
    costs = Costs(
        forward=(1, 2), input_grad=(1, 1), weight_grad=(0.5, 0.5), activation=(4, 4), weight_context=(1, 1),
        payload=(8, 0), link=Link(latency=0.1), links={(0, 1): Link(latency=0.2, bandwidth=4.0)},
    )  # fmt: skip
    assert Costs.from_json(costs.to_json()) == costs
    with pytest.raises(ValueError, match="unknown keys"):
        Costs.from_json(costs.to_json().replace("payload", "payloads"))


def test_messages_queue_for_the_bandwidth_of_their_link():
    """Two microbatches of 4 units over 1 unit a time: the second leaves only when the first is through."""
    costs = Costs(
        forward=(1, 1), input_grad=(0, 0), weight_grad=(0, 0), activation=(1, 1), weight_context=(0, 0),
        payload=(4, 0), link=Link(latency=10, bandwidth=1),
    )  # fmt: skip
    schedule = Schedule("two", 2, (0, 1), build_schedule("gpipe", 2, 2).for_evaluation().ranks)
    slots = simulate(schedule, costs).timeline[1]
    assert [s.start for s in slots] == [1 + 4 + 10, 1 + 4 + 4 + 10]


def test_overlapped_pairs_save_the_share_that_overlap_gives():
    schedule = build_schedule("dualpipe_v", 2, 8)
    assert any(schedule.overlaps)
    plain, overlapped = simulate(schedule), simulate(schedule, overlap=0.8)
    assert overlapped.makespan < plain.makespan
    busy = sum(s.end - s.start for s in overlapped.timeline[0])
    pairs = sum(
        s.end - s.start for i in schedule.overlaps[0] for s in plain.timeline[0][i : i + 2]
    )  # time of the pairs when run one after the other
    assert busy == pytest.approx(sum(s.end - s.start for s in plain.timeline[0]) - 0.2 * pairs)


def test_evaluation_order_keeps_one_activation_a_rank_for_every_family():
    for name in FAMILIES:
        schedule = build_schedule(name, 4, 8)
        evaluation = schedule.for_evaluation(5)
        proof = verify(evaluation, forward_only=True)
        with pytest.raises(ScheduleError, match="never runs"):
            verify(evaluation)
        assert evaluation.forward_only
        assert max(proof.peak) == pytest.approx(1 / schedule.num_chunks)


def test_v_placement_turns_at_the_last_rank():
    assert v_placement(3) == (0, 1, 2, 2, 1, 0)
    assert v_placement(2, 3) == (0, 1, 1, 0, 0, 1)
    assert Action(Kind.F, 2, 0) == Action.parse("2F0")
