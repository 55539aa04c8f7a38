"""Several predicted tokens under every layout: the losses, gradients and weights of one process."""

import random

import composition
import pytest
from composition_check import assert_as_one_process
from composition_matrix import MODELS, SETTINGS, TIED, WITH_EXPERTS, ranks_of, sections_of
from titan_testing import run_ranks
from titan_train.config import parse_config
from titan_train.models import build_model
from titan_train.parallel.check import check_model
from titan_train.parallel.layout.run import plan_run

STEPS = 4
LATE = {"train": {"steps": STEPS}, "mtp": {"late_from": 0.5}, "validation": {"every": STEPS}}
EMBEDDING = ("tok_embeddings.weight", "lm_head.weight", "mtp_embeddings.weight")


def sections(model, depth, *more):
    sections = composition.joined(TIED if model == "tied" else MODELS[model], LATE, *more)
    args = sections["model"].get("args", {}) | {"mtp_depth": depth}
    return composition.joined(sections, {"model": {"args": args}})


def train(folder, name, sections, tied):
    """As `composition.run`, with the modules' losses of each step; copies of the embedding under its first name."""
    ahead = []

    class Seen(composition.Seen):
        def on_step(self, info):
            super().on_step(info)
            ahead.append(info.result.mtp_losses)

    composition.Seen = Seen
    losses, norms, validation, captured = composition.run(folder, name, sections, steps=STEPS)
    for copy in EMBEDDING[1 if tied else 2 :]:
        if copy in captured:
            captured[EMBEDDING[0]] = captured.pop(copy)
    return (losses, norms, validation, captured), ahead


@pytest.fixture(scope="module")
def single(folder):
    known = {}

    def reference(model, depth, *more):
        key = model, depth, str(more)
        if key not in known:
            found = run_ranks(
                train, 1, folder, "single", sections(model, depth, *more), model == "tied", init=False, timeout_s=170
            )
            known[key] = found[0]
        return known[key]

    return reference


def check(model, depth, names, folder, single, *more):
    wanted = single(model, depth, *more)
    layout = sections_of(model, names) if model in MODELS else sections_of("dense", names)
    layout.pop("model"), layout.pop("train", None)
    ranks = ranks_of(names) if len(names) > 1 else max(2, SETTINGS[names[0]].ranks)
    found = run_ranks(
        train, ranks, folder, "-".join(names), sections(model, depth, layout, *more), model == "tied", timeout_s=170
    )
    assert_as_one_process([rank for rank, _ in found], wanted[0])
    for _, ahead in found:
        for got, expected in zip(ahead, wanted[1], strict=True):
            assert got == pytest.approx(expected, abs=2e-5)  # as the losses, after the steps before
            assert len(got) == depth


FAST = [
    ("dense", 2, ("tp+sp", "pp zbv")),
    ("tied", 1, ("cp ring", "pp zb_h2")),
    ("dense", 2, ("fsdp",)),
    ("moe", 1, ("ep", "pp 1f1b")),
    ("hybrid", 1, ("tp+sp", "pp zbv")),
]


@pytest.mark.parametrize(("model", "depth", "names"), FAST, ids=lambda v: v if isinstance(v, str) else str(v))
def test_a_layout_trains_several_predicted_tokens_as_one_process_does(model, depth, names, folder, single):
    check(model, depth, names, folder, single)


def random_products(count, *models):
    """So many products of two to four settings that may be combined, over the models."""
    found, number = [], 0
    while len(found) < count:
        rng = random.Random(number)
        number += 1
        model = rng.choice(models)
        names = rng.sample(
            [name for name in SETTINGS if name not in ("float8", "recomputing")], rng.choice((1, 2, 3, 3, 4))
        )
        axes = [SETTINGS[name].axis for name in names]
        product = 1
        for name in names:
            product *= SETTINGS[name].ranks
        if len(set(axes)) < len(axes) or product > 8 or ("ep" in names and model not in WITH_EXPERTS):
            continue
        if {"ddp", "ep"} <= set(names) or {"tp", "ep"} <= set(names):  # refused
            continue
        found.append((model, rng.choice((1, 2)), tuple(names)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "depth", "names"),
    [*random_products(15, "dense", "tied", "moe"), *random_products(5, "hybrid")],
    ids=str,
)
def test_a_random_product_trains_several_predicted_tokens_as_one_process_does(model, depth, names, folder, single):
    check(model, depth, names, folder, single)


def refusal(**changed):
    config = parse_config(composition.joined({"model": {"name": "llama3_debug", "args": {"mtp_depth": 1}}}, changed))
    plan = plan_run(config, 1)
    check_model(config, plan.layout, plan.batch, build_model(config.model, vocab_size=300))


def test_what_cannot_be_is_refused_by_name():
    with pytest.raises(ValueError, match=r"mtp_depth=1 with train.fused_loss=false"):
        refusal(train={"fused_loss": False})
    with pytest.raises(ValueError, match=r"\[mtp\] sets weights of modules .*'gpt_debug' has none"):
        refusal(model={"name": "gpt_debug", "args": {}}, mtp={"weight": 0.5})
    with pytest.raises(ValueError, match=r"gpt_debug has no such argument"):
        refusal(model={"name": "gpt_debug"})
    refusal()
