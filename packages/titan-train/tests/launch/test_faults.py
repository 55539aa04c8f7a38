import pytest
from titan_train.config import LaunchConfig
from titan_train.config.faults import check_faults, parse_faults


def test_a_plan_is_read():
    kill, slow, nan = parse_faults("kill rank=3 step=20; slow rank=2 factor=3;nan step=25")
    assert (kill.kind, kill.rank, kill.step) == ("kill", 3, 20)
    assert (slow.factor, slow.step, slow.steps) == (3.0, 1, 0)
    assert (nan.rank, nan.step) == (0, 25)
    assert str(kill) == "kill rank=3 step=20"
    assert parse_faults(" ; ") == ()


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("kil rank=1 step=2", "Did you mean 'kill'"),
        ("kill rank=1", "'kill' needs step="),
        ("kill rank=1 step=2 speed=3", "one of the keys of 'kill': rank, step"),
        ("kill rank=x step=2", "needs a number after the '='"),
        ("kill rank=1 step=0", "step=0 must be at least 1"),
        ("kill rank=1 step=1.5", "an integer"),
        ("slow rank=1 factor=0.5", "factor=0.5 must be at least 1"),
    ],
)
def test_a_malformed_plan_is_refused_and_the_message_says_what_there_is(plan, message):
    with pytest.raises(ValueError, match=message):
        parse_faults(plan)
    with pytest.raises(ValueError, match=message):
        LaunchConfig(faults=plan)


def test_a_fault_of_a_rank_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"the run has ranks 0 to 3"):
        check_faults(parse_faults("kill rank=4 step=2"), 4)
