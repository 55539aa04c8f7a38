"""Whatever combination of parallelisms runs it, a model has the loss and the gradients of one process.

Tolerances. Float32 sums in another order: the gradient error is a few units in the last place of the largest term,
2^-24 each, so 4e-6 of a parameter's largest gradient is some 60 of them; ten AdamW steps divide by small second moments
and amplify that, 2e-5 in the loss. Float8 rounds to 3 bits of mantissa: where a sum in another order crosses a rounding
boundary one value changes by 1/16, and blocks of 128 that a cut divides have other scales.
"""

import dataclasses

import composition
import pytest
from composition_check import compare, failures
from composition_matrix import ALL_FIVE, FAST, MOE, combinations, ranks_of, refusal_of, sampled, sections_of
from titan_testing import run_ranks


@pytest.fixture(scope="module")
def single(folder):
    """What one process gives, run once for each model and precision."""
    known = {}

    def reference(model, float8):
        if (model, float8) not in known:
            sections = sections_of(model, ("float8",) if float8 else ())
            known[model, float8] = run_ranks(composition.run, 1, folder, "single", sections, init=False, timeout_s=170)[
                0
            ]
        return known[model, float8]

    return reference


def record(record_property, ranks, errors):
    for name, value in {"ranks": ranks, **dataclasses.asdict(errors)}.items():
        record_property(name, value)


def check(model, names, folder, single, record_property, timeout_s=170):
    """Compare; what was found goes into the JUnit report, from which `benchmarks/matrix_table.py` makes the table."""
    sections, ranks = sections_of(model, names), ranks_of(names)
    reason = refusal_of(names)
    if reason is not None:
        with pytest.raises(Exception, match=reason):
            run_ranks(composition.run, ranks, folder, "refused", sections, timeout_s=60)
        record_property("refused", reason)
        return
    results = run_ranks(
        composition.run, ranks, folder, "-".join(names).replace(" ", "_"), sections, timeout_s=timeout_s
    )
    errors = compare(single(model, "float8" in names), results)
    record(record_property, ranks, errors)
    assert not failures(errors, float8="float8" in names), errors


@pytest.mark.parametrize(
    ("model", "names"), FAST, ids=lambda value: value if isinstance(value, str) else " x ".join(value)
)
def test_a_combination_gives_the_loss_and_gradients_of_one_process(model, names, folder, single, record_property):
    check(model, names, folder, single, record_property)


SAMPLED = sampled()


@pytest.mark.slow
@pytest.mark.timeout(700)  # eight ranks that compile
@pytest.mark.parametrize(
    ("model", "names"),
    [
        pytest.param(*row, id=f"{row[0]}-{' x '.join(row[1])}", marks=[] if row in SAMPLED else [pytest.mark.full])
        for row in combinations()
    ],
)
def test_every_combination_gives_the_loss_and_gradients_of_one_process(model, names, folder, single, record_property):
    check(model, names, folder, single, record_property, timeout_s=600)


@pytest.mark.slow
def test_pipeline_data_context_tensor_and_expert_parallelism_at_once(folder, single, record_property):
    results = run_ranks(composition.run, 16, folder, "all-five", MOE | ALL_FIVE, timeout_s=170)
    errors = compare(single("moe", False), results)
    record(record_property, 16, errors)
    assert not failures(errors, float8=False), errors


@pytest.mark.parametrize("float8", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["float32", "float8"])
def test_a_rank_holds_a_part_of_an_expert_where_shards_outnumber_experts(folder, float8):
    # 4 experts over ep=2 and 4 shards: two experts for four ranks, so each rank holds half the rows of both
    sections = {
        "model": {
            "name": "qwen3_moe_debug", "seq_len": 32,
            "args": {"num_layers": 2, "num_experts": 4, "dim": 128, "expert_ffn_dim": 128},
        }
    }  # fmt: skip
    if float8:
        sections["float8"] = {"recipe": "blockwise", "min_speedup": 0.0}
    layout = sections | {"parallel": {"dp_shard": 8, "ep": 2}}
    single = run_ranks(composition.run, 1, folder, "few-single", sections, init=False, timeout_s=170)[0]
    ranks = run_ranks(composition.run, 8, folder, "few", layout, timeout_s=170)
    assert not failures(compare(single, ranks), float8=float8)
