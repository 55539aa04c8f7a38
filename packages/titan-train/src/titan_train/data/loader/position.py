"""The position in the data as a few integers, and the check that it belongs to the data at hand."""

import logging
from collections.abc import Mapping
from typing import Any

STATE_VERSION = 1

_logger = logging.getLogger(__name__)

_COMPARED = {
    "seed": "run.seed, which draws the order of samples",
    "seq_len": "the length of a sample",
    "tokenizer": "the tokenizer (its fingerprint)",
    "fingerprint": "the data: its tokens, the sources' names and weights, or the document options",
}


def check_state(saved: Mapping[str, Any], current: Mapping[str, Any], *, allow_data_change: bool) -> int:
    """Samples to continue after.

    Args:
        saved: A loader's state.
        current: The state of the loader that is to continue.
        allow_data_change: Log differences instead of raising.

    Raises:
        ValueError: If a field is missing or differs, naming it and both values.
    """
    if missing := sorted(set(current) - set(saved)):
        raise ValueError(
            f"the saved data state has no {missing[0]!r} (it has {sorted(saved)}): it was not written by a data loader."
        )
    if saved["version"] != STATE_VERSION:
        raise ValueError(
            f"the saved data state has version {saved['version']}, but this release reads version {STATE_VERSION}. "
            "Resume with the release that wrote it."
        )
    samples = saved["samples"]
    if not isinstance(samples, int) or samples < 0:
        raise ValueError(f"the saved data state has samples={samples!r}, which is not a count of samples.")
    for field, meaning in _COMPARED.items():
        if saved[field] == current[field]:
            continue
        change = f"{field} was {saved[field]!r} when the state was saved and is {current[field]!r} now: {meaning}"
        if not allow_data_change:
            raise ValueError(
                f"{change}. Samples would repeat or be left out. Restore the setting, or allow it: "
                "checkpoint.allow_data_change=true (allow_data_change=True of a data loader)."
            )
        _logger.warning("%s; continuing after %d samples as asked", change, samples)
    return samples
