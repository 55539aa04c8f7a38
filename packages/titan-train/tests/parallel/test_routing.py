"""How experts were used is logged, the same for every layout."""

import composition
import pytest
from composition_matrix import MOE
from titan_testing import run_ranks
from titan_train.config import parse_config
from titan_train.observe import read_metrics
from titan_train.train import Trainer


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
