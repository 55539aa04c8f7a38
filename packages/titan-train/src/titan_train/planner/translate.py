"""Between configurations and the planner's own words: a `Config` becomes a setup, a setup becomes a TOML file. No torch."""

import json
import math

from titan_train.config import Config, list_configs, load_config
from titan_train.parallel.layout.run import plan_run
from titan_train.planner.setup import ON_A_V, Loss, Setup
from titan_train.planner.shapes import is_diffusion, returns_logits, shape_of_config

_PRECISIONS = {"tensor": "tensorwise", "row": "rowwise", "block1x128": "blockwise", "mx32": "mxfp8"}
"""By how many values of an input share a scale."""


def setup_of_config(config: Config, gpus: int) -> Setup:
    """The setup that a configuration is on ``gpus`` devices.

    Raises:
        ValueError: So many ranks cannot share the layout or the batch, as in `plan_run`.
    """
    plan, p = plan_run(config, gpus), config.parallel
    spec, schedule, kind = plan.layout.spec, plan.schedule, config.activations.checkpoint
    recompute = {"none": "none", "full": "full", "every": "full"}.get(kind, "selective")
    method, degree = _context_method(config)
    return Setup(
        seq_len=config.model.seq_len,
        global_batch=plan.batch.global_batch,
        microbatch=plan.batch.microbatch,
        dp_replicate=spec.dp_replicate,
        dp_shard=spec.dp_shard,
        tp=spec.tp,
        cp=spec.cp,
        pp=spec.pp,
        ep=spec.ep,
        schedule=config.pipeline.schedule,
        stages_per_rank=1 if schedule is None else schedule.num_stages // schedule.num_ranks,
        on_a_v=schedule is not None
        and config.pipeline.schedule not in ON_A_V
        and schedule.placement[-1] == schedule.placement[0],
        recompute=recompute,  # type: ignore[arg-type]
        mlp_tiles=config.activations.mlp_tiles,
        recompute_share=1 / config.activations.every if kind == "every" else 1.0,
        precision=_precision(config),  # type: ignore[arg-type]
        min_speedup=config.float8.min_speedup,
        sharding="ddp" if plan.mode == "ddp" else "fsdp",
        task="lora" if config.model.lora_rank else "pretrain",
        reshard=p.reshard not in ("never", 1),  # alone among one rank is never
        stack="compile" if config.compile.enabled else "eager",
        fused_norms=config.launch.device != "cpu",
        async_tp=p.async_tp,
        cp_method=method,  # type: ignore[arg-type]
        ulysses_degree=degree,
        loss=_loss(config),
        offload_activations=1.0 if config.activations.offload else 0.0,
        offload_optimizer=1.0 if p.offload != "none" else 0.0,
        state_bytes=config.state_bytes,
        weight_bytes=config.optimizer.weight_bytes,
        states=config.optimizer.states,
        grad_bytes=4 if p.reduce_dtype == "fp32" else 2,
    )


def not_predicted(config: Config) -> list[str]:
    """Settings that a `Setup` does not hold, each with what is predicted in its place; `titan-train check` counts them."""
    p, activations = config.parallel, config.activations
    checkpoint, every = activations.checkpoint, activations.matmul_every
    recipe, precision = config.float8.recipe, _precision(config)
    settings = {
        f"pipeline.cuts={list(config.pipeline.cuts)}: stages of equal FLOPs are": p.pp > 1 and config.pipeline.cuts,
        f"parallel.accumulate={p.accumulate!r}: a reduction for each micro-batch, into shards, is": p.accumulate
        != "sharded",
        f"parallel.reshard={p.reshard!r}: shards over all data-parallel ranks are": p.reshard
        not in ("default", "always", "never", 1),
        "parallel.reshard='always': a pipeline that gathers once a step is": p.pp > 1 and p.reshard == "always",
        "parallel.reshard_overrides: parallel.reshard for all modules is": p.reshard_overrides,
        "parallel.keep_fp32: all in train.dtype is": p.keep_fp32 and config.train.dtype != "fp32",
        "parallel.sequence_parallel=false: activations cut by sequence between tensor-parallel regions are": p.tp > 1
        and not p.sequence_parallel,
        f"parallel.compress={p.compress!r}: gradients in parallel.reduce_dtype are": p.compress != "none",
        f"float8.recipe={recipe!r}: {precision!r}, weight gradients in float8 of inputs that are kept in float8, is": recipe
        not in ("none", precision),
        "float8.skip: layers chosen by float8.min_speedup alone are": config.float8.skip
        and config.float8.recipe != "none",
        f"activations.checkpoint={checkpoint!r}: 'selective' is": checkpoint in ("pattern", "budget"),
        f"activations.matmul_every={every}: 2 is": checkpoint == "selective" and every != 2,
        "train.freeze: all trained, which takes more time and memory, is": config.train.freeze,
    }
    return [f"{words} predicted" for words, given in settings.items() if given]


def _loss(config: Config) -> Loss:
    if returns_logits(config.model.name):
        return "eager"
    return "chunked" if config.train.fused_loss else "compiled" if config.compile.enabled else "eager"


