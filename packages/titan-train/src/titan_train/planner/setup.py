"""One way to run a model on a number of devices: degrees, schedule, batch, recomputation, precision, software."""

from dataclasses import dataclass
from typing import Any, Literal

Stack = Literal["eager", "compile", "te", "te_graphs", "te_full", "xla"]
Precision = Literal["fp32", "bf16", "tensorwise", "rowwise", "blockwise", "delayed", "mxfp8", "nvfp4"]
Sharding = Literal["ddp", "zero1", "fsdp"]
Dispatcher = Literal["alltoall", "deepep", "hybridep"]
Loss = Literal["eager", "compiled", "fused", "chunked"]
States = Literal["fp32", "bf16", "int8"]

ON_A_V: frozenset[str] = frozenset({"zbv", "v_half", "v_min", "1f1b_v", "dualpipe_v"})
"""Schedules whose stages walk up the ranks and down again."""
FP8: frozenset[str] = frozenset({"tensorwise", "rowwise", "blockwise", "delayed", "mxfp8"})


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Everything the planner chooses. The ranks' order is pp, dp_replicate, dp_shard, cp, tp, the last innermost."""

    seq_len: int
    global_batch: int
    microbatch: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    """Ranks that share the experts; they are among the dp_shard x cp x tp ranks."""
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    on_a_v: bool = False
    """The schedule's stages walk up the ranks and down again, though it is not one of `ON_A_V`: a file's."""
    equal_stages: bool = False
    """Each pipeline rank holds the same number of blocks, the one with the head too; else the head is balanced."""
    recompute: Literal["none", "selective", "full"] = "none"
    recompute_modules: tuple[str, ...] = ()
    """With recompute = "none": modules recomputed all the same: core_attn, mlp, moe, moe_act, layernorm, mla_up_proj."""
    early_stop: bool = True
    """Recomputation of a whole block ends before what backward needs nothing of: its last product, the way back from experts.
    So does torch's checkpoint; Megatron's repeats everything."""
    mlp_tiles: int = 1
    """Parts of the sequence in which feed-forwards run, recomputed in backward."""
    recompute_share: float = 1.0
    """Share of the blocks that recompute is applied to."""
    precision: Precision = "bf16"
    bf16_share: float = 0.0
    """Share of the blocks whose products stay in bf16."""
    min_speedup: float = 1.0
    """Linears that titan-fp8 predicts to be less than so many times as fast in float8 stay in bf16; 0 casts all."""
    receive_ahead: bool = False
    """Pipeline stages hold receive buffers for all microbatches, as torch's do; titan-pipeline receives two ahead of need."""
    sharding: Sharding = "fsdp"
    reshard: bool = True
    """fsdp: free gathered parameters after forward."""
    stack: Stack = "compile"
    fused_norms: bool = True
    """eager: an RMSNorm keeps its input alone, as torch's kernel on a GPU does; False is a CPU, which keeps more, in float32."""
    async_tp: bool = False
    dispatcher: Dispatcher = "alltoall"
    ep_overlap: bool = False
    cp_method: Literal["ring", "allgather", "ulysses"] = "ring"
    ulysses_degree: int = 0
    """ulysses: ranks that exchange heads, between whose groups keys go round a ring (usp); 0 is all of them, without a ring."""
    loss: Loss = "compiled"
    task: Literal["pretrain", "lora"] = "pretrain"
    overlap: bool = True
    """Whether collectives of data and pipeline parallelism run beside compute."""
    offload_activations: float = 0.0
    """Share of kept activations that move to host memory."""
    offload_optimizer: float = 0.0
    """Share of the optimizer state that the host keeps and updates; with fsdp parameters and gradients go along."""
    attention_share: float = 1.0
    """Packed documents: sum of squared lengths over the square of the sequence length."""
    imbalance: float = 1.1
    """Largest over mean number of tokens that the ranks' experts receive."""
    grad_bytes: int = 4
    """Bytes per element of kept and reduced gradients."""
    weight_bytes: float = 4.0
    """Bytes of each element of a weight that the optimizer updates, and of its gradient; 2 without float32 masters."""
    state_bytes: tuple[float, float] = (8.0, 8.0)
    """Bytes of optimizer state per parameter, of blocks and of embedding and head. AdamW keeps two moments in float32."""
    states: States = "fp32"
    """The format of AdamW's moments, as ``optimizer.states``; ``state_bytes`` says how large they are."""

    def changed(self, **values: Any) -> "Setup":
        """As `dataclasses.replace`, in a tenth of its time: a search makes a hundred thousand."""
        other = object.__new__(Setup)
        other.__dict__.update(self.__dict__)
        other.__dict__.update(values)
        return other

    @property
    def world_size(self) -> int:
        """Devices."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def dp(self) -> int:
        """Data-parallel ranks."""
        return self.dp_replicate * self.dp_shard

    @property
    def microbatches(self) -> int:
        """Microbatches of each rank in one step."""
        return max(1, self.global_batch // (self.dp * self.microbatch))

    @property
    def tokens(self) -> int:
        """Tokens of one microbatch that one tensor-parallel group sees."""
        return self.microbatch * self.seq_len // self.cp

    @property
    def float8(self) -> bool:
        """Whether products run in float8."""
        return self.precision in FP8

    @property
    def te(self) -> bool:
        """Whether the stack is TransformerEngine's."""
        return self.stack in ("te", "te_graphs", "te_full")

    @property
    def element(self) -> int:
        """Bytes of an element of what is computed, gathered and sent, but for what is in float8."""
        return 4 if self.precision == "fp32" else 2

    @property
    def wrapped(self) -> bool:
        """Whether parameters and gradients pass through a data-parallel wrapper: float32 that one rank holds alone does not."""
        copies = self.dp * self.cp * (max(1, self.tp // self.ep) if self.ep > 1 else 1)
        return self.precision != "fp32" or copies > 1 or self.offload_optimizer > 0

    @property
    def expert_shard(self) -> int:
        """Ranks over which the experts that a rank computes with are sharded. Without an axis of their own, FSDP's experts are
        whole on each tensor-parallel rank; elsewhere tensor parallelism cuts them.
        """
        shard = self.dp_shard * self.cp
        if self.ep == 1 and self.sharding == "fsdp":
            return shard
        return max(1, shard * self.tp // self.ep)

    @property
    def head_on_first_rank(self) -> bool:
        """Whether the first pipeline rank has the last stage too: stages walk up the ranks and down again, a V."""
        return self.pp > 1 and (self.on_a_v or self.schedule in ON_A_V)

    def describe(self) -> str:
        """The degrees above 1 and the choices, in one line."""
        axes = [f"{n}{v}" for n, v in self.degrees().items() if v > 1] or ["one device"]
        words = [*axes, f"mbs{self.microbatch}x{self.microbatches}"]
        if self.pp > 1:
            words.append(self.schedule + (f"/v{self.stages_per_rank}" if self.stages_per_rank > 1 else ""))
        every = f" 1 of {round(1 / self.recompute_share)}" if self.recompute_share not in (0.0, 1.0) else ""
        words.append(f"recompute {'+'.join(self.recompute_modules) or self.recompute}{every}")
        if self.precision != "bf16":
            words.append(self.precision)
        if self.sharding != "fsdp" or not self.reshard:
            words.append(self.sharding if self.sharding != "fsdp" else "fsdp no-reshard")
        if self.cp > 1:
            words.append("usp" if self.ulysses_degree else self.cp_method)
        if self.ep > 1:
            words.append(self.dispatcher)
        if self.async_tp:
            words.append("async-tp")
        words += [f"{self.states} states"] * (self.states != "fp32")
        words += ["offload-activations"] * (self.offload_activations > 0) + ["offload"] * (self.offload_optimizer > 0)
        return " ".join(words)

    def degrees(self) -> dict[str, int]:
        """Degrees by axis, outermost first."""
        return {name: getattr(self, name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")}
