"""The verifier rejects everything that a brute-force execution shows to deadlock or go wrong, and nothing else.

The judge shares no code with the verifier: it runs every rank as a little machine with message queues (buffered) or
blocking channels (rendezvous), carries symbolic data, and looks at what comes out.
"""

import random
from collections import deque

import pytest
from titan_pipeline import FAMILIES, Action, Kind, Schedule, ScheduleError, build_schedule, lower, verify


def runs(schedule, transport):
    """Execute the programs of a schedule with communication; True if all finish with the right data."""
    place, last = schedule.placement, schedule.num_stages - 1
    queues, position = {}, [0] * schedule.num_ranks
    memory = [{} for _ in schedule.ranks]  # what each rank has: (what, stage, microbatch) -> value
    done = []

    def pair(action):
        kind, s, _ = action
        other = {Kind.SEND_F: s + 1, Kind.RECV_F: s - 1, Kind.SEND_B: s - 1, Kind.RECV_B: s + 1}[kind]
        if not 0 <= other <= last:
            return None
        a, b = place[s], place[other]
        return (a, b) if kind in (Kind.SEND_F, Kind.SEND_B) else (b, a)

    def deliver(action, value, rank):
        memory[rank]["in" if action.kind is Kind.RECV_F else "grad", action.stage, action.microbatch] = value

    def outgoing(action, rank):
        return memory[rank].get(("out" if action.kind is Kind.SEND_F else "din", action.stage, action.microbatch))

    # a buffered receive books its place in line; the message is matched when both sides have come by
    booked = {}

    def match(channel):
        while queues.get(channel) and booked.get(channel):
            value, (action, rank) = queues[channel].popleft(), booked[channel].popleft()
            deliver(action, value, rank)

    def compute(action, rank):
        kind, s, mb = action
        have = memory[rank]
        if kind is Kind.F:
            if s and place[s - 1] == rank:
                source = have.get(("out", s - 1, mb))
            else:
                source = have.get(("in", s, mb)) if s else ("data", mb)
            if source is None:
                return False
            have["out", s, mb] = ("f", s, source)
        elif kind in (Kind.B, Kind.I):
            key = ("din", s + 1, mb) if s < last and place[s + 1] == rank else ("grad", s, mb)
            source = have.get(key) if s < last else ("loss", mb)
            if source is None or ("out", s, mb) not in have:
                return False
            have["din", s, mb] = ("b", s, source)
        elif ("din", s, mb) not in have:
            return False
        done.append((kind, s, mb, have.get(("din", s, mb)) if kind is not Kind.F else have["out", s, mb]))
        return True

    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(schedule.ranks):
            while position[rank] < len(program):
                action = program[position[rank]]
                if action.kind in (Kind.F, Kind.B, Kind.I, Kind.W):
                    if place[action.stage] != rank or not compute(action, rank):
                        break
                else:
                    channel = pair(action)
                    if channel is None or channel[0] == channel[1]:
                        return False
                    sending = action.kind in (Kind.SEND_F, Kind.SEND_B)
                    if sending and outgoing(action, rank) is None:
                        break
                    if transport == "rendezvous":
                        peer = channel[1] if sending else channel[0]
                        there = (
                            schedule.ranks[peer][position[peer]] if position[peer] < len(schedule.ranks[peer]) else None
                        )
                        if there is None or there.kind in (Kind.F, Kind.B, Kind.I, Kind.W) or pair(there) != channel:
                            break
                        if sending == (there.kind in (Kind.SEND_F, Kind.SEND_B)):
                            break
                        send, recv, at = (action, there, peer) if sending else (there, action, rank)
                        value = outgoing(send, channel[0])
                        if value is None:
                            break
                        deliver(recv, value, at)
                        position[peer] += 1
                    elif sending:
                        queues.setdefault(channel, deque()).append(outgoing(action, rank))
                        match(channel)
                    else:
                        booked.setdefault(channel, deque()).append((action, rank))
                        match(channel)
                position[rank] += 1
                moved = True
    if any(position[r] < len(program) for r, program in enumerate(schedule.ranks)):
        return False
    if any(queues.values()) or any(booked.values()):
        return False  # a message nobody took, or a receive nobody served
    return _results_right(schedule, done)