def _context_method(config: Config) -> tuple[str, int]:
    """`Setup.cp_method` and `Setup.ulysses_degree` of the run; what is left to titan-cp is asked of it, which imports torch."""
    context, cp = config.context, config.parallel.cp
    if cp == 1 or context.dynamic:
        return "ring", 0
    if context.method not in ("auto", "usp"):
        return context.method, 0
    try:
        widths = next((b.attention for b in shape_of_config(config).blocks if b.attention is not None), None)
    except ValueError:  # a model whose shape is not known
        widths = None
    if widths is None:
        return "ring", 0
    heads, kv_heads = (max(1, number // config.parallel.tp) for number in (widths.heads, widths.kv_heads))
    if context.method == "auto" and is_diffusion(config.model.name):
        return ("allgather" if heads % cp else "ulysses"), 0
    import titan_cp
    import torch

    plan = titan_cp.plan(
        config.model.seq_len, size=cp, rank=0, num_heads=heads, num_kv_heads=kv_heads, head_dim=widths.head_dim,
        value_dim=widths.v_dim, dtype=torch.float32 if config.train.dtype == "fp32" else torch.bfloat16,
        method=context.method, layout=context.layout, ulysses_degree=context.ulysses_degree or None, pad=True,
    )  # fmt: skip
    return ("ulysses", plan.ulysses_degree) if plan.method == "usp" else (plan.method, 0)


def _precision(config: Config) -> str:
    recipe = config.float8.recipe
    if recipe == "none":
        return config.train.dtype
    from titan_fp8 import Recipe  # imports torch, which no other precision needs

    return _PRECISIONS[Recipe.get(recipe).x.gran]


def _diffusion_lines(seq_len: int) -> list[str]:
    """The image's grid and the text's length whose tokens make up a sequence; 512 text tokens if they can."""
    for text in (512, 256, *range(8, 4097, 8)):
        side = math.isqrt(max(0, seq_len - text))
        if side > 0 and side * side == seq_len - text:
            return [
                "[diffusion]",
                f"grid = {side}",
                f"text_tokens = {text}",
                "",
            ]
    raise ValueError(
        f"--seq-len {seq_len} is not a number of text tokens and a square of image tokens. Use 512 + n * n, such as 4608."
    )


def config_toml(name: str, setup: Setup, *, nproc: int, base: str = "") -> str:
    """A configuration for `titan-train`. It extends ``base``, the configuration that the model came from, with its data.

    Without one it extends the shipped configuration of the model's name, and of other models that of llama3_1b or flux_dev, whose
    data, tokenizer and recipe are to be replaced. What was planned is written whether it is the default or not: a base may have
    another value.
    """
    s, diffusion = setup, is_diffusion(name)
    inherited = base or (name if name in list_configs() else "flux_dev" if diffusion else "llama3_1b")
    given = load_config(inherited)
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
        f'dtype = "{"fp32" if s.precision == "fp32" else "bf16"}"',
        *([f"fused_loss = {_toml(s.loss == 'chunked')}"] if s.loss != "fused" else []),
        *(
            ["ramp_from = 0  # planned for the whole batch, without the base's ramp", "ramp_tokens = 0"]
            if given.train.ramp_from > 0
            else []
        ),
        "",
        "[parallel]",
        'mode = "auto"',
        *(f"{axis} = {degree}" for axis, degree in s.degrees().items()),
        *(["sequence_parallel = true"] if s.tp > 1 else []),
        f"async_tp = {_toml(s.async_tp and s.tp > 1)}",
        f'reshard = "{"default" if s.reshard else "never"}"',
        f'offload = "{"cpu" if s.offload_optimizer else "none"}"',
        'accumulate = "sharded"',
        'compress = "none"',
    ]
    if diffusion and s.seq_len != given.model.seq_len:
        lines[lines.index("[train]") : lines.index("[train]")] = _diffusion_lines(s.seq_len)
    if s.pp > 1:
        lines += ["", "[pipeline]", f'schedule = "{s.schedule}"', f"stages_per_rank = {s.stages_per_rank}", "cuts = []"]
    lines += ["", "[context]", f'method = "{s.cp_method if s.cp > 1 else "auto"}"', 'layout = "auto"']
    lines += ["ulysses_degree = 0", "dynamic = false"]
    every = round(1 / s.recompute_share)
    lines += [
        "",
        "[activations]",
        *(['checkpoint = "every"', f"every = {every}"] if every > 1 else [f'checkpoint = "{s.recompute}"']),
        *(["matmul_every = 2"] if s.recompute == "selective" else []),
        f"mlp_tiles = {s.mlp_tiles}",
        f"offload = {_toml(s.offload_activations > 0)}",
    ]
    lines += ["", "[float8]", f'recipe = "{s.precision if s.float8 else "none"}"']
    lines += ["", "[optimizer]", f'states = "{s.states}"']
    lines += ["", "[compile]", f"enabled = {_toml(s.stack == 'compile')}"]
    # as many devices of each machine as divide the run, and hold whole tensor-parallel groups if they can
    fitting = [n for n in range(1, nproc + 1) if s.world_size % n == 0]
    each = max((n for n in fitting if n % s.tp == 0), default=max(fitting))
    lines += ["", "[launch]", f"nproc = {each}", f"nnodes = {s.world_size // each}"]
    return "\n".join(lines) + "\n"


def _toml(value: bool) -> str:
    return str(value).lower()
