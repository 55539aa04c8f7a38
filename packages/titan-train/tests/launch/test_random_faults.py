"""Fifty runs, each struck at a random rank and step. `benchmarks/restarts.py` measures how long they take to recover."""

import random

import pytest

KINDS = ("kill", "hang", "slow", "sigterm", "disk-full", "corrupt-checkpoint")


def plan(kind, chance):
    rank, step = chance.randrange(2), chance.randrange(5, 13)
    if kind == "slow":
        return f"slow rank={rank} factor=3 step={step}"
    if kind == "disk-full":
        return f"disk-full rank={rank} step={step // 4 * 4}"
    if kind == "corrupt-checkpoint":  # damage shows only when it is read; an older checkpoint must be there
        step = max(step, 9)
        return f"corrupt-checkpoint rank={rank} step={step}; kill rank={1 - rank} step={step}"
    return f"{kind} rank={rank} step={step}"


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [*range(24), *(pytest.param(n, marks=pytest.mark.full) for n in range(24, 50))])
def test_a_run_struck_at_random_ends_with_the_losses_of_the_undisturbed_one(job, undisturbed, number):
    chance = random.Random(number)
    faults = plan(KINDS[number % len(KINDS)], chance)
    name = f"random-{number}"
    code, told = job.supervise(
        name, "--launch.faults", faults, "--launch.hang-factor", "8", "--launch.hang-least-s", "2"
    )
    assert code == 0, (faults, told)
    assert job.losses(name) == undisturbed, (faults, told)
