"""Batch ramps, averages of weights, skipped spikes, QK-clip and muP: the same under every layout, and after every resume.

Tolerances as in test_matrix.py: sums in another order, amplified by AdamW's division.
"""

import sys
from pathlib import Path

import composition
import pytest
import torch
from titan_testing import run_ranks

SECTIONS = {
    "model": {
        "name": "llama3_debug", "seq_len": 32, "parametrization": "mup", "base_dim": 32, "base_layers": 2,
        "args": {"num_layers": 4, "num_kv_heads": 4, "tied_embeddings": True},
    },
    "train": {"steps": 8, "global_batch": 8, "ramp_from": 2, "ramp_tokens": 512, "microbatch": 1},
    "average": {"ema_decay": 0.5, "ema_every": 2, "use": "ema"},
    "qk_clip": {"threshold": 0.02},
    "spikes": {"sigma": 3.0, "window": 2},
    "validation": {"every": 4, "steps": 1},
    "checkpoint": {"every": 3},
}  # fmt: skip
LAYOUTS = {
    "fsdp2": {"parallel": {"dp_shard": 2}},
    "tp2": {"parallel": {"tp": 2}},
    "pp2": {"parallel": {"pp": 2}, "pipeline": {"schedule": "1f1b"}},
    "cp2": {"parallel": {"cp": 2}},
    "tp2-pp2": {"parallel": {"tp": 2, "pp": 2}, "pipeline": {"schedule": "zb_h1"}},
}


def train(folder, name, sections, until=None):
    """Losses, skipped steps, validation losses, weights, moving averages and largest attention logits of a run."""
    sys.path.insert(0, str(Path(__file__).parent))
    import composition
    from titan_train.config import parse_config
    from titan_train.train import Trainer

    seen = Counted()
    with Trainer(parse_config(composition.tree(folder, name, sections)), callbacks=[seen]) as trainer:
        trainer.fit(until=until)
        weights = composition.boxes(trainer.model, of=lambda p: p.detach())
        state = trainer.optimizer.state
        averages = composition.boxes(trainer.model, of=lambda p: state[p]["ema"])
        return trainer.losses, seen.steps, [record.loss for record in seen.validations], weights, averages, seen.largest


class Counted(composition.Seen):
    def __init__(self):
        super().__init__()
        self.steps, self.largest = [], []

    def on_step(self, info):
        self.largest += info.result.attention_logits.values()
        self.steps.append((info.step, info.sequences, info.samples_consumed, info.result.skipped))


@pytest.fixture(scope="module")
def alone(folder):
    return run_ranks(train, 1, folder, "alone", SECTIONS, init=False, timeout_s=120)[0]


def agree(found, expected):
    losses, steps, validations, *_ = found[0]
    assert steps == expected[1]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected[0]), rtol=2e-5, atol=0)
    torch.testing.assert_close(torch.tensor(validations), torch.tensor(expected[2]), rtol=2e-5, atol=0)
    torch.testing.assert_close(torch.tensor(found[0][5]), torch.tensor(expected[5]), rtol=1e-4, atol=0)
    for kind in (3, 4):  # weights, moving averages
        whole = composition.assemble([rank[kind] for rank in found])
        for name, (_, _, value) in expected[kind].items():
            torch.testing.assert_close(whole[name], value, rtol=0, atol=2e-5)


def test_one_process_ramps_averages_and_leaves_out_spikes(alone):
    _, steps, _, weights, averages, largest = alone
    assert len(largest) == 4 * len(steps)
    assert min(largest[:4]) > 0.03  # every layer is clipped after the first step
    assert max(largest[4:8]) < 0.03
    # 512 tokens of 32 are 16 sequences: two of four sizes, then the last
    assert [sequences for _, sequences, _, _ in steps] == [2, 2, 2, 2, 4, 4, 8, 8]
    assert steps[-1][2] == 32
    assert 0 < sum(skipped for *_, skipped in steps) < 6
    assert any(not torch.equal(weights[name][2], averages[name][2]) for name in weights)


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[] if name == "fsdp2" else pytest.mark.slow) for name in LAYOUTS]
)
def test_a_layout_gives_the_steps_of_one_process(layout, folder, alone):
    sections = composition.joined(SECTIONS, LAYOUTS[layout])
    ranks = 4 if layout == "tp2-pp2" else 2
    agree(run_ranks(train, ranks, folder, layout, sections, timeout_s=120), alone)


def test_a_run_resumes_inside_the_ramp_on_another_layout(folder, alone):
    first = run_ranks(train, 2, folder, "resumed", composition.joined(SECTIONS, LAYOUTS["pp2"]), 6, timeout_s=120)
    second = run_ranks(train, 1, folder, "resumed", SECTIONS, init=False, timeout_s=120)
    losses, steps, validations, weights, averages, largest = second[0]
    before = first[0]
    joined = (before[0] + losses, before[1] + steps, before[2] + validations, weights, averages, before[5] + largest)
    agree([joined], alone)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp2", "tp2", "cp2"])
def test_latent_heads_are_clipped_alike(layout, folder):
    model = {"name": "deepseek_debug", "seq_len": 32, "args": {"q_lora_rank": 16, "balance_loss": 0.0}}
    sections = composition.joined(SECTIONS, {"spikes": {"sigma": 0.0}}) | {"model": model}
    single = run_ranks(train, 1, folder, f"latent-{layout}", sections, init=False, timeout_s=120)[0]
    ranks = composition.joined(sections, LAYOUTS[layout])
    agree(run_ranks(train, 2, folder, f"latent-{layout}-2", ranks, timeout_s=120), single)
