"""Between configurations and the planner's own words: a `Config` becomes a shape and a setup, a setup becomes a TOML file.

Model arguments are read by the names that the shipped families share (``dim``, ``num_layers``, ``num_heads``, …), so that
a registered family with the same names is understood. No torch is imported.
"""

import json
import math
from typing import Any

from titan_train.config import Config
from titan_train.models.arguments import model_args
from titan_train.models.hf.folder import PREFIX, read_published, with_changes
from titan_train.models.hf.plans import hf_plans
from titan_train.models.registry import find_model, list_models
from titan_train.planner.cost.schedules import stages_of
from titan_train.planner.model.families import find_shape, flux_shape
from titan_train.planner.model.published import shape_of_published
from titan_train.planner.model.shape import AttentionWidths, Block, ExpertsShape, FeedForwardShape, ModelShape
from titan_train.planner.setup import Setup


def shape_named(name: str) -> ModelShape:
    """The shape of a shipped or registered configuration, of a folder ("hf:DIR"), or one the planner knows of itself."""
    if name.startswith(PREFIX):
        return shape_of_published(name, read_published(name, key="MODEL"))
    if name in list_models():
        _check_task(name)
        return shape_of_args(name, find_model(name)[1])
    return find_shape(name)


def shape_of_config(config: Config) -> ModelShape:
    """The shape of a configuration's model.

    Raises:
        ValueError: The model is a dotted path, whose inside cannot be seen without building it.
    """
    name = config.model.name
    if name.startswith(PREFIX):
        published = read_published(name)
        known = published | {key.partition(".")[0]: published.get(key.partition(".")[0]) for key in config.model.args}
        return shape_of_published(name, with_changes(published, config.model.args, known=known))
    if ":" in name:
        raise ValueError(
            f"model.name={name!r} is a callable, and the planner needs a shape. Register a model family with arguments like "
            "the shipped ones (dim, num_layers, num_heads, ffn_dim), or estimate a shipped model of similar shape."
        )
    _check_task(name)
    return shape_of_args(name, model_args(config.model, vocab_size=None))


def unplanned_degrees(name: str) -> dict[str, int]:
    """Degrees that a folder's family cannot have: all but those of data parallelism, where it has no plan."""
    kind = read_published(name, key="MODEL").get("model_type")
    return {} if kind in hf_plans() else {"tp": 1, "cp": 1, "pp": 1, "ep": 1}


def _check_task(name: str) -> None:
    task = find_model(name)[0].task
    if task not in ("text", "diffusion"):
        raise ValueError(
            f"model.name={name!r} is trained on {task!r}, and the planner knows decoders of text and FLUX only. `titan-train "
            "check` measures this model's memory under a layout."
        )


def is_diffusion(name: str) -> bool:
    """Whether a shipped or registered configuration is a diffusion transformer."""
    return name in list_models() and find_model(name)[0].task == "diffusion"


def shape_of_args(name: str, args: Any) -> ModelShape:
    """The shape that a family's arguments describe."""
    if hasattr(args, "num_single_layers"):
        return flux_shape(
            name, dim=args.dim, heads=args.num_heads, double=args.num_layers, single=args.num_single_layers
        )
    get = lambda field, default=0: getattr(args, field, default)  # noqa: E731
    dim, layers = args.dim, args.num_layers
    if get("kv_lora_rank"):
        attention = AttentionWidths(
            args.num_heads, args.num_heads, args.qk_nope_head_dim + args.qk_rope_head_dim, value_dim=args.v_head_dim,
            q_lora=args.q_lora_rank, kv_lora=args.kv_lora_rank, rope_dim=args.qk_rope_head_dim,
        )  # fmt: skip
    else:
        gpt = not hasattr(args, "num_kv_heads")
        attention = AttentionWidths(
            args.num_heads,
            get("num_kv_heads", args.num_heads),
            get("head_dim") or dim // args.num_heads,
            qk_norm="qwen3" in type(args).__name__.lower(),
            bias=gpt,
        )
    gpt = not hasattr(args, "num_kv_heads") and not attention.latent
    norm = 2 if gpt else 1
    dense = FeedForwardShape(get("ffn_dim") or 4 * dim, gated=not gpt, bias=gpt)
    blocks = (Block(layers, attention, dense, norms=2 * norm),)
    experts = get("num_experts")
    if experts:
        shared = get("num_shared_experts") * args.expert_ffn_dim
        routed = ExpertsShape(
            experts,
            args.experts_per_token,
            args.expert_ffn_dim,
            shared,
            max_groups=get("top_groups") if get("num_groups") > 1 else 0,
            normalized=bool(get("normalize_weights", True)),
        )
        first = get("num_dense_layers")
        blocks = tuple(b for b in (Block(first, attention, dense), Block(layers - first, attention, routed)) if b.count)
    return ModelShape(
        name,
        dim,
        blocks,
        args.vocab_size,
        tied=bool(get("tied_embeddings", gpt)),
        positions=get("max_seq_len") if gpt else 0,
        final_norm=norm,
        moe=bool(experts),
    )


