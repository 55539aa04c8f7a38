"""States and folders that cannot be saved or read: an error that names the place, before anything is written."""

import json
import warnings

import pytest
import torch
from safetensors.torch import save_file
from titan_ckpt import Checkpointer, TrainState, export_hf, import_hf
from torch import nn


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.15 deprecates them
        return torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8)


def holder(name: str, value: torch.Tensor) -> nn.Module:
    module = nn.Module()
    module.register_buffer(name, value)
    return module


def nested(levels: int) -> list:
    value: list = []
    for _ in range(levels - 1):
        value = [value]
    return value


def endless() -> dict:
    value: dict = {}
    value["again"] = value
    return value


@pytest.mark.parametrize(
    ("name", "value", "error", "text"),
    [
        ("x", torch.eye(3).to_sparse(), TypeError, r"model\.x is a torch\.sparse_coo tensor"),
        ("x", quantized(), TypeError, r"model\.x is a quantized tensor.*dequantize"),
        ("__metadata__", torch.ones(2), ValueError, r"model\.__metadata__: safetensors reserves the name"),
    ],
)
@pytest.mark.parametrize("async_", [False, True])
def test_tensors_that_safetensors_cannot_hold_are_refused_by_name(tmp_path, name, value, error, text, async_):
    with Checkpointer(tmp_path, async_=async_) as ck:
        with pytest.raises(error, match=text):
            ck.save(1, TrainState(model=holder(name, value)))
        assert ck.steps() == []


@pytest.mark.parametrize("value", [nested(101), endless()], ids=["deep", "endless"])
def test_plain_state_that_is_too_deep_to_be_read_back_is_refused(tmp_path, value):
    with pytest.raises(ValueError, match=r"^extra\.k.*is nested more than 100 levels deep, or contains itself"):
        Checkpointer(tmp_path).save(1, TrainState(extra={"k": value}, rng=False))


def test_plain_state_at_the_limits_comes_back(tmp_path):
    value = {"deep": nested(100), "long": -(1 << 13_999)}
    Checkpointer(tmp_path).save(1, TrainState(extra=dict(value), rng=False))
    state = TrainState(extra={"deep": None, "long": None}, rng=False)
    Checkpointer(tmp_path).restore(state)
    assert state.extra == value
    with pytest.raises(ValueError, match=r"extra\.long is an integer of more than 4,000 digits"):
        Checkpointer(tmp_path).save(2, TrainState(extra={"long": 1 << 14_000}, rng=False))


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({"model": "gpt"}, r"TrainState\(model=\) got a str"),
        ({"optim": "adam"}, r"TrainState\(optim=\) got a str"),
        ({"sched": 1}, r"TrainState\(sched=\) got a int"),
        ({"data": 1}, r"TrainState\(data=\) got a int"),
        ({"extra": [1]}, r"TrainState\(extra=\) got a list"),
        ({"shards": {"weight": (4, 2)}}, r"TrainState\(shards=\) got a tuple"),
    ],
)
def test_parts_of_another_type_are_refused_by_the_field(parts, text):
    with pytest.raises(TypeError, match=text):
        TrainState(**parts)


@pytest.mark.parametrize("dp", [(5, 2), (-1, 2), "01", (1,)])
def test_a_place_outside_of_the_data_parallel_ranks_is_refused(dp):
    with pytest.raises(ValueError, match=r"TrainState\(dp=.*is not \(place, number of data-parallel ranks\)"):
        TrainState(dp=dp)


def test_a_model_in_place_of_a_state_is_refused(tmp_path):
    ck = Checkpointer(tmp_path)
    with pytest.raises(TypeError, match="state is a Linear"):
        ck.save(1, nn.Linear(1, 1))
    ck.save(1, TrainState(model=nn.Linear(1, 1)))
    with pytest.raises(TypeError, match="state is a Linear"):
        ck.restore(nn.Linear(1, 1))


def test_names_of_metrics_are_strings(tmp_path):
    with pytest.raises(TypeError, match="has a name that is not a string"):
        Checkpointer(tmp_path).save(1, TrainState(model=nn.Linear(1, 1)), metrics={"loss": 1.0, 3: 2.0})
    assert Checkpointer(tmp_path).steps() == []


@pytest.mark.parametrize("size", ["x", [128], [0, 128], [1.5, 2]])
def test_a_config_with_a_malformed_block_size_is_refused(tmp_path, size):
    save_file({"weight": torch.ones(3, 2), "bias": torch.ones(3)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"weight_block_size": size}}))
    with pytest.raises(ValueError, match=r"config\.json: weight_block_size=.* is not \[rows, columns\]"):
        import_hf(tmp_path, nn.Linear(2, 3))


def test_a_malformed_pattern_is_refused(tmp_path):
    step = Checkpointer(tmp_path / "run").save(1, TrainState(model=nn.Linear(1, 1))).path
    with pytest.raises(ValueError, match=r"leave_out='\(' is not a regular expression"):
        export_hf(step, tmp_path / "hf", leave_out=["("])


@pytest.mark.parametrize("key", [1, None, ("a", 1)])
def test_keys_of_extra_are_strings(tmp_path, key) -> None:
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(TypeError, match=r"extra has the key .*use strings"):
        checkpointer.save(1, TrainState(model=nn.Linear(1, 1), extra={key: 1}))
