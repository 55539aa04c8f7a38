"""What stands in for parts of a program that cannot run on fake tensors, or that hide what they keep.

- A few blocks, for all that are alike.
- Process groups that have a size and send nothing, and the experts' exchange with equal counts.
- The loss of logits.
- Attention between compiled pieces, and the one kernel that an RMSNorm is on a GPU.
- Activation checkpointing. torch's own hides what it keeps of a selective region from saved-tensor hooks, and loads the
  compiler. Here a region shows autograd what it would keep: its arguments, and in selective mode the results that the policy
  keeps.
"""

import functools
import itertools
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, cast

import titan_fp8
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from titan_train.config import ActivationsConfig
from titan_train.config.compute import Float8Config
from titan_train.models.common.attention import CausalAttention
from titan_train.models.common.moe.balance import moe_layers
from titan_train.models.common.moe.routed import expert_stacks
from titan_train.models.flux.blocks import FullAttention
from titan_train.models.hf.stage_layers import StageLayers
from titan_train.parallel.activations.recompute import KeepCostly, SelectivePolicy, recomputed_modules
from titan_train.parallel.activations.tiles import tiled_modules
from titan_train.parallel.expert.dispatch import ExpertParallelDispatch
from titan_train.parallel.param_shard import slice_parameter
from titan_train.parallel.structure import blocks_of
from titan_train.parallel.tied import skip_patterns


@functools.cache
def counting_backend() -> str:
    """The name of a backend of torch.compile that decomposes and partitions as Inductor does, and generates no code.

    ``aot_eager_decomp_partition`` does the same, and imports all of Inductor, which takes a second.
    """
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition  # pyright: ignore[reportPrivateImportUsage]
    from torch._dynamo import register_backend
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch import config
    from torch._inductor.decomposition import select_decomp_table

    def as_it_is(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        return make_boxed_func(graph.forward)

    def titan_rehearsal(graph: torch.fx.GraphModule, inputs: list[Tensor], **_: Any) -> Callable[..., Any]:
        partition = functools.partial(min_cut_rematerialization_partition, compiler="inductor")
        with config.patch(unlift_effect_tokens=True):
            return aot_autograd(
                fw_compiler=as_it_is,
                bw_compiler=as_it_is,
                decompositions=select_decomp_table,
                partition_fn=partition,
            )(graph, inputs)

    register_backend(titan_rehearsal)
    return "titan_rehearsal"


@contextmanager
def pretended_groups(*sizes: int) -> Generator[list[dist.ProcessGroup | None]]:
    """Groups of so many ranks that send nothing; None for one rank."""
    if max(sizes) == 1:
        yield [None] * len(sizes)
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the "fake" backend

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=max(sizes))
    try:
        yield [cast(dist.ProcessGroup, dist.new_group(list(range(size)))) if size > 1 else None for size in sizes]
    finally:
        dist.destroy_process_group()


def keep_blocks(model: nn.Module, kept: Sequence[int]) -> None:
    """Take all repeated blocks but those of these numbers out of ``model``, in place."""
    blocks = blocks_of(model)
    gone = {id(block) for number, block in enumerate(blocks) if number not in kept}
    for container in model.modules():
        for name, child in list(container.named_children()):
            if id(child) not in gone:
                continue
            if isinstance(container, StageLayers):  # which keep their numbers
                del container._modules[name]
            elif isinstance(container, nn.ModuleList):
                del container[next(i for i, other in enumerate(container) if other is child)]
            elif isinstance(container, nn.ModuleDict):
                del container[name]


def kinds_of(model: nn.Module, blocks: Sequence[nn.Module], config: Float8Config, *, first: bool = True) -> list[Any]:
    """For each of ``blocks`` what decides what it keeps, as far as its parameters tell: equal for two that keep the same.

    Args:
        model: The whole model, or a pipeline stage.
        blocks: Its layers, in order.
        config: Which linears are float8.
        first: What the model is given has no gradient. A frozen block keeps nothing if no gradient passes through it.
    """
    skip = skip_patterns(model, config) if config.recipe != "none" else ()
    names = {module: name for name, module in model.named_modules()}
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    before = itertools.takewhile(lambda parameter: id(parameter) not in inside, model.parameters())
    reached, kinds = not first or any(parameter.requires_grad for parameter in before), list[Any]()
    for block in blocks:
        parameters = [(name, p.shape, p.requires_grad) for name, p in block.named_parameters()]
        modules = ((name, f"{names[block]}.{name}") for name, _ in block.named_modules())
        skipped = [name for name, of_model in modules if titan_fp8.matching_pattern(of_model, skip) is not None]
        kinds.append((type(block), tuple(parameters), tuple(skipped), reached))
        reached |= any(trained for _, _, trained in parameters)
    return kinds


