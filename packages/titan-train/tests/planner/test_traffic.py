"""Predicted transfers of a step against those of real steps on gloo ranks: counts and bytes by axis, exactly."""

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from titan_pipeline.runtime import SocketTransport
from titan_testing import run_ranks
from titan_train.config import parse_config
from titan_train.inputs import prepare_inputs
from titan_train.models import build_model
from titan_train.parallel.layout.run import plan_run
from titan_train.parallel.stages import stage_layers
from titan_train.planner.cost.traffic import step_traffic
from titan_train.planner.memory.ranks import rehearse
from titan_train.planner.shapes import shape_of_config
from titan_train.planner.translate import setup_of_config
from titan_train.train import Trainer
from torch.utils._python_dispatch import TorchDispatchMode

# c10d operator: (kind, argument whose bytes count, argument that is the group)
_OPERATORS = {
    "c10d::_allgather_base_": ("all_gather", 0, 2),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1, 2),
    "c10d::allreduce_": ("all_reduce", 0, 1),
    "c10d::alltoall_base_": ("all_to_all", 1, 2),
    "c10d::send": ("send", 0, 1),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", 0, 2),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0, 3),
    "_c10d_functional::all_reduce": ("all_reduce", 0, 2),
    "_c10d_functional::all_to_all_single": ("all_to_all", 0, 3),
}
STAGES = (-1, -1)
"""The group of a message between pipeline stages."""
LEAST_BYTES = 200
"""Shorter transfers are the step's bookkeeping: losses, norms, flags. So are the integers that stages pass on."""


class TransferCounter(TorchDispatchMode):
    """Counts transfers inside a ``with`` block."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[str, tuple[int, ...], int]] = Counter()

    def __enter__(self) -> "TransferCounter":
        """Stages of one machine send through sockets, which no operator shows."""
        self._send = send = SocketTransport.send

        def counted(transport: SocketTransport, target: int, key: Any, payload: Any) -> None:
            for size in (t.numel() * t.element_size() for t in payload if t is not None and t.is_floating_point()):
                if size > LEAST_BYTES:
                    self.found["send", STAGES, size] += 1
            send(transport, target, key, payload)

        SocketTransport.send = counted
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        SocketTransport.send = self._send
        super().__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in _OPERATORS:
            kind, data, where = _OPERATORS[name]
            size = sum(t.numel() * t.element_size() for t in _tensors(args[data]))
            group = args[where]
            group = dist.ProcessGroup.unbox(group) if isinstance(group, torch.ScriptObject) else group
            ranks = tuple(dist.get_process_group_ranks(_group(group)))
            if name == "_c10d_functional::all_gather_into_tensor":
                size *= len(ranks)
            if size > LEAST_BYTES and (kind != "send" or args[data][0].is_floating_point()):
                self.found[kind, ranks, size] += 1
        return func(*args, **(kwargs or {}))


def _group(group: Any) -> Any:
    """Functional collectives name their group."""
    return torch._C._distributed_c10d._resolve_process_group(group) if isinstance(group, str) else group


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for item in value for t in _tensors(item)] if isinstance(value, (list, tuple)) else []


def configure(folder: str, name: str, **sections: dict[str, Any]) -> Any:
    """A tiny model on the corpus in ``folder``."""
    tree: dict[str, Any] = {
        "run": {"dir": str(Path(folder) / "runs"), "name": name, "seed": 7},
        "model": {"name": "llama3_debug", "seq_len": 128},
        "tokenizer": {"kind": "bytes"},
        "data": {
            "sources": [{"name": "corpus", "kind": "text", "paths": [str(Path(folder) / "corpus.txt")]}],
            "cache_dir": str(Path(folder) / "cache"),
            "validation_fraction": 0.0,
        },
        "train": {"steps": 4, "global_batch": 8, "microbatch": 1},
        "checkpoint": {"every": 0},
        "metrics": {"progress": "off"},
        "launch": {"device": "cpu", "timeout_s": 60.0},
    }
    for section, values in sections.items():
        tree[section] = tree.get(section, {}) | values
    return parse_config(tree)


def with_vocabulary(config: Any) -> Any:
    """The configuration with the model's vocabulary that the byte tokenizer sets: 256 bytes and 3 special tokens."""
    model = dataclasses.replace(config.model, args={**config.model.args, "vocab_size": 259})
    return dataclasses.replace(config, model=model)


