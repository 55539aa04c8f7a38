"""A tied weight is one thing under every layout: in the optimizer's tables, in checkpoints, in the patterns of modules."""

import shutil
import tempfile
from pathlib import Path

import composition
import hf_runs
import pytest
import titan_fp8
import torch
from composition_matrix import MODELS, TIED
from titan_ckpt.load.reader import StepReader
from titan_testing import run_ranks
from titan_train.config import parse_config
from titan_train.config.optimizer import OptimizerConfig
from titan_train.models import build_model
from titan_train.optim import plan_groups
from titan_train.optim.matrices import matrix_kinds
from titan_train.parallel.check import check_model
from titan_train.parallel.float8 import convert_to_float8
from titan_train.parallel.layout.run import plan_run
from titan_train.parallel.stages import take_stage
from titan_train.parallel.tied import meaning_all_copies, parameter_names
from titan_train.train import Trainer
from torch import nn

STEPS = 4
LAYOUTS = {
    "one process": (1, {}),
    "fsdp2": (2, {}),
    "tp2": (2, {"parallel": {"tp": 2}}),
    "pp2": (2, {"parallel": {"pp": 2}, "pipeline": {"schedule": "1f1b"}}),
    "zbv": (2, {"parallel": {"pp": 2}, "pipeline": {"schedule": "zbv"}}),
    "tp2 x pp2": (4, {"parallel": {"pp": 2, "tp": 2}, "pipeline": {"schedule": "1f1b"}}),
}
PIPELINES = [name for name in LAYOUTS if "pp" in name or name == "zbv"]
FEW = {"train": {"steps": STEPS, "global_batch": 8, "max_grad_norm": 0.5}, "schedule": {"warmup_steps": 0}}


def tables(name, layer):
    """Every table by one of the names of a tied weight, and another of no tied one."""
    return {
        "optimizer": {
            "lr": 1e-2,
            "eps": 1e-2,  # so that AdamW's step is no steeper in the gradient than the gradient is exact
            "lr_scales": {name: 0.1, layer: 2.0},
            "weight_decays": {name: 3.0},
            "frozen_steps": {name: 2},
        }
    }


def trained(folder, name, sections, tied):
    """Losses, gradient norms and the whole weights' boxes; a copy of a tied weight under its first name."""
    config = parse_config(composition.tree(folder, name, sections))
    seen = composition.Seen()
    with tempfile.TemporaryDirectory() as scratch, Trainer(config, Path(scratch) / "run", callbacks=[seen]) as trainer:
        trainer.fit()
        return trainer.losses, seen.norms, boxes_of(trainer, tied)


def boxes_of(trainer, tied, key=None):
    """This rank's boxes of the weights, or of a part of their optimizer state; of all copies the bits must be the same."""
    found = composition.boxes(
        trainer.model, of=lambda p: p.detach() if key is None else trainer.optimizer.state[p][key]
    )
    copies = [found.pop(name) for name in tied if name in found]
    assert all(torch.equal(a[2], b[2]) for a in copies for b in copies)
    return found | ({tied[0]: copies[0]} if copies else {})


def several(folder, runs, tied):
    return [trained(folder, name, sections, tied) for name, sections in runs]


OWN, HF = ("tok_embeddings.weight", "lm_head.weight"), ("model.embed_tokens.weight", "lm_head.weight")


def assert_as_one_process(folder, layout, model, tied, layer):
    ranks, sections = LAYOUTS[layout]
    by_name = [composition.joined(model, FEW, tables(name.split(".")[-2], layer)) for name in tied]
    single = run_ranks(several, 1, folder, [(f"{layout}-one-{i}", s) for i, s in enumerate(by_name)], tied, init=False)[
        0
    ]
    runs = [(f"{layout}-{i}", composition.joined(s, sections)) for i, s in enumerate(by_name)]
    found = run_ranks(several, ranks, folder, runs, tied, timeout_s=120)
    for number, (losses, norms, boxes) in enumerate(single):
        weights, want = composition.assemble([rank[number][2] for rank in found]), composition.assemble([boxes])
        assert weights.keys() == want.keys()
        # sums of some hundred float32 terms in another order; four steps of lr = eps
        assert found[0][number][0] == pytest.approx(losses, abs=5e-6)
        assert found[0][number][1] == pytest.approx(norms, rel=5e-6)
        assert max(float((weights[name] - want[name]).abs().max()) for name in want) < 2e-6
    assert single[0][0] == single[1][0]  # either name means the same


