"""A diffusion model under every layout: the losses, gradients and samples of one process."""

import composition
import pytest
from composition import joined
from composition_check import assert_as_one_process, assert_continues
from titan_testing import run_ranks
from titan_train.config import load_config, parse_config
from titan_train.launch.validate import validate
from titan_train.models.flux.model import Flux

TINY = {
    "model": {
        "name": "flux_tiny",
        "seq_len": 13,
        "args": {
            "dim": 64, "num_heads": 4, "in_channels": 48, "rope_index_dim": 4, "rope_row_dim": 6, "rope_column_dim": 6,
            "guidance": True,
        },
    },
    "diffusion": {"grid": 3, "text_tokens": 4, "text_dropout": 0.3},
    "validation": {"every": 0},
    "train": {"steps": 4, "global_batch": 8, "max_grad_norm": 0.5},
    "optimizer": {"lr": 1e-3},
    "schedule": {"warmup_steps": 1},
}  # fmt: skip
EVEN = {"model": TINY["model"] | {"seq_len": 20}, "diffusion": TINY["diffusion"] | {"grid": 4}}
SLOW = ("pp zbv", "tp and cp", "fsdp and pp", "cp allgather", "fsdp and tp", "fsdp and cp", "tp and pp")
LAYOUTS = {
    "fsdp": (2, {}),
    "ddp": (2, {"parallel": {"mode": "ddp"}}),
    "hsdp": (4, {"parallel": {"dp_replicate": 2, "mode": "hsdp"}}),
    "tp": (2, {"parallel": {"tp": 2, "sequence_parallel": False}}),
    "cp allgather": (2, EVEN | {"parallel": {"cp": 2}, "context": {"method": "allgather"}}),
    "cp ulysses": (2, EVEN | {"parallel": {"cp": 2}, "context": {"method": "ulysses"}}),
    "pp": (2, {"parallel": {"pp": 2}}),
    "pp zbv": (2, {"parallel": {"pp": 2}, "pipeline": {"schedule": "zbv"}}),
    "accumulation and recomputation": (2, {"train": {"microbatch": 2}, "activations": {"checkpoint": "full"}}),
    "tp and cp": (4, EVEN | {"parallel": {"tp": 2, "cp": 2, "sequence_parallel": False}}),
    "fsdp and pp": (4, {"parallel": {"pp": 2}}),
    "fsdp and tp": (4, {"parallel": {"tp": 2, "sequence_parallel": False}}),
    "fsdp and cp": (4, EVEN | {"parallel": {"cp": 2}}),
    "tp and pp": (4, {"parallel": {"tp": 2, "pp": 2, "sequence_parallel": False}}),
}


def filled(self, fqn, tensor, generator):
    """No zeros: with the model's own start, the first gradient reaches the last layer alone."""
    tensor.normal_(1.0 if fqn.endswith("_norm.weight") else 0.0, 0.1, generator=generator)


def run(folder, name, sections):
    """As `composition.run`, on this rank, from weights whose every gradient says something."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Flux, "init_weights", filled)
        return composition.run(folder, name, sections, 4)


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """One process, for each of the two sizes of image."""
    folder = tmp_path_factory.mktemp("one")
    made = {}

    def alone(even):
        if even not in made:
            sections = joined(TINY, EVEN) if even else TINY
            made[even] = run_ranks(run, 1, folder, f"one{even}", sections, timeout_s=170)[0]
        return made[even]

    return alone


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in LAYOUTS])
def test_a_layout_gives_the_losses_and_gradients_of_one_process(name, single, tmp_path):
    ranks, sections = LAYOUTS[name]
    results = run_ranks(run, ranks, tmp_path, "many", joined(TINY, sections), timeout_s=170)
    alone = single("diffusion" in sections)
    assert_as_one_process(results, alone)
    by_time = alone[2][1]
    assert len(by_time) == 8
    for *_, held_out, _ in results:
        assert held_out[1] == pytest.approx(by_time, abs=2e-5)  # on every rank


@pytest.mark.slow
def test_a_run_continues_on_another_layout_with_the_same_losses_and_bitwise_on_its_own(tmp_path):
    assert_continues(tmp_path, TINY, TINY, joined(TINY, {"parallel": {"dp_replicate": 2, "mode": "hsdp"}}), 2)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"parallel": {"tp": 2}}, "sequence_parallel=false"),
        ({"parallel": {"cp": 2}}, r"does not divide diffusion\.grid \* grid=9"),
        (EVEN | {"parallel": {"cp": 2}, "context": {"method": "ring"}}, "Use 'allgather' or 'ulysses'"),
    ],
)
def test_what_two_streams_cannot_do_is_refused(sections, message, tmp_path):
    config = parse_config(composition.tree(tmp_path, "refused", joined(TINY, sections)))
    with pytest.raises(ValueError, match=message):
        validate(config, 2)


def test_a_length_that_is_not_that_of_the_two_streams_is_refused(tmp_path):
    wrong = joined(TINY, {"model": {"seq_len": 14}})
    with pytest.raises(
        ValueError, match=r"model\.seq_len=14 must be diffusion\.text_tokens \+ diffusion\.grid\^2 = 13"
    ):
        validate(parse_config(composition.tree(tmp_path, "refused", wrong)), 1)


def test_a_loss_on_logits_is_refused_where_there_are_none(tmp_path):
    with pytest.raises(ValueError, match=r"train\.z_loss=0\.1: the loss of diffusion is a squared error"):
        validate(parse_config(composition.tree(tmp_path, "refused", joined(TINY, {"train": {"z_loss": 0.1}}))), 1)


@pytest.mark.parametrize("name", ["flux_dev", "flux_schnell"])
def test_the_published_models_pass_the_checks_of_a_run_over_eight_nodes(name):
    layout = ["--parallel.mode", "hsdp", "--parallel.dp_replicate", "8", "--parallel.dp_shard", "8"]
    validate(load_config(name, layout), 64)
