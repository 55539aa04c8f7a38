"""Trackers by name: the shipped ones, and those that installed packages name as entry points."""

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

from titan_train.observe.records import Tracker
from titan_train.values import did_you_mean

GROUP = "titan_train.trackers"


class MakeTracker(Protocol):
    """Opens a tracker."""

    def __call__(self, run_dir: Path, *, resume_step: int) -> Tracker:
        """Open it for a run in ``run_dir`` that continues after ``resume_step``."""
        ...


@dataclass(frozen=True, slots=True)
class _Shipped:
    path: str
    package: str
    """What it imports; the extra of titan-train has the tracker's name."""


_HERE = "titan_train.observe.trackers"
_SHIPPED: Mapping[str, _Shipped] = {
    "tensorboard": _Shipped(f"{_HERE}.tensorboard:TensorBoardTracker", "tensorboard"),
    "wandb": _Shipped(f"{_HERE}.wandb:WandbTracker", "wandb"),
    "mlflow": _Shipped(f"{_HERE}.mlflow:MlflowTracker", "mlflow"),
    "trackio": _Shipped(f"{_HERE}.trackio:TrackioTracker", "trackio"),
    "prometheus": _Shipped(f"{_HERE}.prometheus:PrometheusTracker", "prometheus_client"),
    "opentelemetry": _Shipped(f"{_HERE}.opentelemetry:OpenTelemetryTracker", "opentelemetry.sdk"),
}


def check_tracker(name: str, setting: str) -> None:
    """Check that a tracker exists and that its package is installed, without importing it.

    Args:
        name: The tracker.
        setting: What the user wrote to ask for it, for the message.

    Raises:
        ValueError: No tracker has this name, or its package is missing.
    """
    shipped = _SHIPPED.get(name)
    if shipped is not None:
        if not _is_installed(shipped.package):
            raise ValueError(
                f"{setting} needs the package {shipped.package}, which is not installed. Install titan-train[{name}] "
                f"(in a clone: uv sync --extra {name}), or leave the tracker out."
            )
        return
    others = _other_packages()
    if name not in others:
        known = [*_SHIPPED, *sorted(others)]
        raise ValueError(
            f"{setting}: no tracker is called {name!r}. {did_you_mean(name, known)}The trackers are {', '.join(known)}; a "
            f"package adds one by an entry point of the group {GROUP}."
        )


def find_tracker(name: str) -> MakeTracker:
    """What opens the tracker of this name, which `check_tracker` has accepted."""
    shipped = _SHIPPED.get(name)
    if shipped is None:
        return _other_packages()[name].load()
    module, _, attribute = shipped.path.partition(":")
    return getattr(importlib.import_module(module), attribute)


@cache
def _other_packages() -> dict[str, Any]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # a dotted name whose first part is missing
        return False