@pytest.mark.parametrize("layout", PIPELINES)
def test_every_table_by_either_name_trains_a_tied_weight_as_one_process_does(layout, folder):
    assert_as_one_process(folder, layout, TIED, OWN, "wq")


@pytest.mark.parametrize("layout", ["pp2", "zbv"])
def test_every_table_by_either_name_trains_a_tied_model_of_transformers_as_one_process_does(layout, folder):
    model = hf_runs.sections(hf_runs.publish(folder, "qwen3"), {})
    assert_as_one_process(folder, layout, model, HF, "q_proj")


def resumed(folder, runs):
    """For each (source, layout): what the source's checkpoint has become here, and the loss of the next step."""
    found = []
    for name, sections in runs:
        with Trainer(parse_config(composition.tree(folder, name, sections))) as trainer:
            first = trainer.step
            if first == 0:
                trainer.fit(until=2)
            states = [boxes_of(trainer, OWN, key) for key in (None, "exp_avg", "exp_avg_sq")]
            if first == 0:
                trainer.save()
            trainer.fit(until=3)
            found.append((first, states, trainer.losses[-1]))
    return found


def on_layouts(folder, runs):
    """The runs, (name, layout) each, by name: those on as many ranks in the same processes."""
    found = {}
    for ranks in sorted({LAYOUTS[layout][0] for _, layout in runs}):
        mine = [(name, layout) for name, layout in runs if LAYOUTS[layout][0] == ranks]
        sections = [(name, composition.joined(TIED, FEW, LAYOUTS[layout][1])) for name, layout in mine]
        each = run_ranks(resumed, ranks, folder, sections, init=ranks > 1, timeout_s=170)
        for number, (name, _) in enumerate(mine):
            states = [composition.assemble([rank[number][1][i] for rank in each]) for i in range(3)]
            found[name] = (each[0][number][0], states, each[0][number][2])
    return found


@pytest.mark.parametrize(
    "layouts",
    [["one process", "tp2", "zbv", "tp2 x pp2"], pytest.param([*LAYOUTS], marks=pytest.mark.slow)],
    ids=["some", "all"],
)
@pytest.mark.filterwarnings("ignore:.*random generators are reseeded")
def test_a_tied_model_resumes_from_every_layout_on_every_other_with_its_optimizer_state(layouts, folder):
    for old in Path(folder).glob("runs/*"):
        shutil.rmtree(old)
    saved = on_layouts(folder, [(f"from {layout}", layout) for layout in layouts])
    runs = [(f"{source} to {layout}", layout) for source in layouts for layout in layouts if layout != source]
    for name, _ in runs:
        shutil.copytree(Path(folder) / "runs" / f"from {name.split(' to ')[0]}", Path(folder) / "runs" / name)
    found = on_layouts(folder, runs)
    for name, _ in runs:
        _, want, _ = saved[f"from {name.split(' to ')[0]}"]
        first, states, loss = found[name]
        assert first == 2, name
        for got, expected in zip(states, want, strict=True):
            assert got.keys() == expected.keys(), name
            assert all(torch.equal(got[key], expected[key]) for key in expected), name
        assert loss == pytest.approx(saved["from one process"][2], abs=2e-6), name
    for layout in layouts:  # whatever the layout, a step has the tied weight once
        index = StepReader(Path(folder) / "runs" / f"from {layout}" / "checkpoints" / "step-00000002").index
        assert OWN[1] not in index.tensors["model"]
        assert not any(key.startswith(OWN[1]) for key in index.tensors["optim"])
        assert index.tied == {OWN[1]: OWN[0]}


def test_both_names_of_a_tied_weight_with_different_values_are_refused():
    model = build_model(parse_config({"model": TIED["model"]}).model, vocab_size=300)
    for table in ("lr_scales", "weight_decays", "frozen_steps"):
        two = OptimizerConfig(**{table: {"tok_embeddings": 2, "lm_head": 3}})
        with pytest.raises(ValueError, match=rf"optimizer.{table} gives tok_embeddings.weight 2 .*one tied weight"):
            plan_groups(model, two)
        plan_groups(model, OptimizerConfig(**{table: {"tok_embeddings": 2, "lm_head": 2}}))
        # a pattern for all is no contradiction: the first that is found counts
        general = plan_groups(model, OptimizerConfig(**{table: {"lm_head": 2, "": 3}}))
        field = {"lr_scales": "lr_scale", "weight_decays": "weight_decay"}.get(table, table)
        assert [getattr(group, field) for group in general if OWN[0] in group.fqns] == [2]


