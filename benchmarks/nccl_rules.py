"""What breaks NCCL's and CUDA's rules, counted without a GPU.

Question: does any schedule, context-parallel packing, dispatch, start, save or failure of titan hang, race or open a context on
another rank's device? Method: the real code on ranks that are threads, with devices that keep the rules
(`titan_testing.device_rules`); values are compared with one process. Output: one line a case family, the first finding of each,
and last a line of JSON. Limits: those of the instrument, which it states. The code is what Python finds first, so that an older
checkout is measured with its packages in PYTHONPATH:

    python benchmarks/nccl_rules.py --quick
    PYTHONPATH=$(echo OLD/packages/*/src | tr ' ' ':') python benchmarks/nccl_rules.py
"""

import argparse
import copy
import inspect
import json
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import titan_cp
import torch
import torch.distributed as dist
from titan_pipeline import FAMILIES, Schedule, build_schedule
from titan_pipeline import runtime as pipeline
from titan_pipeline.runtime import DeviceTransport, Executor, TorchStage
from titan_testing.device_rules import Outcome, on_device, run_on_devices
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

WIDTH = 4
Case = tuple[str, Callable[[], Outcome]]


# pipelines


def pipeline_case(schedule: Schedule, *, traced: bool, fails: tuple[int, str] | None = None) -> Outcome:
    """Two steps (a failing one and one after it, if a rank fails) of a pipeline, compared with one process."""
    m, layers = schedule.num_microbatches, _layers(schedule.num_stages)
    data = [torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(k), dtype=torch.float64) for k in range(m)]
    outcome = run_on_devices(_pipeline_rank, schedule.num_ranks, schedule, layers, data, traced, fails)
    if outcome.hang is None and not outcome.errors:
        whole, want = nn.Sequential(*copy.deepcopy(layers)), 0.0
        for x in data:
            loss = _square_sum(whole(x), x)
            (loss / m).backward()
            want += loss.item() / m
        for loss, grads in outcome.results:
            off = [name for name, g in grads.items() if (g - whole.get_parameter(name).grad).abs().max() > 1e-12]  # type: ignore[operator]
            if abs(loss - want) > 1e-12 * abs(want) or off:
                outcome.findings.append(f"loss {loss} instead of {want}; gradients off: {off}")
    return outcome


def _layers(number: int) -> list[nn.Module]:
    torch.manual_seed(1)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(number)]


def _square_sum(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).sum()


class _Broken(nn.Module):
    """Fails in its first forward or backward."""

    def __init__(self, inner: nn.Module, phase: str) -> None:
        super().__init__()
        self.inner, self.phase, self.broken = inner, phase, True

    def forward(self, x: Tensor) -> Tensor:
        if self.broken and self.phase == "forward":
            raise ArithmeticError("broken")
        out = self.inner(x)
        if self.phase == "backward" and out.requires_grad:
            out.register_hook(self._fail)
        return out

    def _fail(self, grad: Tensor) -> Tensor:
        if self.broken:
            raise ArithmeticError("broken")
        return grad


def _pipeline_rank(
    schedule: Schedule, layers: list[nn.Module], data: list[Tensor], traced: bool, fails: tuple[int, str] | None
) -> Any:
    rank, p = dist.get_rank(), schedule.num_ranks
    device = torch.device("cuda", rank)
    mesh: Any = SimpleNamespace(
        mesh_dim_names=("pp",), mesh=torch.arange(p), size=lambda dim=None: p, get_group=lambda axis: dist.group.WORLD
    )
    transport = DeviceTransport(mesh, "pp", schedule.placement, device)
    mine = {s: on_device(copy.deepcopy(layers[s])) for s in schedule.stages_of(rank)}
    broken = None
    if fails is not None and fails[0] == rank:
        first = min(mine)
        broken = mine[first] = _Broken(mine[first], fails[1])
    stages = [TorchStage(module, s, loss=_square_sum) for s, module in mine.items()]
    clock: dict[str, Any] = {"synchronize": torch.accelerator.synchronize}
    if "clock" in inspect.signature(Executor.__init__).parameters:
        clock = {"clock": pipeline.DeviceClock(device)}  # type: ignore[attr-defined]
    executor = Executor(schedule, stages, transport, hang_timeout_s=None, trace=traced, **clock)
    batch = [on_device(x) for x in data]
    if fails is not None:
        try:
            executor.step(batch, batch)
        except (ArithmeticError, pipeline.PipelineAborted):
            executor.reset()
        else:
            raise AssertionError("the failure was not told")
        if broken is not None:
            broken.broken = False
    loss = 0.0
    for _ in range(2 if fails is None else 1):
        for module in mine.values():
            module.zero_grad()
        loss = executor.step(batch, batch).loss
    return loss, {
        f"{s}.{name.removeprefix('inner.')}": p.grad.cpu()
        for s, module in mine.items()
        for name, p in module.named_parameters()
        if p.grad is not None
    }


