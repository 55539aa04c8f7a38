"""Models that are not ours, under layouts that were not made for them: one process's losses, norms and gradients."""

import logging
from pathlib import Path

import composition
import pytest
from composition_check import compare, failures
from own_models import PLAIN_TABLE, Staged, Unnamed
from titan_testing import run_ranks
from titan_train import use_code
from titan_train.config import parse_config
from titan_train.launch.validate import validate
from titan_train.models import build_model
from titan_train.parallel.layout.degrees import build_layout
from titan_train.parallel.outside_reads import check_reads
from titan_train.parallel.stages import check_can_be_cut
from titan_train.planner.memory.ranks import rehearse
from titan_train.train import Trainer

UNPACKED = {"document_mask": False}  # these models take tokens alone
MODELS = {
    "plain": {},
    "tied": {"tied": True},
    "a unit used twice": {"repeat": True},
    "tied, frozen and unused": {"tied": True, "oddments": True},
}
LAYOUTS = {
    "fsdp": (2, {}, {}),
    "ddp": (2, {"mode": "ddp"}, {}),
    "hsdp accumulating": (4, {"dp_replicate": 2, "accumulate": "hsdp-ar"}, {"train": {"microbatch": 1}}),
    "fsdp zero1 selective": (
        2, {"accumulate": "zero1"}, {"activations": {"checkpoint": "selective"}, "train": {"microbatch": 2}},
    ),
    "tp+sp": (2, {"tp": 2, "tp_plan": PLAIN_TABLE}, {}),
    "tp": (2, {"tp": 2, "tp_plan": PLAIN_TABLE, "sequence_parallel": False}, {}),
}  # fmt: skip


def sections(args, parallel=None, more=None, name="Plain"):
    merged = {"model": {"name": f"own_models:{name}", "seq_len": 32, "args": args}, "data": UNPACKED}
    merged["parallel"] = parallel or {}
    for section, values in (more or {}).items():
        merged[section] = merged.get(section, {}) | values
    return merged


def run(folder, name, tree, steps=10):
    use_code([str(Path(__file__).parent)])  # where `own_models` is
    return composition.run(folder, name, tree, steps)


@pytest.fixture(scope="module")
def single(folder):
    known = {}

    def reference(model):
        if model not in known:
            known[model] = run_ranks(run, 1, folder, "single", sections(MODELS[model]), init=False)[0]
        return known[model]

    return reference


CASES = [
    (model, layout) for model in MODELS for layout in LAYOUTS if not (model == "a unit used twice" and "tp" in layout)
]
# one of each model and of each layout by default; the others are as many questions of the same kind
DEFAULT = [
    ("plain", "tp"), ("tied", "tp+sp"), ("a unit used twice", "fsdp"), ("tied, frozen and unused", "tp+sp"),
    ("tied, frozen and unused", "ddp"), ("tied", "hsdp accumulating"), ("a unit used twice", "fsdp zero1 selective"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "layout"), [c if c in DEFAULT else pytest.param(*c, marks=pytest.mark.slow) for c in CASES]
)
def test_a_users_model_gives_what_one_process_does(folder, single, model, layout):
    ranks, parallel, more = LAYOUTS[layout]
    if "unused" in model and "tp_plan" in parallel:
        parallel = parallel | {"tp_plan": PLAIN_TABLE | {"unused": "replicated"}}
    results = run_ranks(run, ranks, folder, "own", sections(MODELS[model], parallel, more), timeout_s=120)
    errors = compare(single(model), results)
    assert not failures(errors, float8=False), errors


@pytest.mark.parametrize("mode", ["fsdp", "ddp"])
def test_ranks_that_use_other_parts_of_a_block_train_as_one_process(folder, mode):
    """Gradients of one rank's expert were added to those of another's; what nobody uses was decayed."""
    rows = {"train": {"microbatch": 1}}
    (one,), two = (
        run_ranks(run, ranks, folder, "chooses", sections({}, parallel, rows, name="Choosing"), init=ranks > 1)
        for ranks, parallel in ((1, {}), (2, {"mode": mode}))
    )
    assert {name.rpartition("experts.")[2][0] for name in one[3] if "experts" in name} == {"0", "1"}
    assert not failures(compare(one, two), float8=False)


def test_a_weight_that_is_read_outside_of_its_module_is_refused_with_what_works(folder):
    """FSDP gathers it for that module's forward: the first step failed."""
    kept = {"reshard_overrides": {"words": "never"}}
    for args, parallel, words in (
        ({}, {}, r"""'words\.weight' is read .*reshard_overrides={"words" = "never"}"""),
        ({"before": True}, kept, r"'places\.weight' is read .* a parameter of the module that reads it"),
    ):
        with pytest.raises(Exception, match=words):
            run_ranks(run, 2, folder, "functional", sections(args, parallel, name="Functional"), steps=1)
    (one,), two = (
        run_ranks(run, ranks, folder, "functional", sections({}, parallel, name="Functional"), init=ranks > 1)
        for ranks, parallel in ((1, {}), (2, kept))
    )
    assert not failures(compare(one, two), float8=False)


def test_a_weight_that_a_hook_reads_right_before_its_modules_forward_is_there():
    use_code([str(Path(__file__).parent)])
    config = parse_config({"model": {"name": "own_models:Normed", "seq_len": 32}, "train": {"global_batch": 8}})
    check_reads(config, build_layout(config, 2), build_model(config.model, vocab_size=300))


