"""Faults to inject into a run on purpose: what they are called, and how they are written.

    kill rank=3 step=20                 SIGKILL just before step 20
    hang rank=1 step=40                 stop making progress
    slow rank=2 factor=3                every step takes three times as long (from step=, for steps= of them)
    slow-data rank=1 seconds=0.2        every batch of this rank comes so much later (from step=, for steps= of them)
    slow-link rank=1 axis=tp seconds=0.01   every collective of this rank on a mesh axis takes so much longer (likewise)
    sigterm rank=0 step=20              SIGTERM, as a preempted machine gets it
    raise rank=0 step=20                an exception in the training loop
    nan step=25                         the loss of this step is not a number, on every rank
    bit-flip rank=1 step=25             one bit of one activation is wrong, once
    stuck-bit rank=1 step=25            the same in every forward of this step
    bad-data rank=1 step=25             every label of this rank's batch is token 0
    corrupt-checkpoint step=30          flip one bit in the newest finished checkpoint
    disk-full step=30                   the first save at or after this step cannot be written
    lose rank=3 step=20 seconds=60      SIGKILL, and its place stays out of use for so long (see launch.elastic)

Several are separated by ";". Each fires once in a run, however often it restarts; slow ones last. The plan is
text and numbers only: `titan_train.launch.rank.inject` carries it out inside a rank.
"""

from dataclasses import dataclass
from pathlib import Path

from titan_train.values import did_you_mean


@dataclass(frozen=True, slots=True)
class Fault:
    """One entry of a plan."""

    number: int
    """Position in the plan, from 0; distinguishes two equal entries."""
    kind: str
    rank: int
    """The rank that it affects; rank 0 if it affects the whole run."""
    step: int
    """It fires before this step is made."""
    factor: float = 1.0
    """slow: how many times as long a step takes."""
    steps: int = 0
    """slow, slow-data, slow-link: for how many steps; 0 to the end."""
    seconds: float = 0.0
    """lose: how long the place stays out of use; slow-data, slow-link: how much longer it takes."""
    axis: str = ""
    """slow-link: the mesh axis."""

    def covers(self, step: int) -> bool:
        """Whether a fault that lasts is on at ``step``."""
        return self.step <= step and (not self.steps or step < self.step + self.steps)

    def __str__(self) -> str:
        words = [self.kind, f"rank={self.rank}", f"step={self.step}"]
        words += [
            f"{name}={getattr(self, name):g}"
            for name in ("factor", "steps", "seconds")
            if name in {*_KEYS[self.kind][0], *_KEYS[self.kind][1]}
        ]
        words += [f"axis={self.axis}"] if self.axis else []
        return " ".join(words)


_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # kind: keys it needs, keys it may have
    "kill": (("rank", "step"), ()),
    "hang": (("rank", "step"), ()),
    "slow": (("rank", "factor"), ("step", "steps", "factor")),
    "slow-data": (("rank", "seconds"), ("step", "steps")),
    "slow-link": (("rank", "axis", "seconds"), ("step", "steps")),
    "sigterm": (("step",), ("rank",)),
    "raise": (("rank", "step"), ()),
    "nan": (("step",), ()),
    "bit-flip": (("rank", "step"), ()),
    "stuck-bit": (("rank", "step"), ()),
    "bad-data": (("rank", "step"), ()),
    "corrupt-checkpoint": (("step",), ("rank",)),
    "disk-full": (("step",), ("rank",)),
    "lose": (("rank", "step"), ("seconds",)),
}


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Read a plan.

    Raises:
        ValueError: A kind, a key or a value is unknown or missing; the message says which are there.
    """
    entries = [entry.split() for entry in text.split(";") if entry.strip()]
    return tuple(_fault(number, words) for number, words in enumerate(entries))


def check_faults(faults: tuple[Fault, ...], world_size: int) -> None:
    """Refuse a fault of a rank that the run does not have.

    Raises:
        ValueError: Names the fault and the ranks there are.
    """
    for fault in faults:
        if fault.rank >= world_size:
            raise ValueError(f"--faults {str(fault)!r}: the run has ranks 0 to {world_size - 1}.")


def _fault(number: int, words: list[str]) -> Fault:
    kind, entry = words[0], " ".join(words)
    if kind not in _KEYS:
        raise ValueError(
            f"--faults {entry!r}: unknown fault {kind!r}. {did_you_mean(kind, _KEYS)}The faults are {', '.join(_KEYS)}."
        )
    needed, allowed = _KEYS[kind]
    values: dict[str, float] = {}
    axis = ""
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not equals or key not in (*needed, *allowed):
            keys = ", ".join(dict.fromkeys((*needed, *allowed)))
            raise ValueError(f"--faults {entry!r}: {word!r} is not key=value with one of the keys of {kind!r}: {keys}.")
        if key == "axis":
            axis = value
            continue
        try:
            values[key] = float(value)
        except ValueError:
            raise ValueError(f"--faults {entry!r}: {word!r} needs a number after the '='.") from None
    missing = [key for key in needed if key not in values and not (key == "axis" and axis)]
    if missing:
        example = "tp" if missing[0] == "axis" else "2"
        raise ValueError(f"--faults {entry!r}: {kind!r} needs {missing[0]}=, such as {missing[0]}={example}.")
    for key, least in (("rank", 0), ("step", 1), ("steps", 0), ("factor", 1), ("seconds", 0)):
        if values.get(key, least) < least or (key in ("rank", "step", "steps") and values.get(key, 0) % 1):
            raise ValueError(
                f"--faults {entry!r}: {key}={values[key]:g} must be at least {least} and, for rank and steps, an integer."
            )
    return Fault(
        number=number,
        kind=kind,
        rank=int(values.get("rank", 0)),
        step=int(values.get("step", 1)),
        factor=values.get("factor", 1.0),
        steps=int(values.get("steps", 0)),
        seconds=values.get("seconds", 60.0 if kind == "lose" else 0.0),
        axis=axis,
    )


def struck_file(run_dir: Path, fault: Fault) -> Path:
    """The marker that a fault leaves in the run's folder when it strikes: JSON with ``fault`` and ``time``."""
    return run_dir / "faults" / f"{fault.number:02d}-{fault.kind}.json"


def forget_struck(run_dir: Path) -> None:
    """Let every fault strike again: for a new command, not for a restart."""
    for file in (run_dir / "faults").glob("*.json"):
        file.unlink(missing_ok=True)
