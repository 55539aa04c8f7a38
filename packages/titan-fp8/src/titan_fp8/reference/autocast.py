"""Products as wide as they are written, inside a caller's ``torch.autocast`` too."""

from contextlib import AbstractContextManager, nullcontext

import torch


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A block without autocast; on devices that have none (meta), nothing."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()