class Unnamed(nn.Module):
    """Its head is known as one by its weight alone, which is its embedding's."""

    first_stage_parts, last_stage_parts = ("words",), ("to_words",)

    def __init__(self):
        super().__init__()
        self.words, self.to_words = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.layers = nn.ModuleDict({str(i): nn.Linear(4, 4) for i in range(2)})
        self.to_words.weight = self.words.weight


def test_a_tied_head_alone_on_its_stage_is_updated_as_its_copy_is():
    whole = Unnamed()
    names, kinds = parameter_names(whole), matrix_kinds(whole, {})
    for number, tied in enumerate(("words.weight", "to_words.weight")):
        stage = take_stage(whole, range(number, number + 1), first=number == 0, last=number == 1)
        groups = plan_groups(stage, OptimizerConfig(name="muon"), names=names, kinds=kinds)
        assert {name: group.kind for group in groups for name in group.fqns} == {
            tied: "adamw", f"layers.{number}.weight": "muon", f"layers.{number}.bias": "adamw",
        }  # fmt: skip


@pytest.mark.parametrize("name", ["tok_embeddings", "lm_head", "lm_head.weight"])
def test_keep_fp32_by_either_name_keeps_every_copy(name, folder):
    sections = composition.joined(
        TIED, FEW, {"train": {"steps": 1, "dtype": "bf16"}, "parallel": {"keep_fp32": [name]}}
    )
    for kept in run_ranks(computing_dtypes, 2, folder, composition.joined(sections, LAYOUTS["pp2"][1]), init=True):
        assert kept == {"kept": torch.float32, "others": torch.bfloat16}


def computing_dtypes(folder, sections):
    found = {}
    config = parse_config(composition.tree(folder, "dtypes", sections))
    with tempfile.TemporaryDirectory() as scratch, Trainer(config, run_dir=Path(scratch) / "run") as trainer:
        for part in trainer.model.parts:
            for name, module in part.named_modules():
                if isinstance(module, nn.Embedding | nn.Linear):
                    which = "kept" if name in ("tok_embeddings", "lm_head") else "others"
                    module.register_forward_hook(lambda m, *_, which=which: found.update({which: m.weight.dtype}))
        trainer.fit()
    return found


def test_a_module_tied_to_a_linear_may_be_named_in_float8_skip():
    config = parse_config({"model": TIED["model"], "float8": {"recipe": "blockwise", "skip": ["tok_embeddings"]}})
    plan = plan_run(config, 1)
    with torch.device("meta"):
        model = build_model(config.model, vocab_size=300)
    check_model(config, plan.layout, plan.batch, model)
    untied = parse_config(
        {"model": MODELS["dense"]["model"], "float8": {"recipe": "blockwise", "skip": ["tok_embeddings"]}}
    )
    with pytest.raises(ValueError, match=r"float8\.skip: 'tok_embeddings' matches no linear"):
        check_model(untied, plan.layout, plan.batch, build_model(untied.model, vocab_size=300))


def test_a_stage_that_holds_a_tied_head_alone_keeps_its_precision_as_one_process_does():
    config = parse_config(
        {"model": TIED["model"], "float8": {"recipe": "blockwise", "skip": ["layers.0.*"], "min_speedup": 0}}
    )
    whole = build_model(config.model, vocab_size=300)
    meant = meaning_all_copies(config, whole)
    last = take_stage(whole, range(1, len(whole.layers)), first=False, last=True)
    for model in (whole, last):
        convert_to_float8(model, meant.float8, tokens=256, fuse_norms=False)
        assert type(model.lm_head) is nn.Linear
    assert any(isinstance(module, titan_fp8.Float8Linear) for module in last.modules())


def test_layers_that_are_kept_in_float32_are_no_float8():
    tree = {"model": {"name": "qwen3_moe_debug"}, "float8": {"recipe": "blockwise", "min_speedup": 0}}
    keep = ["layers.0", "*.experts", "*.wq.weight", "lm_head"]
    config = parse_config(tree | {"train": {"dtype": "bf16"}, "parallel": {"keep_fp32": keep}})
    whole = build_model(config.model, vocab_size=300)
    convert_to_float8(whole, meaning_all_copies(config, whole).float8, tokens=256, fuse_norms=False)
    kinds = (titan_fp8.Float8Linear, titan_fp8.Float8GroupedMM)
    converted = {name.rpartition(".")[2] for name, module in whole.layers.named_modules() if isinstance(module, kinds)}
    assert converted == {"wk", "wv", "wo"}
    assert not any(isinstance(module, kinds) for module in whole.layers["0"].modules())
    assert meaning_all_copies(parse_config(tree), whole).float8.skip == ()
