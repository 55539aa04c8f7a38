"""What random compositions found wrong, each by name."""

import composition
import pytest
import torch
from titan_testing import run_ranks
from titan_train.config import parse_config
from titan_train.models import build_model
from titan_train.parallel.check import check_model
from titan_train.parallel.layout.run import plan_run


def check(ranks: int, **sections: dict) -> None:
    config = parse_config({"tokenizer": {"kind": "bytes"}, **sections})
    plan = plan_run(config, ranks)
    with torch.device("meta"):
        model = build_model(config.model, vocab_size=257)
    check_model(config, plan.layout, plan.batch, model)


@pytest.mark.parametrize("loss", ["balance_loss", "z_loss"])
def test_losses_over_a_row_are_refused_where_context_parallelism_joins_rows(loss: str) -> None:
    """The z-loss was let through: joined rows halved its gradient on the gate."""
    losses = {"balance_loss": 0.0, "z_loss": 0.0, loss: 0.01}
    model = {"model": {"name": "deepseek_debug", "seq_len": 32, "args": losses}, "parallel": {"cp": 2}}
    with pytest.raises(ValueError, match=r"train\.microbatch=1"):
        check(2, **model, train={"global_batch": 4, "microbatch": 2})
    check(2, **model, train={"global_batch": 4, "microbatch": 1})
    check(2, **model, train={"global_batch": 4, "microbatch": 2}, data={"document_mask": False})


def test_a_mask_of_documents_that_vision_would_not_heed_is_refused() -> None:
    """Without it, a balance loss under context parallelism was let through, though rows were joined all the same."""
    model = {"model": {"name": "qwen3_vl_moe_debug", "seq_len": 64}, "parallel": {"cp": 2}}
    for masked, reason in ((False, r"Leave data\.document_mask=true"), (True, r"train\.microbatch=1")):
        with pytest.raises(ValueError, match=reason):
            check(2, **model, train={"global_batch": 4, "microbatch": 2}, data={"document_mask": masked})


def test_selective_checkpointing_may_keep_the_products_of_asynchronous_tensor_parallelism(folder: str) -> None:
    """The ring added what it received into a product that was kept for backward: an error in backward."""
    sections = {"parallel": {"tp": 2, "async_tp": True}}
    plain = run_ranks(composition.run, 2, folder, "plain", sections, steps=1)
    kept = {"activations": {"checkpoint": "selective", "matmul_every": 0}}
    for got, want in zip(run_ranks(composition.run, 2, folder, "kept", sections | kept, steps=1), plain, strict=True):
        assert got[0] == want[0]
        assert all(
            torch.equal(box, want[3][name][2]) for name, (_, _, box) in got[3].items()
        )  # same shapes, same ranks


def test_experts_held_by_several_ranks_of_tensor_parallelism_stay_equal(folder: str) -> None:
    """With ep < tp and no data parallelism nothing added the gradients of the two copies: they drifted apart."""
    model = {"name": "qwen3_moe_debug", "args": {"num_layers": 2, "balance_loss": 0.0, "z_loss": 0.0}}
    sections = {"model": model, "parallel": {"tp": 4, "ep": 2, "sequence_parallel": True, "replicate_kv": True}}
    ((_, norms, _, single),) = run_ranks(composition.run, 1, folder, "one", {"model": model}, 1, init=False)
    ranks = run_ranks(composition.run, 4, folder, "copies", sections, 1)
    want = composition.assemble([single])
    got = composition.assemble([rank[3] for rank in ranks])  # fails where two copies differ
    # sums of float32 in another order, some sqrt(n) 2^-24 of the largest gradient; a missing half is 5e-1 of it
    largest = max(float(grad.abs().max()) for grad in want.values())
    assert got.keys() == want.keys()
    assert max(float((got[name] - want[name]).abs().max()) for name in want) <= 4e-6 * largest
    assert ranks[0][1][0] == pytest.approx(norms[0], rel=1e-5)


SGD = {"optimizer": {"name": "sgd", "lr": 0.1}}


@pytest.mark.filterwarnings("ignore:.*random generators are reseeded")
def test_sgd_of_plain_weights_goes_on_with_sharded_ones(folder) -> None:
    """The fused kernel came along with the checkpoint, and has no way to step a DTensor."""
    want = run_ranks(composition.run, 1, folder, "sgd", SGD, init=False)[0][0]
    first = run_ranks(composition.continue_run, 1, folder, "sgd-on", SGD, 2, init=False)[0][1]
    more = run_ranks(composition.continue_run, 2, folder, "sgd-on", SGD, 4)[0][1]
    assert first + more == pytest.approx(want[:4], abs=2e-6)
