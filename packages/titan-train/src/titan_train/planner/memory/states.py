"""Bytes of parameters, gradients and optimizer state on one rank."""

from titan_train.models.shape import ExpertsShape, ModelShape
from titan_train.planner.cost.step import rank_ends, rank_parameters
from titan_train.planner.setup import Setup


def state_bytes(
    shape: ModelShape, setup: Setup, *, first: bool, head: bool = False, share: float = 0.0
) -> dict[str, float]:
    """What lives through the whole step.

    fsdp shards parameters, gradients and AdamW's two moments: 16 bytes over the shards in float32. ``gathered`` is what stays
    whole through the step. zero1 keeps bf16 parameters and whole gradients, and shards float32 masters and moments: 2 + 4 + 12 /
    shards. ddp keeps 16 bytes, and bf16 copies. Experts are sharded over the ranks that hold the same experts.

    Args:
        shape: The whole model.
        setup: How it runs.
        first: The rank has the embedding, the head or both.
        head: It has the head.
        share: Its part of the blocks; 0 takes an even one.
    """
    key = (
        "states", first, head, share, setup.tp, setup.cp, setup.pp, setup.ep, setup.dp_shard, setup.dp_replicate, setup.sharding,
        setup.reshard, setup.task, setup.precision == "fp32", setup.head_on_first_rank, setup.offload_optimizer,
        setup.grad_bytes, setup.weight_bytes, setup.state_bytes,
    )  # fmt: skip
    if key not in shape.memo:
        shape.memo[key] = _state_bytes(shape, setup, first=first, head=head, share=share)
    return shape.memo[key]


