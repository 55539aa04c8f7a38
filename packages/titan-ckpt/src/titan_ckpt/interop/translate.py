"""Apply a key map: views by Hugging Face name to views by native name, and back."""

from collections.abc import Container, Mapping
from dataclasses import replace

from titan_ckpt.interop.key_map import KeyMap, Pair
from titan_ckpt.interop.views import ItemView, JoinView, PartView, RotaryView, StackView, TransposedView, View


def from_hf(hf: Mapping[str, View], names: KeyMap, wanted: Container[str] | None = None) -> dict[str, View]:
    """Native tensors from Hugging Face tensors.

    Args:
        hf: Hugging Face name to view.
        names: The family's key map.
        wanted: The model's names. They decide if a Hugging Face tensor fits several native ones; None takes the first. As a
            mapping to shapes, they also decide whether a stack of matrices is stored transposed or as it is.

    Raises:
        ValueError: If the family does not have a name, two tensors get the same name, or a stack lacks an expert.
    """
    native: dict[str, View] = {}
    stacks: dict[str, dict[int, View]] = {}
    shapes: Mapping[str, tuple[int, ...] | None] = wanted if isinstance(wanted, Mapping) else {}
    for name, view in hf.items():
        for chosen, letters in _chosen(names.match_hf(name), wanted):
            key = chosen.native.format(**letters)
            pair = _as_stored(chosen, view, shapes.get(key))
            items = stacks.setdefault(key, {}) if pair.stacked else {}
            if key in native or (pair.stacked and int(letters["j"]) in items):
                raise ValueError(f"{name!r} and another tensor of the folder both become {key!r}. Remove one of them.")
            if pair.stacked:
                items[int(letters["j"])] = _as_native(pair, view, name)
            else:
                native[key] = _as_native(pair, view, name)
    return native | {key: _stack(key, items) for key, items in stacks.items()}


def to_hf(native: Mapping[str, View], names: KeyMap) -> dict[str, View]:
    """Hugging Face tensors from native tensors.

    Raises:
        ValueError: If the family does not have a name, two tensors get the same name, or a packed tensor lacks a part.
    """
    hf: dict[str, View] = {}
    sources: dict[tuple[str, tuple[int, int, int] | None], str] = {}
    packs: dict[str, tuple[int, int, dict[int, View]]] = {}
    for name, base in native.items():
        pair, letters = names.match_native(name)
        view = RotaryView(base, pair.head_dim, to_halves=True) if pair.head_dim else base
        view = _transposed(view, name) if pair.transposed else view
        target = (names.to_hf(name), pair.part)
        if sources.setdefault(target, name) != name:
            raise ValueError(
                f"{sources[target]!r} and {name!r} become the same Hugging Face tensor. Leave one of them out with "
                "names.leaving_out(...)."
            )
        if pair.stacked:
            hf |= {pair.hf.format(**letters, j=j): ItemView(view, j) for j in range(view.shape[0])}
        elif pair.part:
            index, count, dim = pair.part
            packs.setdefault(pair.hf.format(**letters), (count, dim, {}))[2][index] = view
        else:
            hf[pair.hf.format(**letters)] = view
    for name, (count, dim, parts) in packs.items():
        if len(parts) != count:
            raise ValueError(f"{name!r} is made of {count} tensors, but the step holds {len(parts)} of them.")
        hf[name] = JoinView([parts[i] for i in range(count)], dim)
    return hf | {copy: hf[other] for copy, other in names.copies if other in hf}


def _chosen(
    found: list[tuple[Pair, dict[str, str]]], wanted: Container[str] | None
) -> list[tuple[Pair, dict[str, str]]]:
    """The pairs to use: one, or all parts of a packed tensor."""
    fitting = found
    if wanted is not None:
        fitting = [(pair, letters) for pair, letters in found if pair.native.format(**letters) in wanted] or found
    return [match for match in fitting if match[0].part] if fitting and fitting[0][0].part else fitting[:1]


def _as_stored(pair: Pair, view: View, shape: tuple[int, ...] | None) -> Pair:
    """The pair, not transposed for a stack that is stored as the native one is: transformers 5 reads both and saves that."""
    if not pair.transposed or len(view.shape) != 3 or shape is None:
        return pair
    plain, sizes = replace(pair, transposed=False), list(view.shape)
    if pair.part is not None:
        index, count, dim = pair.part
        plain = replace(plain, part=(index, count, 3 - dim))  # rows for columns
        sizes[3 - dim] //= count
    return plain if tuple(sizes) == tuple(shape) else pair


def _as_native(pair: Pair, view: View, name: str) -> View:
    if pair.part:
        view = _part_of(pair, view, name)
    if pair.transposed:
        view = _transposed(view, name)
    if pair.head_dim:
        if view.shape[0] % pair.head_dim:
            raise ValueError(f"{name!r} of shape {list(view.shape)} does not consist of heads of {pair.head_dim} rows.")
        view = RotaryView(view, pair.head_dim, to_halves=False)
    return view


def _part_of(pair: Pair, view: View, name: str) -> View:
    assert pair.part
    index, count, dim = pair.part
    if pair.rows is not None:
        start, size = pair.rows
        if len(view.shape) <= dim or view.shape[dim] < start + size:
            raise ValueError(
                f"{name!r} of shape {list(view.shape)} has no places {start} to {start + size} along dimension {dim}."
            )
        return PartView(view, dim, start, size)
    if len(view.shape) <= dim or view.shape[dim] % count:
        raise ValueError(
            f"{name!r} of shape {list(view.shape)} cannot be cut into {count} equal parts along dimension {dim}."
        )
    size = view.shape[dim] // count
    return PartView(view, dim, index * size, size)


def _transposed(view: View, name: str) -> View:
    if len(view.shape) not in (2, 3):
        raise ValueError(
            f"{name!r} of shape {list(view.shape)} is neither a matrix nor a stack of them, so it cannot be transposed."
        )
    return TransposedView(view)


def _stack(key: str, items: dict[int, View]) -> View:
    missing = sorted(set(range(max(items) + 1)) - set(items))
    if missing:
        raise ValueError(f"{key!r} is missing experts {missing[:8]} of {max(items) + 1}. Fetch the whole checkpoint.")
    kinds = {(view.dtype, view.shape) for view in items.values()}
    if len(kinds) > 1:
        raise ValueError(f"the experts of {key!r} have different dtypes or shapes: {sorted(kinds)[:4]}.")
    return StackView([items[j] for j in range(len(items))])
