"""Shapes known by name: the shipped models, and the models of the published tables.

Sources: the models' published configurations and reports. A shape marked "approximate" is known in outline only; its
parameter count agrees with the published one, its inner widths may not.
"""

from functools import cache

from titan_train.planner.model.shape import (
    AttentionWidths,
    Block,
    ExpertsShape,
    FeedForwardShape,
    ModelShape,
    StateSpaceShape,
)
from titan_train.values import did_you_mean

_LLAMA3_VOCAB = 128_256


def _dense(
    name: str,
    dim: int,
    layers: int,
    heads: int,
    kv: int,
    hidden: int,
    vocab: int,
    *,
    head_dim: int = 0,
    tied: bool = False,
    gated: bool = True,
    bias: bool = False,
    qk_norm: bool = False,
    positions: int = 0,
    norm: int = 1,
) -> ModelShape:
    attention = AttentionWidths(heads, kv, head_dim or dim // heads, qk_norm=qk_norm, bias=bias)
    block = Block(layers, attention, FeedForwardShape(hidden, gated, bias), norms=2 * norm)
    return ModelShape(name, dim, (block,), vocab, tied=tied, positions=positions, final_norm=norm)


def _routed(
    name: str,
    dim: int,
    layers: int,
    attention: AttentionWidths,
    experts: ExpertsShape,
    vocab: int,
    *,
    dense: int = 0,
    dense_hidden: int = 0,
) -> ModelShape:
    first = (Block(dense, attention, FeedForwardShape(dense_hidden)),) if dense else ()
    return ModelShape(name, dim, (*first, Block(layers - dense, attention, experts)), vocab, moe=True)


def _mla(heads: int, q_lora: int, *, nope: int = 128, rope: int = 64, v: int = 128) -> AttentionWidths:
    return AttentionWidths(heads, heads, nope + rope, value_dim=v, q_lora=q_lora, kv_lora=512, rope_dim=rope)


def _hybrid(
    name: str,
    dim: int,
    mamba: int,
    routed: int,
    attention: int,
    heads: int,
    kv: int,
    mamba_heads: int,
    experts: ExpertsShape,
    vocab: int = 131_072,
) -> ModelShape:
    ssm = StateSpaceShape(mamba_heads, 64, 128, 8)
    blocks = (
        Block(mamba, ssm=ssm, norms=1),
        Block(routed, ffn=experts, norms=1),
        Block(attention, AttentionWidths(heads, kv, 128), norms=1),
    )
    return ModelShape(name, dim, blocks, vocab, moe=True)


def _deepseek_v4_flash() -> ModelShape:
    """284 B parameters, 13 B active (transformers' ``DeepseekV4Config``): grouped low-rank outputs, one head that is key and
    value, four residual streams. Half of the blocks attend to 128 near tokens and 512 chosen ones of the compressed rest,
    half to the near ones and the rest compressed 128 times. Compressors and indexer, 2 % of a block, are left out.
    """
    near = AttentionWidths(64, 1, 512, q_lora=1024, o_lora=1024, o_groups=8, shared_kv=True, sparse=True, window=160)
    far = AttentionWidths(64, 1, 512, q_lora=1024, o_lora=1024, o_groups=8, shared_kv=True, sparse=True, window=640)
    ffn = ExpertsShape(256, 6, 2048, 2048)
    blocks = (Block(22, near, ffn, streams=4), Block(21, far, ffn, streams=4))
    return ModelShape("deepseek_v4_flash", 4096, blocks, 129_280, moe=True)


def _gpt(name: str, dim: int, layers: int, heads: int, vocab: int = 50_257, seq: int = 2048) -> ModelShape:
    return _dense(
        name, dim, layers, heads, heads, 4 * dim, vocab, tied=True, gated=False, bias=True, positions=seq, norm=2
    )


def _gpt_oss(name: str, layers: int, experts: int) -> ModelShape:
    near = AttentionWidths(64, 8, 64, bias=True, window=128)
    far = AttentionWidths(64, 8, 64, bias=True)
    ffn = ExpertsShape(experts, 4, 2880, bias=True)
    return ModelShape(name, 2880, (Block(layers // 2, near, ffn), Block(layers // 2, far, ffn)), 201_088, moe=True)


def _dit(
    name: str, dim: int, layers: int, heads: int, hidden: int, *, text: int = 0, gated: bool = False
) -> ModelShape:
    attention = AttentionWidths(heads, heads, dim // heads, qk_norm=True, causal=False, cross_tokens=text)
    block = Block(
        layers, attention, FeedForwardShape(hidden, gated), norms=0, modulation=6 * dim * (dim if not text else 1)
    )
    return ModelShape(name, dim, (block,), 0)


def flux_shape(name: str, *, dim: int, heads: int, double: int, single: int) -> ModelShape:
    """FLUX, without its embedders and final layer (0.5 % of FLUX.1's parameters).

    A double block has weights for text and for image tokens: a token meets one half of them. In a single block attention
    and feed-forward stand beside each other.
    """
    attention = AttentionWidths(heads, heads, dim // heads, qk_norm=True, causal=False)
    ffn = FeedForwardShape(4 * dim, gated=False)
    blocks = (
        Block(double, attention, ffn, norms=0, modulation=24 * dim * dim),
        Block(single, attention, ffn, norms=0, modulation=3 * dim * dim),
    )
    return ModelShape(name, dim, tuple(b for b in blocks if b.count), 0)


@cache
def shapes() -> dict[str, ModelShape]:
    """All shapes, by name."""
    return {shape.name: shape for shape in (*_dense_shapes(), *_routed_shapes(), *_other_shapes())}


def _dense_shapes() -> list[ModelShape]:
    return [
        _dense("llama3_1b", 2048, 16, 32, 8, 8192, _LLAMA3_VOCAB, tied=True),
        _dense("llama3_3b", 3072, 28, 24, 8, 8192, _LLAMA3_VOCAB, tied=True),
        _dense("llama3_8b", 4096, 32, 32, 8, 14_336, _LLAMA3_VOCAB),
        _dense("llama3_70b", 8192, 80, 64, 8, 28_672, _LLAMA3_VOCAB),
        _dense("llama3_405b", 16_384, 126, 128, 8, 53_248, _LLAMA3_VOCAB),
        _dense("llama2_7b", 4096, 32, 32, 32, 11_008, 32_000),
        _dense("llama2_13b", 5120, 40, 40, 40, 13_824, 32_000),
        _dense("llama2_70b", 8192, 80, 64, 8, 28_672, 32_000),
        _dense("qwen2.5_7b", 3584, 28, 28, 4, 18_944, 152_064),
        _dense("qwen2.5_14b", 5120, 48, 40, 8, 13_824, 152_064),
        _dense("qwen2.5_32b", 5120, 64, 40, 8, 27_648, 152_064),
        _dense("qwen2.5_72b", 8192, 80, 64, 8, 29_568, 152_064),
        *(
            _dense(f"qwen3_{n}", d, layers, h, 8, f, 151_936, head_dim=128, qk_norm=True, tied=t)
            for n, d, layers, h, f, t in (
                ("0.6b", 1024, 28, 16, 3072, True),
                ("1.7b", 2048, 28, 16, 6144, True),
                ("4b", 2560, 36, 32, 9728, True),
                ("8b", 4096, 36, 32, 12_288, False),
                ("14b", 5120, 40, 40, 17_408, False),
                ("32b", 5120, 64, 64, 25_600, False),
            )
        ),
    ]


def _routed_shapes() -> list[ModelShape]:
    qwen = AttentionWidths(32, 4, 128, qk_norm=True)
    return [
        _routed("qwen3_30b_a3b", 2048, 48, qwen, ExpertsShape(128, 8, 768), 151_936),
        _routed(
            "qwen3_235b_a22b", 4096, 94, AttentionWidths(64, 4, 128, qk_norm=True), ExpertsShape(128, 8, 1536), 151_936
        ),
        _routed(
            "deepseek_v2_lite",
            2048,
            27,
            _mla(16, 0),
            ExpertsShape(64, 6, 1408, 2816),
            102_400,
            dense=1,
            dense_hidden=10_944,
        ),
        _routed(
            "deepseek_v2",
            5120,
            60,
            _mla(128, 1536),
            ExpertsShape(160, 6, 1536, 3072),
            102_400,
            dense=1,
            dense_hidden=12_288,
        ),
        _routed(
            "deepseek_v3",
            7168,
            61,
            _mla(128, 1536),
            ExpertsShape(256, 8, 2048, 2048, max_groups=4),
            129_280,
            dense=3,
            dense_hidden=18_432,
        ),
        _routed(
            "kimi_k2", 7168, 61, _mla(64, 1536), ExpertsShape(384, 8, 2048, 2048), 163_840, dense=1, dense_hidden=18_432
        ),
        _deepseek_v4_flash(),
        _routed("mixtral_8x7b", 4096, 32, AttentionWidths(32, 8, 128), ExpertsShape(8, 2, 14_336), 32_000),
        _routed("mixtral_8x22b", 6144, 56, AttentionWidths(48, 8, 128), ExpertsShape(8, 2, 16_384), 32_768),
        _gpt_oss("gpt_oss_20b", 24, 32),
        _gpt_oss("gpt_oss_120b", 36, 128),
        # hybrids of state space, routed feed-forward and attention; squared ReLU. Super and Ultra: approximate
        _hybrid("nemotron3_nano", 2688, 23, 23, 6, 32, 2, 64, ExpertsShape(128, 6, 1856, 3712, gated=False)),
        _hybrid(
            "nemotron3_super",
            4096,
            40,
            40,
            8,
            32,
            2,
            128,
            ExpertsShape(512, 22, 2688, 5376, gated=False, latent_dim=1024),
        ),
        _hybrid(
            "nemotron3_ultra",
            8192,
            48,
            48,
            12,
            64,
            2,
            256,
            ExpertsShape(512, 22, 5120, 10_240, gated=False, latent_dim=2048),
        ),
    ]


def _other_shapes() -> list[ModelShape]:
    return [
        _gpt("gpt3_5b", 4096, 24, 32),
        _gpt("gpt3_20b", 6144, 44, 48),
        _gpt("gpt3_175b", 12_288, 96, 96),
        _dense("nemotron_8b", 4096, 32, 32, 32, 16_384, 256_000, gated=False),
        _dense("nemotron_15b", 6144, 32, 48, 8, 24_576, 256_000, gated=False),
        _dense("nemotron_22b", 6144, 40, 48, 48, 24_576, 256_000, gated=False),
        _dense("nemotron_340b", 18_432, 96, 96, 8, 73_728, 256_000, gated=False),
        _dit("wan2.1_14b", 5120, 40, 40, 13_824, text=512),
        _dit("wan2.1_1.3b", 1536, 30, 12, 8960, text=512),
        flux_shape("flux_dev", dim=3072, heads=24, double=19, single=38),
    ]


_ALIASES = {
    "llama3.1": "llama3",
    "llama2": "llama2",
    "deepseek_v2_236b": "deepseek_v2",
    "deepseek_v3_671b": "deepseek_v3",
}


def find_shape(name: str) -> ModelShape:
    """The shape called ``name``; dashes and a point release ("llama3.1-8b") are accepted.

    Raises:
        ValueError: No such shape; the message names the nearest.
    """
    key = name.lower().replace("-", "_")
    key = key.replace("llama3.1", "llama3").replace("llama3.2", "llama3")
    key = _ALIASES.get(key, key)
    # "kimi_k2_1t": a size after a known name
    key = next((known for known in shapes() if key.startswith(known + "_")), key) if key not in shapes() else key
    if key not in shapes():
        raise ValueError(
            f"no shape is known for model {name!r}. {did_you_mean(key, shapes())}Known: {', '.join(sorted(shapes()))}. "
            "For another model give a configuration file."
        )
    return shapes()[key]
