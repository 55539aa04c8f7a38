"""How many ranks each parallelism gets, and in which order they are laid out.

Axis names, outer to inner in the default order:

- ``pp``: pipeline stages
- ``dp_replicate``: copies of the model that only all-reduce gradients (the outer part of HSDP)
- ``dp_shard``: FSDP shards
- ``cp``: context parallelism, a sequence cut over ranks
- ``tp``: tensor parallelism, innermost because it talks most

Experts use the same ranks differently: ``ep`` (expert parallelism) and ``etp`` (tensor parallelism inside an expert) are
no factors of the world size. They divide the ranks of ``dp_shard * cp * tp``. With ``etp = 1`` an expert is whole on its
rank; with ``etp = tp`` it is split as the dense layers are.
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
EXPERT_AXES = ("efsdp", "ep", "etp")
"""Axes of the expert view, besides pp and dp_replicate; ``efsdp`` is what ep and etp leave of the region."""

DEFAULT_EXPERT_ORDER = "-".join(EXPERT_AXES)
"""Outer to inner: neighbouring ranks differ in ``etp`` first."""

_EXPERT_DEGREES = ("ep", "etp")
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
    """Ranks that share the experts of a layer; ``ep * etp`` must divide ``dp_shard * cp * tp``."""
    etp: int = 1
    """Ranks that share each expert's matrices."""
    order: str = DEFAULT_ORDER
    """Axis names, outer to inner, joined by ``-``; ``dp`` stands for ``dp_replicate-dp_shard``."""
    expert_order: str = DEFAULT_EXPERT_ORDER
    """The axes efsdp, ep and etp of the expert view, outer to inner, joined by ``-``."""

    def __post_init__(self) -> None:
        for name in (*AXES, *_EXPERT_DEGREES):
            _check_degree(name, getattr(self, name))
        inferred = [name for name in AXES if getattr(self, name) == -1]
        if len(inferred) > 1:
            raise ValueError(
                f"{' and '.join(f'{name}=-1' for name in inferred)}: only one degree can be inferred from the world "
                f"size. Give all but one a number; {inferred[0]}=1 turns that axis off."
            )
        _parse_order(self.order)
        if sorted(self.expert_order.split("-")) != sorted(EXPERT_AXES):
            raise ValueError(
                f"expert_order={self.expert_order!r} must name efsdp, ep and etp once each, outer to inner, like "
                f"{DEFAULT_EXPERT_ORDER!r}."
            )

    @classmethod
    def parse(cls, text: str) -> "MeshSpec":
        """Read a spec such as ``"pp3 dp4 tp8"``; `str` of a spec gives a text that parses back to it.

        Items are separated by spaces or commas; ``tp8``, ``tp=8`` and ``tp:8`` are the same, ``dp`` means ``dp_shard``,
        ``order=pp-dp-cp-tp`` sets the order, and ``expert_order=ep-efsdp-etp`` that of the expert view.

        Raises:
            ValueError: An item is not an axis and a number, an axis is unknown or named twice, or `MeshSpec` rejects it.
        """
        degrees: dict[str, int] = {}
        orders = {"order": DEFAULT_ORDER, "expert_order": DEFAULT_EXPERT_ORDER}
        for item in re.split(r"[\s,]+", text.strip()):
            if not item:
                continue
            if item.startswith(("order=", "expert_order=")):
                key, _, value = item.partition("=")
                orders[key] = value
                continue
            match = _TOKEN.fullmatch(item)
            if match is None:
                raise ValueError(f"{item!r} in {text!r} is not an axis and its degree. Write it like 'tp8' or 'tp=8'.")
            name = "dp_shard" if match[1] == "dp" else match[1]
            if name not in (*AXES, *_EXPERT_DEGREES):
                raise ValueError(
                    f"{item!r} in {text!r}: unknown axis {name!r}. The axes are {', '.join(AXES)}, ep, etp, and dp, which "
                    f"is short for dp_shard.{nearest_name(name, (*AXES, *_EXPERT_DEGREES))}"
                )
            if name in degrees:
                raise ValueError(f"{name} appears twice in {text!r} ({degrees[name]} and {match[2]}). Keep one.")
            degrees[name] = int(match[2])
        return cls(**degrees, order=orders["order"], expert_order=orders["expert_order"])

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

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """The axes of the expert view besides pp and dp_replicate, outer to inner; ``etp`` only above 1."""
        return tuple(axis for axis in self.expert_order.split("-") if axis != "etp" or self.etp > 1)

    def _check_experts(self) -> None:
        region = self.dp_shard * self.cp * self.tp
        if region % (self.ep * self.etp) == 0:
            return
        sizes = f"dp_shard={self.dp_shard} * cp={self.cp} * tp={self.tp} = {region}"
        given = f"ep={self.ep}" + (f" * etp={self.etp} = {self.ep * self.etp}" if self.etp > 1 else "")
        nearest = either(self._nearest_experts(region))
        if self.dp_replicate > 1 and (region * self.dp_replicate) % (self.ep * self.etp) == 0:
            raise ValueError(
                f"{given} would cross dp_replicate={self.dp_replicate}: experts are spread over {sizes} ranks, "
                f"each model copy holding all of them. Nearest valid: {nearest}; or dp_replicate=1 "
                f"dp_shard={self.dp_shard * self.dp_replicate}."
            )
        raise ValueError(
            f"{given} does not divide {sizes}: experts use the ranks of these three axes. Nearest valid: {nearest}."
        )

    def _nearest_experts(self, region: int) -> list[str]:
        """Degrees near those given that fit ``region`` ranks: with one of the two changed, or both where neither divides."""
        choices: list[str] = []
        if region % self.etp == 0:
            choices += [f"ep={d}" for d in nearest_divisors(self.ep, region // self.etp)]
        if region % self.ep == 0:
            choices += [f"etp={d}" for d in nearest_divisors(self.etp, region // self.ep)]
        return choices or [
            f"ep={d} etp={nearest_divisors(self.etp, region // d)[0]}" for d in nearest_divisors(self.ep, region)
        ]

    def __str__(self) -> str:
        names = (*self.axes, *_EXPERT_DEGREES)
        parts = [f"{name}{getattr(self, name)}" for name in names if getattr(self, name) != 1]
        if self.order != DEFAULT_ORDER:
            parts.append(f"order={self.order}")
        if self.expert_order != DEFAULT_EXPERT_ORDER:
            parts.append(f"expert_order={self.expert_order}")
        return " ".join(parts)


def megatron(order: str = "tp-cp-ep-dp-pp") -> str:
    """Translate Megatron-LM's rank order (innermost first) to `MeshSpec.order`.

    Megatron uses the same text for its second, expert grid: see `megatron_experts`.

    Raises:
        ValueError: ``order`` does not name each of tp, cp, dp, pp once (ep at most once).
    """
    names = reversed(_megatron_names(order))
    return "-".join("dp_replicate-dp_shard" if name == "dp" else name for name in names if name != "ep")


def megatron_experts(order: str = "tp-cp-ep-dp-pp") -> str:
    """Translate Megatron-LM's rank order (innermost first) to `MeshSpec.expert_order`.

    Its expert grid has no context parallelism: ``expert_tensor_parallel_size`` stands where tp is named, and its
    data-parallel ranks where dp is. An order that does not name ep has it outermost, as in Megatron.

    Raises:
        ValueError: As `megatron`.
    """
    names = _megatron_names(order)
    names = names if "ep" in names else [*names, "ep"]
    axes = {"tp": "etp", "ep": "ep", "dp": "efsdp"}
    return "-".join(axes[name] for name in reversed(names) if name in axes)


def _megatron_names(order: str) -> list[str]:
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
    return names


def _parse_order(order: object) -> tuple[str, ...]:
    if not isinstance(order, str):
        raise ValueError(f"order={order!r} is not a string. Write it outer to inner, like {DEFAULT_ORDER!r}.")
    names: list[str] = []
    for name in order.split("-"):
        names += ["dp_replicate", "dp_shard"] if name == "dp" else [name]
    for name in names:
        if name not in AXES:
            why = " Its place is in expert_order, the order of the expert view." if name in EXPERT_AXES else ""
            hint = nearest_name(name, AXES)
            raise ValueError(f"{name!r} in order={order!r} is not an axis.{why} The axes are {', '.join(AXES)}.{hint}")
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
    if degree >= 1 or (degree == -1 and name not in _EXPERT_DEGREES):
        return
    if name in _EXPERT_DEGREES:
        raise ValueError(
            f"{name}={degree} is not a number of ranks, and cannot be inferred: {name} is not a factor of the world size. "
            f"Nearest valid: {name}=1."
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
