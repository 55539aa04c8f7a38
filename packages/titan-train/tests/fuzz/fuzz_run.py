"""Run a case's layouts, run one process, and compare losses, gradient norms and final weights.

Bounds in float32, with u = 2^-24 its unit roundoff. Every layout sums the same terms in another order. Such a sum of n
terms differs by some sqrt(n) u of the largest; with some thousand roundings between a weight and the loss and back, that is
64 u = 4e-6 of the largest gradient of a parameter. A step of AdamW with lr = eps moves a weight by at most 2 lr / eps = 2
times the gradient's error, one of SGD with lr = 0.1 and momentum by less. So after three steps weights agree to
3 * 2 * 4e-6 of the largest gradient; and losses, a mean of some hundred values near 5.6 (4.8e-7 apart in float32), to a
few of those, plus what the weights' error adds, which is at most the gradient's 1-norm times it: second order, but the
sum has as many terms as the model has weights.

Routing is a step function: where two experts' scores are nearly equal, one rounding sends a token elsewhere. So the one
process measures the smallest gap between a chosen and a refused expert or group, and draws another seed for the weights
where it is not well above the rounding of a score.

Float8 rounds to 3 bits of mantissa, 1/16 of a value; blocks that a cut divides have other scales. Sums of such values
differ by what the recipe's own test allows. With experts, tokens go elsewhere as well.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import composition
import torch
import torch.distributed as dist
from fuzz_cases import Case, sections
from titan_testing import run_ranks
from titan_train.config import dump_config, parse_config
from titan_train.models.common.moe.balance import moe_layers
from titan_train.models.common.moe.router import Router
from titan_train.train import Trainer

LIMITS = {
    "float32": {"first loss": 2e-6, "loss": 2e-5, "first norm": 2e-6, "norm": 2e-5, "weights": 1.5e-6},
    "float8": {"first loss": 5e-3, "loss": 3e-2, "first norm": 2e-2, "norm": 0.1, "weights": 1.2},
    "float8 with experts": {"first loss": 2e-2, "loss": 5e-2, "first norm": 0.1, "norm": 0.3, "weights": math.inf},
}
LEAST_GAP = 1e-6  # of scores up to 1; rounding moves one of 0.5 by some 1e-7, one of 1 / 8 by a tenth of that


def configure(folder, name, *parts):
    return parse_config(composition.tree(folder, name, sections(*parts)))


def train(folder, name, *parts):
    """Losses, gradient norms, and this rank's boxes of the final weights and expert biases."""
    config = configure(folder, name, *parts)
    with tempfile.TemporaryDirectory() as scratch, Trainer(config, run_dir=Path(scratch) / "run") as trainer:
        norms = []
        record = trainer._record

        def keep_norm(result, *args, **kwargs):
            norms.append(result.grad_norm)
            return record(result, *args, **kwargs)

        trainer._record = keep_norm
        trainer.fit()
        boxes = composition.boxes(trainer.model, of=lambda p: p.detach())
        for part in trainer.model.parts:
            for fqn, layer in moe_layers(part):
                if layer.expert_bias is not None:
                    bias = layer.expert_bias.clone()
                    boxes[f"{fqn}.expert_bias"] = (tuple(bias.shape), (0,), bias)
        return trainer.losses, norms, boxes


def all_layouts(folder, parts, layouts):
    """One trainer after the other, in the same processes."""
    if not dist.is_initialized():
        os.environ.pop("WORLD_SIZE", None)  # alone, as started by hand
    return [train(folder, f"layout-{i}", *parts, layout) for i, layout in enumerate(layouts)]


class TooClose(Exception):
    """Two experts, or groups, have nearly the same score."""


def one_process(folder, common, layout):
    """The reference, and the sections it was run with: those of ``common`` with a seed that keeps experts apart."""
    choose = Router._choose

    def watched(self, preference):
        args = self.args
        values = preference
        if args.num_groups > 1:
            grouped = preference.unflatten(-1, (args.num_groups, -1))
            best = grouped.topk(1 if args.group_score == "max" else min(2, grouped.shape[-1])).values.sum(-1)
            _look(best, args.top_groups)
            closed = torch.ones_like(best, dtype=torch.bool).scatter(-1, best.topk(args.top_groups).indices, False)
            values = grouped.masked_fill(closed.unsqueeze(-1), -1e9).flatten(-2)
        _look(values, args.experts_per_token)
        return choose(self, preference)

    if "float8" not in layout:  # whose rounding sends tokens elsewhere in any case
        Router._choose = watched
    for attempt in range(100):
        parts = sections(common, {"run": {"seed": common["run"]["seed"] + 100_000 * attempt}})
        try:
            return *train(folder, "single", parts, layout), parts
        except TooClose:
            continue
    raise AssertionError("no seed of the weights keeps experts apart")


