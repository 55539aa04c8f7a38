"""How experts were used is logged, the same for every layout, and padding does not count."""

import json
import tempfile
from pathlib import Path
from unittest import mock

import composition
import numpy as np
import pytest
from composition_matrix import MOE
from titan_testing import run_ranks
from titan_train.config import parse_config
from titan_train.inputs import open_inputs, prepare_inputs
from titan_train.models.common.moe.balance import moe_layers
from titan_train.observe import read_metrics
from titan_train.train import Trainer, step


def train(folder, name, parallel):
    sections = MOE | {"parallel": parallel, "train": MOE["train"] | {"steps": 2}, "validation": {"every": 0}}
    config = parse_config(composition.tree(folder, name, sections))
    with Trainer(config) as trainer:
        trainer.fit()
        return str(trainer.run_dir)


def test_the_routing_of_all_stages_and_ranks_is_in_the_log(tmp_path):
    composition.prepare(tmp_path)
    (alone,) = run_ranks(train, 1, str(tmp_path), "alone", {}, init=False)
    cut, *_ = run_ranks(train, 4, str(tmp_path), "cut", {"pp": 2, "ep": 2})
    steps, others = read_metrics(alone).steps, read_metrics(cut).steps
    assert len(steps) == len(others) == 2
    for one, other in zip(steps, others, strict=True):
        assert one.routing["load_max"] > 1
        assert 0 < one.routing["load_entropy"] < 1
        assert other.routing == pytest.approx(one.routing, rel=1e-5)


def padded(folder, more=None):
    """One text a row, of half a row on the average, and auxiliary losses that show in the gradient."""
    source = {"name": "texts", "kind": "jsonl", "paths": [str(Path(folder) / "texts.jsonl")], "packing": "whole"}
    args = {"num_layers": 4, "mtp_depth": 1, "balance_loss": 0.1, "z_loss": 0.01}
    sections = {
        "model": MOE["model"] | {"args": args},
        "train": MOE["train"] | {"steps": 2, "global_batch": 4},
        "data": {"sources": [source], "validation_fraction": 0.0},
        "validation": {"every": 0},
    }
    return parse_config(composition.tree(folder, "padded", composition.joined(sections, more or {})))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("padded")
    lines = [json.dumps({"text": f"{i * 7919} a b {i * i} c"[: 17 + 5 * i % 13]}) for i in range(60)]
    (folder / "texts.jsonl").write_text("\n".join(lines))
    prepare_inputs(padded(folder), quiet=True)
    return str(folder)


def route(folder, more):
    """Losses and gradient norms of two steps, each layer's load in them, and its expert bias after them."""
    seen, loads, biases = composition.Seen(), [], {}
    end_routing = step.end_routing

    def counted(*args, **options):
        loads.append(end_routing(*args, **options))
        return loads[-1]

    with (
        tempfile.TemporaryDirectory() as scratch,
        mock.patch.object(step, "end_routing", counted),
        Trainer(padded(folder, more), Path(scratch) / "run", callbacks=[seen]) as trainer,
    ):
        trainer.fit()
        for part in trainer.model.parts:
            biases |= {layer: moe.expert_bias.tolist() for layer, moe in moe_layers(part)}
        return trainer.losses, seen.norms, [{n: r.load for n, r in found.items()} for found in loads], biases


@pytest.fixture(scope="module")
def routed(texts):
    return run_ranks(route, 1, texts, {}, init=False)[0]


def test_the_load_of_a_step_is_that_of_its_text(texts, routed):
    dataset = open_inputs(padded(texts)).train
    for number, loads in enumerate(routed[2]):
        batch = dataset.build_batch(np.arange(4 * number, 4 * number + 4), ignore_index=-100, samples_consumed=0)
        assert 0.25 < batch.padding.mean() < 0.5
        assert len(loads) == 4  # of 4 layers the first is dense; and the module that predicts a second token
        assert {sum(load) for load in loads.values()} == {2 * int((~batch.padding).sum())}


LAYOUTS = {
    "tp2+sp": {"parallel": {"tp": 2}},
    "cp2": {"parallel": {"cp": 2}},
    "pp2 recomputing": {"parallel": {"pp": 2}, "activations": {"checkpoint": "full"}},
    "tp2": {"parallel": {"tp": 2, "sequence_parallel": False}},
    "ep2 compiled": {"parallel": {"ep": 2}, "compile": {"enabled": True, "backend": "aot_eager"}},
    "pp2 zbv": {"parallel": {"pp": 2}, "pipeline": {"schedule": "zbv"}},
}
DEFAULT = ("tp2+sp", "cp2", "pp2 recomputing")


@pytest.mark.parametrize("layout", [n if n in DEFAULT else pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS])
def test_padding_counts_in_no_layout(texts, routed, layout):
    losses, norms, loads, biases = routed
    ranks = run_ranks(route, 2, texts, LAYOUTS[layout], timeout_s=150)
    for number, load in enumerate(loads):
        found = {name: value for rank in ranks for name, value in rank[2][number].items()}
        assert found == load
    assert {name: bias for rank in ranks for name, bias in rank[3].items()} == biases
    # float32 sums of the same terms in another order
    assert ranks[0][0] == pytest.approx(losses, abs=2e-6)
    assert ranks[0][1] == pytest.approx(norms, rel=2e-6)
