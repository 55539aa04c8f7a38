"""PowerSGD whose state can be saved: what was not sent yet, and the directions it is sent along.

PowerSGD (Vogels et al., NeurIPS 2019) sends a matrix M as P Qᵀ of low rank, keeps the error M - P Qᵀ for the next step, and
begins the next step's approximation with this one's Q. torch's hook keeps both by bucket, and DistributedDataParallel makes
other buckets after its first step: state that is saved by bucket fits nothing after a resume. Here it is taken apart by
parameter, and put together for whatever buckets come.
"""

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Size, Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from titan_fsdp.names import clean_fqn


class PowerSGD:
    """State of the hook of one wrapped model on one rank, by the names of its parameters. Every rank has its own errors."""

    def __init__(self, model: DistributedDataParallel, group: dist.ProcessGroup, *, rank: int, start_step: int) -> None:
        """Nothing is compressed yet; see `titan_fsdp.Comm` for the arguments."""
        self._torch: Any = powerSGD_hook.PowerSGDState(
            process_group=group, matrix_approximation_rank=rank, start_powerSGD_iter=start_step
        )
        self._parameters = {id(p): (clean_fqn(name), p.shape) for name, p in model.named_parameters()}
        self._buckets: dict[int, list[tuple[str, Size]]] = {}
        """What torch's state has, by bucket; the rest is in `_kept`."""
        self._reduced: set[int] = set()
        """Buckets that this step has begun to reduce: their state is in use."""
        self._kept: dict[str, dict[str, Tensor]] = {}

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # pyright: ignore[reportPrivateImportUsage]
        """Average one bucket of gradients over the group."""
        index = bucket.index()
        if index in self._reduced:  # another step
            self._reduced.clear()
        members = [self._parameters[id(p)] for p in bucket.parameters()]
        if self._buckets.get(index) != members:
            for other in [number for number in self._buckets if number not in self._reduced]:
                self._kept |= self._taken_apart(other)
                del self._buckets[other]
                for memory in self._memories():
                    memory.pop(other, None)
            self._put_together(index, members, bucket.buffer())
        self._reduced.add(index)
        return powerSGD_hook.powerSGD_hook(self._torch, bucket)

    def state_dict(self) -> dict[str, Any]:
        """Plain data and tensors: steps made, the generator of new directions, and each parameter's ``error`` and ``q``."""
        parameters = dict(self._kept)
        for index in self._buckets:
            parameters |= self._taken_apart(index)
        return {"steps": self._torch.iter, "generator": self._torch.rng.get_state(), "parameters": parameters}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Go on from what `state_dict` returned on the same rank of a group of the same size.

        Raises:
            ValueError: It is of other parameters, or of parts of another shape.
        """
        saved, shapes = state["parameters"], dict(self._parameters.values())
        for name, found in saved.items():
            if name not in shapes or found["error"].numel() != shapes[name].numel():
                raise ValueError(
                    f"the saved state of PowerSGD has {name}, of which this rank has another part, or none"
                )
        self.forget()
        self._torch.iter = state["steps"]
        self._torch.rng = np.random.RandomState()
        self._torch.rng.set_state(state["generator"])
        self._kept = {name: dict(found) for name, found in saved.items()}

    def forget(self) -> None:
        """Drop errors and directions, such as those of a step that was not finite. Every rank of the group does."""
        for memory in (*self._memories(), self._buckets, self._kept):
            memory.clear()

    def _memories(self) -> tuple[dict[int, Tensor], ...]:
        return self._torch.error_dict, self._torch.p_memory_dict, self._torch.q_memory_dict

    def _taken_apart(self, index: int) -> dict[str, dict[str, Tensor]]:
        """One bucket's state by parameter, as views; empty if it was not compressed yet."""
        if index not in self._torch.error_dict:
            return {}
        members = self._buckets[index]
        errors = self._torch.error_dict[index].split([shape.numel() for _, shape in members])
        found = {name: {"error": error} for (name, _), error in zip(members, errors, strict=True)}
        order = self._compressed(members)
        qs = self._torch.q_memory_dict[index].split([columns for _, _, columns in order])
        for (name, _, _), q in zip(order, qs, strict=True):
            found[name]["q"] = q
        return found

    def _put_together(self, index: int, members: list[tuple[str, Size]], buffer: Tensor) -> None:
        self._buckets[index] = members
        if not all(name in self._kept for name, _ in members):
            return  # torch begins with no error and random directions
        found = {name: self._kept.pop(name) for name, _ in members}
        empty = [buffer.new_empty(0)]
        order = self._compressed(members)
        errors, ps, qs = self._memories()
        errors[index] = torch.cat([found[name]["error"].to(buffer) for name, _ in members])
        qs[index] = torch.cat(empty + [found[name]["q"].to(buffer) for name, _, _ in order])
        ps[index] = buffer.new_empty(sum(rows for _, rows, _ in order))

    def _compressed(self, members: list[tuple[str, Size]]) -> list[tuple[str, int, int]]:
        """The parameters that are compressed, in the order in which torch lays them out: name, size of P, size of Q."""
        by_shape: dict[tuple[int, int], list[tuple[str, int, int]]] = {}
        for name, shape in members:
            rows = shape[0] if shape else 1
            columns = shape.numel() // max(1, rows)
            rank = min(rows, columns, self._torch.matrix_approximation_rank)
            if (rows + columns) * rank * self._torch.min_compression_rate < rows * columns:
                by_shape.setdefault((rows, columns), []).append((name, rows * rank, columns * rank))
        return [one for alike in by_shape.values() for one in alike]


def gradient_compression(model: object) -> PowerSGD | None:
    """The state behind a wrapped model's ``Comm(ddp_hook="powersgd")``, to be saved with a checkpoint; None if it has none."""
    found = getattr(model, "gradient_compression", None)
    return found if isinstance(found, PowerSGD) else None