def _look(values, k):
    if k < values.shape[-1]:
        top = values.topk(k + 1, dim=-1).values
        if float((top[..., k - 1] - top[..., k]).min()) < LEAST_GAP:
            raise TooClose


def reference(folder, common, layout=None):
    """What one process gives: losses, norms, whole weights; and the sections it was run with."""
    same = (
        {} if layout is None else {"float8": layout["float8"], "train": {"microbatch": layout["train"]["microbatch"]}}
    )
    ((losses, norms, boxes, parts),) = run_ranks(one_process, 1, folder, common, same, init=False, timeout_s=170)
    return (losses, norms, composition.assemble([boxes])), parts


def check(case: Case, folder) -> dict[str, float]:
    """Run a case; returns the largest share of each limit that was used.

    Raises:
        AssertionError: A limit is passed, or ranks failed. The message replays the case.
    """
    try:
        want, common = reference(folder, case.common)
        if case.launcher == "group":
            ranks = run_ranks(
                all_layouts, case.ranks, folder, (common,), case.layouts, init=case.ranks > 1, timeout_s=170
            )
            found = [
                (*ranks[0][i][:2], composition.assemble([of_rank[i][2] for of_rank in ranks]))
                for i in range(len(case.layouts))
            ]
            for of_rank in ranks:
                assert [r[:2] for r in of_rank] == [r[:2] for r in ranks[0]], "ranks report other losses or norms"
        else:
            found = [launched(case, folder, common, layout) for layout in case.layouts]
        used: dict[str, float] = {}
        for number, (layout, got) in enumerate(zip(case.layouts, found, strict=True)):
            float8 = "float8" in layout
            wanted = reference(folder, common, layout)[0] if float8 else want
            kind = "float32" if not float8 else "float8 with experts" if case.moe else "float8"
            for name, share in shares(got, wanted, LIMITS[kind]).items():
                assert share <= 1, f"layout {number}: {name} is {share:.3g} times what rounding explains"
                used[name] = max(share, used.get(name, 0.0))
    except Exception as err:
        replay = f"python packages/titan-train/tests/fuzz/replay.py --seed {case.seed}"
        raise AssertionError(f"{err}\n\n{case.describe()}\nreplay with: {replay}") from err
    return used


def shares(got, want, limits) -> dict[str, float]:
    """Each error over its limit."""
    losses, norms, weights = got
    want_losses, want_norms, want_weights = want
    for named in (weights, want_weights):  # a tied head has a name of its own on another pipeline stage
        named.setdefault("lm_head.weight", named["tok_embeddings.weight"])
    assert len(losses) == len(want_losses)
    assert weights.keys() == want_weights.keys(), f"weights differ by name: {weights.keys() ^ want_weights.keys()}"
    assert all(map(math.isfinite, losses)), losses
    relative = [abs(a - b) / b for a, b in zip(norms, want_norms, strict=True)]
    differences = [abs(a - b) for a, b in zip(losses, want_losses, strict=True)]
    # no gradient element is larger than the gradient's norm, nor, where it is clipped, than the clip
    largest = max(want_norms)
    worst = max(float((weights[name] - want_weights[name]).abs().max()) for name in weights)
    errors = {
        "first loss": differences[0], "loss": max(differences), "first norm": relative[0], "norm": max(relative),
        "weights": worst / largest,
    }  # fmt: skip
    return {name: errors[name] / limits[name] for name in limits}


def launched(case: Case, folder, common, layout):
    """The same by the command, with its own processes: losses from the log, weights from the last checkpoint."""
    from titan_train import load_run

    name = f"launched-{case.seed}"
    launch = {"launch": {"launcher": case.launcher, "nproc": case.ranks, "device": "cpu"}}
    saved = {"checkpoint": {"every": 0, "async_save": False}, "metrics": {"progress": "off", "report": False}}
    config = configure(folder, name, common, layout, launch, saved)
    file = Path(folder) / f"{name}.toml"
    file.write_text(dump_config(config))
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(
        [sys.executable, "-m", "titan_train", "run", str(file)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run_dir = Path(folder) / "runs" / name
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "grad_norm" in line and "lr" in line]
    model = load_run(run_dir, device="cpu").model
    weights = {name: p.detach().clone() for name, p in model.state_dict().items()}
    return [line["loss"] for line in steps], [line["grad_norm"] for line in steps], weights
