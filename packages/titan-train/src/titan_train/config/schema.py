"""The configuration of a run, as frozen dataclasses.

The docstring of a field is its help on the command line. Each class validates its own fields; what depends on the
number of ranks is validated by `titan_train.parallel.layout` before any rank starts.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from titan_train.config.compute import ActivationsConfig, CompileConfig, Float8Config, KernelsConfig
from titan_train.config.data import DataConfig
from titan_train.config.diffusion import DiffusionConfig
from titan_train.config.launch import LaunchConfig
from titan_train.config.metrics import MetricsConfig, ProfileConfig
from titan_train.config.model import ModelConfig
from titan_train.config.optimizer import OptimizerConfig, ScheduleConfig
from titan_train.config.parallel import ContextConfig, ParallelConfig, PipelineConfig
from titan_train.config.patterns import check_patterns
from titan_train.config.ramp import BatchRamp, plan_ramp
from titan_train.config.recipe import AverageConfig, MTPConfig, QKClipConfig, SpikesConfig
from titan_train.config.tokenizer import TokenizerConfig
from titan_train.config.vision import VisionConfig
from titan_train.terminal import shortened
from titan_train.values import Count, CountOrOff, Range, check_values, nearest_divisor


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Folder, name and seed of a run."""

    name: str = "run"
    """Name of the run; its folder is dir/name. Running the same name again resumes it."""

    dir: str = "runs"
    """Folder of all runs, relative to the working directory."""

    seed: Annotated[int, Range(0, below=2**63, note="use 0")] = 0
    """Seed of the weights, the data order and every random number generator."""

    deterministic: bool = False
    """Use only deterministic kernels. Slower on GPUs; CPU runs are always deterministic."""

    def __post_init__(self) -> None:
        plain = self.name.isprintable() and "/" not in self.name and not self.name.startswith(".")
        if not plain or not 0 < len(self.name.encode()) <= 200:
            raise ValueError(
                f"run.name={shortened(self.name)!r} must be a plain folder name of at most 200 bytes, such as 'llama3-small'."
            )
        check_values("run", self)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """The optimizer step: how many, over how much data, in which precision."""

    steps: Count = 1000
    """Optimizer steps of the whole run."""

    global_batch: Count = 32
    """Sequences in one optimizer step, over all ranks."""

    microbatch: Annotated[int, Range(0, note="0 takes the whole share of a rank")] = 0
    """Sequences per forward and backward on one rank; 0 takes the whole share of the rank, or one sequence with
    pipeline parallelism."""

    ramp_from: Annotated[int, Range(0, note="0 is no ramp")] = 0
    """Sequences in the first steps, fewer than global_batch, which is reached after ramp_tokens; 0 is no ramp. The order of the
    data does not change."""

    ramp_by: Annotated[int, Range(0, note="0 doubles")] = 0
    """Sequences that each rise of the batch adds; 0 doubles it. All sizes last for the same number of tokens."""

    ramp_tokens: Annotated[int, Range(0, note="with ramp_from, such as 1 % of the run's tokens")] = 0
    """Tokens after which the ramp has reached global_batch."""

    dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of parameters in forward and backward; the optimizer updates float32 ones, see optimizer.weights."""

    max_grad_norm: Annotated[float, Range(0, note="0 measures without clipping")] = 1.0
    """Clip the gradient's 2-norm to this; 0 only measures it."""

    freeze: tuple[str, ...] = ()
    """Parameters that are not trained: regular expressions searched in the full names, such as "tok_embeddings". A pattern
    found in no name is an error."""

    fused_loss: bool = True
    """Compute the head and its cross-entropy in chunks of tokens, without whole logits. Models without a loss_head, and
    tasks with a loss of their own, compute whole logits either way; a float8 head needs false."""

    z_loss: Annotated[float, Range(0, below=1, note="0 disables, 1e-4 is usual")] = 0.0
    """Weight of the z-loss, which keeps the logits' log-sum-exp small (PaLM: 1e-4); it changes gradients, not the reported
    loss. 0 disables."""

    nonfinite_limit: Count = 10
    """Fail after this many consecutive steps with a non-finite loss or gradient. Each such step is skipped."""

    rerun_above: Annotated[float, Range(above=1, also=0, note="0 disables, 2.0 is a loss that jumps")] = 0.0
    """Compute a step again, here and with its data on another rank, whose loss is not finite or above this many times the mean
    of the last 16, such as 2.0, to tell hardware from data; 0 disables."""

    gc_every: Annotated[int, Range(0, note="0 leaves it to Python")] = 50
    """Run Python's garbage collector every this many steps, on all ranks at the same step; 0 leaves it to Python."""

    def __post_init__(self) -> None:
        check_values("train", self)
        check_patterns("train.freeze", self.freeze)
        if bool(self.ramp_from) != bool(self.ramp_tokens):
            raise ValueError(
                f"train.ramp_from={self.ramp_from} and train.ramp_tokens={self.ramp_tokens}: a ramp needs both, the first batch "
                "and the tokens until train.global_batch. Set both, or leave both at 0."
            )
        self.ramp(1)
        if self.microbatch and self.global_batch % self.microbatch:
            near = nearest_divisor(self.global_batch, self.microbatch)
            raise ValueError(
                f"train.microbatch={self.microbatch} does not divide train.global_batch={self.global_batch}: the last "
                f"micro-batch would be smaller. The nearest valid choice is {near}."
            )

    def ramp(self, seq_len: int) -> BatchRamp:
        """The sequences of each step, of ``seq_len`` tokens each."""
        return plan_ramp(
            self.global_batch, start=self.ramp_from, step=self.ramp_by, tokens=self.ramp_tokens, seq_len=seq_len
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationConfig:
    """Loss on held-out text."""

    every: CountOrOff = 0
    """Validate every this many steps, and after the last step; 0 disables."""

    steps: Count = 8
    """Batches of train.global_batch sequences in one validation."""

    prompts: tuple[str, ...] = ()
    """Texts that the model continues after each validation, for the report; none takes the beginnings of two held-out samples."""

    patience: CountOrOff = 0
    """Stop the run early after this many validations in a row without a new lowest loss; 0 disables."""

    sample_tokens: Annotated[int, Range(0, note="0 samples no text")] = 32
    """Tokens added to each prompt, each a forward of the whole model; 0 disables. Not under cp or pp."""

    def __post_init__(self) -> None:
        check_values("validation", self)
        if "" in self.prompts:
            raise ValueError("validation.prompts holds an empty text. Give each at least one character, or remove it.")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """When to save, and what to keep. The last step and SIGTERM always save."""

    every: CountOrOff = 500
    """Save every this many steps; 0 disables."""

    every_minutes: Annotated[float, Range(0, note="0 disables")] = 0.0
    """Also save when this many minutes have passed since the last save; 0 disables."""

    keep_last: Annotated[int, Range(0, note="0 keeps all")] = 3
    """Finished checkpoints to keep; older ones are deleted after the next one is committed. 0 keeps all."""

    keep_every: CountOrOff = 0
    """Keep every checkpoint whose step is a multiple of this; 0 disables."""

    keep_best: bool = False
    """Save after each validation with the lowest loss so far, and keep the best checkpoint of all; @best names it."""

    start_from: str = ""
    """Branch from another run: "DIR", "DIR@STEP" or "DIR@best". Weights, optimizer, schedule and data position of that step
    continue in this run's own folder; run --from is short for it. Once this run has a checkpoint, that counts."""

    async_save: bool = False
    """Write checkpoints in a separate process, which finishes even if training is killed. Training continues
    once the state is copied; the copy takes the same amount of host memory again."""

    resume: Literal["auto", "never"] = "auto"
    """auto resumes from the last valid checkpoint of the run; never refuses a run folder that holds a checkpoint."""

    allow_data_change: bool = False
    """Resume even if the data, its order or the sequence length differs from the checkpoint."""

    def __post_init__(self) -> None:
        check_values("checkpoint", self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A whole run."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    diffusion: DiffusionConfig = field(default_factory=DiffusionConfig)
    vision: VisionConfig = field(default_factory=VisionConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    context: ContextConfig = field(default_factory=ContextConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    activations: ActivationsConfig = field(default_factory=ActivationsConfig)
    float8: Float8Config = field(default_factory=Float8Config)
    compile: CompileConfig = field(default_factory=CompileConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    mtp: MTPConfig = field(default_factory=MTPConfig)
    qk_clip: QKClipConfig = field(default_factory=QKClipConfig)
    spikes: SpikesConfig = field(default_factory=SpikesConfig)
    average: AverageConfig = field(default_factory=AverageConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)

    @property
    def state_bytes(self) -> tuple[float, float]:
        """Bytes of optimizer state for each element of Muon's matrices, and of every other parameter, moving average included."""
        average = 4.0 if self.average.ema_decay else 0.0
        matrices, others = self.optimizer.state_bytes
        return matrices + average, others + average

    @property
    def evaluated_weights(self) -> Literal["none", "ema", "checkpoints", "schedule_free"]:
        """What validation, export, eval, generate and serve take; none is the weights that are trained."""
        return "schedule_free" if self.optimizer.name == "schedule_free" else self.average.use

    def __post_init__(self) -> None:
        if self.optimizer.name == "schedule_free":
            self._check_schedule_free()
        if self.optimizer.weights == "bf16":
            self._check_small_weights()
        kept = self.checkpoint.keep_last
        if self.average.use == "checkpoints" and 0 < kept < self.average.checkpoints:
            raise ValueError(
                f"average.checkpoints={self.average.checkpoints}, but checkpoint.keep_last={kept} deletes older ones. Set "
                f"checkpoint.keep_last={self.average.checkpoints}, or 0 to keep all."
            )

    def _check_small_weights(self) -> None:
        if self.train.dtype != "bf16":
            raise ValueError(
                f"optimizer.weights='bf16' with train.dtype={self.train.dtype!r}: weights of 8 bits of precision have no more in "
                "compute. Set train.dtype='bf16', or optimizer.weights='fp32'."
            )
        if self.qk_clip.threshold:
            raise ValueError(
                f"qk_clip.threshold={self.qk_clip.threshold} with optimizer.weights='bf16': QK-clip shrinks weights by factors "
                "near 1, which bfloat16 would round away. Set qk_clip.threshold=0, or optimizer.weights='fp32'."
            )

    def _check_schedule_free(self) -> None:
        for key, given, value in (
            ("schedule.name", self.schedule.name, "constant"),
            ("average.use", self.average.use, "none"),
            ("average.ema_decay", self.average.ema_decay, 0.0),
            ("qk_clip.threshold", self.qk_clip.threshold, 0.0),
        ):
            if given != value:
                raise ValueError(
                    f"{key}={given!r} with optimizer.name='schedule_free', which averages the weights itself, in place of a "
                    "decay of the rate or another average, and keeps a second copy of them that nothing else changes. "
                    f"Set {key}={value!r}."
                )
