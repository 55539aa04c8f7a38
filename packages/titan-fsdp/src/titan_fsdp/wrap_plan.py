"""From a model, group sizes and a policy to a plan; nothing is changed, no rank is needed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from titan_fsdp.names import unwrap
from titan_fsdp.planning.collectives import Accumulate, Collectives, planned_collectives
from titan_fsdp.planning.data import PlanData
from titan_fsdp.planning.decide import MeshOrSizes, check_tensor_parallel, plan_warnings, planned_units, sizes_of
from titan_fsdp.planning.estimate import Estimate, estimate_step
from titan_fsdp.planning.explain import explain_plan
from titan_fsdp.planning.fp32 import split_fp32
from titan_fsdp.planning.policy import Policy
from titan_fsdp.planning.units import find_groups
from titan_fsdp.torch_private import check_has
from titan_fsdp.wrapping.checks import check_not_wrapped

if TYPE_CHECKING:
    from titan_fsdp.planning.timeline import MemoryTrace


@dataclass(frozen=True, slots=True)
class WrapPlan(PlanData):
    """What `plan` decided. A value: explain it, estimate with it, apply it to the model it was made from."""

    mesh: DeviceMesh | None = field(default=None, compare=False)
    meshes: Mapping[str, DeviceMesh] = field(default_factory=dict[str, DeviceMesh], compare=False)

    def explain(self) -> str:
        """A table of the units: parameters, bytes, dtypes, what happens after forward, collectives; then warnings."""
        return explain_plan(self)

    def collectives(
        self, microbatches: int = 1, keep: Accumulate = "sharded", *, mesh: str | None = "all"
    ) -> Collectives | None:
        """Collectives of one step, by closed form; None in ddp mode with a hook, whose buckets are torch's choice.

        Args:
            microbatches: Forward-backward passes in the step.
            keep: What `accumulate` keeps between them.
            mesh: The mesh whose units are counted, by its name in the policy; None is the plan's own, "all" counts all.
        """
        return planned_collectives(self, microbatches, keep, mesh=mesh)

    def estimate(
        self,
        model: nn.Module | None = None,
        inputs: Sequence[Any] = (),
        *,
        loss: Callable[[Any], Tensor] | None = None,
        optimizer_states: int = 2,
        microbatches: int = 1,
        keep: Accumulate = "sharded",
        in_place: bool = False,
        watched: Sequence[nn.Module] = (),
    ) -> Estimate:
        """Memory of one rank and the collectives of a step. No ranks, no allocation.

        Args:
            model: The plain model (before `apply`), for the activations; a copy of it runs without memory.
            inputs: Example arguments of one microbatch; tensors on any device. Hidden states of another pipeline stage require
                a gradient, and more is saved for them.
            loss: From the model's output to the loss, whose saved tensors count too.
            optimizer_states: Tensors of the gradient's size and dtype that the optimizer keeps; 2 for AdamW.
            microbatches: Forward-backward passes in the step.
            keep: What `accumulate` keeps between them.
            in_place: Run ``model`` itself, which is then of no further use, rather than a copy: for a model that cannot
                be copied, because something put on it holds process groups or its own modules.
            watched: With ``in_place``: modules whose own part of the activations is wanted.
        """
        return estimate_step(self, model, inputs, loss, optimizer_states, microbatches, keep, in_place, watched)

    def record_memory(
        self,
        model: nn.Module,
        inputs: Sequence[Any],
        *,
        loss: Callable[[Any], Tensor] | None = None,
        gathers: bool = True,
        compiled: bool = False,
    ) -> "MemoryTrace":
        """Every allocation and free of one microbatch's forward and backward, in order. No ranks, no allocation.

        Args:
            model: The plain model, with recomputation or compilation as it will run. It runs itself, on fake tensors, and is of
                no further use.
            inputs: Example arguments, as for `estimate`.
            loss: From the model's output to the loss; without one backward starts from the output.
            gathers: Whether each microbatch gathers and reduces; a pipeline does so once a step.
            compiled: Run once before recording, so that what the compiler allocates is not recorded.
        """
        from titan_fsdp.planning.timeline import record_memory

        return record_memory(self, model, inputs, loss, gathers=gathers, compiled=compiled)

    def apply(
        self, model: nn.Module, mesh: DeviceMesh | None = None, meshes: Mapping[str, DeviceMesh] | None = None
    ) -> nn.Module:
        """Wrap ``model`` as planned, in place, and return it.

        Args:
            model: The model the plan was made from, or one of the same structure. Meta parameters are fine: call
                `materialize` afterwards.
            mesh: The data-parallel mesh, where the plan was made from sizes: 1-D, or 2-D (replicate, shard) for hsdp.
            meshes: Meshes of units that name their own.

        Returns:
            ``model``; with ``Comm(ddp_hook=…)`` the DistributedDataParallel module around it.

        Raises:
            ValueError: The model differs from the plan, is already wrapped, or the mesh has other sizes.
        """
        from titan_fsdp.wrapping.apply import apply_plan  # imports FSDP2, which a plan alone does not need

        return apply_plan(self, model, mesh or self.mesh, {**self.meshes, **(meshes or {})})


def plan(
    model: nn.Module,
    mesh_or_sizes: MeshOrSizes,
    policy: Policy | None = None,
    *,
    meshes: Mapping[str, MeshOrSizes] | None = None,
) -> WrapPlan:
    """Decide units, resharding, dtypes and groups for ``model``. Pure: no collective, no process group, no change.

    Args:
        model: The model; parameters may be on the meta device, or DTensors of a tensor-parallel mesh.
        mesh_or_sizes: A DeviceMesh, 1-D (shard, or replicate in ddp mode) or 2-D (replicate, shard); or sizes such as
            ``{"shard": 8, "replicate": 2}``.
        policy: The policy; the default shards everything in float32.
        meshes: Meshes or sizes of units that name their own (``Unit(…, mesh="experts")``).

    Raises:
        ValueError: The policy does not fit the model or the sizes; the message says how to change it.
    """
    policy = policy or Policy()
    check_not_wrapped(model)
    _check_torch(policy)
    sizes = sizes_of(mesh_or_sizes, policy.mode)
    own_sizes = {name: sizes_of(m, "fsdp" if policy.mode == "fsdp" else None) for name, m in (meshes or {}).items()}
    check_tensor_parallel(model, mesh_or_sizes)
    groups = split_fp32(model, find_groups(model, policy.units), policy.mp)
    units, ignored = planned_units(model, groups, policy, sizes, own_sizes)
    warnings = plan_warnings(policy, units, sizes)
    return WrapPlan(
        policy=policy,
        sizes=sizes,
        units=units,
        ignored=ignored,
        buffer_bytes=sum(b.numel() * b.element_size() for b in unwrap(model).buffers()),
        warnings=warnings,
        mesh=mesh_or_sizes if isinstance(mesh_or_sizes, DeviceMesh) else None,
        meshes={n: m for n, m in (meshes or {}).items() if isinstance(m, DeviceMesh)},
    )


def _check_torch(policy: Policy) -> None:
    needed = (
        (
            policy.unused_parameters and policy.comm.ddp_hook is None,
            "set_reduce_scatter_unused_params",
            "2.13",
            "unused_parameters=True",
        ),
        (policy.comm.symmetric_memory, "set_symm_mem_for_comm", "2.12", "comm.symmetric_memory=True"),
        (
            policy.comm.reduce_scatter_group == "own",
            "set_separate_reduce_scatter_group",
            "2.15",
            "comm.reduce_scatter_group='own'",
        ),
        (
            policy.comm.reduce_scatter_buffers > 1,
            "set_reduce_scatter_max_input_buffers",
            "2.15",
            f"comm.reduce_scatter_buffers={policy.comm.reduce_scatter_buffers}",
        ),
    )
    for asked, method, since, why in needed:
        if asked:
            check_has(method, since=since, why=why)
