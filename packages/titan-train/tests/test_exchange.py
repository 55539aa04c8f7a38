"""What ranks send each other is text: equal on arrival, and never unpickled."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from titan_testing import run_ranks
from titan_train.exchange import gather_values

PACKAGES = Path(__file__).parents[2]
CAN_RUN_CODE = re.compile(
    r"\b(?:pickle|dill|marshal|shelve|joblib)\.(?:loads?|open)\(|\(pickle\.Unpickler\)|weights_only=False|allow_pickle=True"
    r"|\bdist\.\w+_object(?:_list)?\("
)


def run_gather():
    rank = dist.get_rank()
    tensors = [
        torch.arange(6, dtype=dtype).reshape(2, 3) + rank for dtype in (torch.bfloat16, torch.int64, torch.float64)
    ]
    value = {
        "n": rank,
        "pair": (1.5, None),
        3: b"x",
        "t": tensors,
        "flags": torch.tensor([True]),
        "none": torch.empty(0, 2),
    }
    found = gather_values(value)
    for number, other in enumerate(found):
        assert other["n"] == number
        assert (other["pair"], other[3]) == ((1.5, None), b"x")
        for mine, theirs in zip(tensors, other["t"], strict=True):
            assert torch.equal(theirs, mine - rank + number)
            assert theirs.dtype == mine.dtype
        assert other["none"].shape == (0, 2)
        assert other["flags"].tolist() == [True]
    assert gather_values(np.float32(0.5) + rank) == [0.5, 1.5]


def test_values_and_tensors_of_every_rank_arrive_as_they_were():
    run_ranks(run_gather, 2)


def run_refused():
    with pytest.raises(TypeError):
        gather_values({"a": object()})


def test_what_is_neither_value_nor_tensor_is_refused_by_the_rank_that_would_send_it():
    run_ranks(run_refused, 1)


def test_no_package_reads_what_can_run_code_but_the_import_of_dcp_by_an_allow_list():
    found = {
        f"{file.name}: {match[0]}"
        for file in PACKAGES.glob("*/src/**/*.py")
        for match in CAN_RUN_CODE.finditer(file.read_text(encoding="utf-8"))
    }
    assert found == {"dcp_import.py: (pickle.Unpickler)"}
