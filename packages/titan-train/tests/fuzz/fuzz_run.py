"""Run a case's layouts, run one process, and compare losses, gradient norms, bits per byte of other text and final weights.

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

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import composition
import torch
import torch.distributed as dist
from fuzz_cases import STEPS, Case, sections
from fuzz_corpus import other_text, resolve
from titan_testing import run_ranks
from titan_train.config import dump_config, parse_config
from titan_train.models.common.moe.balance import moe_layers
from titan_train.models.common.moe.router import Router
from titan_train.parallel.tied import tied_to_first
from titan_train.train import Trainer

LIMITS = {
    "float32": {"first loss": 2e-6, "loss": 2e-5, "first norm": 2e-6, "norm": 2e-5, "bits": 5e-6, "weights": 1.5e-6},
    "float8": {"first loss": 5e-3, "loss": 3e-2, "first norm": 2e-2, "norm": 0.1, "bits": 1e-2, "weights": 1.2},
    "float8 with experts": {
        "first loss": 2e-2,
        "loss": 5e-2,
        "first norm": 0.1,
        "norm": 0.3,
        "bits": 2e-2,
        "weights": math.inf,
    },
}
LEAST_GAP = 1e-6  # of scores up to 1; rounding moves one of 0.5 by some 1e-7, one of 1 / 8 by a tenth of that


def configure(folder, name, *parts):
    return parse_config(composition.tree(folder, name, sections(other_text(folder), *parts)))


def train(folder, name, *parts, until=None):
    """Losses, gradient norms, bits per byte, and this rank's boxes of the final weights and expert biases.

    With ``until``, the run of that name goes on up to that step, and is saved.
    """
    config = configure(folder, name, *parts)
    with contextlib.ExitStack() as around:
        run_dir = None if until else Path(around.enter_context(tempfile.TemporaryDirectory())) / "run"
        seen = composition.Seen()
        trainer = around.enter_context(Trainer(config, run_dir=run_dir, callbacks=[seen]))
        trainer.fit(until=until)
        if until:
            trainer.save()
        boxes = composition.boxes(trainer.model, of=lambda p: p.detach())
        for copy, first in tied_to_first(trainer.model.names).items():
            if copy in boxes:  # of a tied weight, on another pipeline stage
                other = boxes.pop(copy)
                assert first not in boxes or torch.equal(boxes[first][2], other[2]), f"{copy} and {first} differ"
                boxes[first] = other
        for part in trainer.model.parts:
            for fqn, layer in moe_layers(part):
                if layer.expert_bias is not None:
                    bias = layer.expert_bias.clone()
                    boxes[f"{fqn}.expert_bias"] = (tuple(bias.shape), (0,), bias)
        bits = [record.bits_per_byte for record in seen.validations]
        return trainer.losses, seen.norms, bits, boxes


def all_layouts(folder, parts, layouts):
    """One trainer after the other, in the same processes."""
    if not dist.is_initialized():
        os.environ.pop("WORLD_SIZE", None)  # alone, as started by hand
    return [train(folder, f"layout-{i}", *parts, layout) for i, layout in enumerate(layouts)]


def together(ranks):
    """What all ranks found, of one layout: losses, norms and bits of the first, and whole weights."""
    for of_rank in ranks:
        assert of_rank[:3] == ranks[0][:3], "ranks report other losses, norms or bits per byte"
    return *ranks[0][:3], composition.assemble([of_rank[3] for of_rank in ranks])


def trained_together(case: Case, folder, common):
    """What each layout gives."""
    ranks = run_ranks(all_layouts, case.ranks, folder, (common,), case.layouts, init=case.ranks > 1, timeout_s=170)
    return [together([of_rank[i] for of_rank in ranks]) for i in range(len(case.layouts))]


def go_on(folder, name, parts, until):
    if not dist.is_initialized():
        os.environ.pop("WORLD_SIZE", None)
    return train(folder, name, *parts, until=until)


def resumed(case: Case, folder, common):
    """What one run gives whose every step or two are made by another layout."""
    name = f"resumed-{case.seed}-{time.monotonic_ns()}"
    losses, norms, bits, weights = [], [], [], {}
    for number, (ranks, layout) in enumerate(zip(case.resume, case.layouts, strict=True), 1):
        until = number if number < len(case.layouts) else STEPS
        found = run_ranks(go_on, ranks, folder, name, (common, layout), until, init=ranks > 1, timeout_s=170)
        more_losses, more_norms, bits, weights = together(found)
        losses, norms = losses + more_losses, norms + more_norms
    return losses, norms, bits, weights


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


def reference(folder, common, same=None, ranks=1):
    """What one process gives, or plain data parallelism of ``ranks``; and the sections it was run with.

    Args:
        folder: Of the corpus.
        common: Sections of the case.
        same: Of a layout, what its reference needs to have in common with it.
        ranks: Data-parallel ones.
    """
    found = run_ranks(one_process, ranks, folder, common, same or {}, init=ranks > 1, timeout_s=170)
    return together(found), found[0][4]


def check(case: Case, folder) -> dict[str, float]:
    """Run a case; returns the largest share of each limit that was used.

    Raises:
        AssertionError: A limit is passed, or ranks failed. The message replays the case.
    """
    try:
        want, common = reference(folder, resolve(case.common))
        if case.resume:
            found = [resumed(case, folder, common)]
        elif case.launcher == "group":
            found = trained_together(case, folder, common)
        else:
            found = [launched(case, folder, common, layout) for layout in case.layouts]
        used: dict[str, float] = {}
        for number, (layout, got) in enumerate(zip(case.layouts, found, strict=not case.resume)):
            wanted, kind = want, "float32"
            if "float8" in layout:
                same = {"float8": layout["float8"], "train": {"microbatch": layout["train"]["microbatch"]}}
                wanted = reference(folder, common, same)[0]
                kind = "float8 with experts" if case.moe else "float8"
            elif case.dropout:
                alike = case.ranks // layout["parallel"].get("tp", 1)
                wanted = reference(folder, common, {"train": {"microbatch": 1}}, alike)[0]
            for name, share in shares(got, wanted, LIMITS[kind]).items():
                assert share <= 1, f"layout {number}: {name} is {share:.3g} times what rounding explains"
                used[name] = max(share, used.get(name, 0.0))
    except Exception as err:
        replay = f"python packages/titan-train/tests/fuzz/replay.py --seed {case.seed}"
        raise AssertionError(f"{err}\n\n{case.describe()}\nreplay with: {replay}") from err
    return used


def shares(got, want, limits) -> dict[str, float]:
    """Each error over its limit."""
    losses, norms, bits, weights = got
    want_losses, want_norms, want_bits, want_weights = want
    assert len(losses) == len(want_losses)
    assert len(bits) == len(want_bits) == 1, (bits, want_bits)
    assert weights.keys() == want_weights.keys(), f"weights differ by name: {weights.keys() ^ want_weights.keys()}"
    assert all(map(math.isfinite, losses)), losses
    relative = [abs(a - b) / b for a, b in zip(norms, want_norms, strict=True)]
    differences = [abs(a - b) for a, b in zip(losses, want_losses, strict=True)]
    # no gradient element is larger than the gradient's norm, nor, where it is clipped, than the clip
    largest = max(want_norms)
    worst = max(float((weights[name] - want_weights[name]).abs().max()) for name in weights)
    errors = {
        "first loss": differences[0], "loss": max(differences), "first norm": relative[0], "norm": max(relative),
        "bits": max(abs(a - b) / b for a, b in zip(bits, want_bits, strict=True)),
        "weights": worst / largest,
    }  # fmt: skip
    return {name: errors[name] / limits[name] for name in limits}


def launched(case: Case, folder, common, layout):
    """The same by the command, with its own processes: losses from the log, weights from the last checkpoint."""
    from titan_train import load_run

    name = f"launched-{case.seed}"
    launch = {"launch": {"nproc": case.ranks, "device": "cpu"}}
    saved = {"checkpoint": {"every": 0, "async_save": False}, "metrics": {"progress": "off", "report": False}}
    config = configure(folder, name, common, layout, launch, saved)
    file = Path(folder) / f"{name}.toml"
    file.write_text(dump_config(config))
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0")
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", str(case.ranks), *rendezvous)
    starter = torchrun if case.launcher == "torchrun" else ()
    done = subprocess.run(
        [sys.executable, *starter, "-m", "titan_train", "run", str(file)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run_dir = Path(folder) / "runs" / name
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "grad_norm" in line and "lr" in line]
    bits = [line["bits_per_byte"] for line in lines if "bits_per_byte" in line]
    model = load_run(run_dir, device="cpu").model
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    weights |= {name: b.clone() for name, b in model.state_dict().items() if name.endswith(".expert_bias")}
    return [line["loss"] for line in steps], [line["grad_norm"] for line in steps], bits, weights
