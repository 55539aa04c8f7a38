"""Muon under every layout: the weights of one process, two collectives a bucket, and a resume elsewhere with the same state."""

import composition
import pytest
import torch
import torch.distributed as dist
from composition_matrix import ranks_of, sections_of
from titan_testing import run_ranks
from titan_train import use_code
from titan_train.config import parse_config
from titan_train.config.optimizer import OptimizerConfig
from titan_train.parallel.gradients import Gradients, local_tensor
from titan_train.train import Trainer

MUON = {"name": "muon", "lr": 1e-3, "muon": {"dtype": "fp32"}}
NORMUON = {"name": "muon", "lr": 1e-3, "muon": {"dtype": "fp32", "normuon": True, "coefficients": "polar_express"}}
BY_HEAD = {
    "name": "muon",
    "lr": 1e-3,
    "cautious": True,
    "muon": {"dtype": "fp32", "normuon": True, "heads": {r"w[qk]\.": 4}},
}


STRANGE = {
    "model": {"name": "strange:Strange", "seq_len": 32, "args": {}},
    "train": {"freeze": ["frozen"], "steps": 10, "global_batch": 8},
    "data": {"document_mask": False},
    "optimizer": MUON | {"muon": {"dtype": "fp32", "groups": {"stack": "muon", r"\.one\.w": "muon", "^row": "muon"}}},
}
use_code(["strange"])


def train(folder, name, sections, steps=5):
    """Train and save; this rank's boxes of all weights and of the state, and the all-to-alls of an update by bucket."""
    with Trainer(parse_config(composition.tree(folder, name, sections))) as trainer:
        trainer.fit(until=steps - 1)
        calls = []
        exchange, update = dist.all_to_all_single, trainer.optimizer.step

        def counted(*args, **kwargs):
            calls.append(args)
            return exchange(*args, **kwargs)

        def step():
            dist.all_to_all_single = counted
            try:
                return update()
            finally:
                dist.all_to_all_single = exchange

        trainer.optimizer.step = step
        trainer.fit(until=steps)
        trainer.save()
        weights = composition.boxes(trainer.model, lambda parameter: parameter.detach())
        return weights, state_of(trainer), len(calls), len(trainer.optimizer.plan().buckets)


def restored(folder, name, sections):
    """This rank's boxes of the state that a run under another layout begins with."""
    with Trainer(parse_config(composition.tree(folder, name, sections))) as trainer:
        assert trainer.step == 5
        return state_of(trainer)


def state_of(trainer):
    found = {}
    for key in ("muon_momentum", "muon_row_mean", "exp_avg", "exp_avg_sq"):
        boxes = composition.boxes(trainer.model, lambda parameter, key=key: trainer.optimizer.state[parameter].get(key))
        for name, (shape, offset, part) in boxes.items():
            if key == "muon_row_mean":
                shape, offset = (*shape[:-1], 1), (*offset[:-1], 0)
            found[f"{name}/{key}"] = shape, offset, part
    return found


def compared(folder, single, model, names, optimizer, ranks=None):
    """Run under a layout, and compare the weights with those of one process; the state."""
    sections = sections_of(model, names) | {"optimizer": optimizer}
    run = "-".join([model, *names, str(ranks), str(hash(str(optimizer)))]).replace(" ", "_")
    found = run_ranks(train, ranks or ranks_of(names), folder, run, sections, timeout_s=240)
    for _, _, calls, buckets in found:
        assert calls == 2 * buckets
    whole = composition.assemble([weights for weights, *_ in found])
    want = single(model, optimizer)
    assert whole.keys() == want.keys()
    for name, weight in want.items():
        errors = (whole[name] - weight).abs()
        # float32 gradients add up in another order, and small singular values are raised to 1
        wrong = errors > 1e-6
        if optimizer.get("cautious"):  # the sign of an update that is all but zero decides whether a weight decays
            assert int(wrong.sum()) <= 2, name
            wrong &= errors > 1e-6 + optimizer["lr"] * OptimizerConfig().weight_decay * weight.abs()
        assert not wrong.any(), (name, float(errors.max()))
    return run, composition.assemble([state for _, state, *_ in found])


def restores(folder, run, saved, model, names, optimizer, ranks):
    """Resume the run under another layout, and compare its state bit by bit."""
    sections = sections_of(model, names) | {"optimizer": optimizer}
    found = run_ranks(restored, ranks, folder, run, sections, timeout_s=240, init=ranks > 1)
    state = composition.assemble(found)
    assert state.keys() == saved.keys()
    assert [name for name in saved if not torch.equal(saved[name], state[name])] == []


@pytest.fixture(scope="module")
def single(folder):
    """The weights of one process."""
    kept = {}

    def reference(model, optimizer):
        key = model, str(optimizer)
        if key not in kept:
            sections = sections_of(model, ()) | {"optimizer": optimizer}
            run = f"single-{model}-{len(kept)}"
            weights, _, calls, _ = run_ranks(train, 1, folder, run, sections, init=False, timeout_s=240)[0]
            assert calls == 0
            kept[key] = composition.assemble([weights])
        return kept[key]

    return reference


