"""Documents shared by all ranks of data and context parallelism: the losses of the static layout, and what it refuses."""

import json
import random
from pathlib import Path

import composition
import pytest
import torch
from titan_cp import plan_step
from titan_testing import run_ranks
from titan_train import Trainer
from titan_train.config import parse_config
from titan_train.inputs import prepare_inputs, prepared_rows
from titan_train.models import build_model
from titan_train.parallel.check import check_model
from titan_train.parallel.layout.run import plan_run
from titan_train.train.given import build_loader

DYNAMIC = {"context": {"dynamic": True}}
DENSE = {"model": {"name": "llama3_debug", "seq_len": 128, "args": {"num_layers": 2, "num_kv_heads": 2}},
         "train": {"global_batch": 8, "microbatch": 1}}  # fmt: skip
EXPERTS = {
    "model": {"name": "qwen3_moe_debug", "seq_len": 64, "args": {"num_layers": 2, "balance_loss": 0.0, "z_loss": 0.0}}
}
STATES = {"model": {"name": "qwen3_next_debug", "seq_len": 64}}
LENGTHS = {  # bytes of a document
    "alike": lambda rng: rng.randint(20, 40),
    "log-normal": lambda rng: int(rng.lognormvariate(3.2, 1.0)) + 1,
    "a tail": lambda rng: 2000 if rng.random() < 0.02 else rng.randint(5, 25),
}


def corpus(folder: Path, lengths: str) -> str:
    """A folder as `composition` wants it, with documents of a distribution."""
    rng = random.Random(1)
    texts = folder / "texts"
    texts.mkdir(parents=True)
    total = 0
    while total < 40_000:
        length = LENGTHS[lengths](rng)
        (texts / f"{total:06}.txt").write_text("".join(rng.choice("abcdefg hij\n") for _ in range(length)))
        total += length
    prepare_inputs(parse_config(composition.tree(folder, "prepare", {})), quiet=True)
    return str(folder)


def compare(folder: str, sections: dict, ranks: int = 4, steps: int = 3) -> None:
    """Losses, validation and first gradients of both layouts on the same ranks."""
    static, dynamic = (
        run_ranks(
            composition.run, ranks, folder, name, composition.joined({"train": {"steps": steps}}, sections, more), steps
        )
        for name, more in (("static", {}), ("dynamic", DYNAMIC))
    )
    assert all(rank[0] == dynamic[0][0] for rank in dynamic), "every rank knows the same losses"
    # float32 sums of the same terms in another order
    assert max(abs(a - b) for a, b in zip(static[0][0], dynamic[0][0], strict=True)) <= 1e-6
    assert dynamic[0][2][0] == pytest.approx(static[0][2][0], abs=1e-6)
    want, got = (composition.assemble([rank[3] for rank in run]) for run in (static, dynamic))
    largest = max(float(grad.abs().max()) for grad in want.values())
    assert max(float((got[name] - want[name]).abs().max()) for name in want) <= 4e-6 * largest


def train(folder: str, name: str, sections: dict, steps: int) -> None:
    config = parse_config(composition.tree(folder, name, sections))
    with Trainer(config, Path(folder) / name) as trainer:
        trainer.fit(until=steps)


def test_the_log_says_on_how_many_ranks_documents_lie(tmp_path: Path) -> None:
    folder = corpus(tmp_path / "data", "a tail")
    sections = composition.joined(DENSE, {"parallel": {"cp": 2}, "train": {"steps": 3}})
    config = parse_config(composition.tree(folder, "rows", sections))
    rows = prepared_rows(config, 24)
    assert rows is not None
    for dynamic in (True, False):
        more = composition.joined(sections, DYNAMIC) if dynamic else sections
        run_ranks(train, 4, folder, f"logged-{dynamic}", more, 3)
        lines = map(json.loads, (Path(folder) / f"logged-{dynamic}" / "metrics.jsonl").read_text().splitlines())
        found = [line["context"] for line in lines if line["kind"] == "step"]
        assert len(found) == 3
        for step, context in enumerate(found):
            here = rows[8 * step : 8 * step + 8]
            plan = plan_step(here if dynamic else here[:4], dp=2 if dynamic else 1, cp=2)
            assert context["documents"] == sum(plan.degrees.values())
            if dynamic:
                assert context["split"] == sum(count for degree, count in plan.degrees.items() if degree > 1)
                assert context["largest_degree"] == max(plan.degrees)
                assert context["imbalance"] == pytest.approx(plan.makespan / plan.bound)
            assert context["imbalance"] >= 1.0


