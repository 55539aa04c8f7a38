"""What is derived from a plan once, and kept with it: indices on a device, above all.

A plan serves inference and training alike, and rehearsals with fake tensors (``FakeTensorMode``). A tensor made in inference
mode may not be saved for a backward, so nothing is built in that mode; a fake one has no values, so it serves the mode that it
was made in alone.
"""

from collections.abc import Callable, Hashable, MutableMapping
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

_FAKE = "in the newest fake mode"


def build_once(kept: MutableMapping[Hashable, Any], key: Hashable, build: Callable[[], Any]) -> Any:
    """What ``build`` makes: ``kept[key]``, built where it is missing."""
    if torch.compiler.is_compiling():  # a part of the graph, which makes real tensors
        if key not in kept:
            kept[key] = build()
        return kept[key]
    if is_in_torch_dispatch_mode() and (mode := detect_fake_mode()) is not None:
        kept = _kept_in(mode, kept)
    if key not in kept:
        with torch.inference_mode(False):
            kept[key] = build()
    return kept[key]


def _kept_in(mode: object, kept: MutableMapping[Hashable, Any]) -> MutableMapping[Hashable, Any]:
    """The part of ``kept`` that was built in a fake mode; only that of the newest one lasts."""
    newest, found = kept.get(_FAKE, (None, {}))
    if newest is not mode:
        found = {}
        kept[_FAKE] = mode, found
    return found