def loss_like(output: Any) -> Tensor:
    """The loss, or one that saves what cross-entropy on float32 logits would; of several outputs, the sum."""
    if not isinstance(output, Tensor):
        return torch.stack([loss_like(leaf) for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]).sum()
    return output if output.ndim == 0 else torch.logsumexp(output.float(), dim=-1).sum()


def cut_experts(part: nn.Module, ep: int) -> None:
    """Leave a rank's own experts; in place."""
    for stack in expert_stacks(part):
        for name, parameter in list(stack.experts.named_parameters(recurse=False)):
            slice_parameter(stack.experts, name, 0, 0, parameter.shape[0] // ep)


def count_beside_rows(part: nn.Module, args: tuple[Tensor, ...]) -> None:
    """A hook before ``part``: the counts of experts are where the rows are before a block is compiled."""
    for _, layer in moe_layers(part):
        layer.count_on(args[0].device)


class BalancedDispatch(ExpertParallelDispatch):
    """Expert parallelism's exchange where nothing can be counted: every rank sends as many rows to each as it gets."""

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """As `ExpertParallelDispatch.forward`."""
        self._rows = chosen.numel()
        return super().forward(x, weights, chosen, *args, **kwargs)

    def _sizes(self, counts: Tensor, received: Tensor) -> tuple[list[int], list[int]]:
        torch._dynamo.graph_break()  # where the host waits for the numbers
        each = [self._rows // self._group.size()] * self._group.size()
        return each, each


def attend_between_pieces(model: nn.Module, *, copies: bool) -> None:
    """Keep attention out of compiled graphs, as context parallelism's exchange keeps it; in place.

    Args:
        model: Any of the shipped families.
        copies: Attention's result is exchanged too (Ulysses): what the next layer reads is another tensor.
    """
    for module in model.modules():
        if isinstance(module, (CausalAttention, FullAttention)):
            attend = _exchanged if copies else type(module).forward
            module.forward = MethodType(_disable_dynamo(attend), module)


def _exchanged(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    return type(module).forward(module, *args, **kwargs).clone()


class _NormOfAGpu(torch.autograd.Function):
    """What ``aten::_fused_rms_norm`` keeps: input, weight, and a float32 number a row. Elsewhere torch takes it apart."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(input, weight, input.new_empty((*input.shape[:-1], 1), dtype=torch.float32))
        return torch.empty_like(input)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        input, weight, _ = ctx.saved_tensors
        return torch.empty_like(input), None if weight is None else torch.empty_like(weight)


@contextmanager
def norms_of_a_gpu() -> Generator[None]:
    """Inside the block an RMSNorm of a fake tensor is the one kernel that torch has on a GPU, and keeps what that does."""
    plain = F.rms_norm

    def rms_norm(input: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        if not isinstance(input, FakeTensor) or (weight is not None and weight.dtype != input.dtype):
            return plain(input, shape, weight, eps)
        return cast(Tensor, _NormOfAGpu.apply(input, weight))

    F.rms_norm = rms_norm
    try:
        yield
    finally:
        F.rms_norm = plain


def fuse_norms_beside(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Make norms that lie in none of ``blocks`` keep what a GPU's kernel does; in place."""
    within = {id(module) for block in blocks for module in block.modules()}
    beside = [module for module in model.modules() if isinstance(module, nn.RMSNorm) and id(module) not in within]

    def fused(inner: Callable[..., Tensor], *args: Any) -> Tensor:
        with norms_of_a_gpu():
            return inner(*args)

    for norm in cast(list[nn.Module], beside):
        norm.forward = functools.partial(fused, norm.forward)


def rehearse_activation_checkpointing(model: nn.Module, blocks: list[nn.Module], config: ActivationsConfig) -> None:
    """Make ``model`` save for backward what it would keep as configured; in place. Backward is then impossible.

    Args:
        model: The model, for ``patterns``.
        blocks: Its repeated blocks, in order.
        config: What to do. Offload moves bytes to the host and is not rehearsed.

    Raises:
        ValueError: A pattern matches no module.
    """
    for module in tiled_modules(model, config):
        _rehearse(module, None)
    for module in recomputed_modules(model, blocks, config):
        _rehearse(module, config.matmul_every if config.checkpoint == "selective" else None)


def _rehearse(module: nn.Module, matmul_every: int | None) -> None:
    inner = module.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        results: list[Tensor] = []
        with saved_tensors_hooks(lambda _: None, _no_backward):  # what the region itself saves is recomputed
            if matmul_every is None:
                output = inner(*args, **kwargs)
            else:
                with KeepCostly(SelectivePolicy(matmul_every)) as region:
                    output = inner(*args, **kwargs)
                results = region.kept_tensors()
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        _Keep.apply(torch.empty(0, requires_grad=True), *given, *results)
        return output

    module.forward = forward


class _Keep(torch.autograd.Function):
    """Saves its arguments for backward."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _no_backward(grads)


def _no_backward(_: Any) -> Tensor:
    raise AssertionError("a rehearsal has no backward")