def _state_bytes(shape: ModelShape, setup: Setup, *, first: bool, head: bool, share: float) -> dict[str, float]:
    dense, experts = rank_parameters(shape, setup, first=first, share=share)
    shard = setup.dp_shard * setup.cp
    expert_shard = setup.expert_shard
    stacked = next((b.ffn.num_experts // setup.ep for b in shape.blocks if isinstance(b.ffn, ExpertsShape)), 1)
    if expert_shard < stacked:  # the fullest shard has whole experts
        experts *= -(-stacked // expert_shard) * expert_shard / stacked
    both = ((dense, shard), (experts, expert_shard))
    of_blocks, of_ends = setup.state_bytes

    def state(shards: int, of_experts: int) -> float:
        ends = rank_ends(shape, setup, first=first)
        return of_blocks * ((dense - ends) / shards + experts / of_experts) + of_ends * ends / shards

    if setup.task == "lora":
        kept = sum(n / (s if setup.sharding == "fsdp" else 1) for n, s in both)
        out = {"parameters": setup.weight_bytes * kept, "gradients": 0.0, "optimizer": 0.02 * 16 * kept}
        if setup.sharding == "fsdp" and setup.wrapped and (setup.pp > 1 or not setup.reshard):
            out["gathered"] = float(setup.element) * (dense + experts)
        return _offloaded(out, setup)
    if setup.sharding == "fsdp":
        local = sum(n / s for n, s in both)
        whole = dense + experts
        each = setup.weight_bytes * local
        out = {"parameters": each, "gradients": each, "optimizer": state(shard, expert_shard)}
        if setup.pp > 1 and setup.wrapped:
            # gathered once a step, gradients added up whole, in whose place their shards come as the schedule ends; around
            # one block, or the head, what a rehearsal counts for each element
            of_dense, of_experts = (3.0 if shards > 1 else 10.0 for _, shards in both)
            blocks = [
                of_dense * one / setup.tp + of_experts * routed / setup.ep for _, one, routed in shape.block_sizes
            ]
            largest = max(*blocks, (4.0 if shard > 1 else 6.0) * shape.head_parameters / setup.tp if head else 0.0)
            out["gathered"] = (setup.element + 4.0) * whole - each * (1 - setup.offload_optimizer) + largest
        elif not setup.reshard and setup.wrapped:
            out["gathered"] = float(setup.element) * whole
        return _offloaded(out, setup)
    if setup.sharding == "zero1":
        whole, local = dense + experts, sum(n / s for n, s in both)
        out = {
            "parameters": 2.0 * whole,
            "gradients": float(setup.grad_bytes) * whole,
            "optimizer": 4.0 * local + state(shard, expert_shard),
        }
        return _offloaded(out, setup)
    whole = dense + experts
    return {
        "parameters": (setup.weight_bytes + (2.0 if setup.element == 2 else 0.0)) * whole,
        "gradients": setup.weight_bytes * whole,
        "optimizer": state(1, 1),
    }


def _offloaded(out: dict[str, float], setup: Setup) -> dict[str, float]:
    """Fsdp moves parameters, gradients and optimizer state to the host together; zero1 the optimizer state alone."""
    for name in ("parameters", "gradients", "optimizer") if setup.sharding == "fsdp" else ("optimizer",):
        out[name] *= 1 - setup.offload_optimizer
    return out


def gathered_block_bytes(shape: ModelShape, setup: Setup) -> float:
    """Bytes of parameters and whole gradients around one block's backward, the largest block, sharded data parallelism.

    At one time: the unit's gathered parameters, the buffer of the unit that is gathered next, the unit's gradients, and
    the previous unit's input to its reduction. Routed experts on an axis of their own are a unit of their own. A tied embedding
    is no unit: gathered once for embedding and head, it stays, with the head's gradient, until backward ends.
    """
    reduced, each = float(setup.grad_bytes), float(setup.element)
    ahead = each if setup.reshard and setup.dp_shard * setup.cp > 1 else 0.0
    own = 2 * each if setup.reshard else each  # never resharded: the parameters are counted with the states

    def around(unit: float, before: float) -> float:
        return own * unit + ahead * unit + reduced * before

    head, worst = shape.head_parameters / setup.tp, 0.0
    throughout, head_before = (own * head, 0.0) if shape.tied else (0.0, head)
    for _, dense, experts in shape.block_sizes:
        here, there = dense / setup.tp, experts / setup.ep
        if setup.ep > 1 and there:
            worst = max(worst, around(here, there), around(there, here))
        else:
            worst = max(worst, around(here + there, max(here + there, head_before)))
    return throughout + worst


def gathered_head_bytes(shape: ModelShape, setup: Setup) -> float:
    """Bytes of the head's weight around the loss: gathered, and its gradient or (chunked loss) its unit's flat buffer."""
    each = float(setup.element)
    own = each if setup.reshard and setup.wrapped else 0.0
    buffer = 0.0 if shape.tied or setup.dp_shard * setup.cp == 1 else each
    return (own + (buffer if setup.loss == "chunked" else each)) * shape.head_parameters / setup.tp


def gathered_end_bytes(shape: ModelShape, setup: Setup) -> float:
    """Bytes of the embedding's reduction, the last of backward: its whole gradient, the reduction's input, and a new shard beside
    that of earlier microbatches.
    """
    shards = setup.dp_shard * setup.cp
    each = float(setup.element)
    reduction = each + setup.grad_bytes + 4.0 / shards
    before = 0.0 if shape.tied else max(dense / setup.tp for _, dense, _ in shape.block_sizes)
    compute = (2 * each if setup.reshard else each) * shape.head_parameters / setup.tp + setup.grad_bytes * before
    return max(reduction * shape.head_parameters / setup.tp, compute)


def dummy_gradient_bytes(shape: ModelShape, setup: Setup) -> float:
    """Bytes in bf16 of the distinct matrices of one block: experts have the same shape, so that one is enough."""
    distinct = 0.0
    for block, (_, dense, experts) in zip(shape.blocks, shape.block_sizes, strict=True):
        one = experts / block.ffn.num_experts if isinstance(block.ffn, ExpertsShape) else 0.0
        distinct = max(distinct, dense / setup.tp + one)
    return 2.0 * distinct
