"""What is derived from a plan once, and kept with it: indices on a device, above all.

A plan serves inference and training alike, and rehearsals with fake tensors (``FakeTensorMode``). A tensor made in inference
mode may not be saved for a backward, so nothing is built in that mode; a fake one has no values, so it is not kept.
"""

from collections.abc import Callable, Hashable, MutableMapping
from typing import Any

import torch
from torch._guards import detect_fake_mode


def build_once(kept: MutableMapping[Hashable, Any], key: Hashable, build: Callable[[], Any]) -> Any:
    """What ``build`` makes: ``kept[key]``, built where it is missing."""
    if key in kept:
        return kept[key]
    if torch.compiler.is_compiling():  # a part of the graph, which makes real tensors
        made = kept[key] = build()
        return made
    with torch.inference_mode(False):
        made = build()
    if detect_fake_mode() is None:
        kept[key] = made
    return made
