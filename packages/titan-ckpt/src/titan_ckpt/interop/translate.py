"""Apply a key map: views by Hugging Face name to views by our name, and back."""

from collections.abc import Container, Mapping

from titan_ckpt.interop.key_map import KeyMap, Pair
from titan_ckpt.interop.views import ItemView, JoinView, PartView, RotaryView, StackView, View


def from_hf(theirs: Mapping[str, View], names: KeyMap, wanted: Container[str] | None = None) -> dict[str, View]:
    """Our tensors, out of theirs.

    Args:
        theirs: Hugging Face name to view.
        names: The family's key map.
        wanted: The model's names, to choose by where a tensor there can become several here; None takes the first.

    Raises:
        ValueError: If a name is not of the family, two tensors would have one name, or a stack lacks an expert.
    """
    ours: dict[str, View] = {}
    stacks: dict[str, dict[int, View]] = {}
    for name, view in theirs.items():
        for pair, letters in _chosen(names.match_theirs(name), wanted):
            key = pair.ours.format(**letters)
            got = _as_ours(pair, view, name)
            known = stacks.setdefault(key, {}) if pair.stacked else ours
            place = int(letters["j"]) if pair.stacked else key
            if place in known:
                raise ValueError(f"{name!r} and another tensor of the folder are both {key!r}. Take one of them out.")
            known[place] = got  # type: ignore[index]
    for key, items in stacks.items():
        ours[key] = _stack(key, items)
    return ours


def to_hf(ours: Mapping[str, View], names: KeyMap) -> dict[str, View]:
    """Their tensors, out of ours.

    Raises:
        ValueError: If a name is not of the family, two tensors would have one name, or a packed tensor lacks a part.
    """
    theirs: dict[str, View] = {}
    sources: dict[tuple[str, tuple[int, int, int] | None], str] = {}
    packs: dict[str, tuple[Pair, dict[int, View]]] = {}
    for name, base in ours.items():
        pair, letters = names.match_ours(name)
        view = RotaryView(base, pair.head_dim, to_halves=True) if pair.head_dim else base
        target = (names.to_hf(name), pair.part)
        if sources.setdefault(target, name) != name:
            raise ValueError(
                f"{sources[target]!r} and {name!r} are one tensor on the other side. Leave one of them out with "
                "names.leaving_out(...)."
            )
        if pair.stacked:
            for j in range(view.shape[0]):
                theirs[pair.theirs.format(**letters, j=j)] = ItemView(view, j)
        elif pair.part:
            packs.setdefault(pair.theirs.format(**letters), (pair, {}))[1][pair.part[0]] = view
        else:
            theirs[pair.theirs.format(**letters)] = view
    for name, (pair, parts) in packs.items():
        assert pair.part
        _, count, dim = pair.part
        if len(parts) != count:
            raise ValueError(f"{name!r} is made of {count} tensors, but the step holds {len(parts)} of them.")
        theirs[name] = JoinView(tuple(parts[i] for i in range(count)), dim)
    return theirs


def _chosen(
    found: list[tuple[Pair, dict[str, str]]], wanted: Container[str] | None
) -> list[tuple[Pair, dict[str, str]]]:
    """The pairs to follow: one, or the several parts of a packed tensor."""
    fitting = found
    if wanted is not None:
        fitting = [(pair, letters) for pair, letters in found if pair.ours.format(**letters) in wanted] or found
    return [match for match in fitting if match[0].part] if fitting and fitting[0][0].part else fitting[:1]


def _as_ours(pair: Pair, view: View, name: str) -> View:
    if pair.part:
        index, count, dim = pair.part
        if len(view.shape) <= dim or view.shape[dim] % count:
            raise ValueError(f"{name!r} of shape {list(view.shape)} has no {count} equal parts along dimension {dim}.")
        size = view.shape[dim] // count
        view = PartView(view, dim, index * size, size)
    if pair.head_dim:
        if view.shape[0] % pair.head_dim:
            raise ValueError(f"{name!r} of shape {list(view.shape)} is not made of heads of {pair.head_dim} rows.")
        view = RotaryView(view, pair.head_dim, to_halves=False)
    return view


def _stack(key: str, items: dict[int, View]) -> View:
    missing = sorted(set(range(max(items) + 1)) - set(items))
    if missing:
        raise ValueError(f"{key!r} lacks experts {missing[:8]} of {max(items) + 1}. Fetch the whole checkpoint.")
    kinds = {(items[j].dtype, items[j].shape) for j in items}
    if len(kinds) > 1:
        raise ValueError(f"the experts of {key!r} have different dtypes or shapes: {sorted(kinds)[:4]}.")
    return StackView(tuple(items[j] for j in range(len(items))))
