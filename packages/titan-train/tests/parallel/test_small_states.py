"""AdamW with small states or weights, and schedule-free AdamW, under layouts: one process's weights, and a resume's same bits."""

import composition
import pytest
import torch
from composition_matrix import sections_of
from titan_fsdp.weights.materialize import copy_full
from titan_testing import RankFailure, run_ranks
from titan_train.config import parse_config
from titan_train.launch.validate import validate
from titan_train.models import named_parameters
from titan_train.train import Trainer

WIDE = {
    "model": {"name": "llama3_debug", "seq_len": 32, "args": {"num_layers": 4, "num_kv_heads": 4, "dim": 128}},
    "train": {"global_batch": 24},  # of 2, 3 and 4 ranks
}
SMOOTH = {"lr": 1e-3, "eps": 1e-3}  # an error of a gradient becomes one of the weight of at most that size
OPTIMIZERS = {
    "int8": {"optimizer": SMOOTH | {"states": "int8"}},
    "bf16": {"optimizer": SMOOTH | {"states": "bf16"}},
    "schedule_free": {
        "optimizer": SMOOTH | {"name": "schedule_free"},
        "schedule": {"name": "constant", "warmup_steps": 2},
    },
}
STATES = (
    "exp_avg", "exp_avg_sq", "exp_avg_bf16", "exp_avg_sq_bf16", "exp_avg_codes", "exp_avg_sq_codes", "exp_avg_magnitudes",
    "exp_avg_sq_magnitudes", "schedule_free_z",
)  # fmt: skip