@pytest.mark.filterwarnings("ignore:.*random generators are reseeded")
@pytest.mark.parametrize(
    ("model", "names", "optimizer", "ranks"),
    [("dense", ("fsdp", "tp+sp"), BY_HEAD, 4), ("moe", ("ep",), MUON, 2)],
    ids=["fsdp-tp-normuon", "ep"],
)
def test_muon_gives_the_weights_of_one_process_and_its_state_to_it(model, names, optimizer, ranks, folder, single):
    run, saved = compared(folder, single, model, names, optimizer, ranks)
    restores(folder, run, saved, model, (), optimizer, 1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*random generators are reseeded")
@pytest.mark.parametrize("optimizer", [MUON, NORMUON], ids=["muon", "normuon"])
@pytest.mark.parametrize(
    ("model", "names", "ranks", "elsewhere"),
    [
        ("dense", ("fsdp",), 2, ("tp+sp",)),
        ("dense", ("fsdp",), 4, ("pp 1f1b",)),
        ("dense", ("fsdp",), 8, ("ddp",)),
        ("dense", ("ddp",), 2, ("fsdp",)),
        ("dense", ("hsdp",), 8, ("cp ring",)),
        ("dense", ("tp",), 2, ("fsdp", "tp+sp")),
        ("dense", ("async tp",), 4, ("fsdp",)),
        ("dense", ("cp ring",), 2, ("fsdp",)),
        ("dense", ("pp zbv",), 2, ("fsdp",)),
        ("dense", ("pp zb_h2",), 2, ("tp",)),
        ("dense", ("hsdp", "tp+sp"), 8, ("fsdp",)),
        ("dense", ("tp+sp", "pp zbv"), 4, ("fsdp",)),
        ("dense", ("fsdp", "tp+sp", "cp ring"), 8, ("fsdp",)),
        ("moe", ("fsdp",), 4, ("ep",)),
        ("moe", ("ep", "tp+sp"), 4, ("fsdp",)),
        ("moe", ("ep", "pp zbv"), 4, ("fsdp",)),
        ("moe", ("hsdp", "ep"), 8, ("fsdp",)),
    ],
    ids=str,
)
def test_muon_gives_the_weights_of_one_process_everywhere(model, names, ranks, elsewhere, optimizer, folder, single):
    run, saved = compared(folder, single, model, names, optimizer, ranks)
    restores(folder, run, saved, model, elsewhere, optimizer, 4 if len(elsewhere) > 1 else 2)
    if optimizer is NORMUON:  # switched off at a resume: its means of rows are left out
        sections = sections_of(model, elsewhere) | {"optimizer": MUON}
        ranks = 4 if len(elsewhere) > 1 else 2
        assert run_ranks(restored, ranks, folder, run, sections, timeout_s=240)


def strange(folder, name):
    """Five steps, the third with a gradient that is not finite on one rank; the weights before it, after it and at the end."""
    seen = {}
    with Trainer(parse_config(composition.tree(folder, name, STRANGE))) as trainer:
        names = [n for g in trainer.optimizer.param_groups if g["kind"] == "muon" for n in g["param_names"]]
        assert not [n for n in names if "conv" in n or "words" in n or "frozen" in n or "bias" in n or "scale" in n], (
            names
        )
        assert {"row", "blocks.0.stack", "blocks.0.one.weight", "blocks.1.wide.weight"} <= set(names)
        finish, one = Gradients.finish, trainer.model.parts[0].get_parameter("blocks.1.back.weight")

        def broken(gradients):
            finish(gradients)
            if trainer.step == 2 and trainer.rank == 0:
                local_tensor(one.grad)[0, 0] = float("nan")

        Gradients.finish = broken  # of this process, which ends with the test
        for steps in (2, 3, 5):
            trainer.fit(until=steps)
            seen[steps] = composition.boxes(trainer.model, lambda parameter: parameter.detach())
    return [seen[steps] for steps in (2, 3, 5)]


@pytest.mark.filterwarnings("ignore:.*random generators are reseeded")
def test_a_users_module_with_muon_on_two_ranks_is_that_of_one_process(folder):
    found = {}
    for ranks in (1, 2):
        of_ranks = run_ranks(strange, ranks, folder, f"strange-{ranks}", timeout_s=240, init=ranks > 1)
        before, after, found[ranks] = (composition.assemble(parts) for parts in zip(*of_ranks, strict=True))
        assert all(torch.equal(before[name], after[name]) for name in before)  # the step that is not finite
    for name, weight in found[1].items():
        assert float((found[2][name] - weight).abs().max()) <= 1e-6, name
        assert torch.equal(weight, before[name]) == ("frozen" in name), name
