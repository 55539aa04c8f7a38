"""Where metrics go beside `metrics.jsonl`.

================  ======================================================================
`build`           open the trackers that a configuration names
`beside`          a tracker on a thread of its own, opened again when it fails
`registry`        trackers by name, those of other packages included
`scalars`         a record as named numbers
`tensorboard`     TensorBoard event files
`wandb`           Weights & Biases
`mlflow`          MLflow
`trackio`         Trackio
`prometheus`      a text file that Prometheus collects
`opentelemetry`   OpenTelemetry gauges, sent by its own exporter
================  ======================================================================

A tracker of your own is a class with the four methods of `titan_train.observe.Tracker`, made by
``Class(run_dir, resume_step=...)``. Your package names it as an entry point of the group ``titan_train.trackers``; then
``metrics.trackers = ["its-name"]`` opens it.
"""

from typing import TYPE_CHECKING

from titan_train.lazy import first_use

if TYPE_CHECKING:
    from titan_train.observe.trackers.build import build_trackers, check_trackers
    from titan_train.observe.trackers.tensorboard import TensorBoardTracker
    from titan_train.observe.trackers.wandb import WandbTracker

__all__ = ["TensorBoardTracker", "WandbTracker", "build_trackers", "check_trackers"]

__getattr__ = first_use(__name__)