def _results_right(schedule, done):
    forwards, gradients, weights = {}, {}, {}
    for kind, s, mb, value in done:
        table = forwards if kind is Kind.F else weights if kind is Kind.W else gradients
        table.setdefault((s, mb), []).append((kind, value))
    for mb in range(schedule.num_microbatches):
        value, gradient = ("data", mb), ("loss", mb)
        for s in range(schedule.num_stages):
            value = ("f", s, value)
            if forwards.get((s, mb)) != [(Kind.F, value)]:
                return False
        for s in reversed(range(schedule.num_stages)):
            gradient = ("b", s, gradient)
            found = gradients.get((s, mb))
            halves = weights.get((s, mb), [])
            if found == [(Kind.B, gradient)]:
                if halves:
                    return False
            elif found != [(Kind.I, gradient)] or len(halves) != 1:
                return False
    count = schedule.num_stages * schedule.num_microbatches
    return sum(map(len, forwards.values())) == sum(map(len, gradients.values())) == count


def mutate(schedule, rng):
    """Drop, double, swap, move or retarget one action, or swap two receives of a rank."""
    ranks = [list(program) for program in schedule.ranks]
    rank = rng.randrange(len(ranks))
    program = ranks[rank]
    i, j = rng.randrange(len(program)), rng.randrange(len(program))
    how = rng.choice(("drop", "double", "swap", "neighbours", "move", "retarget", "receives"))
    if how == "drop":
        del program[i]
    elif how == "double":
        program.insert(j, program[i])
    elif how == "swap":
        program[i], program[j] = program[j], program[i]
    elif how == "neighbours":
        j = min(i + 1, len(program) - 1)
        program[i], program[j] = program[j], program[i]
    elif how == "move":
        program.insert(j, program.pop(i))
    elif how == "retarget":
        kind, stage, mb = program[i]
        program[i] = rng.choice(
            (
                Action(kind, stage, rng.randrange(schedule.num_microbatches)),
                Action(kind, rng.randrange(schedule.num_stages), mb),
                Action(rng.choice(list(Kind)), stage, mb),
            )
        )
    else:
        received = [k for k, a in enumerate(program) if a.kind in (Kind.RECV_F, Kind.RECV_B)]
        if len(received) > 1:
            a, b = rng.sample(received, 2)
            program[a], program[b] = program[b], program[a]
    return Schedule(schedule.name, schedule.num_microbatches, schedule.placement, tuple(map(tuple, ranks)))


def judged(schedule, transport):
    """The verifier's objection, or None."""
    try:
        verify(schedule, transport=transport)
    except ScheduleError as err:
        return err
    return None


def sample_schedules(count, rng):
    made = []
    while len(made) < count:
        name, p = rng.choice(sorted(FAMILIES)), rng.randrange(1, 5)
        m = rng.randrange(1, 9)
        try:
            schedule = build_schedule(name, p, m)
        except ValueError:
            continue
        made.append(lower(schedule))
    return made


@pytest.mark.parametrize(
    ("schedules", "mutations"), [(40, 50), pytest.param(200, 60, marks=pytest.mark.slow)], ids=["2000", "12000"]
)
def test_every_mutation_that_deadlocks_or_goes_wrong_is_rejected(schedules, mutations):
    rng = random.Random(20261121)
    rejected = accepted = 0
    for schedule in sample_schedules(schedules, rng):
        for transport in ("buffered", "rendezvous"):
            assert runs(schedule, transport)
        for _ in range(mutations):
            mutant = mutate(schedule, rng)
            transport = rng.choice(("buffered", "rendezvous"))
            fine = runs(mutant, transport) and mutant.communicates == schedule.communicates
            verdict = judged(mutant, transport)
            assert (verdict is None) == fine, f"{transport}: executes {fine}, verdict {verdict}\n{mutant.to_text()}"
            if verdict is None:
                accepted += 1
            else:
                assert verdict.code
                rejected += 1
    # the test has teeth: both verdicts occur, the harmful one mostly
    assert rejected > 0.5 * schedules * mutations
    assert accepted > 0.01 * schedules * mutations


def random_schedule(rng):
    """A random valid schedule: run random ready actions of a random placement until all are done."""
    p = rng.randrange(1, 5)
    placement = list(range(p)) + [rng.randrange(p) for _ in range(rng.randrange(0, 5))]
    rng.shuffle(placement)
    m, stages = rng.randrange(1, 5), len(placement)
    programs = [[] for _ in range(p)]
    done = set()
    left = [(Kind.F, s, k) for s in range(stages) for k in range(m)]
    for s in range(stages):
        for k in range(m):
            left += [(Kind.B, s, k)] if rng.random() < 0.4 else [(Kind.I, s, k), (Kind.W, s, k)]

    def ready(action):
        kind, s, k = action
        if kind is Kind.F:
            return s == 0 or ("F", s - 1, k) in done
        if kind is Kind.W:
            return ("G", s, k) in done
        return ("F", s, k) in done and (s == stages - 1 or ("G", s + 1, k) in done)

    while left:
        action = rng.choice([a for a in left if ready(a)])
        left.remove(action)
        kind, s, k = action
        programs[placement[s]].append(Action(kind, s, k))
        if kind is not Kind.W:
            done.add(("F" if kind is Kind.F else "G", s, k))
    return Schedule("random", m, tuple(placement), tuple(map(tuple, programs)))


