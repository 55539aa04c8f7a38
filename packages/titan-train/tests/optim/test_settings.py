import torch
from titan_train.optim import put_back, settings_of


def group(**settings):
    return torch.optim.AdamW([{"params": [torch.nn.Parameter(torch.ones(2))], **settings}])


def restored(ours, **saved):
    """What `put_back` makes of a configuration's optimizer, into which a checkpoint's settings were restored."""
    settings = settings_of(ours)
    ours.param_groups[0].update(saved)
    put_back(settings, ours)
    return ours.param_groups[0]


def test_a_part_that_is_no_longer_frozen_learns_after_a_resume():
    assert "frozen" not in restored(group(), frozen=True)


def test_the_schedule_decides_what_is_frozen_and_the_rate():
    now = restored(group(frozen=True, weight_decay=0.3), frozen=False, lr=0.5, weight_decay=0.1)
    assert (now["frozen"], now["lr"], now["weight_decay"]) == (False, 0.5, 0.3)
