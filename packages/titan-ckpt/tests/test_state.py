"""States that are not as simple as parameters and AdamW: what hooks, optimizers, wrappers and users put there."""

import collections
import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from titan_ckpt import Checkpointer, CheckpointError, DamageError, TrainState
from titan_ckpt.load import restore as restoring
from titan_ckpt.load.reader import StepReader
from titan_testing import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard


def save(root, step: int = 1, **parts) -> None:
    Checkpointer(root).save(step, TrainState(rng=False, **parts))


def restore(root, strict: bool = True, cast: bool = False, **parts) -> TrainState:
    state = TrainState(rng=False, **parts)
    Checkpointer(root).restore(state, strict=strict, cast=cast)
    return state


def holder(**tensors) -> nn.Module:
    """A module with these parameters and buffers."""
    module = nn.Module()
    for name, value in tensors.items():
        if isinstance(value, nn.Parameter):
            module.register_parameter(name, value)
        else:
            module.register_buffer(name, value)
    return module


class Counter(nn.Module):
    """Extra state of a kind of one's choice."""

    def __init__(self, count: int, as_tensor: bool = False) -> None:
        super().__init__()
        self.count, self.as_tensor = count, as_tensor

    def get_extra_state(self):
        return torch.tensor(self.count) if self.as_tensor else {"count": self.count}

    def set_extra_state(self, state):
        self.count = int(state if self.as_tensor else state["count"])


# --- the model's state dict


@pytest.mark.parametrize("as_tensor", [False, True])
def test_extra_state_comes_back_as_a_tensor_too(tmp_path, as_tensor):
    save(tmp_path, model=nn.Sequential(nn.Linear(2, 2), Counter(7, as_tensor)))
    got = nn.Sequential(nn.Linear(2, 2), Counter(0, as_tensor))
    restore(tmp_path, model=got)
    assert got[1].count == 7


def test_an_entry_that_a_hook_made_reaches_the_module(tmp_path):
    def build(value: float) -> nn.Linear:
        linear = nn.Linear(3, 3)
        nn.init.constant_(linear.weight, value)

        def transpose(module, state, prefix, _):
            state[prefix + "weight"] = state[prefix + "weight"].detach().t().clone()

        linear.register_state_dict_post_hook(transpose)
        return linear

    save(tmp_path, model=build(4.0))
    got = build(0.0)
    restore(tmp_path, model=got)
    assert bool((got.weight == 4.0).all())


def test_two_modules_may_not_have_one_extra_state(tmp_path):
    with pytest.raises(ValueError, match="two modules"):
        save(tmp_path, model=[Counter(1), Counter(2)])


def refuse_fsdp1(root: str) -> str:
    model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    try:
        save(root, model=model)
    except ValueError as err:
        return str(err)
    return ""


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_model_of_flat_parameters_is_refused(tmp_path):
    for error in run_ranks(refuse_fsdp1, 2, str(tmp_path)):
        assert "fully_shard" in error


@pytest.mark.parametrize("saving", [True, False])
def test_tensors_without_values_are_neither_saved_nor_loaded(tmp_path, saving):
    with torch.device("meta"):
        meta = nn.Linear(2, 2)
    if not saving:
        save(tmp_path, model=nn.Linear(2, 2))
    with pytest.raises(ValueError, match="to_empty"):
        (save if saving else restore)(tmp_path, model=meta)


def test_a_view_whose_elements_share_memory_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match=r"model\.p .* expanded"):
        save(tmp_path, model=holder(p=torch.ones(1).expand(4)))
    save(tmp_path, model=holder(p=torch.ones(4), q=torch.ones(2)))
    got = holder(p=torch.zeros(1).expand(4), q=torch.zeros(2))
    with pytest.raises(ValueError, match="expanded"):
        restore(tmp_path, model=got)
    assert not got.q.any()


@pytest.mark.parametrize("async_", [False, True])
def test_lazily_conjugated_tensors_are_saved_conjugated(tmp_path, async_):
    values = torch.randn(4, dtype=torch.complex64)
    with Checkpointer(tmp_path, async_=async_) as ck:
        ck.save(1, TrainState(model=holder(z=values.conj(), n=values.conj().imag), rng=False))
    got = holder(z=torch.zeros(4, dtype=torch.complex64), n=torch.zeros(4))
    restore(tmp_path, model=got)
    assert torch.equal(got.z, values.conj().resolve_conj())
    assert torch.equal(got.n, values.conj().imag)