def state_of(trainer):
    """This rank's boxes of the state."""
    found = {}
    for key in STATES:
        boxes = composition.boxes(trainer.model, lambda parameter, key=key: trainer.optimizer.state[parameter].get(key))
        sizes = composition.boxes(trainer.model, lambda parameter: parameter.detach()) if boxes else {}
        for name, (shape, offset, part) in boxes.items():
            block = sizes[name][2].shape[-1] // part.shape[-1] if name in trainer.model.cuts else 1
            place = (*shape[:-1], shape[-1] // block), (*offset[:-1], offset[-1] // block)
            found[f"{name}/{key}"] = *place, part.float()
    return found


def train(folder, name, sections, steps):
    """Train up to a step and save; this rank's boxes of the weights, and of the state that the run began and ended with."""
    with Trainer(parse_config(composition.tree(folder, name, sections))) as trainer:
        began = state_of(trainer) if trainer.step else {}
        trainer.fit(until=steps)
        trainer.save()
        return composition.boxes(trainer.model, lambda parameter: parameter.detach()), began, state_of(trainer)


def trained(folder, name, sections, ranks, steps):
    found = run_ranks(train, ranks, folder, name, sections, steps, timeout_s=240, init=ranks > 1)
    return [composition.assemble(parts) for parts in zip(*found, strict=True)]


def compare(folder, kind, names, ranks, elsewhere, elsewhere_ranks):
    sections = composition.joined(sections_of("dense", ()), WIDE, OPTIMIZERS[kind])
    layouts = [
        composition.joined(sections_of("dense", layout), WIDE, OPTIMIZERS[kind]) for layout in (names, elsewhere)
    ]
    run = "-".join([kind, *names]).replace(" ", "_")
    if (folder, kind) not in _references:
        _references[folder, kind] = [trained(folder, f"{kind}-single-{n}", sections, 1, n)[0] for n in (1, 4)]
    first, last = _references[folder, kind]
    weights, _, _ = trained(folder, run, layouts[0], ranks, 1)
    assert weights.keys() == first.keys()
    # the first update is made of means that no rounding has touched yet
    assert max(float((weights[name] - first[name]).abs().max()) for name in first) <= 1e-6
    weights, _, saved = trained(folder, run, layouts[0], ranks, 4)
    for name in last:
        errors = (weights[name] - last[name]).abs()
        if kind == "schedule_free":
            assert float(errors.max()) <= 1e-6, name
        else:  # a gradient that adds up otherwise can round a mean to the neighbouring value: 1/128 or 1/64 of it
            assert float((errors > 1e-6).float().mean()) <= 0.01, name
            assert float(errors.max()) <= 0.05 * 4 * 1e-3, name
    _, began, _ = trained(folder, run, layouts[1], elsewhere_ranks, 5)
    assert began.keys() == saved.keys()
    assert [name for name in saved if not torch.equal(began[name], saved[name])] == []


_references = {}


@pytest.mark.filterwarnings("ignore:.*random generators are reseeded")
@pytest.mark.parametrize(
    ("kind", "names", "elsewhere"),
    [("int8", ("tp+sp",), ("fsdp",)), ("schedule_free", ("pp 1f1b",), ("fsdp",))],
    ids=str,
)
def test_small_states_are_those_of_one_process_on_two_ranks(folder, kind, names, elsewhere):
    compare(folder, kind, names, 2, elsewhere, 2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*random generators are reseeded")
@pytest.mark.parametrize("kind", [*OPTIMIZERS])
@pytest.mark.parametrize(
    ("names", "ranks", "elsewhere", "others"),
    [
        (("fsdp",), 4, ("tp",), 2),
        (("hsdp",), 4, (), 1),
        (("fsdp", "tp+sp"), 4, ("ddp",), 2),
        (("cp ring",), 2, ("fsdp", "tp"), 4),
        (("tp+sp", "pp zbv"), 4, ("fsdp",), 2),
    ],
    ids=str,
)
def test_small_states_are_those_of_one_process_everywhere(folder, kind, names, ranks, elsewhere, others):
    compare(folder, kind, names, ranks, elsewhere, others)


SMALL_WEIGHTS = {
    "optimizer": SMOOTH | {"weights": "bf16", "states": "bf16"}, "train": {"dtype": "bf16"}, "average": {"ema_decay": 0.9}
}  # fmt: skip


def given_gradients(folder, name, sections, steps):
    """This rank's boxes of the weights after steps of the optimizer with gradients that are functions of name and step."""
    with Trainer(parse_config(composition.tree(folder, name, sections))) as trainer:
        for step in range(steps):
            for part in trainer.model.parts:
                for fqn, parameter in named_parameters(part):
                    first = trainer.model.names[fqn][0]
                    cut = trainer.model.cuts.get(fqn)
                    generator = torch.Generator().manual_seed(step + sum(map(ord, first)))
                    whole = torch.randn(cut.global_shape if cut else tuple(parameter.shape), generator=generator)
                    local = parameter.to_local() if cut and hasattr(parameter, "to_local") else parameter
                    shape = tuple(parameter.shape) if cut else tuple(whole.shape)
                    assert local.dtype == torch.bfloat16
                    parameter.grad = torch.zeros_like(parameter)
                    copy_full(parameter.grad, cut.of(whole, shape) if cut else whole)
            trainer.optimizer.step()
        return composition.boxes(trainer.model, lambda parameter: parameter.detach())


def weights_of(folder, names, ranks):
    sections = composition.joined(sections_of("dense", names), WIDE, SMALL_WEIGHTS)
    run = "-".join(["given", *names]).replace(" ", "_")
    return composition.assemble(run_ranks(given_gradients, ranks, folder, run, sections, 3, timeout_s=240))


def same_bits(folder, names, ranks):
    if folder not in _given:
        _given[folder] = weights_of(folder, (), 1)
    found = weights_of(folder, names, ranks)
    assert found.keys() == _given[folder].keys()
    assert [name for name, value in _given[folder].items() if not torch.equal(value, found[name])] == []


_given = {}


@pytest.mark.parametrize(("names", "ranks"), [(("fsdp",), 2), (("tp+sp",), 2)], ids=str)
def test_small_weights_have_one_processs_bits_from_equal_gradients(folder, names, ranks):
    same_bits(folder, names, ranks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "ranks"),
    [(("fsdp",), 4), (("ddp",), 2), (("hsdp",), 4), (("pp 1f1b",), 2), (("fsdp", "tp+sp"), 4), (("cp ring",), 2)],
    ids=str,
)
def test_small_weights_have_one_processs_bits_from_equal_gradients_everywhere(folder, names, ranks):
    same_bits(folder, names, ranks)


def resumed_weights(folder, name, sections, steps):
    """Train from the last checkpoint, if any, up to a step; weights and moving averages before and after."""

    def held(trainer):
        found = composition.boxes(trainer.model, lambda parameter: parameter.detach())
        means = composition.boxes(trainer.model, lambda parameter: trainer.optimizer.state[parameter].get("ema"))
        assert all(part.dtype == torch.bfloat16 for _, _, part in found.values())
        assert all(part.dtype == torch.float32 for _, _, part in means.values())
        return found | {f"{name}/ema": box for name, box in means.items()} | state_of(trainer)

    with Trainer(parse_config(composition.tree(folder, name, sections))) as trainer:
        began = held(trainer) if trainer.step else {}
        trainer.fit(until=steps)
        trainer.save()
        return began, held(trainer), trainer.losses


def resume_on(folder, names, ranks, elsewhere, others, extra=None):
    run = "-".join(["resumed", *names, *elsewhere]).replace(" ", "_")
    losses = []
    saved = None
    for layout, count, steps in ((names, ranks, 3), (elsewhere, others, 5)):
        sections = composition.joined(sections_of("dense", layout), WIDE, SMALL_WEIGHTS, extra or {})
        found = run_ranks(resumed_weights, count, folder, run, sections, steps, timeout_s=240)
        began, ended = (composition.assemble([rank[i] for rank in found]) for i in (0, 1))
        if saved is not None:
            assert began.keys() == saved.keys()
            assert [name for name in saved if not torch.equal(began[name], saved[name])] == []
        saved = ended
        losses += next(rank[2] for rank in found if rank[2])
    return losses


@pytest.mark.filterwarnings("ignore:.*random generators are reseeded")
def test_small_weights_resume_with_the_same_bits_on_another_layout(folder):
    sections = composition.joined(WIDE, {"train": {"dtype": "bf16"}, "optimizer": SMOOTH})
    (reference,) = run_ranks(resumed_weights_losses, 1, folder, "wide-weights", sections, 5, timeout_s=240)
    losses = resume_on(folder, ("fsdp",), 2, ("tp+sp",), 2)
    # bf16 compute: 8 bits of precision in every activation, and as many in a weight
    assert losses == pytest.approx(reference, rel=2**-7)


def resumed_weights_losses(folder, name, sections, steps):
    with Trainer(parse_config(composition.tree(folder, name, sections))) as trainer:
        trainer.fit(until=steps)
        trainer.save()
        return trainer.losses


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*random generators are reseeded")
@pytest.mark.parametrize(
    ("names", "ranks", "elsewhere", "others"),
    [
        (("hsdp",), 4, ("pp 1f1b",), 2),
        (("ddp",), 2, ("fsdp",), 4),
        (("fsdp", "tp+sp"), 4, (), 1),
        (("pp 1f1b",), 2, ("ddp",), 2),
        (("fsdp", "float8"), 2, ("tp+sp", "float8"), 2),
    ],
    ids=str,
)
def test_small_weights_resume_with_the_same_bits_everywhere(folder, names, ranks, elsewhere, others):
    resume_on(folder, names, ranks, elsewhere, others)


@pytest.mark.filterwarnings("ignore:.*random generators are reseeded")
def test_a_run_does_not_change_the_format_of_its_weights(folder):
    sections = composition.joined(WIDE, {"train": {"dtype": "bf16"}, "optimizer": SMOOTH})
    run_ranks(resumed_weights_losses, 1, folder, "changed-weights", sections, 1, timeout_s=240)
    again = composition.joined(sections, {"optimizer": {"weights": "bf16"}})
    with pytest.raises(ValueError, match=r"optimizer\.weights='bf16', and the checkpoint of step 1 in .* in 'fp32'"):
        validate(parse_config(composition.tree(folder, "changed-weights", again)), 1)
    with pytest.raises(
        RankFailure, match=r"optimizer\.weights='bf16', and the checkpoint of step 1 has weights in 'fp32'"
    ):
        run_ranks(resumed_weights_losses, 2, folder, "changed-weights", again, 2, timeout_s=240)
    # its weights alone may begin another run, rounded
    init = composition.joined(again, {"model": {"init": f"run:{folder}/runs/changed-weights"}})
    (losses,) = run_ranks(resumed_weights_losses, 1, folder, "from-wide-weights", init, 2, timeout_s=240)
    assert len(losses) == 2
