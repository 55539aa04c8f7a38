"""The attention kernels that the methods run on, in one visible registry.

``print(backends.explain("cpu", torch.float32))`` says which one is used and why. A kernel of your own is a `Backend`
passed as ``backend=`` to any attention function.
"""

from titan_cp.backends.backend import Backend, Grads, Request, Saved
from titan_cp.backends.registry import BACKENDS, Choice, explain, select

__all__ = ["BACKENDS", "Backend", "Choice", "Grads", "Request", "Saved", "explain", "select"]