# --- layouts


def save_strided(root: str, placements: str) -> bool:
    size = dist.get_world_size()
    line, square = init_device_mesh("cpu", (size,)), init_device_mesh("cpu", (2, size // 2))
    whole = torch.arange(48.0).reshape(24, 2)
    two, three = _StridedShard(0, split_factor=2), _StridedShard(0, split_factor=3)
    mesh, kinds = {
        "alone": (line, [two]),
        "alone, by three": (line, [three]),
        "over a shard, as FSDP": (square, [two, Shard(0)]),
        "beside a replica": (square, [two, Replicate()]),
        "beside another dim": (square, [two, Shard(1)]),
        "within a shard": (square, [Shard(0), two]),
    }[placements]
    save(root, model=holder(x=distribute_tensor(whole, mesh, kinds)))
    got = holder(x=torch.zeros(24, 2))
    restore(root, model=got)
    return torch.equal(got.x, whole)


@pytest.mark.parametrize(
    "placements",
    ["alone", "alone, by three", "over a shard, as FSDP", "beside a replica", "beside another dim", "within a shard"],
)
def test_strided_shards_are_read_as_their_split_factor_says(tmp_path, placements):
    assert all(run_ranks(save_strided, 4, str(tmp_path), placements))


def save_differing(root: str) -> tuple[list[str], float, float]:
    rank = dist.get_rank()
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("titan_ckpt").addHandler(handler)
    same, mine = torch.ones(8), torch.full((4,), float(rank))
    with Checkpointer(root, async_=True) as ck:
        for step in (1, 2):
            ck.save(step, TrainState(model=holder(same=same, mine=mine, too=mine.clone()), rng=False))
    got = holder(same=torch.zeros(8), mine=torch.full((4,), -1.0), too=torch.full((4,), -1.0))
    restore(root, model=got)
    return records, float(got.mine[0]), float(got.too[0])


def test_replicas_that_differ_are_told_of_once(tmp_path):
    results = run_ranks(save_differing, 2, str(tmp_path))
    (warning,) = results[0][0]
    assert "2 tensors differ" in warning
    assert "model.mine, model.too" in warning
    assert results[1][0] == []
    assert results[0][1:] == results[1][1:]


# --- the optimizer


def momentum(model: nn.Module, steps: int = 1, **options) -> torch.optim.SGD:
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **options)
    for _ in range(steps):
        for param in model.parameters():
            param.grad = torch.full_like(param, 2.0)
        optim.step()
    return optim


def keep_local_state(root: str) -> bool:
    """A custom optimizer that works on ``param.to_local()`` and keeps plain state beside it."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    param = nn.Parameter(distribute_tensor(torch.zeros(5, 2), mesh, [Shard(0)]))
    model, optim = holder(p=param), torch.optim.SGD([param], lr=0.1)
    own = torch.full_like(param.to_local().detach(), float(rank + 1))
    optim.state[param]["m"] = own.clone()
    save(root, model=model, optim=optim)
    optim.state[param]["m"].zero_()
    restore(root, model=model, optim=optim)
    kept = optim.state[param]["m"]
    fresh = torch.optim.SGD([param], lr=0.1)
    restore(root, model=model, optim=fresh)
    made = fresh.state[param]["m"]
    return not isinstance(kept, DTensor) and torch.equal(kept, own) and torch.equal(made.to_local(), own)


def test_plain_state_beside_a_shard_is_a_shard(tmp_path):
    assert all(run_ranks(keep_local_state, 2, str(tmp_path)))


def test_state_that_belongs_to_no_parameter_comes_back(tmp_path):
    model = nn.Linear(2, 2)
    optim = momentum(model)
    optim.state["global"] = {"k": 3, "history": torch.arange(4)}
    save(tmp_path, model=model, optim=optim)
    got = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    restore(tmp_path, model=model, optim=got)
    assert got.state["global"]["k"] == 3
    assert torch.equal(got.state["global"]["history"], torch.arange(4))


def test_state_under_keys_that_are_no_strings_comes_back_and_that_of_lost_parameters_is_refused(tmp_path):
    model = nn.Linear(2, 2)
    optim = momentum(model)
    optim.state[("blocks", 0)] = {"history": torch.arange(4), 3: 4}
    save(tmp_path, model=model, optim=optim)
    got = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    restore(tmp_path, model=model, optim=got)
    assert torch.equal(got.state[("blocks", 0)]["history"], torch.arange(4))
    assert got.state[("blocks", 0)][3] == 4
    lost = nn.Parameter(torch.ones(3))
    optim.state[lost] = {}  # as looking it up leaves behind
    save(tmp_path, 2, model=model, optim=optim)
    optim.state[lost] = {"m": torch.ones(3)}
    with pytest.raises(ValueError, match=r"SGD holds state of a tensor of shape \[3\] that is in none of its groups"):
        save(tmp_path, 3, model=model, optim=optim)


def keep_nested_averages(root: str) -> bool:
    """Sharded averages in a dict of a parameter's state, into an optimizer that has them and into one that does not."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    param = nn.Parameter(distribute_tensor(torch.zeros(6, 2), mesh, [Shard(0)]))
    model, optim = holder(p=param), torch.optim.SGD([param], lr=0.1)
    if dist.get_world_size() == 2:
        average = distribute_tensor(torch.arange(12.0).view(6, 2), mesh, [Shard(0)])
        optim.state[param] |= {"ema": {"fast": average}, "log": [average[0], torch.ones(3)]}
        save(root, model=model, optim=optim)
    averages = []
    for present in (False, True):
        optim.state[param] = {"ema": {"fast": torch.zeros_like(param.detach())}} if present else {}
        restore(root, model=model, optim=optim)
        averages.append(optim.state[param]["ema"]["fast"])
    whole = all(torch.equal(a.full_tensor(), torch.arange(12.0).view(6, 2)) for a in averages)
    return whole and all(a.placements == (Shard(0),) for a in averages)


def test_sharded_state_inside_containers_of_an_optimizer_stays_sharded(tmp_path):
    assert all(run_ranks(keep_nested_averages, 2, str(tmp_path)))
    assert all(run_ranks(keep_nested_averages, 3, str(tmp_path)))


def keep_whole_history(root: str) -> bool:
    mesh = init_device_mesh("cpu", (2,))
    param = nn.Parameter(distribute_tensor(torch.zeros(600, 2), mesh, [Shard(0)]))
    optim = torch.optim.SGD([param], lr=0.1)
    optim.state["global"] = {"history": torch.ones(600, 2)}
    save(root, model=holder(p=param), optim=optim)
    got = torch.optim.SGD([param], lr=0.1)
    restore(root, model=holder(p=param), optim=got)
    history = got.state["global"]["history"]
    return not isinstance(history, DTensor) and torch.equal(history, torch.ones(600, 2))


def test_state_that_belongs_to_no_parameter_gets_no_parameters_layout(tmp_path):
    assert all(run_ranks(keep_whole_history, 2, str(tmp_path)))


def test_tensors_inside_containers_go_to_the_device_of_those_they_replace_or_of_their_parameter():
    elsewhere: Any = SimpleNamespace(device=torch.device("meta"), is_meta=False)
    restore = restoring._Restore.__new__(restoring._Restore)
    saved = {"lists": [torch.ones(2), (torch.ones(()), 3)], "kept": torch.ones(1)}
    got = restore._placed(saved, {"kept": torch.zeros(1)}, elsewhere)
    assert [t.device.type for t in (got["lists"][0], got["lists"][1][0], got["kept"])] == ["meta", "meta", "cpu"]
    assert got["lists"][1][1] == 3


def test_two_optimizers_of_one_parameter_are_refused(tmp_path):
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="'weight' belongs to two optimizers"):
        save(tmp_path, model=model, optim=[momentum(model), momentum(model)])


