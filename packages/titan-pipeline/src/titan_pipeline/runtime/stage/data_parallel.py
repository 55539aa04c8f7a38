"""Stages that are wrapped for data parallelism: gradients are reduced once per step, after the last weight gradient.

Problem: FSDP2 and DistributedDataParallel reduce gradients when a backward ends. A pipeline runs one backward a
microbatch, and a zero-bubble schedule computes weight gradients after the backward that owes them: reducing by
themselves, the wrappers would communicate once per microbatch, and too early.

Idea: synchronization is off while the schedule runs; gradients pile up unreduced. When the stage's last action has
run, they are reduced in one go, through the wrapper's own machinery, so that its divide factor, mixed precision,
replicas (HSDP) and communication hooks apply. All data-parallel peers of a stage run the same program, so their
collectives come in the same order.

``gather="step"`` gathers FSDP's parameters at their first use in a step and frees them after the last; ``"microbatch"``
leaves it to the wrapper to free them after each forward and backward: less memory, one more all-gather a pass.

Only public methods of torch 2.15 are used where it has them (`FSDPModule.finalize_backward`, ``reset_iter_state``); for
older releases, and for DDP's reducer, this module is the one place that reaches inside. Checked on torch 2.11 and 2.15
by ``test_data_parallel.py``.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

Gather = Literal["step", "microbatch"]


class Wrapping(Protocol):
    """What a stage does around its module's passes because of the way it is wrapped."""

    def begin(self) -> None:
        """A training step starts: no reduction until `reduce`."""
        ...

    def forward(self) -> AbstractContextManager[Any]:
        """Around each training forward."""
        ...

    def after_weights(self) -> None:
        """Deferred weight gradients have been added."""
        ...

    def reduce(self) -> None:
        """The step's gradients are complete."""
        ...

    def release(self) -> None:
        """Free gathered parameters: those of an evaluation that has ended, or of a forward outside of the stage."""
        ...

    def reset(self) -> None:
        """Forget a step that failed."""
        ...


def wrapping_of(module: nn.Module, gather: Gather) -> Wrapping:
    """How ``module`` is wrapped: itself for DDP, itself or any of its children for FSDP2."""
    if gather not in ("step", "microbatch"):
        raise ValueError(f"gather={gather!r} is unknown. Use 'step' or 'microbatch'.")
    if isinstance(module, DistributedDataParallel):
        return _Ddp(module)
    inner = [name for name, m in module.named_modules() if isinstance(m, DistributedDataParallel)]
    if inner:
        raise ValueError(
            f"{inner} are DistributedDataParallel inside the stage's module: each would reduce by itself, once a "
            "microbatch. Wrap the whole stage."
        )
    if any(isinstance(m, FSDPModule) for m in module.modules()):
        return _Fsdp(module, gather)
    return _Plain()


class _Plain:
    """Not wrapped."""

    def begin(self) -> None:
        """Nothing to prepare."""

    def forward(self) -> AbstractContextManager[Any]:
        """Nothing to surround."""
        return nullcontext()

    def after_weights(self) -> None:
        """Gradients are where they belong."""

    def reduce(self) -> None:
        """No peers."""

    def release(self) -> None:
        """Nothing gathered."""

    def reset(self) -> None:
        """Nothing held."""


class _Ddp(_Plain):
    def __init__(self, module: DistributedDataParallel) -> None:
        self._module = module

    def begin(self) -> None:
        """Buffers come from the first peer at the step's first forward. ``no_sync`` had switched that off for good."""
        self._module.require_forward_param_sync = True

    def forward(self) -> AbstractContextManager[Any]:
        """The reducer ignores every gradient until it is armed."""
        return self._module.no_sync()

    def reduce(self) -> None:
        """Arm the reducer, then let zeros flow into every parameter: it reduces the sums as after a last backward."""
        parameters = [p for p in self._module.parameters() if p.requires_grad]
        if self._module.find_unused_parameters:
            parameters = [p for p in parameters if p.grad is not None] or parameters
        if not parameters:
            return
        reducer: Any = self._module.reducer
        reducer.prepare_for_backward([p.view_as(p) for p in parameters])  # where it looks for unused parameters
        torch.autograd.backward(parameters, [torch.zeros_like(p) for p in parameters])


