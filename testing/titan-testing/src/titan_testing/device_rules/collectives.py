"""Stand-ins for `torch.distributed`: tensors on a device go to a group's communicator, those in host memory to its gloo."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_testing.device_rules.nccl import Group, Message, Work


@dataclass
class P2POp:
    """`torch.distributed.P2POp`."""

    op: Any
    tensor: Tensor
    peer: int | None = None
    group: Group | None = None
    tag: int = 0
    group_peer: int | None = None


class Collectives:
    """The functions, by name; each acts for the calling thread's rank."""

    def __init__(self, machine: Any, world: Group) -> None:
        self._machine, self._world = machine, world
        self._made: dict[Any, tuple[Group, set[int]]] = {}
        self._calls: dict[Any, int] = {}
        self.store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        self.world_meetings = 0
        """How often all ranks waited for each other to make a group."""

    def functions(self) -> dict[str, Any]:
        """What to put into `torch.distributed`."""
        names = (
            "new_group", "isend", "irecv", "send", "recv", "batch_isend_irecv", "all_reduce", "broadcast", "all_gather",
            "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "barrier", "get_rank", "get_world_size",
            "get_backend", "get_process_group_ranks", "is_initialized", "get_default_backend_for_device",
        )  # fmt: skip
        return {"P2POp": P2POp, **{name: getattr(self, name) for name in names}}

    def get_rank(self, group: Group | None = None) -> int:
        return (group or self._world).rank()

    def get_world_size(self, group: Group | None = None) -> int:
        return (group or self._world).size()

    def get_backend(self, group: Group | None = None) -> str:
        return (group or self._world).backend

    def get_process_group_ranks(self, group: Group | None = None) -> list[int]:
        return list((group or self._world).ranks)

    def is_initialized(self) -> bool:
        return True

    def get_default_backend_for_device(self, device: Any) -> str:
        return "nccl" if torch.device(device).type == "cuda" else "gloo"

    def new_group(
        self, ranks: Any = None, timeout: Any = None, backend: str | None = None, pg_options: Any = None,
        use_local_synchronization: bool = False, group_desc: str | None = None, device_id: Any = None,
    ) -> Any:  # fmt: skip
        del timeout, pg_options, group_desc, device_id
        machine, me = self._machine, self._machine.rank()
        members = tuple(self._world.ranks if ranks is None else sorted(ranks))
        if use_local_synchronization and me not in members:
            return dist.GroupMember.NON_GROUP_MEMBER
        with machine.hosts.lock:
            which = members if use_local_synchronization else "world"
            number = self._calls.get((me, which), 0)
            self._calls[me, which] = number + 1
            fresh = (Group(machine, members, backend or self._world.backend), set[int]())
            group, came = self._made.setdefault((which, number), fresh)
            if group.ranks != members:
                raise RuntimeError(
                    f"rank {me} makes group {members} where others make {group.ranks}: one order on all ranks"
                )
            came.add(me)
            waited_for = set(members if use_local_synchronization else self._world.ranks)
            if came == waited_for == set(self._world.ranks):
                self.world_meetings += 1
            machine.hosts.look()
        machine.hosts.block(
            lambda: f"to make group {list(members)} for ranks {sorted(waited_for - came)}",
            lambda: came == waited_for,
            lambda: waited_for - came,
        )
        return group if me in members else dist.GroupMember.NON_GROUP_MEMBER

    # messages

    def batch_isend_irecv(self, operations: list[P2POp]) -> list[Work]:
        group = operations[0].group or self._world
        if not self._machine.holds(operations[0].tensor):
            return [o.op(o.tensor, o.peer, group, o.tag, o.group_peer) for o in operations]
        messages = [self._message(o, group) for o in operations]
        touched = [(o.tensor, not m.sends) for o, m in zip(operations, messages, strict=True)]
        return [group.queue("batch_isend_irecv", None, messages, touched)]

    def _message(self, operation: P2POp, group: Group) -> Message:
        me = self._machine.rank()
        other = group.ranks[operation.group_peer] if operation.group_peer is not None else operation.peer
        assert other is not None
        sends = operation.op == self.isend
        return Message(operation.tensor.data, (me, other) if sends else (other, me), sends)

    def isend(
        self,
        tensor: Tensor,
        dst: int | None = None,
        group: Group | None = None,
        tag: int = 0,
        group_dst: int | None = None,
    ) -> Work:
        return self._alone(self.isend, tensor, dst, group or self._world, tag, group_dst)

    def irecv(
        self,
        tensor: Tensor,
        src: int | None = None,
        group: Group | None = None,
        tag: int = 0,
        group_src: int | None = None,
    ) -> Work:
        return self._alone(self.irecv, tensor, src, group or self._world, tag, group_src)

    def send(self, *args: Any, **kwargs: Any) -> None:
        self.isend(*args, **kwargs).wait()

    def recv(self, *args: Any, **kwargs: Any) -> None:
        self.irecv(*args, **kwargs).wait()

    def _alone(self, op: Any, tensor: Tensor, peer: Any, group: Group, tag: int, group_peer: int | None) -> Work:
        message = self._message(P2POp(op, tensor, peer, group, tag, group_peer), group)
        if self._machine.holds(tensor):  # outside of a batch: a communicator of these two ranks
            with self._machine.hosts.lock:
                pair: Any = tuple(sorted(message.pair))
                made = self._made.setdefault((group, pair), (Group(self._machine, pair, group.backend), set()))
            return made[0].queue("isend" if message.sends else "irecv", None, [message], [(tensor, not message.sends)])
        if message.sends:
            group.mail(tensor, message.pair[1], tag)
            return Work(self._machine, None, [])
        return Work(self._machine, None, [], lambda: group.fetch(tensor, message.pair[0], tag))

    # collectives

    def _all(
        self, kind: str, output: Any, given: Tensor, options: Any, group: Group | None, async_op: bool
    ) -> Work | None:
        group = group or self._world
        written: list[Tensor] = output if isinstance(output, list) else [output]
        # .data has no version: autograd notes one before it calls the kernel that waits for the values
        output = [x.data for x in output] if isinstance(output, list) else output.data
        if not self._machine.holds(given):
            if async_op:
                return Work(self._machine, None, [], lambda: group.meet(kind, (output, given, options)))
            group.meet(kind, (output, given, options))
            return None
        touched = [(given, False), *((x, True) for x in written)]
        work = group.queue(kind, (output, given.data, options), [], touched)
        if async_op:
            return work
        work.wait()
        return None

    def all_reduce(self, tensor: Tensor, op: Any = None, group: Group | None = None, async_op: bool = False) -> Any:
        name = {dist.ReduceOp.MAX: "max", dist.ReduceOp.MIN: "min"}.get(op, "sum")
        return self._all("all_reduce", tensor, tensor, name, group, async_op)

    def broadcast(
        self, tensor: Tensor, src: Any = None, group: Group | None = None, async_op: bool = False, group_src: Any = None
    ) -> Any:
        source = group_src if group_src is not None else (group or self._world).ranks.index(src)
        return self._all("broadcast", tensor, tensor, source, group, async_op)

    def all_gather(
        self, tensors: list[Tensor], tensor: Tensor, group: Group | None = None, async_op: bool = False
    ) -> Any:
        return self._all("all_gather", tensors, tensor, None, group, async_op)

    def all_gather_into_tensor(self, out: Tensor, x: Tensor, group: Group | None = None, async_op: bool = False) -> Any:
        return self._all("all_gather_into_tensor", out, x, None, group, async_op)

    def reduce_scatter_tensor(
        self, out: Tensor, x: Tensor, op: Any = None, group: Group | None = None, async_op: bool = False
    ) -> Any:
        del op
        return self._all("reduce_scatter_tensor", out, x, None, group, async_op)

    def all_to_all_single(
        self, out: Tensor, x: Tensor, output_split_sizes: Any = None, input_split_sizes: Any = None,
        group: Group | None = None, async_op: bool = False,
    ) -> Any:  # fmt: skip
        return self._all("all_to_all_single", out, x, (output_split_sizes, input_split_sizes), group, async_op)

    def barrier(self, group: Group | None = None, **_: Any) -> None:
        (group or self._world).meet("barrier", None)


class FunctionalAllToAll(torch.autograd.Function):
    """`all_to_all_single_autograd` of torch's functional collectives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, outputs: list[int] | None, inputs: list[int] | None, group: Group) -> Tensor:
        ctx.sizes, ctx.group = (inputs, outputs), group
        out = x.new_empty((sum(outputs) if outputs is not None else x.shape[0], *x.shape[1:]))
        dist.all_to_all_single(out, x.contiguous(), outputs, inputs, group=group)  # pyright: ignore[reportArgumentType]
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return FunctionalAllToAll.apply(grads[0], *ctx.sizes, ctx.group), None, None, None
