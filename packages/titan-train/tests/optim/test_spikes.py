"""Which steps are left out for their gradient."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from titan_ckpt import Checkpointer, TrainState
from titan_testing import run_ranks
from titan_train.config import parse_config
from titan_train.config.ramp import plan_ramp
from titan_train.config.recipe import AverageConfig, SpikesConfig
from titan_train.config.schema import TrainConfig
from titan_train.optim.average import older_steps, restore_averaged, update_ema
from titan_train.optim.spikes import Spikes


def test_a_norm_far_above_the_last_ones_is_a_spike_once_the_window_is_full():
    spikes = Spikes(SpikesConfig(sigma=2.0, window=4))
    for norm in (1.0, 3.0, 1.0):
        assert not spikes.note(norm, skipped=False)
        assert spikes.limit == math.inf
    spikes.note(3.0, skipped=False)
    assert spikes.limit == 4.0  # mean 2, deviation 1
    assert spikes.note(4.5, skipped=True)
    assert not spikes.note(math.nan, skipped=True)  # left out for another reason
    assert spikes.limit == 4.0
    assert spikes.in_a_row == 1


def test_a_saved_state_has_the_same_limit_and_a_step_made_ends_the_row():
    spikes = Spikes(SpikesConfig(sigma=1.0, window=3, most=2))
    for norm in (0.1, 0.7, 0.3):
        spikes.note(norm, skipped=False)
    assert spikes.note(9.0, skipped=True)
    again = Spikes(SpikesConfig(sigma=1.0, window=3, most=2))
    again.load_state_dict(spikes.state_dict())
    assert (again.limit, again.in_a_row) == (spikes.limit, 1)
    assert again.limit == float(torch.tensor(again.limit))
    assert again.note(9.0, skipped=True)
    assert again.exhausted
    again.note(0.2, skipped=False)
    assert not again.exhausted
    again.forget(norms=True)
    assert again.limit == math.inf


def test_no_sigma_leaves_nothing_out_and_saves_nothing():
    spikes = Spikes(SpikesConfig())
    for _ in range(200):
        assert not spikes.note(1.0, skipped=False)
    assert spikes.limit == math.inf
    assert spikes.state_dict() == {}


def test_the_first_spike_is_told_where_steps_between_are_not_finite():
    spikes = Spikes(SpikesConfig(sigma=1.0, window=2, most=2))
    for norm in (1.0, 1.0, math.nan, 9.0, math.nan):
        spikes.note(norm, skipped=norm != 1.0)
    again = Spikes(SpikesConfig(sigma=1.0, window=2, most=2))
    again.load_state_dict(spikes.state_dict())
    again.note(9.0, skipped=True)
    assert (again.exhausted, again.in_a_row, again.lasting) == (True, 2, 3)
    again.note(1.0, skipped=False)
    assert (again.in_a_row, again.lasting) == (0, 0)
    again.load_state_dict([2.0, 1.0, 1.0])  # as an older version saved it
    assert (again.in_a_row, again.lasting, again.limit) == (2, 2, 1.0)


def test_a_ramp_gives_each_size_the_same_tokens():
    ramp = plan_ramp(16, start=4, step=0, tokens=160, seq_len=2)
    assert ramp.sizes == (4, 8, 16)
    steps = [ramp.consumed_after(n) for n in range(18)]
    assert all(ramp.consumed_after(17 - n, start=steps[n]) == steps[17] for n in range(18))
    sizes = [after - before for before, after in itertools.pairwise(steps)]
    assert sizes == [4] * 10 + [8] * 5 + [16] * 2
    assert [ramp.at(consumed) for consumed in steps[:-1]] == sizes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ramp_from": 3, "ramp_tokens": 10}, "does not lead to train.global_batch=32 by doubling: the sizes are 3, 6, 12"),
        ({"ramp_from": 8, "ramp_by": 5, "ramp_tokens": 10}, "by adding train.ramp_by=5"),
        ({"ramp_from": 32, "ramp_tokens": 10}, "Set a ramp_from below global_batch"),
        ({"ramp_from": 8}, "a ramp needs both"),
    ],
)  # fmt: skip
def test_a_ramp_that_leads_nowhere_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**settings)


def test_settings_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match=r"average.use='ema' without average.ema_decay"):
        AverageConfig(use="ema")
    with pytest.raises(ValueError, match=r"spikes.rewind=5 without spikes.sigma"):
        SpikesConfig(rewind=5)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_the_moving_average_is_that_of_a_plain_loop(kind):
    trained, frozen = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))
    optimizer = kind([trained, frozen], lr=0.1)
    expected = None
    for step in range(5):
        trained.grad = torch.full((3,), float(step + 1))
        optimizer.step()
        update_ema(optimizer, 0.75, due=step % 2 == 1)
        if expected is None:
            expected = trained.detach().clone()
        elif step % 2:
            expected = 0.75 * expected + 0.25 * trained.detach()
    torch.testing.assert_close(optimizer.state[trained]["ema"], expected)
    if kind is torch.optim.AdamW:  # a parameter that thaws later gets its state from AdamW
        frozen.grad = torch.ones(2)
        optimizer.step()
        assert "exp_avg" in optimizer.state[frozen]


def test_plans_count_the_moving_average():
    plain, averaged = parse_config({}), parse_config({"average": {"ema_decay": 0.9}})
    assert (plain.state_bytes, averaged.state_bytes) == ((8.0, 8.0), (12.0, 12.0))


def test_a_mean_takes_the_newest_checkpoints_before_a_step():
    assert older_steps([10, 20, 30, 40, 50], 40, 3) == [30, 20]
    assert older_steps([40], 40, 3) == []
    assert older_steps([10, 37, 20, 45], 45, 3) == [20, 10]  # from beyond 37 back to 20, which was saved again
    assert older_steps([10, 20, 40, 60, 30], 40, 3) == [30, 20]  # on the way to 40 for the second time


def steps_of_one_weight(root, *steps):
    """A run's checkpoints, of a weight that is the number of the step."""
    checkpointer, model = Checkpointer(root), torch.nn.Linear(1, 1, bias=False).requires_grad_(False)
    for step in steps:
        model.weight.fill_(step)
        checkpointer.save(step, TrainState(model=model, rng=False))
    return checkpointer


def loaded_mean(root, listed):
    """The mean over three checkpoints, where this rank's list has these."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    checkpointer, model = Checkpointer(root), torch.nn.Linear(1, 1, bias=False).requires_grad_(False)
    checkpointer.steps = lambda: listed[rank]
    config = parse_config({"average": {"use": "checkpoints", "checkpoints": 3}})
    found = restore_averaged(checkpointer, TrainState(model=model, rng=False), config, None)
    return found, model.weight.item()


def test_a_checkpoint_that_its_run_deletes_meanwhile_is_left_out_of_the_mean(tmp_path, caplog):
    steps_of_one_weight(tmp_path, 1, 3)
    assert loaded_mean(tmp_path, [[1, 2, 3]]) == (3, 2.0)
    assert "step 2 is left out of the mean over checkpoints" in caplog.text


def test_ranks_that_see_other_checkpoints_take_one_mean(tmp_path):
    steps_of_one_weight(tmp_path, 1, 2, 3)
    assert run_ranks(loaded_mean, 2, tmp_path, [[1, 2, 3], [2, 3]], timeout_s=60) == [(3, 2.0)] * 2