def test_a_new_parameter_is_an_error_and_starts_anew_where_that_is_asked_for(tmp_path):
    small = nn.Sequential(nn.Linear(2, 2))
    save(tmp_path, model=small, optim=momentum(small, steps=2))
    grown = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optim = torch.optim.SGD(grown.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(ValueError, match=r"'1\.weight'"):
        restore(tmp_path, model=grown, optim=optim)
    restore(tmp_path, strict=False, model=grown, optim=optim)
    assert "momentum_buffer" in optim.state[grown[0].weight]
    assert grown[1].weight not in optim.state


def test_an_optimizer_that_lacks_saved_parameters_is_an_error_unless_that_is_asked_for(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    save(tmp_path, model=model, optim=momentum(model))
    fewer = torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(ValueError, match=r"2 parameters that the optimizer does not have: \['0\.weight', '0\.bias'\]"):
        restore(tmp_path, model=model, optim=fewer)
    restore(tmp_path, strict=False, model=model, optim=fewer)
    assert "momentum_buffer" in fewer.state[model[1].weight]


def test_weights_are_cast_where_that_is_asked_for_and_names_still_have_to_match(tmp_path):
    half = nn.Sequential(nn.Linear(2, 2, dtype=torch.bfloat16))
    save(tmp_path, model=half)
    full = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"float32, but torch\.bfloat16 was saved"):
        restore(tmp_path, model=full)
    restore(tmp_path, cast=True, model=full)
    assert torch.equal(full[0].weight, half[0].weight.float())
    with pytest.raises(ValueError, match=r"'1\.weight'"):
        restore(tmp_path, cast=True, model=nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))