@pytest.mark.parametrize("count", [400, pytest.param(5000, marks=pytest.mark.slow)])
def test_no_valid_random_schedule_is_rejected(count):
    rng = random.Random(7)
    for _ in range(count):
        schedule = random_schedule(rng)
        verify(schedule)
        lowered = lower(schedule)
        for transport in ("buffered", "rendezvous"):
            verify(lowered, transport=transport)
        assert runs(lowered, "rendezvous")


def test_two_swapped_receives_of_one_pair_are_rejected():
    """torch 2.15 accepts this file and trains on the wrong microbatches without a word."""
    schedule = lower(build_schedule("gpipe", 2, 2))
    program = list(schedule.ranks[1])
    i, j = (k for k, a in enumerate(program) if a.kind is Kind.RECV_F)
    program[i], program[j] = program[j], program[i]
    wrong = Schedule("swapped", 2, schedule.placement, (schedule.ranks[0], tuple(program)))
    with pytest.raises(ScheduleError, match="wrong data") as caught:
        verify(wrong)
    assert (caught.value.code, caught.value.rank) == ("fifo", 1)


def test_a_deadlock_names_its_cycle():
    text = """# titan-pipeline/schedule 1
name: crossed
microbatches: 2
placement: 0 1
rank 0: 0F0 0B0 0F1 0B1
rank 1: 1F1 1B1 1F0 1B0
"""
    with pytest.raises(ScheduleError) as caught:
        verify(Schedule.from_text(text))
    assert caught.value.code == "deadlock"
    cycle = [str(a) for _, _, a in caught.value.cycle]
    assert cycle[0] == cycle[-1]
    assert {"0B0", "0F1", "1F1"} <= set(cycle)


def test_two_ranks_that_both_send_first_deadlock_only_without_buffers():
    text = """# titan-pipeline/schedule 1
name: both-send
microbatches: 2
placement: 0 1
rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
rank 1: 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1
"""
    schedule = Schedule.from_text(text)
    verify(schedule, transport="buffered")
    with pytest.raises(ScheduleError, match="rendezvous"):
        verify(schedule, transport="rendezvous")


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("0B1", "", "missing"),
        ("0B1", "0B1 0B1", "duplicate"),
        ("0B1", "0B1 0W1", "duplicate"),
        ("0B1", "0B7", "out_of_range"),
        ("0B1", "1B1", "wrong_rank"),
        ("0F0 0F1", "0B0 0F0 0F1", "duplicate"),
        ("0F0 0F1 0B0", "0B0 0F0 0F1", "order"),
    ],
)
def test_a_fault_is_named_by_code_rank_and_action(old, new, code):
    text = build_schedule("1f1b", 2, 2).to_text()
    assert old in text
    with pytest.raises(ScheduleError) as caught:
        verify(Schedule.from_text(text.replace(old, new)))
    assert caught.value.code == code
    assert caught.value.rank == 0
    assert caught.value.action is not None


def test_a_memory_limit_names_the_first_action_that_breaks_it():
    with pytest.raises(ScheduleError) as caught:
        verify(build_schedule("gpipe", 2, 6), mem_limit=4)
    assert (caught.value.code, str(caught.value.action)) == ("memory", "0F4")
    verify(build_schedule("gpipe", 2, 6), mem_limit=[6, 6])


@pytest.mark.parametrize(("program", "needed"), [("0F0 0B0", "1I0"), ("0F0 0W0", "0I0")])
def test_a_backward_in_an_evaluation_that_lacks_what_it_needs_is_named(program, needed):
    ranks = tuple(tuple(map(Action.parse, text.split())) for text in (program, "1F0"))
    with pytest.raises(ScheduleError, match=f"needs {needed}") as caught:
        verify(Schedule("part of its backwards", 1, (0, 1), ranks), forward_only=True)
    assert (caught.value.code, str(caught.value.action)) == ("missing", program.split()[1])
