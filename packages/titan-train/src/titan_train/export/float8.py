"""Which matrices of a model are exported as float8 with block scales, and how a folder says so.

Attention, feed-forward and experts are; embeddings, head, norms and routers are not. Readers take a matrix's block to be its
size over the number of its scales, which is 128 only where a side is at most 128 or a multiple of it; other matrices stay
bfloat16. Matrices that vLLM and SGLang join (queries, keys and values; gate and up) are float8 all together or not at all.
Readers take every linear for float8 that the folder does not except, so it excepts all others.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from titan_train.models.family import Family

_BLOCK = 128
_MATRIX = re.compile(r"(model\.layers\..*)\.(?!eh_)(\w+_proj|kv_a_proj_with_mqa)\.weight")
_EXPERTS = re.compile(r".*\.experts(?=\.)")
_JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"))


def float8_names(model: nn.Module, family: Family) -> frozenset[str]:
    """Hugging Face names of the matrices that are stored as float8.

    Raises:
        ValueError: There are none, as readers know none of the architecture's.
    """
    suited = {name: _suits(shape) for name, shape in _shapes(_matrices(model, family)).items()}
    if not any(suited.values()):
        raise ValueError(
            "--dtype float8: readers of Hugging Face folders know no matrix of this model as float8: its family has none, or "
            "none with sides that are multiples of 128. Use --dtype bf16."
        )
    return frozenset(name for name in suited if all(suited.get(other, True) for other in _partners(name)))


def float8_parameters(model: nn.Module, family: Family) -> frozenset[str]:
    """Native names of the parameters that are stored as float8."""
    chosen = float8_names(model, family)
    return frozenset(native for name, native, _, _ in _matrices(model, family) if name in chosen)


def float8_config(model: nn.Module, family: Family) -> dict[str, Any]:
    """``quantization_config`` of ``config.json``, as transformers, vLLM and SGLang read DeepSeek-V3's."""
    chosen = float8_names(model, family)
    whole = dict.fromkeys(["lm_head"])
    for name, _, _, _ in _stored(model, family):
        if name in chosen:
            continue
        if name.endswith(".weight"):
            whole[name.removesuffix(".weight")] = None
        if (experts := _EXPERTS.match(name)) is not None:  # transformers has one module of all experts
            whole[experts[0]] = None
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [_BLOCK, _BLOCK],
        "modules_to_not_convert": [*whole],
        "ignored_layers": [*whole],  # vLLM's name of the same
    }


def _stored(model: nn.Module, family: Family) -> Iterator[tuple[str, str, tuple[int, ...], int | None]]:
    """Hugging Face name, native name and shape of every matrix or stack; of a part, the dimension that it is cut along."""
    args: Any = model.args
    key_map = family.load_hf().names(args)
    for native, parameter in model.named_parameters():
        pair, letters = key_map.match_native(native)
        for j in range(parameter.shape[0]) if pair.stacked else [0]:
            if parameter.ndim > 1:
                cut = None if pair.part is None else pair.part[2]
                yield pair.hf.format(**{"j": j, **letters}), native, tuple(parameter.shape[-2:]), cut


def _matrices(model: nn.Module, family: Family) -> Iterator[tuple[str, str, tuple[int, ...], int | None]]:
    """The same of every matrix that could be float8."""
    return (found for found in _stored(model, family) if _MATRIX.fullmatch(found[0]))


def _shapes(found: Iterable[tuple[str, str, tuple[int, ...], int | None]]) -> dict[str, tuple[int, ...]]:
    """Hugging Face name to shape; parts of one tensor are put together."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, _, shape, cut in found:
        if cut is not None and (before := shapes.get(name)) is not None:
            shape = tuple(size + (before[dim] if dim == cut else 0) for dim, size in enumerate(shape))
        shapes[name] = shape
    return shapes


def _suits(shape: tuple[int, ...]) -> bool:
    return all(size <= _BLOCK or size % _BLOCK == 0 for size in shape)


def _partners(name: str) -> list[str]:
    """The names of what is joined with a matrix, itself among them."""
    found = _MATRIX.fullmatch(name)
    assert found is not None
    group = next((group for group in _JOINED if found[2] in group), (found[2],))
    return [f"{found[1]}.{member}.weight" for member in group]
