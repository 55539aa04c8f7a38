import pytest
from titan_train.config import LaunchConfig
from titan_train.launch.supervise.restarts import Ended, RestartBudget


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def lost(step=5, **fields):
    return Ended("rank 1 was ended by SIGKILL", step, **{"progressed": True} | fields)


def test_restarts_are_counted_within_a_window_only():
    clock = Clock()
    budget = RestartBudget(LaunchConfig(max_restarts=2, restart_window_s=100), clock)
    assert budget.decide(lost()).reason == "restart 1 of 2"
    assert budget.decide(lost(6)).again
    refused = budget.decide(lost(7))
    assert not refused.again
    assert "2 restarts within 100 s are used up" in refused.reason
    clock.now = 101
    assert budget.decide(lost(8)).again


@pytest.mark.parametrize(
    ("ended", "reason"),
    [
        (lost(error="ValueError: x", users_mistake=True, progressed=False), "would fail again"),
        (lost(error="ImportError: x", progressed=False), "before its first step"),
    ],
)
def test_a_program_that_is_wrong_is_not_started_again(ended, reason):
    decision = RestartBudget(LaunchConfig()).decide(ended)
    assert not decision.again
    assert reason in decision.reason


def test_the_same_error_at_the_same_step_ends_the_run_and_another_does_not():
    budget = RestartBudget(LaunchConfig(max_restarts=9))
    assert budget.decide(lost(5, error="RuntimeError: x")).again
    assert budget.decide(lost(6, error="RuntimeError: x")).again
    assert not budget.decide(lost(6, error="RuntimeError: x")).again


def test_once_a_step_was_made_the_network_may_fail_again_and_again_before_the_next():
    budget = RestartBudget(LaunchConfig(max_restarts=3))
    assert budget.decide(lost(5)).again
    away = {"error": "RuntimeError: gloo: Network is unreachable", "progressed": False, "from_world": True}
    assert budget.decide(lost(5, **away)).again
    assert budget.decide(lost(5, **away)).again
    assert not budget.decide(lost(5, **away)).again  # the budget
    torn = RestartBudget(LaunchConfig(max_restarts=3))
    assert torn.decide(lost(5)).again
    assert torn.decide(lost(5, error="ValueError: torn", progressed=False, users_mistake=True)).again
    assert not torn.decide(lost(5, error="ValueError: torn", progressed=False, users_mistake=True)).again


def test_a_preempted_rank_does_not_count():
    budget = RestartBudget(LaunchConfig(max_restarts=1))
    for step in range(5):
        assert budget.decide(lost(step, planned=True)).again
    assert budget.decide(lost(9)).reason == "restart 1 of 1"


def test_attempts_that_make_no_step_wait_longer_each_time():
    budget = RestartBudget(LaunchConfig(max_restarts=9))
    waits = [budget.decide(lost(5, progressed=False)).wait_s for _ in range(3)]
    assert waits == [1.0, 2.0, 4.0]
    assert budget.decide(lost()).wait_s == 0.0


def test_attempts_that_make_no_step_end_the_run_however_long_each_lasts():
    clock = Clock()
    budget = RestartBudget(LaunchConfig(), clock)
    decisions = []
    for attempt in range(6):
        clock.now = 1850.0 * attempt  # only two restarts lie within the window at any time
        decisions.append(budget.decide(lost(5, progressed=False)))
    assert [decision.again for decision in decisions[:4]] == [True, True, True, False]
    assert decisions[3].reason == "4 attempts in a row made no step (launch.max_restarts=3)"
    assert not decisions[-1].again
    assert budget.decide(lost(6)).again


def test_no_restarts_means_none():
    assert not RestartBudget(LaunchConfig(max_restarts=0)).decide(lost(planned=True)).again