def test_parts_of_parts_may_be_named_as_units(folder, tmp_path):
    use_code([str(Path(__file__).parent)])
    tree = composition.tree(folder, "units", sections({}, more={"train": {"dtype": "bf16"}}, name="Wrapped"))
    with Trainer(parse_config(tree), run_dir=tmp_path) as trainer:
        names = {unit.name for unit in trainer.model.report.plans[0].units}
    assert {"inner.units.0", "inner.units.0.mixer", "inner.final", "inner.unembed"} < names


def test_what_gets_no_gradient_does_not_stop_compressed_reduction(folder):
    tree = sections(MODELS["tied, frozen and unused"], {"mode": "ddp", "compress": "bf16"})
    for losses, *_ in run_ranks(run, 2, folder, "compressed", tree, steps=2):
        assert len(losses) == 2


def test_logits_that_lack_part_of_the_vocabulary_are_refused(folder):
    """A head of a style that leaves its output cut: the loss over half of the vocabulary looked like one."""
    table = PLAIN_TABLE | {"unembed": "colwise"}
    with pytest.raises(Exception, match="must have the style 'head'"):
        run_ranks(run, 2, folder, "cut", sections({"vocab_size": 260}, {"tp": 2, "tp_plan": table}), steps=1)


def test_a_model_that_returns_more_than_logits_trains_as_one_that_returns_them(folder):
    plain, verbose = (
        run_ranks(run, 1, folder, name, sections({}, name=name), steps=1, init=False)[0]
        for name in ("Plain", "Verbose")
    )
    assert plain[0] == verbose[0]


@pytest.mark.parametrize("checkpoint", ["none", "full"])
def test_a_block_that_torch_does_not_capture_is_compiled_in_pieces(folder, checkpoint):
    compiled = {"compile": {"enabled": True, "backend": "aot_eager"}, "activations": {"checkpoint": checkpoint}}
    eager, pieces = (
        run_ranks(run, 1, folder, "pieces", sections({}, more=more, name="Recurrent"), steps=2, init=False)[0]
        for more in ({}, compiled)
    )
    assert pieces[0] == pytest.approx(eager[0], rel=1e-6)  # float32: order of summation


def test_a_users_model_is_cut_into_stages_by_the_names_of_its_parts(folder):
    single, *staged = (
        run_ranks(run, ranks, folder, f"{ranks} stages", sections({}, parallel, name="Staged"), init=ranks > 1)
        for ranks, parallel in ((1, {}), (4, {"pp": 2}))
    )
    assert not failures(compare(single[0], staged[0]), float8=False)


def test_a_block_of_several_layers_is_in_every_stage_that_computes_one(folder):
    """Two blocks make four layers; the layers that repeat one were in no stage."""
    few = {"train": {"steps": 3}}
    single, staged = (
        run_ranks(
            run, ranks, folder, "repeats", sections({"repeat": True}, parallel, few, name="Staged"), 3, init=ranks > 1
        )
        for ranks, parallel in ((1, {}), (2, {"pp": 2}))
    )
    losses, norms, validation, _ = single[0]
    for found, other_norms, held_out, _ in staged:
        assert found == pytest.approx(losses, abs=2e-5)
        assert other_norms[0] == pytest.approx(norms[0], rel=2e-6)
        assert held_out[0] == pytest.approx(validation[0], abs=2e-5)


def test_a_stage_of_a_users_model_is_rehearsed_on_hidden_states(folder):
    use_code([str(Path(__file__).parent)])
    tree = composition.tree(folder, "rehearsed", sections({"vocab_size": 260}, {"pp": 2}, name="Staged"))
    first, second = rehearse(parse_config(tree), 2)
    assert first.activations > 0 < second.activations


def test_a_users_model_whose_ends_are_not_known_is_not_cut_into_stages():
    check_can_be_cut(Staged(8))
    with pytest.raises(ValueError, match="first_stage_parts"):
        check_can_be_cut(Unnamed(8))


def test_a_parameter_that_nothing_fills_is_refused_before_ranks_start(folder):
    use_code([str(Path(__file__).parent)])
    tree = composition.tree(folder, "unfilled", sections({"vocab_size": 260}, name="Unfilled"))
    with pytest.raises(ValueError, match=r"Unfilled does not say how its weights start: .*'scale'"):
        validate(parse_config(tree), 1)


def warnings_of(folder, tree):
    use_code([str(Path(__file__).parent)])
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("titan_train").addHandler(handler)
    composition.run(folder, "warned", tree, 1)
    return messages


def test_packing_for_a_model_that_cannot_keep_documents_apart_is_said(folder):
    for masked in (False, True):
        tree = sections({}) | {"data": {"document_mask": masked}}
        (messages,) = run_ranks(warnings_of, 1, folder, tree, init=False)
        assert masked == any("attend across documents" in message for message in messages), messages


def test_context_parallelism_is_refused_for_a_model_that_counts_positions_itself(folder):
    """Its rows are cut over ranks in another order than it counts: it trained on wrong positions without a word."""
    with pytest.raises(Exception, match="positions"):
        run_ranks(run, 2, folder, "blind", sections({}, {"cp": 2}, name="Blind"), steps=1)
