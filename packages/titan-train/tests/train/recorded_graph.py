"""A stand-in for CUDA graphs on the CPU: the operators of one run, recorded with their tensors and run again on them.

As with a graph, replay runs no Python of the model, reads and writes the tensors of the recording, and a value that the
host reads makes the recording fail.
"""

import contextlib

import torch
from torch.utils._python_dispatch import TorchDispatchMode

READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.equal.default}


class Recording(TorchDispatchMode):
    """Notes every operator that runs below autograd."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in READS:
            raise RuntimeError("operation not permitted when stream is capturing")
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    @torch.no_grad()
    def replay(self):
        """Run them again; each result goes where the recorded one is."""
        for func, args, kwargs, recorded in self.calls:
            for old, new in zip(tensors_of(recorded), tensors_of(func(*args, **kwargs)), strict=True):
                if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    old.copy_(new)


def tensors_of(result):
    """The tensors of an operator's result, which is a tensor or a sequence."""
    every = result if isinstance(result, (list, tuple)) else [result]
    return [x for x in every if isinstance(x, torch.Tensor)]


@contextlib.contextmanager
def storages_kept():
    """FSDP frees gathered parameters by resizing them; a graph's memory stays its own."""
    resize = torch.UntypedStorage.resize_
    torch.UntypedStorage.resize_ = lambda storage, size: storage if size == 0 else resize(storage, size)
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize


class Captures:
    """Captures like `titan_train.train.graphs.capture_cuda_graph`, and counts."""

    def __init__(self):
        self.captures = self.replays = 0

    def __call__(self, run, device, pool):
        self.captures += 1
        run()  # warm-up
        with storages_kept(), Recording() as recording:
            run()

        def replay():
            self.replays += 1
            recording.replay()

        return replay