def count(folder: str, cases: list[tuple[str, dict[str, Any]]]) -> list[dict[tuple[str, tuple[int, ...], int], int]]:
    """Transfers of the second step of each case, on this rank."""
    found = []
    for name, sections in cases:
        with Trainer(configure(folder, name, **sections)) as trainer:
            trainer.fit(until=1)
            with TransferCounter() as counter:
                trainer.fit(until=2)
        found.append(dict(counter.found))
    return found


FULL = {"activations": {"checkpoint": "full"}}
SELECTIVE = {"activations": {"checkpoint": "selective"}}
EVERY = {"activations": {"checkpoint": "every", "every": 2}}
FOUR = {"model": {"name": "llama3_debug", "args": {"num_layers": 4}}}
MOE = {"model": {"name": "qwen3_moe_debug"}}


def parallel(**degrees: Any) -> dict[str, Any]:
    return {"parallel": {"dp_shard": 1} | degrees}


def context(method: str, **degrees: int) -> dict[str, Any]:
    return parallel(**degrees) | {"context": {"method": method}}


LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "dp2": parallel(dp_shard=2),
        "dp2 full": parallel(dp_shard=2) | FULL,
        "dp2 never resharded": parallel(dp_shard=2, reshard="never"),
        "dp2 unsharded": parallel(dp_shard=2, accumulate="unsharded"),
        "dp2 zero1": parallel(dp_shard=2, accumulate="zero1"),
        "dp2 bf16": parallel(dp_shard=2, compress="bf16"),
        "2 copies": parallel(dp_replicate=2, mode="ddp"),
        "dp2 experts": parallel(dp_shard=2) | MOE,
        "tp2": parallel(tp=2),
        "tp2 full": parallel(tp=2) | FULL,
        "tp2 selective": parallel(tp=2) | SELECTIVE,
        "tp2 every": parallel(tp=2) | EVERY,
        "cp2 ulysses": context("ulysses", cp=2),
        "cp2 ring": context("ring", cp=2),
        "cp2 ring selective": context("ring", cp=2) | SELECTIVE,
        "cp2 ulysses selective": context("ulysses", cp=2) | SELECTIVE,
        "cp2 ring every": context("ring", cp=2) | EVERY,
        "cp2 allgather": context("allgather", cp=2),
        "pp2": parallel(pp=2),
        "ep2": parallel(dp_shard=2, ep=2) | MOE,
        "ep2 selective": parallel(dp_shard=2, ep=2) | MOE | SELECTIVE,
    },
    4: {
        "dp4": parallel(dp_shard=4),
        "dp2 x 2 copies": parallel(dp_shard=2, dp_replicate=2),
        "dp2 tp2": parallel(dp_shard=2, tp=2),
        "dp2 tp2 full": parallel(dp_shard=2, tp=2) | FULL,
        "dp2 cp2 ring": context("ring", dp_shard=2, cp=2),
        "cp4 ring": context("ring", cp=4),
        "cp4 allgather": context("allgather", cp=4),
        "cp2 tp2 ring": context("ring", cp=2, tp=2),
        "dp2 pp2": parallel(dp_shard=2, pp=2),
        "dp2 pp2 always resharded": parallel(dp_shard=2, pp=2, reshard="always"),
        "tp2 pp2": parallel(tp=2, pp=2),
        "tp2 pp2 with cuts": parallel(tp=2, pp=2) | FOUR | EVERY | {"pipeline": {"cuts": [3]}},
        "cp4 ulysses": context("ulysses", cp=4),
        "cp2 tp2 ulysses": context("ulysses", cp=2, tp=2),
        "dp4 ep2": parallel(dp_shard=4, ep=2) | MOE,
        "dp4 ep4": parallel(dp_shard=4, ep=4) | MOE,
        "dp2 ep2 x 2 copies": parallel(dp_shard=2, dp_replicate=2, ep=2) | MOE,
        "dp4 ep2 never resharded": parallel(dp_shard=4, ep=2, reshard="never") | MOE,
        "dp2 ep2 pp2": parallel(dp_shard=2, ep=2, pp=2) | MOE,
        "dp2 x 2 copies, reduced once": parallel(dp_shard=2, dp_replicate=2, accumulate="hsdp-ar"),
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("traffic")
    lines = [f"def add_{i % 7}(x, y):\n    return x + {i * i % 97} * y\n" for i in range(1200)]
    Path(folder, "corpus.txt").write_text("".join(lines))
    prepare_inputs(configure(str(folder), "prepare"), quiet=True)
    return str(folder)


def axis_of(kind: str, ranks: tuple[int, ...], world: int, setup: Any) -> str:
    """The axis whose group this is, on rank 0."""
    groups = {
        "tp": tuple(range(setup.tp)),
        "shard": tuple(range(0, setup.dp_shard * setup.cp * setup.tp, setup.tp)),
        "cp": tuple(range(0, setup.cp * setup.tp, setup.tp)),
        "replicate": tuple(range(0, world // setup.pp, setup.dp_shard * setup.cp * setup.tp)),
        "ep": tuple(range(setup.ep)),
        "pp": STAGES if setup.pp > 1 else (),
        "expert shard": tuple(range(0, setup.dp_shard * setup.cp * setup.tp, setup.ep)),
    }
    order = {"all_to_all": ("ep", "cp", "shard"), "send": ("cp", "pp"), "all_reduce": ("tp", "replicate", "shard")}
    candidates = order.get(kind, ("tp", "shard", "cp", "expert shard"))
    return next((axis for axis in candidates if len(groups[axis]) > 1 and groups[axis] == ranks), f"{kind} {ranks}")


QUICK = ("dp2", "tp2 full", "tp2 selective", "tp2 every", "cp2 ring", "ep2")
CASES = [
    pytest.param(2, QUICK, id="6 layouts on 2 ranks"),
    pytest.param(2, tuple(LAYOUTS[2]), id="all on 2 ranks", marks=pytest.mark.slow),
    pytest.param(4, tuple(LAYOUTS[4]), id="all on 4 ranks", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("ranks", "names"), CASES)
def test_counted_transfers_are_the_predicted_ones(ranks: int, names: tuple[str, ...], folder: str) -> None:
    cases = [(name, LAYOUTS[ranks][name]) for name in names]
    found = run_ranks(count, ranks, folder, cases, timeout_s=600.0)
    wrong = []
    for number, (name, sections) in enumerate(cases):
        config = configure(folder, name, **sections)
        setup = setup_of_config(config, ranks)
        named = with_vocabulary(config)
        wrapper, schedule, held = rehearse(named, ranks)[0].wrapper, plan_run(named, ranks).schedule, None
        if schedule is not None:
            held = len(stage_layers(named, build_model(named.model, vocab_size=None), schedule)[0])
        predicted = step_traffic(shape_of_config(named), setup, wrapper, element_bytes=4, held=held)
        counts: Counter[tuple[str, str]] = Counter()
        sizes: Counter[tuple[str, str]] = Counter()
        for (kind, group, size), times in found[0][number].items():
            key = (axis_of(kind, group, ranks, setup), kind)
            counts[key] += times
            sizes[key] += times * size
        if setup.ep > 1:  # what one rank sends depends on the routing; over all ranks it does not
            every = [item for rank in found for item in rank[number].items()]
            sizes["ep", "all_to_all"] = sum(n * size for (kind, _, size), n in every if kind == "all_to_all") // ranks
        wanted = [merged(predicted.counts, setup), merged(predicted.num_bytes, setup)]
        if [counts, sizes] != wanted:
            wrong.append(f"{name}: counted {dict(counts)} {dict(sizes)}\n   predicted {[dict(w) for w in wanted]}")
    assert not wrong, "\n".join(wrong)


def merged(predicted: Counter[tuple[str, str]], setup: Any) -> Counter[tuple[str, str]]:
    """Without data parallelism, the shards' group is the cp group: their gathers cannot be told apart by group. Nor can the sums
    over copies of experts and of other parameters.

    On a CPU, all-gather attention exchanges the gradients that it reduce-scatters on a GPU: the same bytes.
    """
    out: Counter[tuple[str, str]] = Counter()
    for (axis, kind), number in predicted.items():
        axis = "replicate" if axis == "expert replicate" else axis
        if setup.dp_shard > 1:
            out[axis, kind] += number
            continue
        if (axis, kind, setup.cp_method) == ("cp", "reduce_scatter", "allgather"):
            out["cp", "all_to_all"] += number
            continue
        out["shard" if axis == "cp" and kind in ("all_gather", "reduce_scatter") else axis, kind] += number
    return out