@pytest.mark.parametrize("lengths", LENGTHS)
def test_losses_are_those_of_the_static_layout_for_three_distributions_of_lengths(lengths: str, tmp_path: Path) -> None:
    compare(corpus(tmp_path / "data", lengths), composition.joined(DENSE, {"parallel": {"cp": 2}}))


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param(composition.joined(EXPERTS, {"parallel": {"cp": 2, "ep": 2}}), id="experts over ranks"),
        pytest.param(composition.joined(STATES, {"parallel": {"cp": 2}}), id="layers with a state"),
        pytest.param(composition.joined(DENSE, {"parallel": {"cp": 2, "dp_replicate": 2}}), id="replicas"),
    ],
)
def test_losses_are_those_of_the_static_layout_for_other_models_and_wrappers(sections: dict, tmp_path: Path) -> None:
    compare(
        corpus(tmp_path / "data", "a tail"),
        composition.joined({"train": {"global_batch": 8, "microbatch": 1}}, sections),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "sections", [{"parallel": {"cp": 2, "pp": 2}}, {"parallel": {"cp": 2, "tp": 2}}], ids=["pp2", "tp2"]
)
def test_losses_are_those_of_the_static_layout_beside_pipelines_and_tensor_parallelism(
    sections: dict, tmp_path: Path
) -> None:
    compare(corpus(tmp_path / "data", "a tail"), composition.joined(DENSE, sections), ranks=8, steps=2)


def check(ranks: int = 4, **sections: dict) -> None:
    base = {"tokenizer": {"kind": "bytes"}, "parallel": {"cp": 2}, "train": {"global_batch": 8, "microbatch": 1}}
    config = parse_config(composition.joined(base, DYNAMIC, sections))
    plan = plan_run(config, ranks)
    with torch.device("meta"):
        model = build_model(config.model, vocab_size=257)
    check_model(config, plan.layout, plan.batch, model)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"parallel": {"cp": 1}}, r"parallel\.cp=1: no attention.*Set parallel\.cp=2"),
        ({"context": {"method": "ulysses"}}, r"context\.method='ulysses'.*Leave context\.method at 'auto'"),
        ({"context": {"layout": "zigzag"}}, r"context\.layout='zigzag'.*Leave context\.layout at 'auto'"),
        ({"data": {"document_mask": False}}, r"without the mask a row is\s+one"),
        ({"model": {"seq_len": 63}}, r"parallel\.cp=2 does not divide the 63 tokens.*model\.seq_len=62"),
        (
            {"model": {"name": "qwen3_moe_debug", "args": {"balance_loss": 0.01}}},
            "joins the rows of all data-parallel ranks",
        ),
        ({"train": {"rerun_above": 2.0}}, "here all ranks share one batch"),
        ({"model": {"name": "qwen3_vl_debug", "seq_len": 64}}, "hold no packed documents"),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_name(sections: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(**composition.joined({"model": {"name": "llama3_debug", "seq_len": 64}}, sections))


def test_rows_that_the_static_layout_cannot_cut_are_taken() -> None:
    """Zig-zag wants chunks of a row; documents over all ranks only as many tokens on each."""
    check(
        8, model={"name": "llama3_debug", "seq_len": 66}, parallel={"cp": 2}, train={"global_batch": 8, "microbatch": 1}
    )


def test_tensor_parallel_ranks_share_the_tokens_of_all_rows_of_a_micro_batch() -> None:
    """A context rank holds a part of them all, not of each row."""
    words = {
        "model": {"name": "llama3_debug"},
        "parallel": {"cp": 2, "tp": 2},
        "train": {"global_batch": 8, "microbatch": 2},
    }
    with pytest.raises(ValueError, match="33 tokens"):
        check(4, **composition.joined(words, {"model": {"seq_len": 33}}))
    check(4, **composition.joined(words, {"model": {"seq_len": 34}}))


def test_microbatches_of_a_program_are_refused_as_ranks_cannot_read_each_others_rows() -> None:
    config = parse_config(composition.joined({"tokenizer": {"kind": "bytes"}, "parallel": {"cp": 2}}, DENSE, DYNAMIC))
    plan = plan_run(config, 4)
    with pytest.raises(ValueError, match="Pass a BatchSource"):
        build_loader([], config=config, plan=plan.batch, mesh=None, device=torch.device("cpu"), vocab_size=257)
