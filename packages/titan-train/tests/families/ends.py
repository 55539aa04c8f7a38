"""Families that hang, crash and fail, in a module that the process of a row can import."""

import os
import time
from pathlib import Path


def ends_unlike_others(kind: str, folder: Path) -> dict[str, str]:
    """In place of `one.family`: no row ever, no process, or an error."""
    if kind == "slow":
        time.sleep(60)
    if kind == "gone":
        os._exit(3)
    raise ZeroDivisionError("division by zero")
