"""Random compositions give the losses, gradient norms and weights of one process: 11 by default, 12 more with --slow.

`nox -s fuzz` runs any others.
A failure names the command that replays its case alone. What a case is: `fuzz_cases`; the bounds: `fuzz_run`.
"""

import fuzz_cases
import fuzz_run
import pytest

DEFAULT = (3, 7, 10, 12, 16, 23, 25, 29, 33, 61, 100)  # few and quick ones that cover every kind
SLOW = range(1000, 1012)  # 500 and more: `nox -s fuzz -- --seed 0 --count 500`, and 200 new ones each night
MUST_COVER = {
    "llama", "gpt", "qwen3", "qwen3_moe", "deepseek", "tied", "untied", "packed", "unpacked", "several trainers",
    "ep over all ranks", "one-rank fsdp mesh", "float8", "pp > 1", "tp > 1", "cp > 1", "ep > 1", "dp_replicate > 1",
    "group", "local", "torchrun", "full", "every", "pattern", "selective", "sharded", "unsharded", "zero1",
    "ring", "allgather", "ulysses", "usp", "1 ranks", "2 ranks", "3 ranks", "4 ranks", "6 ranks", "resume", "hf", "unplanned",
    "dropping", "lr_scales", "weight_decays", "frozen_steps", "tied x tp x pp", "muon", "normuon",
    "schedule_free", "qk_clip", "ema", "ramp", "mup", "mtp", "mtp hf", "mtp hybrid",
}  # fmt: skip


@pytest.mark.timeout(600)  # a case is up to three trainers and their references
@pytest.mark.parametrize("seed", DEFAULT)
def test_a_random_composition_gives_what_one_process_does(seed, fuzz_folder):
    fuzz_run.check(fuzz_cases.draw(seed), fuzz_folder)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", SLOW)
def test_many_random_compositions_give_what_one_process_does(seed, fuzz_folder):
    fuzz_run.check(fuzz_cases.draw(seed), fuzz_folder)


def test_the_default_cases_cover_every_kind_of_composition():
    covered = set().union(*(fuzz_cases.draw(seed).tags for seed in DEFAULT))
    wanted = MUST_COVER - (set() if fuzz_cases.HAS_TRANSFORMERS else {"hf", "unplanned", "mtp hf"})
    assert covered >= wanted, wanted - covered


def test_a_seed_always_draws_the_same_case():
    assert fuzz_cases.draw.__wrapped__(11).describe() == fuzz_cases.draw(11).describe()


def test_the_bounds_see_a_gradient_that_is_wrong_by_a_hundredth():
    weights = {"tok_embeddings.weight": fuzz_run.torch.zeros(4)}
    want = ([5.6, 5.6, 5.6], [1.0, 1.0, 1.0], [8.0], weights)
    limits = fuzz_run.LIMITS["float32"]
    # a gradient of 1e-3 in a norm of 1, wrong by a hundredth: after three steps of lr = eps the weight is off by 3e-5
    wrong = ([5.6, 5.6, 5.6], [1.0, 1.0, 1.0], [8.0], {"tok_embeddings.weight": fuzz_run.torch.full((4,), 3e-5)})
    assert fuzz_run.shares(wrong, want, limits)["weights"] > 1
    assert max(fuzz_run.shares(want, want, limits).values()) == 0