def pipelines(quick: bool) -> Iterator[tuple[str, list[Case]]]:
    """Every family, traced and not."""
    for family in FAMILIES:
        for traced in (False, True):
            cases: list[Case] = []
            for p in (2, 4) if quick else range(2, 9):
                for m in (p, 2 * p) if quick else (p, 2 * p, 4 * p):
                    try:
                        schedule = build_schedule(family, p, m)
                    except ValueError:
                        continue
                    name = f"p={p} m={m}"
                    cases.append((name, lambda s=schedule, t=traced: pipeline_case(s, traced=t)))
            yield f"pipeline {family}{' traced' if traced else ''}", cases


def failures(quick: bool) -> Iterator[tuple[str, list[Case]]]:
    """A rank fails in its first forward or backward; the step after it is whole."""
    for phase in ("forward", "backward"):
        cases: list[Case] = []
        for family in ("1f1b", "interleaved_1f1b", "zbv") if quick else FAMILIES:
            for p in (3,) if quick else (2, 3, 4):
                for rank in range(p):
                    try:
                        schedule = build_schedule(family, p, 2 * p)
                    except ValueError:
                        continue
                    cases.append(
                        (
                            f"{family} p={p} rank {rank}",
                            lambda s=schedule, r=rank, f=phase: pipeline_case(s, traced=False, fails=(r, f)),
                        )
                    )
        yield f"failure in a {phase}", cases


# context parallelism


def packing(tokens: int, rng: random.Random, mean: float) -> list[int]:
    """Boundaries of documents with log-normal lengths."""
    ends = [0]
    while ends[-1] < tokens:
        ends.append(min(tokens, ends[-1] + max(1, int(rng.lognormvariate(0, 1) * mean / 1.65))))
    return ends


class _Silent(titan_cp.backends.Backend):
    """Attention that computes nothing, so that only what travels is left."""

    name = "silent"
    summary = "nothing"
    narrow_values = True

    def why_not(self, request: Any) -> str | None:
        del request

    def forward(self, *args: Any) -> None:
        """No kernel."""

    def backward(self, *args: Any) -> None:
        """No kernel."""


def context_case(bounds: list[int], size: int, options: dict[str, Any], *, values: bool = True) -> Outcome:
    """The run's start, forward and backward of one packing, with a collective of all ranks between them, as FSDP's."""
    plans = [
        titan_cp.plan(
            cu_seqlens=bounds,
            size=size,
            rank=r,
            num_heads=4,
            num_kv_heads=2,
            head_dim=4,
            pad=True,
            dtype=torch.float32,
            **options,
        )
        for r in range(size)
    ]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, bounds[-1], 4, generator=generator) for heads in (4, 2, 2))
    outcome = run_on_devices(_context_rank, size, plans, q, k, v, "naive" if values else _Silent())
    if values and outcome.hang is None and not outcome.errors:
        want, _ = titan_cp.reference_attention(q.double(), k.double(), v.double(), cu_seqlens=bounds)
        for p, got in zip(plans, outcome.results, strict=True):
            if (got - p.shard(want, 2)).abs().max() > 1e-5:
                outcome.findings.append("attention is not that of one process")
    return outcome


def _context_rank(plans: list[titan_cp.AttentionPlan], q: Tensor, k: Tensor, v: Tensor, backend: Any) -> Tensor:
    rank = dist.get_rank()
    p = plans[rank]
    groups: dict[str, Any] = {"group": dist.new_group(list(range(p.size)))}
    if p.method == "usp":
        u = p.ulysses_degree
        first = rank // u * u
        ring, heads = list(range(rank % u, p.size, u)), list(range(first, first + u))
        made = [dist.new_group(m, use_local_synchronization=True) for m in (ring, heads)]
        groups = {"ring_group": made[0], "ulysses_group": made[1]}
    if hasattr(titan_cp, "connect"):
        titan_cp.connect(*groups.values(), device="cuda")
    local = [on_device(p.shard(x, 2)).requires_grad_() for x in (q, k, v)]
    out = titan_cp.attention(*local, plan=p, backend=backend, **groups)
    # what a rank does next, whoever had something to send: gather weights of all
    weights = on_device(torch.ones(2))
    whole = torch.empty(2 * p.size, device="cuda")
    dist.all_gather_into_tensor(whole, weights, group=dist.group.WORLD)
    out.sum().backward()
    return out.detach().cpu()


