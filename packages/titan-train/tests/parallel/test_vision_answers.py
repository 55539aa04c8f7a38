"""The answers that a validation scores are those of one process under every layout."""

import json

import composition
import pytest
from composition import joined
from test_vision import TINY, WHOLE, SeesImages, filled
from titan_testing import run_ranks
from titan_train.config import parse_config
from titan_train.tasks.vision import answers
from titan_train.train import Trainer

# 9 answers: no number of microbatches below divides them
SCORED = joined(
    TINY, {"vision": {"items": 40, "held_out": 12, "sample_answers": 9}, "train": {"steps": 1, "global_batch": 8}}
)
SCORED["validation"] = {"every": 1, "steps": 1}
LAYOUTS = {
    "fsdp2": (2, {}),
    "tp2": (2, {"parallel": WHOLE}),
    "cp2": (2, {"parallel": {"cp": 2}}),
    "cp2 ulysses": (2, {"parallel": {"cp": 2}, "context": {"method": "ulysses"}}),
    "pp2": (2, {"parallel": {"pp": 2}}),
    "cp2 x pp2": (4, {"parallel": {"cp": 2, "pp": 2}}),
}
FAST = ("cp2",)


def scored(folder, sections):
    """Sums of the logits of each row that is scored, and what is written."""
    sums = []
    real = answers.score_answers

    def kept(model, *args, **kwargs):
        def note(module, given, logits):
            sums.extend(logits.double().square().sum((1, 2)).tolist())

        with model.register_forward_hook(note):
            return real(model, *args, **kwargs)

    from titan_train.tasks.vision import task

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SeesImages, "init_weights", filled)
        patch.setattr(task, "score_answers", kept)
        config = parse_config(composition.tree(folder, "scored", sections))
        with Trainer(config) as trainer:
            trainer.fit()
            (found,) = (trainer.run_dir / "samples").glob("*.json")
    return sums, json.loads(found.read_text())


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS])
def test_answers_are_scored_as_by_one_process(name, tmp_path):
    ranks, sections = LAYOUTS[name]
    ((alone, written),) = run_ranks(scored, 1, tmp_path / "one", SCORED, timeout_s=300)
    assert len(alone) == 18  # with their images and with shuffled ones
    assert alone[:9] != alone[9:]
    for sums, found in run_ranks(scored, ranks, tmp_path / "many", joined(SCORED, sections), timeout_s=300):
        assert len(sums) >= 18
        # one AdamW step on float32 sums in another order, then their squares
        assert max(abs(a - b) / b for a, b in zip(sums, alone, strict=False)) <= 1e-3
        assert found == written
