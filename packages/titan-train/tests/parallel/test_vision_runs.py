"""Vision-language runs that are compiled, in bfloat16 or float8, recomputed, or thaw part by part: beside the plain one."""

import composition
import pytest
from composition import joined
from composition_check import compare, failures
from test_vision import TINY, WHOLE, run
from titan_testing import run_ranks

COMPILED = {"compile": {"enabled": True, "backend": "aot_eager"}}
FLOAT8 = {"float8": {"recipe": "blockwise", "min_speedup": 0.0}}
BF16 = {"train": {"dtype": "bf16"}}
PP, TP = {"parallel": {"pp": 2}}, {"parallel": WHOLE}
# blocks of 128: each of two ranks has whole ones
WIDE = joined(
    TINY,
    {
        "model": {
            "name": "qwen3_vl_debug", "seq_len": 64,
            "args": {
                "dim": 256, "num_layers": 2, "num_heads": 4, "num_kv_heads": 4, "head_dim": 64, "ffn_dim": 256, "vision_dim": 256,
                "vision_ffn_dim": 256, "vision_layers": 1, "position_side": 4, "rope_row_pairs": 10, "rope_column_pairs": 10,
            },
        },
        "train": {"steps": 2, "global_batch": 4, "max_grad_norm": 0.5},
    },
)  # fmt: skip


def run_each(folder, name, many):
    """One after the other on the same ranks, two steps each."""
    from test_vision import SeesImages, filled

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SeesImages, "init_weights", filled)
        return [
            composition.run(folder, f"{name}{n}", sections, sections["train"]["steps"])
            for n, sections in enumerate(many)
        ]


def on(ranks, folder, many):
    """The results of each run, of all ranks."""
    results = run_ranks(run_each, ranks, folder, f"on{ranks}_", many, timeout_s=900)
    return [[of_rank[n] for of_rank in results] for n in range(len(many))]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_compiled_and_recomputed_layouts_are_those_of_one_plain_process(tmp_path):
    (alone,) = on(1, tmp_path, [WIDE])
    recomputed = {"activations": {"checkpoint": "full"}}
    many = [joined(WIDE, COMPILED, more) for more in ({}, TP, PP)]
    many += [joined(WIDE, recomputed, more) for more in ({}, TP, PP)]
    many += [joined(WIDE, COMPILED, recomputed)]
    for sections, results in zip(many, on(2, tmp_path, many), strict=True):
        errors = compare(alone[0], results)
        assert not failures(errors, float8=False), (sections, errors)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("precision", [FLOAT8, BF16], ids=["float8", "bf16"])
def test_a_lower_precision_is_near_float32_and_the_same_under_every_layout(precision, tmp_path):
    (plain,), (rounded,) = on(1, tmp_path, [WIDE, joined(WIDE, precision)])
    assert plain[0] != rounded[0]  # something was rounded
    # e4m3 rounds each factor by 2^-5 on average, bfloat16 by 2^-9; sums of 256 products average that out
    assert max(abs(a - b) / a for a, b in zip(plain[0], rounded[0], strict=True)) < 0.05
    assert abs(plain[1][0] - rounded[1][0]) / plain[1][0] < 0.05
    many = [joined(WIDE, precision, more) for more in ({}, TP, PP)]
    for sections, results in zip(many, on(2, tmp_path, many), strict=True):
        errors = compare(rounded, results)
        # the limits of text models, derived there; bfloat16's are tighter than float8's by the same argument
        assert not failures(errors, float8=True), (sections, errors)


THAWED = {
    "optimizer": {
        "lr": 1e-3,
        "frozen_steps": {"^(?!vision.projector|vision.deepstack)": 2},
        "lr_scales": {"^vision.blocks": 0.1},
    }
}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_projector_first_and_then_all_is_the_same_under_every_layout(tmp_path):
    """Before, at and after the thaw; parts learn at rates of their own."""
    (alone,) = on(1, tmp_path, [joined(TINY, THAWED)])
    losses = alone[0][0]
    many = [joined(TINY, THAWED, more) for more in ({}, TP, PP)]
    trained = composition.assemble([alone[0][3]])
    for results in on(2, tmp_path, many):
        check_thaw(results, alone[0], trained)
    assert len(losses) == 4


def check_thaw(results, alone, trained):
    """Losses and norms of all steps, and the gradients of the first, in which only projectors have any."""
    losses, norms, *_ = alone
    for found, other_norms, *_ in results:
        assert max(abs(a - b) for a, b in zip(found, losses, strict=True)) <= 2e-5  # AdamW amplifies what differs
        assert max(abs(a - b) / b for a, b in zip(other_norms, norms, strict=True)) <= 1e-5
    # a pipeline stage without projectors has its first update, and so its first gradients here, at the thaw
    projectors = ("vision.projector", "vision.deepstack")
    whole = composition.assemble(
        [{name: box for name, box in boxes.items() if name.startswith(projectors)} for *_, boxes in results]
    )
    assert whole.keys() == trained.keys()
    assert all(name.startswith(projectors) for name in trained)
    for name, gradient in trained.items():
        assert gradient.any(), name
        assert (whole[name] - gradient).abs().max() <= 1e-6, name


def thaw(folder, sections, until):
    """Continue, from weights whose every gradient says something; also the weights after it."""
    from test_vision import SeesImages, filled
    from titan_train.config import parse_config
    from titan_train.train import Trainer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SeesImages, "init_weights", filled)
        with Trainer(parse_config(composition.tree(folder, "thaw", sections))) as trainer:
            first = trainer.step
            trainer.fit(until=until)
            trainer.save()
            return first, trainer.losses, composition.boxes(trainer.model, of=lambda parameter: parameter)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_resumes_across_the_thaw_on_another_layout(tmp_path):
    sections = joined(TINY, THAWED)
    whole = run_ranks(run, 1, tmp_path, "one", sections, timeout_s=300)[0][0]
    start = composition.assemble([run_ranks(thaw, 1, tmp_path / "a", sections, 0, timeout_s=300)[0][2]])
    before = run_ranks(thaw, 2, tmp_path / "a", sections, 1, timeout_s=300)
    held = composition.assemble([boxes for *_, boxes in before])
    for name, weight in held.items():
        assert (weight == start[name]).all() != name.startswith(("vision.projector", "vision.deepstack")), name
    at = run_ranks(thaw, 2, tmp_path / "a", joined(sections, PP), 2, timeout_s=300)[0]
    after = run_ranks(thaw, 2, tmp_path / "a", joined(sections, TP), 4, timeout_s=300)[0]
    assert [before[0][0], at[0], after[0]] == [0, 1, 2]
    found = before[0][1] + at[1] + after[1]
    assert max(abs(a - b) for a, b in zip(found, whole, strict=True)) <= 5e-6