def test_moments_follow_the_parameters_to_another_dtype(tmp_path):
    half = nn.Linear(2, 2, dtype=torch.bfloat16)
    save(tmp_path, model=half, optim=momentum(half))
    full = nn.Linear(2, 2)
    optim = torch.optim.SGD(full.parameters(), lr=0.1, momentum=0.9)
    restore(tmp_path, strict=False, model=full, optim=optim)
    buffer = optim.state[full.weight]["momentum_buffer"]
    assert buffer.dtype is torch.float32
    assert bool((buffer == 2.0).all())
    full.weight.grad = torch.ones_like(full.weight)
    optim.step()


def test_groups_that_were_equal_do_not_share_their_learning_rate(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    groups = [{"params": list(layer.parameters())} for layer in model]
    save(tmp_path, model=model, optim=torch.optim.SGD(groups, lr=torch.tensor(0.25)))
    groups = [{"params": list(layer.parameters())} for layer in model]
    got = torch.optim.SGD(groups, lr=0.1)
    restore(tmp_path, model=model, optim=got)
    first, second = (group["lr"] for group in got.param_groups)
    assert float(first) == float(second) == 0.25
    assert first is not second


def test_the_kernel_that_steps_is_this_optimizers_choice_and_step_counters_lie_where_it_wants_them(tmp_path):
    model = nn.Linear(2, 2)
    optim = torch.optim.Adam(model.parameters(), fused=True)
    model(torch.ones(1, 2)).sum().backward()
    optim.step()
    save(tmp_path, model=model, optim=optim)
    got = torch.optim.Adam(model.parameters())
    restore(tmp_path, model=model, optim=got)
    assert got.param_groups[0]["fused"] is None
    assert got.state[model.weight]["step"].device == torch.device("cpu")
    got.step()


def stage_without(root: str, part: str) -> tuple[int, int]:
    """Two pipeline stages; the first has no optimizer, or no data."""
    rank = dist.get_rank()
    model = holder(**{f"layer{rank}": nn.Parameter(torch.full((2,), float(rank)))})

    class Data:
        def __init__(self, at):
            self.at = at

        def state_dict(self):
            return {"at": self.at}

        def load_state_dict(self, state):
            self.at = state["at"]

    first = rank == 0
    optim = None if first and part == "optim" else momentum(model)
    save(root, model=model, optim=optim, data=None if first and part == "data" else Data(5), dp=(0, 1))
    optim = None if first and part == "optim" else torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = None if first and part == "data" else Data(0)
    restore(root, model=model, optim=optim, data=data, dp=(0, 1))
    return -1 if optim is None else len(optim.state), -1 if data is None else data.at


@pytest.mark.parametrize("part", ["optim", "data"])
def test_a_stage_may_lack_a_part_that_the_others_have(tmp_path, part):
    first, second = run_ranks(stage_without, 2, str(tmp_path), part)
    assert second == (1, 5)
    assert first == ((-1, 5) if part == "optim" else (1, -1))


# --- extra values, and errors


def test_keys_that_look_like_paths_stay_apart(tmp_path):
    extra = {"a.b": torch.zeros(5000), "a": {"b": torch.ones(5000)}, "c": [torch.full((5000,), 2.0)]}
    extra["c[0]"] = torch.full((5000,), 3.0)
    save(tmp_path, extra=extra)
    got = restore(tmp_path, extra={}).extra
    assert [float(t[0]) for t in (got["a.b"], got["a"]["b"], got["c"][0], got["c[0]"])] == [0.0, 1.0, 2.0, 3.0]


def test_large_tensors_in_sets_and_as_keys_come_back(tmp_path):
    save(
        tmp_path, extra={"set": {torch.zeros(5000)}, "dict": {torch.ones(5000): 1}, "counter": collections.Counter(a=2)}
    )
    got = restore(tmp_path, extra={}).extra
    assert [float(tensor[0]) for tensor in (*got["set"], *got["dict"])] == [0.0, 1.0]
    assert got["counter"] == collections.Counter(a=2)


def test_large_tensors_under_keys_that_look_alike_stay_apart(tmp_path):
    averages = {torch.full((5000,), 0.0): torch.full((5000,), 1.0), torch.full((5000,), 0.0): torch.full((5000,), 2.0)}
    save(tmp_path, extra={"d": averages, "pairs": {(torch.full((5000,), float(i)), 1): i for i in range(3)}})
    got = restore(tmp_path, extra={}).extra
    assert [(float(key[0]), float(value[0])) for key, value in got["d"].items()] == [(0.0, 1.0), (0.0, 2.0)]
    assert [(float(key[0]), value) for (key, _), value in got["pairs"].items()] == [(0.0, 0), (1.0, 1), (2.0, 2)]


def test_extra_that_is_left_out_is_not_read(tmp_path, monkeypatch):
    save(tmp_path, model=nn.Linear(2, 2), extra={"table": torch.zeros(5000)})
    monkeypatch.setattr(restoring, "read_tensor", lambda *_: pytest.fail("it was read"))
    assert restore(tmp_path, model=nn.Linear(2, 2)).extra == {}


def test_extra_tensors_are_cast_where_that_is_asked_for(tmp_path):
    save(tmp_path, extra={"average": torch.full((3,), 0.5, dtype=torch.bfloat16)})
    got = restore(tmp_path, cast=True, extra={"average": torch.zeros(3)}).extra["average"]
    assert (got.dtype, got.tolist()) == (torch.float32, [0.5] * 3)


def test_extra_tensors_of_another_shape_or_dtype_are_refused_before_the_weights_change(tmp_path):
    save(tmp_path, model=nn.Linear(2, 2), extra={"seen": torch.tensor(3.5)})
    got = nn.Linear(2, 2)
    before = got.weight.detach().clone()
    for wrong in (torch.zeros(4), torch.zeros((), dtype=torch.int64)):
        with pytest.raises(ValueError, match="extra 'seen'"):
            restore(tmp_path, model=got, extra={"seen": wrong})
        assert torch.equal(got.weight, before)
    assert restore(tmp_path, model=got, extra={"seen": torch.zeros(())}).extra["seen"] == 3.5


def keep_average(root: str, as_module: bool) -> bool:
    """A sharded moving average beside the model, in the layout of either two ranks or any other number."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def build(value: float):
        model = nn.Linear(6, 6)
        nn.init.constant_(model.weight, value)
        fully_shard(model, mesh=mesh)
        return model if as_module else {"weight": model.weight.detach()}

    if dist.get_world_size() == 2:
        save(root, extra={"ema": build(3.0)})
    got = restore(root, extra={"ema": build(0.0)}).extra["ema"]
    weight = got.weight if as_module else got["weight"]
    return isinstance(weight, DTensor) and bool((weight.to_local() == 3.0).all())


@pytest.mark.parametrize("as_module", [False, True])
def test_a_sharded_moving_average_is_an_extra_of_any_layout(tmp_path, as_module):
    assert all(run_ranks(keep_average, 2, str(tmp_path), as_module))
    assert all(run_ranks(keep_average, 3, str(tmp_path), as_module))


def keep_averages_in(root: str, how: str) -> bool:
    mesh = init_device_mesh("cpu", (2,))
    one = distribute_tensor(torch.full((6, 6), 3.0), mesh, [Shard(0)])
    zero = torch.zeros_like(one)
    save(root, extra={"ema": {0: one} if how == "dict" else (one,)})
    got = restore(root, extra={"ema": {0: zero} if how == "dict" else (zero,)}).extra["ema"]
    return isinstance(got[0], DTensor) and bool((got[0].to_local() == 3.0).all())


@pytest.mark.parametrize("how", ["dict", "tuple"])
def test_sharded_extras_keep_their_layout_in_tuples_and_under_numbers(tmp_path, how):
    assert all(run_ranks(keep_averages_in, 2, str(tmp_path), how))


class Errors:
    """Another tensor on every rank, of which a resume on another number takes the first alone."""

    def state_dict(self):
        return {"error": torch.full((5000,), float(dist.get_rank()))}

    def load_state_dict(self, state):
        raise AssertionError("the number of ranks has changed")

    def reshard(self, states):
        self.count, self.first = len(states), float(states[0]["error"][0])


def save_errors(root: str) -> None:
    save(root, model=nn.Linear(2, 2), data=Errors())


def test_a_reshard_reads_no_more_of_the_saved_states_than_it_looks_at_and_checks_all(tmp_path, monkeypatch):
    run_ranks(save_errors, 2, str(tmp_path))
    read, real = [], restoring.read_tensor
    monkeypatch.setattr(restoring, "read_tensor", lambda *args: read.append(args[2]) or real(*args))
    data = restore(tmp_path, data=Errors()).data
    assert (data.count, data.first, len(read)) == (2, 0.0, 1)
    reader = StepReader(next(tmp_path.glob("step-*")))
    stored = reader.index.find("extra", next(key for key in reader.index.tensors["extra"] if "rank-1" in key))
    file = reader.path / reader.index.files[stored.chunks[0].file].name
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    with pytest.raises(DamageError):
        restore(tmp_path, model=model, data=Errors())
    assert torch.equal(model.weight, before), "nothing is loaded where a state of another rank is damaged"


def test_empty_strings_and_arrays_of_numpy_come_back(tmp_path):
    extra = {"text": np.str_(""), "none": np.zeros((0, 3)), "flag": np.bool_(True), "texts": np.array(["", "a"])}
    save(tmp_path, extra=extra)
    got = restore(tmp_path, extra={}).extra
    assert got["text"] == ""
    assert got["none"].shape == (0, 3)
    assert bool(got["flag"])
    assert got["texts"].tolist() == ["", "a"]


def test_sparse_extra_values_are_refused_with_their_path(tmp_path):
    for size in (3, 300):
        with pytest.raises(TypeError, match=r"extra\.s is a torch\.sparse_coo"):
            save(tmp_path, extra={"s": torch.eye(size).to_sparse()})


def fail_alone(root: str, how: str) -> str:
    rank = dist.get_rank()

    class Data:
        def state_dict(self):
            if rank == 1 and how == "state":
                raise RuntimeError("worker died")
            return {}

        def load_state_dict(self, state):
            pass

    metrics = {"loss": "low"} if rank == 0 and how == "metric" else {"loss": np.float32(1.5)}
    ck = Checkpointer(root)
    try:
        ck.save(1, TrainState(model=nn.Linear(2, 2), data=Data(), rng=False), metrics=metrics)
    except (RuntimeError, TypeError) as err:
        return f"{type(err).__name__}: {err}"
    return "saved"


def test_what_fails_on_one_rank_is_an_error_on_all(tmp_path):
    first, second = run_ranks(fail_alone, 2, str(tmp_path / "a"), "state")
    assert first.startswith(CheckpointError.__name__)
    assert "rank 1 failed" in first
    assert "worker died" in first
    assert second == "RuntimeError: worker died"
    first, second = run_ranks(fail_alone, 2, str(tmp_path / "b"), "metric")
    assert first.startswith("TypeError")
    assert "not a number" in second
    assert run_ranks(fail_alone, 2, str(tmp_path / "c"), "") == ["saved", "saved"]


def test_weights_saved_apart_load_into_a_model_that_ties_them(tmp_path):
    """As two pipeline stages hold a tied embedding and head: equal, under two names."""

    def build(tied: bool) -> nn.Module:
        model = holder(embed=nn.Parameter(torch.ones(3, 2)), head=nn.Parameter(torch.ones(3, 2)))
        if tied:
            model.head = model.embed
        return model

    apart, together = build(tied=False), build(tied=True)
    save(tmp_path, model=apart, optim=momentum(apart))
    optim = torch.optim.SGD(together.parameters(), lr=0.1, momentum=0.9)
    restore(tmp_path, model=together, optim=optim)
    assert torch.equal(together.embed, apart.embed)
    assert torch.equal(optim.state[together.embed]["momentum_buffer"], torch.full((3, 2), 2.0))