def contexts(quick: bool) -> Iterator[tuple[str, list[Case]]]:
    """Packings: 500 where what travels depends on them, 100 where not; values of every fifth, what travels of all."""
    for method in ("auto", "ring", "allgather", "ulysses", "usp"):
        cases: list[Case] = []
        for trial in range(20 if quick else 125 if method in ("auto", "ring") else 25):
            for size in (4,) if quick else (2, 4, 6, 8):
                rng = random.Random(trial * 10 + size)
                if method == "ulysses" and size not in (2, 4):
                    continue
                bounds = packing(32 * size, rng, rng.choice([4, 8, 16]))
                options = {"method": method, **({"ulysses_degree": 2} if method == "usp" else {})}
                name = f"cp={size} packing {trial}"
                cases.append(
                    (name, lambda b=bounds, s=size, o=options, v=trial % 5 == 0: context_case(b, s, o, values=v))
                )
        yield f"context parallelism, {method}", cases


# experts, starts, saves, loaders


def experts_case(size: int, load: str) -> Outcome:
    """Routing that leaves ranks without tokens, or experts without rows."""
    from titan_train.parallel.expert.dispatch import ExpertParallelDispatch

    def rank_body() -> float:
        rank, experts_here, d = dist.get_rank(), 2, 4
        number, top = size * experts_here, 2
        tokens = {"even": 6, "one expert": 6, "empty ranks": 6 if rank == 0 else 0, "nobody": 0}[load]
        dispatch = ExpertParallelDispatch(dist.group.WORLD)  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(rank)
        chosen = torch.rand(tokens, number, generator=generator).topk(top, dim=1).indices
        if load == "one expert":
            chosen = torch.stack([torch.zeros(tokens, dtype=torch.int64), torch.ones(tokens, dtype=torch.int64)], 1)
        x = on_device(torch.randn(tokens, d, generator=generator)).requires_grad_()
        counts = on_device(torch.bincount(chosen.flatten(), minlength=number))
        weights = on_device(torch.full((tokens, top), 0.5))
        scale: Any = lambda rows, counts: rows * 2  # noqa: E731
        out = dispatch(x, weights, on_device(chosen), counts, scale)
        assert (out - 2 * x).abs().max().item() < 1e-6 if tokens else True
        out.sum().backward()
        return 0.0

    return run_on_devices(rank_body, size)


def start_case(n: int, degrees: dict[str, int]) -> Outcome:
    """Groups of a mesh, their first collective each, and the pipeline's channels."""
    from titan_mesh import Layout, MeshSpec, build

    def rank_body() -> None:
        rank = dist.get_rank()
        layout = Layout(MeshSpec(**degrees), world_size=n)
        mesh = build(layout, "cuda", timeout=timedelta(seconds=60))
        mesh.check()
        for name in ("dp_shard", "cp", "tp", "pp"):
            if mesh.size(name) > 1:
                x = on_device(torch.ones(1))
                dist.all_reduce(x, group=mesh.group(name))
                assert x.item() == mesh.size(name)
        if mesh.size("cp") > 1 and n > 1:
            from titan_train.config import ContextConfig
            from titan_train.parallel.context import ContextParallelism, Heads

            config = ContextConfig(method="usp", ulysses_degree=2) if mesh.size("cp") > 2 else ContextConfig()
            ContextParallelism(config, mesh, Heads(4, 4, 8), seq_len=64, dtype=torch.float32)
        if mesh.size("pp") > 1:
            grid: Any = torch.tensor([list(ranks) for ranks in layout.groups("pp")])
            fake: Any = SimpleNamespace(
                mesh_dim_names=("dp", "pp"), mesh=grid, get_group=mesh.group,
                size=lambda dim=None: grid.numel() if dim is None else grid.shape[dim],
            )  # fmt: skip
            placement = build_schedule("interleaved_zb", mesh.size("pp"), 4 * mesh.size("pp")).placement
            DeviceTransport(fake, "pp", placement, torch.device("cuda", rank))

    # torch's mesh would ask torch's own groups; it only names those that exist already
    with mock.patch.object(DeviceMesh, "from_group", return_value=SimpleNamespace()):
        return run_on_devices(rank_body, n)


