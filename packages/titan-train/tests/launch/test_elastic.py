import pytest
from titan_train.config import Config, LaunchConfig, ParallelConfig, TrainConfig
from titan_train.launch.supervise.elastic import fit_layout
from titan_train.parallel.layout.degrees import build_layout


def config(global_batch=12, microbatch=0, min_ranks=1, **parallel):
    return Config(
        train=TrainConfig(global_batch=global_batch, microbatch=microbatch),
        parallel=ParallelConfig(**parallel),
        launch=LaunchConfig(elastic=True, min_ranks=min_ranks),
    )


@pytest.mark.parametrize(
    ("available", "parallel", "chosen"),
    [
        (4, {}, (4, 1, 4)),
        (3, {}, (3, 1, 3)),
        (5, {}, (4, 1, 4)),
        (2, {"dp_shard": 2, "dp_replicate": -1}, (2, 1, 2)),
        (3, {"dp_shard": 2, "dp_replicate": 2}, (3, 1, 3)),
        (2, {"dp_shard": 1, "dp_replicate": 4}, (2, 2, 1)),
        (3, {"dp_shard": 4}, (3, 1, 3)),
        (3, {"tp": 2}, (2, 1, 1)),
        (3, {"mode": "ddp"}, (3, 3, 1)),
    ],
)
def test_data_parallelism_shrinks_to_what_is_left(available, parallel, chosen):
    fitted, size = fit_layout(config(**parallel), available, full=4)
    spec = build_layout(fitted, size).spec
    assert (size, spec.dp_replicate, spec.dp_shard) == chosen
    assert fitted.train.global_batch == 12


def test_a_size_that_cannot_cut_the_batch_is_passed_over():
    assert fit_layout(config(global_batch=8), 3, full=4)[1] == 2


def test_ranks_leave_by_whole_nodes():
    assert fit_layout(config(global_batch=24), 7, full=8, unit=2)[1] == 6


def test_no_layout_is_refused_with_the_reason_for_every_size():
    with pytest.raises(ValueError, match=r"3: train.global_batch=8 cannot be cut evenly over 3") as caught:
        fit_layout(config(global_batch=8, min_ranks=3), 3, full=4)
    assert "3 of 4 ranks are left" in str(caught.value)
    with pytest.raises(ValueError, match=r"fewer than launch.min_ranks=2"):
        fit_layout(config(min_ranks=2), 1, full=4)
