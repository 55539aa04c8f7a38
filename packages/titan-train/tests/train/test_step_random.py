"""Dropout: other masks for other tokens, the same for copies, and no trace of a resume."""

import json
import logging
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from dropping import TABLE
from tiny_run import Injecting, tiny_run, write_text
from titan_testing import run_ranks
from titan_train.inputs import prepare_inputs
from titan_train.models import build_model
from titan_train.parallel.check import check_model
from titan_train.parallel.layout.run import plan_run
from titan_train.train import Trainer
from titan_train.train.step_random import place_of_rank, step_seed

TP = {"tp": 2, "tp_plan": TABLE}
REPLICATED = TP | {"sequence_parallel": False}
LAYOUTS = {
    "fsdp": (2, {}, "Dropping", [0, 1]),
    "ddp": (2, {"mode": "ddp"}, "Dropping", [0, 1]),
    "cp": (2, {"cp": 2}, "Attending", [0, 1]),
    "tp": (2, REPLICATED, "Dropping", [0, 0]),
    "tp splitting the sequence": (2, TP, "Dropping", [0, 1]),
    "fsdp x tp": (4, REPLICATED, "Dropping", [0, 0, 1, 1]),
}


@pytest.fixture(autouse=True)
def trusted(monkeypatch):
    monkeypatch.setenv("TITAN_TRAIN_CODE", "dropping")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dropout")
    write_text(folder)
    prepare_inputs(tiny_run(folder), quiet=True)
    return folder


def dropping(folder, name, model="Dropping", args=None, **sections):
    tree = {
        "model": {"name": f"dropping:{model}", "seq_len": 32, "args": args or {}},
        "data": {"document_mask": False},
        "train": {"steps": 6, "global_batch": 8},
    }
    return tiny_run(folder, name, **(tree | sections))


def masks(folder, name, steps=1, save=False, **sections):
    """What each step's first forward of this rank dropped, as 0 and 1; and the losses."""
    found = []
    with Trainer(dropping(folder, name, **sections)) as trainer:
        for part in trainer.model.parts:
            for module in part.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.register_forward_hook(lambda _m, _args, out: found.append((out == 0).flatten().tolist()))
        trainer.fit(until=trainer.step + steps)
        if save:
            trainer.save()
        return found, trainer.losses


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_with_other_tokens_drop_others_and_ranks_with_copies_the_same(layout, folder):
    ranks, parallel, model, kinds = LAYOUTS[layout]
    dropped = [found for found, _ in run_ranks(masks, ranks, folder, layout, model=model, parallel=parallel)]
    for rank, kind in enumerate(kinds):
        for other, same in enumerate(kinds):
            assert (dropped[rank] == dropped[other]) == (kind == same), (rank, other)


def test_a_resume_drops_what_the_run_would_have_dropped(folder):
    straight = run_ranks(masks, 2, folder, "straight", steps=6)
    run_ranks(masks, 2, folder, "resumed", steps=3, save=True)
    after = run_ranks(masks, 2, folder, "resumed", steps=3)
    for whole, rest in zip(straight, after, strict=True):
        assert whole[0][len(whole[0]) // 2 :] == rest[0]
        assert whole[1][3:] == rest[1]
        assert whole[0][:3] != whole[0][3:6]  # another step, other masks


def test_a_resume_with_tensor_parallelism_keeps_the_masks_of_copies_equal(folder):
    run_ranks(masks, 1, folder, "widened", save=True)
    first, second = run_ranks(masks, 2, folder, "widened", parallel=REPLICATED)
    assert first == second


def test_recomputed_blocks_drop_the_same_again(folder):
    plain = run_ranks(masks, 1, folder, "kept", steps=4)[0][1]
    again = run_ranks(masks, 1, folder, "recomputed", steps=4, activations={"checkpoint": "full"})[0][1]
    assert plain == again


def test_stages_of_a_pipeline_draw_for_themselves():
    mesh = SimpleNamespace(rank_in={"dp": 1, "cp": 0, "pp": 2, "tp": 3}.get)
    assert place_of_rank(mesh, sequence_parallel=False) == {"dp": 1, "cp": 0, "pp": 2}
    assert place_of_rank(None, sequence_parallel=True) == {}
    places = [{}, *({axis: index} for axis in ("dp", "cp", "pp", "tp") for index in (1, 2)), {"dp": 1, "pp": 1}]
    seeds = {step_seed(7, step, place) for step in (1, 2) for place in places}
    assert len(seeds) == 2 * len(places)
    assert step_seed(7, 1, {"dp": 0}) == step_seed(7, 1, {})


def faulty(folder, name):
    import torch.distributed as dist

    more = {"optimizer": {"lr": 2e-2}, "metrics": {"progress": "off", "split_every": 0}}
    more["train"] = {"steps": 20, "global_batch": 8, "rerun_above": 1.15}
    config = dropping(folder, name, **more)
    plan = "bad-data rank=1 step=18"
    with Trainer(config, monitor=Injecting(plan, dist.get_rank(), folder / "runs" / name)) as trainer:
        trainer.fit()
    lines = map(json.loads, (folder / "runs" / name / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["verdict"], line["ranks"]) for line in lines if line.get("event") == "rerun"]


def test_a_suspect_step_is_judged_with_the_masks_of_the_rank_whose_data_it_is(folder):
    assert run_ranks(faulty, 2, folder, "suspect")[0] == [(18, "data or numerics", [1])]


def test_a_run_says_that_dropout_is_active(folder, caplog):
    with caplog.at_level(logging.INFO, logger="titan_train.train.run_log"):
        with Trainer(dropping(folder, "said")):
            pass
        with Trainer(dropping(folder, "unsaid", args={"rate": 0.0})):
            pass
    said = [record.message for record in caplog.records if "dropout" in record.message]
    assert len(said) == 1
    assert said[0].startswith("dropout is active: embedded=0.25 (1x), added=0.25 (2x).")


ENDING = {"words": "embedding", "mlp.0": "colwise", "mlp.2": "rowwise", "unembed": "head"}
REGION = {"mlp": "region"} | ENDING


@pytest.mark.parametrize("function", [False, True])
@pytest.mark.parametrize(
    ("table", "whole", "rate", "refused"),
    [
        (REGION, False, 0.25, True),
        (REGION, False, 0.0, False),
        (REGION, True, 0.25, False),
        (ENDING, False, 0.25, False),
    ],
)
def test_dropout_of_the_summands_of_ranks_that_draw_for_themselves_is_refused(
    folder, table, whole, rate, refused, function
):
    parallel = {"tp": 2, "tp_plan": table, "sequence_parallel": not whole}
    config = dropping(folder, "ending", "Ending", args={"rate": rate, "function": function}, parallel=parallel)
    plan, model = plan_run(config, 2), build_model(config.model, vocab_size=259)
    with (
        pytest.raises(ValueError, match="the module 'mlp' of style 'region' ends in a dropout")
        if refused
        else nullcontext()
    ):
        check_model(config, plan.layout, plan.batch, model)


def test_layers_that_are_skipped_by_chance_are_refused_on_several_ranks(folder):
    config = dropping(folder, "skipping", args={"layerdrop": 0.1})
    model = build_model(config.model, vocab_size=259, device="meta")
    for ranks in (1, 2):
        plan = plan_run(config, ranks)
        if ranks == 1:
            check_model(config, plan.layout, plan.batch, model)
            continue
        with pytest.raises(ValueError, match=r"skips whole layers by chance \(layerdrop=0.1\)"):
            check_model(config, plan.layout, plan.batch, model)
