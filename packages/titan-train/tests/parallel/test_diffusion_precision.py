"""A diffusion model compiled and in float8, beside the plain one and under layouts."""

import composition
import pytest
from composition import joined
from composition_check import compare, failures
from test_diffusion import EVEN, TINY, run
from titan_testing import run_ranks
from titan_train.config import parse_config
from titan_train.train import Trainer

FLOAT8 = {"float8": {"recipe": "blockwise", "min_speedup": 0.0}}
# one row at a time: the weight gradient's scales stand for blocks of 128 tokens, so other micro-batches round otherwise
ROWS = {"train": {"microbatch": 1}}
COMPILED = {"compile": {"enabled": True, "backend": "aot_eager"}}
LAYOUTS = {
    "compiled": (1, COMPILED),
    "compiled fsdp": (2, COMPILED),
    "compiled tp": (2, joined(COMPILED, {"parallel": {"tp": 2, "sequence_parallel": False}})),
    "compiled cp": (2, joined(COMPILED, {"parallel": {"cp": 2}, "context": {"method": "ulysses"}})),
    "compiled pp": (2, joined(COMPILED, {"parallel": {"pp": 2}})),
    "float8 fsdp": (2, FLOAT8),
    "float8 tp": (2, joined(FLOAT8, {"parallel": {"tp": 2, "sequence_parallel": False}})),
    "float8 cp": (2, joined(FLOAT8, {"parallel": {"cp": 2}})),
    "float8 pp": (2, joined(FLOAT8, ROWS, {"parallel": {"pp": 2}, "pipeline": {"schedule": "zb_h1"}})),
    "float8 compiled": (1, joined(FLOAT8, COMPILED)),
    "float8 compiled fsdp": (2, joined(FLOAT8, COMPILED)),
    "float8 compiled tp": (2, joined(FLOAT8, COMPILED, {"parallel": {"tp": 2, "sequence_parallel": False}})),
    "float8 compiled pp": (2, joined(FLOAT8, ROWS, COMPILED, {"parallel": {"pp": 2}})),
    "float8 compiled full": (1, joined(FLOAT8, COMPILED, {"activations": {"checkpoint": "full"}})),
    "float8 compiled selective": (1, joined(FLOAT8, COMPILED, {"activations": {"checkpoint": "selective"}})),
    "float8 full": (1, joined(FLOAT8, {"activations": {"checkpoint": "full"}})),
}
FAST = ("compiled", "float8 fsdp")
# blocks of 128: with two heads of 128 channels, each of two ranks has whole blocks
WIDE = {
    "dim": 256, "num_heads": 2, "in_channels": 48, "num_layers": 1, "num_single_layers": 1, "rope_index_dim": 16,
    "rope_row_dim": 56, "rope_column_dim": 56, "guidance": True,
}  # fmt: skip
BASE = joined(TINY, EVEN, {"model": {"args": WIDE, "seq_len": 20}})


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """One process: plain, in float8, and in float8 with one row at a time."""
    folder = tmp_path_factory.mktemp("one")
    made = {}

    def alone(float8, by_row=False):
        key = f"one_{float8}_{by_row}"
        if key not in made:
            sections = joined(BASE, FLOAT8 if float8 else {}, ROWS if by_row else {})
            made[key] = run_ranks(run, 1, folder, key, sections, timeout_s=170)[0]
        return made[key]

    return alone


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS])
def test_a_compiled_or_float8_layout_is_that_of_one_process(name, single, tmp_path):
    ranks, sections = LAYOUTS[name]
    results = run_ranks(run, ranks, tmp_path, "many", joined(BASE, sections), timeout_s=170)
    by_row = sections.get("train") == ROWS["train"]
    errors = compare(single("float8" in name, by_row), results)
    # the limits of text models, derived there
    assert not failures(errors, float8="float8" in name), errors
    if by_row and "compile" not in sections:  # the same casts: only the order of float32 sums is another
        assert errors.norm <= 2e-6, errors
        assert errors.gradient <= 4e-6, errors


def test_float8_stays_close_to_float32(single):
    losses, norms, validation, gradients = single(False)
    quantized, other_norms, other_validation, other = single(True)
    # e4m3 has 4 significant bits, an error of 2^-4 at most and 2^-5 on average of each factor; sums of 256 and more products
    # average it out, to about 2^-5 / sqrt(256) of the sum for each of a block's products. 5 % is far above that
    assert max(abs(a - b) / a for a, b in zip(losses, quantized, strict=True)) < 0.05
    assert abs(norms[0] - other_norms[0]) / norms[0] < 0.05
    assert abs(validation[0] - other_validation[0]) / validation[0] < 0.05
    assert losses != quantized  # something was computed in float8
    whole, rounded = composition.assemble([gradients]), composition.assemble([other])
    for name, gradient in whole.items():
        # a product's error is relative to its factors: two roundings of each of three, through two blocks
        assert (rounded[name] - gradient).norm() / gradient.norm() < 0.25, name


def converted(folder, sections):
    import titan_fp8

    with Trainer(parse_config(composition.tree(folder, "r", sections))) as trainer:
        modules = trainer.model.parts[0].named_modules()
        return {name for name, module in modules if isinstance(module, titan_fp8.Float8Linear)}


def test_ends_and_modulation_stay_in_higher_precision(tmp_path):
    found = run_ranks(converted, 1, tmp_path, joined(BASE, FLOAT8), timeout_s=170)[0]
    assert {name.partition(".")[0] for name in found} == {"double_blocks", "single_blocks"}
    assert not [name for name in found if "modulation" in name]
    assert len(found) == 8 + 4 + 6  # attention and feed-forwards of a double block, a single block


def compiled_names(folder, sections):
    with Trainer(parse_config(composition.tree(folder, "r", sections))) as trainer:
        part = trainer.model.parts[0]
        return [name for name, module in part.named_modules() if module._compiled_call_impl is not None]


def test_each_block_is_compiled(tmp_path):
    found = run_ranks(compiled_names, 1, tmp_path, joined(BASE, COMPILED), timeout_s=170)[0]
    assert found == ["double_blocks.0", "single_blocks.0"]
