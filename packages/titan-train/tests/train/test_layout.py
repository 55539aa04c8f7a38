import dataclasses
import re

import pytest
from titan_train.config import Config, ParallelConfig, TrainConfig
from titan_train.parallel.layout.batch import plan_batch
from titan_train.parallel.layout.degrees import build_layout, explain_mode, resolve_mode


def config(batch=32, micro=0, **parallel):
    return Config(parallel=ParallelConfig(**parallel), train=TrainConfig(global_batch=batch, microbatch=micro))


@pytest.mark.parametrize(
    ("ranks", "parallel", "mode", "replicate", "shard"),
    [
        (1, {}, "none", 1, 1),
        (4, {}, "fsdp", 1, 4),
        (4, {"dp_replicate": 2}, "hsdp", 2, 2),
        (4, {"dp_replicate": 4}, "ddp", 4, 1),
        (4, {"mode": "ddp"}, "ddp", 4, 1),
        (4, {"dp_replicate": -1, "dp_shard": 2}, "hsdp", 2, 2),
        (1, {"mode": "fsdp"}, "fsdp", 1, 1),
        (1, {"offload": "cpu-nopin"}, "fsdp", 1, 1),
    ],
)
def test_the_mode_follows_the_degrees(ranks, parallel, mode, replicate, shard):
    c = config(**parallel)
    layout = build_layout(c, ranks)
    assert (layout.spec.dp_replicate, layout.spec.dp_shard) == (replicate, shard)
    assert resolve_mode(c.parallel, layout) == mode


@pytest.mark.parametrize(
    ("ranks", "dtype", "parallel", "line"),
    [
        (1, "fp32", {}, "is 'none': no wrapper"),
        (1, "bf16", {}, "'fsdp': for mixed precision (bf16 compute, float32 master weights); on one rank it makes no collective"),
        (1, "bf16", {"offload": "cpu"}, "float32 master weights) and offload to 'cpu'; on one rank"),
        (4, "bf16", {}, "is 'fsdp': parameters, gradients and optimizer state are sharded over 4 ranks"),
        (4, "fp32", {"dp_replicate": 2}, "is 'hsdp': 2 copies, each sharded over 2 ranks"),
        (4, "fp32", {"dp_replicate": 4}, "is 'ddp': 4 ranks hold whole copies and add their gradients"),
        (4, "fp32", {"tp": 4, "ep": 2}, "is 'fsdp': for experts that several ranks hold"),
        (4, "fp32", {"mode": "ddp"}, "parallel.mode='ddp' as configured"),
    ],
)  # fmt: skip
def test_the_log_says_what_the_mode_is_for(ranks, dtype, parallel, line):
    c = config(**parallel)
    layout = build_layout(c, ranks)
    assert line in explain_mode(c.parallel, layout, resolve_mode(c.parallel, layout, dtype=dtype), dtype=dtype)


def test_experts_that_several_ranks_of_tensor_parallelism_hold_have_their_gradients_added():
    c = config(tp=4, ep=2, sequence_parallel=True)
    assert resolve_mode(c.parallel, build_layout(c, 4)) == "fsdp"
    c = config(tp=4, ep=4, sequence_parallel=True)
    assert resolve_mode(c.parallel, build_layout(c, 4)) == "none"


def test_one_rank_in_bf16_is_wrapped_for_its_casts():
    c = config()
    assert resolve_mode(c.parallel, build_layout(c, 1), dtype="bf16") == "fsdp"


@pytest.mark.parametrize(
    ("ranks", "parallel", "words"),
    [
        (4, {"mode": "ddp", "dp_shard": 2}, ["mode='ddp'", "dp_shard=2", "hsdp"]),
        (4, {"mode": "hsdp"}, ["mode='hsdp'", "dp_replicate to one of [2]"]),
        (3, {"mode": "hsdp"}, ["mode='hsdp'", "use mode 'fsdp'"]),
        (4, {"mode": "fsdp", "dp_replicate": 2}, ["dp_replicate=2", "use mode 'hsdp'"]),
        (8, {"dp_shard": 3}, ["dp_shard", "3"]),
        (4, {"compress": "powersgd"}, ["powersgd", "mode='ddp'"]),
        (4, {"mode": "ddp", "offload": "cpu"}, ["offload='cpu'", "fsdp"]),
        (4, {"mode": "ddp", "reduce_scatter_group": "own"}, ["reduce_scatter_group='own'", "mode='fsdp'"]),
        (1, {"symmetric_memory": True}, ["symmetric_memory=True", "this run is 'none'"]),
        (4, {"reshard": 3}, ["reshard=3", "nearest valid choice is 2"]),
        (4, {"pp": 2, "reshard": 2}, ["parallel.reshard=2 and parallel.pp=2", "Set parallel.reshard='always'"]),
        (
            4,
            {"pp": 2, "reshard_overrides": {"layers.0": "always"}},
            ["reshard_overrides={'layers.0': 'always'} and parallel.pp=2"],
        ),
        (4, {"accumulate": "hsdp-ar"}, ["accumulate='hsdp-ar'", "'unsharded'"]),
    ],
)
def test_what_does_not_fit_the_ranks_names_the_way_out(ranks, parallel, words):
    c = config(**parallel)
    with pytest.raises(ValueError, match=re.escape(words[0])) as caught:
        resolve_mode(c.parallel, build_layout(c, ranks))
    for word in words:
        assert word in str(caught.value)


def test_the_batch_is_cut_over_ranks_and_microbatches():
    c = config(batch=32, micro=2)
    plan = plan_batch(c, build_layout(c, 4))
    assert (plan.dp_size, plan.microbatch, plan.accumulation) == (4, 2, 4)
    assert plan_batch(config(batch=32), build_layout(c, 4)).accumulation == 1


@pytest.mark.parametrize(
    ("batch", "micro", "ranks", "near"), [(31, 0, 4, 32), (3, 0, 4, 4), (36, 4, 8, 32), (33, 0, 4, 32)]
)
def test_a_batch_that_cannot_be_cut_names_the_nearest_that_can(batch, micro, ranks, near):
    c = config(batch=batch, micro=micro)
    with pytest.raises(ValueError, match=f"The nearest valid choice is {near}"):
        plan_batch(c, build_layout(c, ranks))


def test_the_topology_follows_the_nodes():
    c = dataclasses.replace(config(), launch=dataclasses.replace(Config().launch, nnodes=2))
    assert build_layout(c, 16).topology.gpus_per_node == 8
