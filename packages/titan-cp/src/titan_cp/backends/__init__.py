"""The attention kernels that the methods run on, in one visible registry.

``print(backends.explain("cpu", torch.float32))`` says which one is used and why. A kernel of your own is a `Backend`
passed as ``backend=`` to any attention function. `kernel_choices` says what was tried and taken in this process, by the first
calls of attention and of layers with a state.
"""

from titan_cp.backends.backend import Backend, Grads, Request, Saved
from titan_cp.backends.registry import BACKENDS, Choice, explain, select
from titan_cp.backends.trial import KernelChoice, TrialKernel, choose_kernel, forget_choices, kernel_choices

__all__ = [
    "BACKENDS",
    "Backend",
    "Choice",
    "Grads",
    "KernelChoice",
    "Request",
    "Saved",
    "TrialKernel",
    "choose_kernel",
    "explain",
    "forget_choices",
    "kernel_choices",
    "select",
]