def loader_case(n: int) -> Outcome:
    """The prefetch thread sends batches to its rank's device."""
    from titan_train.data.loader.batch import HostBatch
    from titan_train.data.loader.transfer import HostToDevice

    def rank_body() -> list[int]:
        import numpy as np

        rows = np.arange(8, dtype=np.int64).reshape(1, 8)
        mover = HostToDevice(torch.device("cuda", dist.get_rank()), 2)
        sent: list[Any] = []

        def prefetch() -> None:
            for step in range(3):
                sent.append(mover.send(HostBatch(rows + step, rows, rows, None, 8, step)))

        thread = threading.Thread(target=prefetch)
        thread.start()
        thread.join()
        total = 0
        for batch in sent:
            mover.receive(batch)
            total += int((batch.batch.tokens + 1).sum())
        return [total]

    return run_on_devices(rank_body, n)


def save_case(n: int, overlap: bool) -> Outcome:
    """A save in the middle of a step: staging in a thread or in order, while the weights go on changing."""
    from titan_ckpt.background.arena import Arena, staging_point

    def rank_body() -> float:
        weights = on_device(torch.ones(64))
        arena = Arena()
        arena.memory, arena.pinned = torch.zeros(256, dtype=torch.uint8), True
        target = arena.memory.view(torch.float32)
        ready = staging_point([weights])
        if overlap:
            saver = threading.Thread(target=arena.stage, args=([target], [weights], ready))
            saver.start()
            loss = (weights * weights).sum()
            saver.join()
        else:
            arena.stage([target], [weights], ready)
            loss = (weights * weights).sum()
        weights.add_(1)
        assert float(target.sum()) == 64
        arena.pinned = False
        return float(loss)

    return run_on_devices(rank_body, n)


def others(quick: bool) -> Iterator[tuple[str, list[Case]]]:
    """Experts, starts, loaders, saves."""
    sizes = (2, 4) if quick else range(2, 9)
    loads = ("even", "one expert", "empty ranks", "nobody")
    yield "experts", [(f"ep={n} {load}", lambda n=n, w=load: experts_case(n, w)) for n in sizes for load in loads]
    starts = [
        (2, {"dp_shard": 2}), (2, {"tp": 2}), (2, {"cp": 2}), (4, {"cp": 4}), (4, {"pp": 4}), (3, {"pp": 3}),
        (8, {"dp_shard": 2, "tp": 2, "pp": 2}), (8, {"dp_replicate": 2, "cp": 4}), (8, {"pp": 2, "cp": 2, "dp_shard": 2}),
        (8, {"dp_shard": 4, "ep": 4, "pp": 2}),
    ]  # fmt: skip
    yield "start with each axis", [(f"{n} ranks {d}", lambda n=n, d=d: start_case(n, d)) for n, d in starts]
    yield "loader's thread", [(f"{n} ranks", lambda n=n: loader_case(n)) for n in sizes]
    yield (
        "save during a step",
        [
            (f"{n} ranks{' overlapping' if o else ''}", lambda n=n, o=o: save_case(n, o))
            for n in sizes
            for o in (False, True)
        ],
    )


def verdict(outcome: Outcome) -> str:
    """The first thing that is wrong, in one line; empty if nothing is."""
    if outcome.hang is not None:
        return "hang: " + str(outcome.hang).split("\n")[0]
    if outcome.errors:
        error = next(iter(outcome.errors.values()))
        return f"{type(error).__name__}: {error}".split("\n")[0]
    return outcome.findings[0] if outcome.findings else ""


def main() -> None:
    """Count, print, and end with one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few sizes of each family")
    parser.add_argument("--only", default="", help="families whose name contains this")
    parser.add_argument("--explain", action="store_true", help="print the first hang of each family in full")
    args = parser.parse_args()
    torch.set_num_threads(1)
    table: dict[str, dict[str, Any]] = {}
    for source in (pipelines, failures, contexts, others):
        for family, cases in source(args.quick):
            if args.only not in family:
                continue
            began, found = time.perf_counter(), list[str]()
            full = ""
            for name, run in cases:
                try:
                    outcome = run()
                    text = verdict(outcome)
                    full = full or (str(outcome.hang) if outcome.hang else "")
                except ImportError as err:
                    text = str(err)
                if text:
                    found.append(f"{name}: {text}")
            first = found[0] if found else ""
            table[family] = {"cases": len(cases), "found": len(found), "first": first}
            seconds = time.perf_counter() - began
            print(f"| {family} | {len(cases)} | {len(found)} | {first} | {seconds:.1f} s |", flush=True)
            if args.explain and full:
                print(full, flush=True)
    print(
        json.dumps({"torch": torch.__version__, "python": sys.version.split()[0], "quick": args.quick, "table": table})
    )


if __name__ == "__main__":
    main()
