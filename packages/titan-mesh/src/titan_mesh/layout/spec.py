"""How many ranks each parallelism gets, and in which order they are laid out.

Axis names, outer to inner in the default order:

- ``pp``: pipeline stages
- ``dp_replicate``: copies of the model that only all-reduce gradients (the outer part of HSDP)
- ``dp_shard``: FSDP shards
- ``cp``: context parallelism, a sequence cut over ranks
- ``tp``: tensor parallelism, innermost because it talks most

``ep`` (expert parallelism) is no factor of the world size: experts borrow the ranks of ``dp_shard * cp * tp``.
"""

import math
import re
from dataclasses import dataclass, replace

from titan_mesh.nearest import either, nearest_divisors, nearest_name

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""The factors of the world size."""

DEFAULT_ORDER = "-".join(AXES)
"""Outer to inner: neighbouring ranks differ in ``tp`` first."""

EXPERT_REGION = ("dp_shard", "cp", "tp")
_TOKEN = re.compile(r"([a-z_]+?)\s*[=:]?\s*(-?\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshSpec:
    """Parallel degrees and their order.

    One degree may be -1: `resolve` fills it with what the other degrees leave of the world size.

    Raises:
        ValueError: A degree is not a positive integer (or the one -1), or ``order`` does not name each axis once.
    """

    pp: int = 1
    """Pipeline stages."""
    dp_replicate: int = 1
    """Model copies that all-reduce gradients; above 1 with ``dp_shard`` above 1 this is HSDP."""
    dp_shard: int = 1
    """Ranks that shard parameters, gradients and optimizer state."""
    cp: int = 1
    """Ranks that share one sequence."""
    tp: int = 1
    """Ranks that share each weight matrix."""
    ep: int = 1
    """Ranks that share the experts of a layer; must divide ``dp_shard * cp * tp``."""
    order: str = DEFAULT_ORDER
    """Axis names, outer to inner, joined by ``-``; ``dp`` stands for ``dp_replicate-dp_shard``."""

    def __post_init__(self) -> None:
        for name in (*AXES, "ep"):
            _check_degree(name, getattr(self, name))
        inferred = [name for name in AXES if getattr(self, name) == -1]
        if len(inferred) > 1:
            raise ValueError(
                f"{' and '.join(f'{name}=-1' for name in inferred)}: only one degree can be inferred from the world "
                f"size. Give all but one a number; {inferred[0]}=1 turns that axis off."
            )
        _parse_order(self.order)

    @classmethod
    def parse(cls, text: str) -> "MeshSpec":
        """Read a spec such as ``"pp3 dp4 tp8"``; `str` of a spec gives a text that parses back to it.

        Items are separated by spaces or commas; ``tp8``, ``tp=8`` and ``tp:8`` are the same, ``dp`` means ``dp_shard``,
        and ``order=pp-dp-cp-tp`` sets the order.

        Raises:
            ValueError: An item is no axis and number, an axis is unknown or named twice, or `MeshSpec` rejects it.
        """
        degrees: dict[str, int] = {}
        order = DEFAULT_ORDER
        for item in re.split(r"[\s,]+", text.strip()):
            if not item:
                continue
            if item.startswith("order="):
                order = item.removeprefix("order=")
                continue
            match = _TOKEN.fullmatch(item)
            if match is None:
                raise ValueError(f"{item!r} in {text!r} is not an axis and its degree. Write it like 'tp8' or 'tp=8'.")
            name = "dp_shard" if match[1] == "dp" else match[1]
            if name not in (*AXES, "ep"):
                raise ValueError(
                    f"{item!r} in {text!r}: {name!r} is no axis. The axes are {', '.join(AXES)}, ep, and dp, which is "
                    f"short for dp_shard.{nearest_name(name, (*AXES, 'ep'))}"
                )
            if name in degrees:
                raise ValueError(f"{name} appears twice in {text!r} ({degrees[name]} and {match[2]}). Keep one.")
            degrees[name] = int(match[2])
        return cls(**degrees, order=order)

    @property
    def axes(self) -> tuple[str, ...]:
        """The five axis names in this spec's order, outer to inner."""
        return _parse_order(self.order)

    @property
    def degrees(self) -> dict[str, int]:
        """The degree of each of the five axes, outer to inner."""
        return {name: getattr(self, name) for name in self.axes}

    def resolve(self, world_size: int) -> "MeshSpec":
        """Fill the degree that is -1, and check every degree against the world size.

        Args:
            world_size: Number of ranks.

        Returns:
            A spec whose degrees multiply to ``world_size``.

        Raises:
            ValueError: The degrees cannot make up ``world_size`` ranks, or ``ep`` does not fit. The message names the
                factor and the nearest valid choice.
        """
        check_count("world_size", world_size)
        for name in AXES:
            self._check_divides(name, world_size)
        fixed = math.prod(d for d in self.degrees.values() if d != -1)
        inferred = next((name for name in AXES if getattr(self, name) == -1), None)
        if world_size % fixed or (inferred is None and fixed != world_size):
            raise ValueError(self._product_message(world_size, fixed, inferred))
        spec = self if inferred is None else replace(self, **{inferred: world_size // fixed})
        spec._check_experts()
        return spec

    def _check_divides(self, name: str, world_size: int) -> None:
        degree = getattr(self, name)
        if degree < 1 or world_size % degree == 0:
            return
        others = math.prod(d for axis, d in self.degrees.items() if axis != name and d != -1)
        room = world_size // others if world_size % others == 0 else world_size
        nearest = either(f"{name}={d}" for d in nearest_divisors(degree, room))
        raise ValueError(
            f"{name}={degree} does not divide world_size={world_size}: the ranks cannot be cut into {name} groups of "
            f"{degree}. Nearest valid: {nearest}."
        )

    def _product_message(self, world_size: int, fixed: int, inferred: str | None) -> str:
        product = " * ".join(f"{name}={d}" for name, d in self.degrees.items() if d > 1) or "1"
        choices: list[str] = []
        # Data parallelism first: it is the degree people mean to let go.
        for name in ("dp_shard", "dp_replicate", "pp", "cp", "tp"):
            degree = getattr(self, name)
            if degree == -1 or world_size % (fixed // degree):
                continue
            room = world_size // (fixed // degree)
            valid = [room] if inferred is None else nearest_divisors(degree, room)
            choices += [f"{name}={d}" for d in valid if d != degree]
        if inferred is None:
            head = f"{product} needs {fixed} ranks, but world_size={world_size}."
            tail = (
                "" if world_size % fixed else f" {'dp_shard' if self.dp_shard == 1 else 'Any one degree'}=-1 infers it."
            )
        else:
            head = f"{product} = {fixed} does not divide world_size={world_size}, so {inferred}=-1 cannot be inferred."
            tail = ""
        fix = f"Nearest valid, changing one factor: {either(choices)}." if choices else "No single factor fixes it."
        return f"{head} {fix}{tail} Or start {fixed * max(1, round(world_size / fixed))} ranks."

    def _check_experts(self) -> None:
        region = self.dp_shard * self.cp * self.tp
        if region % self.ep == 0:
            return
        sizes = f"dp_shard={self.dp_shard} * cp={self.cp} * tp={self.tp} = {region}"
        nearest = either(f"ep={d}" for d in nearest_divisors(self.ep, region))
        if self.dp_replicate > 1 and (region * self.dp_replicate) % self.ep == 0:
            raise ValueError(
                f"ep={self.ep} would cross dp_replicate={self.dp_replicate}: experts are spread over {sizes} ranks, "
                f"each model copy holding all of them. Nearest valid: {nearest}; or dp_replicate=1 "
                f"dp_shard={self.dp_shard * self.dp_replicate}."
            )
        raise ValueError(
            f"ep={self.ep} does not divide {sizes}: experts borrow the ranks of these three axes. "
            f"Nearest valid: {nearest}."
        )

    def __str__(self) -> str:
        names = (*self.axes, "ep")
        parts = [f"{name}{getattr(self, name)}" for name in names if getattr(self, name) != 1]
        if self.order != DEFAULT_ORDER:
            parts.append(f"order={self.order}")
        return " ".join(parts)


def megatron(order: str = "tp-cp-ep-dp-pp") -> str:
    """Translate Megatron-LM's rank order (``--rank-order``-style, innermost first) to `MeshSpec.order`.

    ``ep`` may stand anywhere: Megatron uses it for its second, expert grid; here experts have the sparse view of a
    `Layout`, in which ``ep`` is innermost.

    Raises:
        ValueError: ``order`` does not name each of tp, cp, dp, pp once (ep at most once).
    """
    names = order.split("-")
    known = ("tp", "cp", "ep", "dp", "pp")
    for name in names:
        if name not in known:
            raise ValueError(
                f"{name!r} in Megatron order {order!r} is unknown. It is made of {', '.join(known)}."
                f"{nearest_name(name, known)}"
            )
    for name in known:
        if names.count(name) > 1 or (name != "ep" and name not in names):
            raise ValueError(
                f"Megatron order {order!r} names {name} {names.count(name)} times; it needs tp, cp, dp and pp once "
                "each, as in 'tp-cp-ep-dp-pp'."
            )
    return "-".join("dp_replicate-dp_shard" if name == "dp" else name for name in reversed(names) if name != "ep")


def _parse_order(order: object) -> tuple[str, ...]:
    if not isinstance(order, str):
        raise ValueError(f"order={order!r} is not a string. Write it outer to inner, like {DEFAULT_ORDER!r}.")
    names: list[str] = []
    for name in order.split("-"):
        names += ["dp_replicate", "dp_shard"] if name == "dp" else [name]
    for name in names:
        if name not in AXES:
            why = " ep is not in the order: it is innermost in the expert view." if name == "ep" else ""
            hint = nearest_name(name, AXES)
            raise ValueError(f"{name!r} in order={order!r} is no axis.{why} The axes are {', '.join(AXES)}.{hint}")
        if names.count(name) > 1:
            raise ValueError(f"order={order!r} names {name} {names.count(name)} times. Name each axis once.")
    missing = [name for name in AXES if name not in names]
    if missing:
        raise ValueError(
            f"order={order!r} leaves out {', '.join(missing)}. Name all of {', '.join(AXES)}, also those of degree 1."
        )
    return tuple(names)


def _check_degree(name: str, degree: object) -> None:
    if isinstance(degree, bool) or not isinstance(degree, int):
        raise ValueError(f"{name}={degree!r} is not an integer. A degree is a number of ranks; 1 turns the axis off.")
    if degree >= 1 or (degree == -1 and name != "ep"):
        return
    if name == "ep":
        raise ValueError(
            f"ep={degree} is not a number of ranks, and cannot be inferred: ep is no factor of the world size. Nearest "
            "valid: ep=1."
        )
    nearest = -1 if degree < 0 else 1
    meaning = "to infer it from the world size" if nearest == -1 else "to turn the axis off"
    raise ValueError(
        f"{name}={degree} is not a number of ranks: a degree is at least 1, or -1 to infer it. Nearest valid: "
        f"{name}={nearest}, {meaning}."
    )


def check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} is not a positive integer. Nearest valid: {name}=1.")
