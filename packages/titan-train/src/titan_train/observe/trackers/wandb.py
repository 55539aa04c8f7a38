"""Weights & Biases."""

import importlib
import os
from pathlib import Path
from typing import Any

from titan_train.observe.records import StepRecord, ValidationRecord
from titan_train.observe.trackers.registry import check_tracker
from titan_train.observe.trackers.scalars import step_scalars, validation_scalars


class WandbTracker:
    """Sends metrics to Weights & Biases; a resumed run continues the same W&B run.

    The W&B run's id lives in ``run_dir/wandb_run_id``. How to log in, or to stay offline, is wandb's own business
    (``wandb login``, ``WANDB_MODE``).
    """

    def __init__(self, run_dir: str | Path, *, project: str, resume_step: int = 0) -> None:
        """Start or continue the W&B run.

        Raises:
            ValueError: If wandb is not installed.
        """
        check_tracker("wandb", "WandbTracker")
        wandb: Any = importlib.import_module("wandb")
        run_dir = Path(run_dir)
        id_file = run_dir / "wandb_run_id"
        known = id_file.read_text(encoding="utf-8").strip() if resume_step and id_file.exists() else None
        self._run: Any = wandb.init(
            project=project, name=run_dir.name, dir=str(run_dir), id=known, resume="allow" if known else None
        )
        id_file.write_text(f"{self._run.id}\n", encoding="utf-8")
        # W&B's own step counter cannot go back, but a resumed run can: plot against ours.
        self._run.define_metric("step")
        for prefix in ("train/*", "speed/*", "memory/*", "moe/*", "validation/*"):
            self._run.define_metric(prefix, step_metric="step")

    def log_step(self, record: StepRecord) -> None:
        """Send the step's scalars."""
        self._run.log({**step_scalars(record), "step": record.step})

    def log_validation(self, record: ValidationRecord) -> None:
        """Send the validation's scalars."""
        self._run.log({**validation_scalars(record), "step": record.step})

    def log_event(self, kind: str, *, step: int, **fields: object) -> None:
        """Send the event as a count, with its fields."""
        self._run.log({f"event/{kind}": 1, "step": step, **{f"event/{kind}/{k}": v for k, v in fields.items()}})

    def close(self) -> None:
        """Finish the W&B run. Safe to call twice."""
        if self._run is not None:
            self._run.finish()
            self._run = None


def check_login(setting: str) -> None:
    """Check that wandb can find a key, where it looks for one, without importing it: without one it asks or raises.

    Args:
        setting: What the user wrote to ask for the tracker, for the message.

    Raises:
        ValueError: It is to be online, and there is no key.
    """
    if os.environ.get("WANDB_MODE", "online") != "online" or os.environ.get("WANDB_DISABLED"):
        return
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return
    folder = Path(os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb").expanduser()
    # a key that was logged in with, or settings that may hold one, a mode or another server
    places = [os.environ.get("NETRC") or "~/.netrc", "~/_netrc", folder / "settings", Path("wandb") / "settings"]
    if not any(_speaks_of_wandb(Path(place).expanduser()) for place in places):
        raise ValueError(
            f"{setting}: Weights & Biases finds no key. Run `wandb login`, or set WANDB_API_KEY; with WANDB_MODE=offline it "
            "needs none and `wandb sync` sends the run later."
        )


def _speaks_of_wandb(file: Path) -> bool:
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    if file.name == "settings":
        return any(word in text for word in ("mode", "base_url", "api_key"))
    server = (
        os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").partition("://")[2].partition("/")[0].partition(":")[0]
    )
    return any(word.partition(":")[0] in (server, "default") for word in text.split())