def setup_of_config(config: Config, gpus: int) -> Setup:
    """The setup that a configuration is on ``gpus`` devices.

    Raises:
        ValueError: The degrees do not divide the devices, or the batch the data-parallel ranks.
    """
    p = config.parallel
    given = p.pp * p.cp * p.tp
    if gpus % given:
        raise ValueError(f"--gpus {gpus} is not a multiple of pp x cp x tp = {given}. Use a multiple of {given}.")
    dp = gpus // given
    replicate = p.dp_replicate if p.dp_replicate > 0 else dp // max(1, p.dp_shard)
    if p.mode == "ddp":
        replicate = dp
    if replicate < 1 or dp % replicate or (p.dp_shard > 0 and p.mode != "ddp" and replicate * p.dp_shard != dp):
        raise ValueError(
            f"dp_replicate={p.dp_replicate} x dp_shard={p.dp_shard} does not fill the {dp} data-parallel ranks that --gpus "
            f"{gpus} leaves. Set one of them to -1."
        )
    train, kind = config.train, config.activations.checkpoint
    if train.global_batch % dp:
        raise ValueError(f"train.global_batch={train.global_batch} is not a multiple of {dp} data-parallel ranks.")
    local = train.global_batch // dp
    stages = config.pipeline.stages_per_rank or stages_of(config.pipeline.schedule)
    recompute = {"none": "none", "full": "full", "every": "full"}.get(kind, "selective")
    return Setup(
        seq_len=config.model.seq_len,
        global_batch=train.global_batch,
        microbatch=train.microbatch or (1 if p.pp > 1 else local),
        dp_replicate=replicate,
        dp_shard=dp // replicate,
        tp=p.tp,
        cp=p.cp,
        pp=p.pp,
        ep=p.ep,
        schedule=config.pipeline.schedule,
        stages_per_rank=stages if p.pp > 1 else 1,
        recompute=recompute,  # type: ignore[arg-type]
        recompute_share=1 / config.activations.every if kind == "every" else 1.0,
        precision=_precision(config),  # type: ignore[arg-type]
        sharding="ddp" if p.mode == "ddp" else "fsdp",
        reshard=p.reshard != "never",
        stack="compile" if config.compile.enabled else "eager",
        async_tp=p.async_tp,
        cp_method={"auto": "ring", "usp": "ulysses"}.get(config.context.method, config.context.method),  # type: ignore[arg-type]
        loss="chunked" if config.train.fused_loss else "compiled" if config.compile.enabled else "eager",
        offload_activations=1.0 if config.activations.offload else 0.0,
        offload_optimizer=1.0 if p.offload != "none" else 0.0,
        grad_bytes=4 if p.reduce_dtype == "fp32" else 2,
    )


def _precision(config: Config) -> str:
    recipe = config.float8.recipe
    if recipe == "none":
        return config.train.dtype
    return "rowwise" if recipe.startswith("rowwise") else recipe


def _diffusion_lines(seq_len: int) -> list[str]:
    """The image's grid and the text's length whose tokens make up a sequence; 512 text tokens if they can."""
    for text in (512, 256, *range(8, 4097, 8)):
        side = math.isqrt(max(0, seq_len - text))
        if side > 0 and side * side == seq_len - text:
            return [
                "[diffusion]",
                'source = "shards"',
                'path = "features"',
                f"grid = {side}",
                f"text_tokens = {text}",
                "",
            ]
    raise ValueError(
        f"--seq-len {seq_len} is not a number of text tokens and a square of image tokens. Use 512 + n * n, such as 4608."
    )


def config_toml(name: str, setup: Setup, *, nproc: int, base: str = "") -> str:
    """A configuration for `titan-train`, with the data and tokenizer of the shipped llama3_1b to be replaced.

    A diffusion model extends its own shipped configuration, and reads shards from the folder ``features``. ``base`` is the
    configuration that the model came from, with its data.
    """
    s, diffusion = setup, is_diffusion(name) and not base
    inherited = base or ("flux_dev" if diffusion else "llama3_1b")
    lines = [
        f"# {s.describe()}, for {s.world_size} devices; written by titan-train plan.",
        f"extends = {json.dumps(inherited)}",
        "",
        "[model]",
        *([] if base else [f"name = {json.dumps(name)}"]),
        f"seq_len = {s.seq_len}",
        "",
        "[train]",
        f"global_batch = {s.global_batch}",
        f"microbatch = {s.microbatch}",
        'dtype = "bf16"',
        "",
        "[parallel]",
        *(f"{axis} = {degree}" for axis, degree in s.degrees().items()),
    ]
    if diffusion:
        lines[lines.index("[train]") : lines.index("[train]")] = _diffusion_lines(s.seq_len)
    if s.async_tp and s.tp > 1:
        lines.append("async_tp = true")
    if not s.reshard:
        lines.append('reshard = "never"')
    if s.offload_optimizer:
        lines.append('offload = "cpu"')
    if s.pp > 1:
        lines += ["", "[pipeline]", f'schedule = "{s.schedule}"', f"stages_per_rank = {s.stages_per_rank}"]
    if s.cp > 1:
        lines += ["", "[context]", f'method = "{s.cp_method}"']
    lines += ["", "[activations]", f'checkpoint = "{s.recompute}"']
    if s.float8:
        lines += ["", "[float8]", f'recipe = "{s.precision}"']
    lines += ["", "[compile]", f"enabled = {str(s.stack == 'compile').lower()}"]
    lines += ["", "[launch]", f"nproc = {min(nproc, s.world_size)}", f"nnodes = {max(1, s.world_size // nproc)}"]
    return "\n".join(lines) + "\n"
