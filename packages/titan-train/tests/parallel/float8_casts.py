"""How often a test casts."""

import collections

from torch.utils._python_dispatch import TorchDispatchMode


class Casts(TorchDispatchMode):
    """Counts operators of titan-fp8."""

    def __init__(self):
        super().__init__()
        self.calls = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "titan_fp8":
            self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))