class _Fsdp(_Plain):
    def __init__(self, module: nn.Module, gather: Gather) -> None:
        self._modules: list[Any] = [m for m in module.modules() if isinstance(m, FSDPModule)]
        inner = {id(m) for outer in self._modules for m in outer.modules() if m is not outer}
        self._roots = [m for m in self._modules if id(m) not in inner]
        self._gather = gather
        self._used = False

    def begin(self) -> None:
        """Gradients stay whole and unreduced; parameters stay gathered if asked to."""
        self._used = True
        for root in self._roots:
            root.set_requires_gradient_sync(False)
            root.set_is_last_backward(False)
            root.set_reshard_after_backward(self._gather == "microbatch")
            if self._gather == "step":
                root.set_reshard_after_forward(False)
            if hasattr(root, "finalize_backward"):
                root.set_manual_backward_finalization(True)

    def after_weights(self) -> None:
        """Before torch 2.15 sums in the reduction's precision live beside the parameters: move what was added."""
        for group in _groups(self._modules):
            for param in group.fsdp_params:
                if hasattr(param, "to_accumulated_grad_if_needed") and hasattr(param, "_unsharded_param"):
                    param.accumulate_unsharded_grad_if_needed()
                    param.to_accumulated_grad_if_needed()

    def reduce(self) -> None:
        """Reduce-scatter every group once and free the parameters."""
        for root in self._roots:
            root.set_requires_gradient_sync(True)
            root.set_is_last_backward(True)
            root.set_reshard_after_backward(True)
            if hasattr(root, "finalize_backward"):
                root.finalize_backward()
                root.set_manual_backward_finalization(False)
            else:
                _finalize(root)
        self.release()

    def release(self) -> None:
        """Free gathered parameters; a stale copy would outlive the optimizer's step."""
        for module in self._modules:
            module.reshard()

    def reset(self) -> None:
        """Drop unreduced gradients and gathered parameters."""
        if not self._used:
            return
        for root in self._roots:
            state = root._get_fsdp_state()
            if state._is_root is None:  # failed before its first forward
                continue
            if hasattr(root, "reset_iter_state"):
                root.reset_iter_state()
                root.set_manual_backward_finalization(False)
            else:
                _forget(state)


def _groups(modules: list[Any]) -> list[Any]:
    """FSDP's parameter groups; one or several a module, by release."""
    found: list[Any] = []
    for module in modules:
        state = module._get_fsdp_state()
        if hasattr(state, "_fsdp_param_groups"):
            found += state._fsdp_param_groups
        elif state._fsdp_param_group is not None:
            found.append(state._fsdp_param_group)
    return found


def _finalize(root: Any) -> None:
    """What torch 2.15 has as ``finalize_backward``, for releases before it; torch's own pipeline stages do the same."""
    state = root._get_fsdp_state()
    if state._is_root is None:  # never ran
        return
    for inner in reversed(state._state_ctx.all_states):
        groups = getattr(inner, "_fsdp_param_groups", None) or [inner._fsdp_param_group]
        for group in reversed(groups):
            if group is not None:
                group.post_backward()
    state._root_post_backward_final_callback()


def _forget(state: Any) -> None:
    """What torch 2.15 has as ``reset_iter_state``, for releases before it."""
    context = state._state_ctx
    context.iter_forward_root = None
    context.post_backward_final_callback_queued = False
    state._comm_ctx.post_forward_order.clear()
    for inner in context.all_states:
        idle = type(inner._training_state).IDLE
        inner._training_state = idle
        inner._modules_to_run_forward.clear()
        groups = getattr(inner, "_fsdp_param_groups", None) or [inner._fsdp_param_group]
        for group in groups:
            if group is None:
                continue
            group._training_state = idle
            group._post_forward_indices.clear()
            for param in group.fsdp_params:
                param.unsharded_accumulated_grad = None
                if hasattr(param, "_unsharded_param"):
                    param._unsharded_param.grad = None
            group._to_sharded()
