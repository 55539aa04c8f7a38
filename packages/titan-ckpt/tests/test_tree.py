import collections
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from titan_ckpt.format import tagged_json
from titan_ckpt.state import leaves

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers(), st.text()), inner)
        | st.frozensets(st.integers())
        | st.sets(st.text())
    ),
    max_leaves=12,
)


def same(a, b) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return a == b


@settings(max_examples=150, deadline=None)
@given(plain)
def test_plain_data_comes_back_the_same(value):
    text = tagged_json.dump_json(tagged_json.encode(value, "x"))
    import json

    assert same(tagged_json.decode(json.loads(text)), value)


@pytest.mark.parametrize(
    "value",
    [
        collections.OrderedDict(b=1, a=2),
        collections.Counter({4: 1}),
        {"$tuple": 1},
        {1: {2: (3, {4})}},
        range(2, 9, 3),
        bytearray(b"ab"),
        -0.0,
    ],
    ids=repr,
)
def test_what_json_lacks_comes_back_the_same(value):
    got = tagged_json.decode(tagged_json.encode(value, "x"))
    assert type(got) is type(value)
    assert same(got, value)


def test_tensors_arrays_and_dtypes_come_back_small_inline_large_stored():
    sink = leaves.TensorSink()
    value = {
        "small": torch.tensor([1.5, 2.5], dtype=torch.bfloat16),
        "scalar": torch.tensor(7),
        "none": torch.empty(0, 3),
        "large": torch.arange(5000.0),
        "array": np.arange(6, dtype=np.uint16).reshape(2, 3),
        "number": np.float32(1.5),
        "dtype": torch.bfloat16,
        "device": torch.device("cuda:1"),
        "size": torch.Size([2, 3]),
    }
    encoded = sink.encode(value, "x")
    assert list(sink.tensors) == ["x.large"]
    got = leaves.decode(encoded, sink.tensors.__getitem__)
    for key, want in value.items():
        assert type(got[key]) is type(want)
        if isinstance(want, torch.Tensor):
            assert got[key].dtype == want.dtype
            assert torch.equal(got[key], want)
        else:
            assert np.array_equal(got[key], want) if isinstance(want, np.ndarray) else got[key] == want


@pytest.mark.parametrize("bad", [object(), lambda: 0, torch.nn.Linear(1, 1), np.array([object()]), Exception])
def test_anything_else_is_refused_with_its_path(bad):
    with pytest.raises(TypeError, match=r"x\.a\[0\] is a .* Save its fields instead"):
        leaves.TensorSink().encode({"a": [bad]}, "x")


def test_unknown_tags_are_refused():
    with pytest.raises(ValueError, match=r"unknown tag '\$call'"):
        leaves.decode({"$call": "os.system"}, lambda key: torch.empty(0))
    with pytest.raises(ValueError, match=r"unknown tag '\$dtype'"):
        leaves.decode({"$dtype": "load"}, lambda key: torch.empty(0))
