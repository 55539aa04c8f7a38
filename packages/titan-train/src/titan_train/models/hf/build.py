"""A model of transformers from a folder's ``config.json``, on the current device, without weights and without remote code."""

import copy
import inspect
import types
from typing import Any

import torch
from torch import nn

from titan_train.models.arguments import ModelChoice
from titan_train.models.common.moe.routed import RoutedExperts, StackedExperts
from titan_train.models.hf.ahead import add_modules
from titan_train.models.hf.configuration import check_configuration, read_configuration
from titan_train.models.hf.folder import DROPOUTS, folder_of, split_depth
from titan_train.models.hf.names import SplitConvolution, separate_experts
from titan_train.models.hf.plan import STACKED, HFPlan
from titan_train.models.hf.plans import hf_plans

_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
"""What families call the number of experts of a token."""


def build_hf(choice: ModelChoice, *, vocab_size: int | None) -> nn.Module:
    """Build the model that a folder describes.

    Args:
        choice: The folder, changes to its ``config.json``, and adapters.
        vocab_size: The tokenizer's; the model's may be larger.

    Raises:
        ValueError: The folder is not one of a decoder that the installed transformers has, or cannot be as asked.
    """
    name = choice.name
    depth, changes = split_depth(name, choice.args)
    if depth and choice.lora_rank:
        raise ValueError(
            f"model.args.mtp_depth={depth} with model.lora_rank={choice.lora_rank}: adapters leave the model's weights as they "
            "are, and modules for tokens further ahead start from none. Set mtp_depth=0, or lora_rank=0."
        )
    config, published = read_configuration(name, changes)
    check_configuration(name, config, vocab_size, choice.seq_len)
    if published["model_type"] in hf_plans():
        _check_plan(name, config, hf_plans()[published["model_type"]], choice.seq_len)
    model = assemble(config, published, name=name, split=choice.lora_rank == 0)
    if choice.lora_rank:
        from titan_train.models.hf.lora import add_adapters

        add_adapters(model, rank=choice.lora_rank, alpha=choice.lora_alpha, targets=choice.lora_targets)
    if depth:
        add_modules(model, depth, name)
    return model


def assemble(config: Any, published: dict[str, Any], *, name: str, split: bool = True) -> Any:
    """The model of a configuration of transformers, with what its family's plan adds, on the current device.

    Args:
        config: Of transformers; changed in place.
        published: What describes it: the content of ``config.json``, with the changes of ``model.args``.
        name: ``model.name``, for messages.
        split: Take fused linears apart, as the plan says.

    Raises:
        ValueError: transformers cannot build it as a causal decoder.
    """
    from titan_train.models.hf.attention import MASKED, NAME
    from titan_train.models.hf.decoder import HFDecoder, HFModel, UnplannedDecoder, class_with
    from titan_train.models.hf.device import keep_kernels_on_gpus

    kind = str(published["model_type"])
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"model.name={name!r}: a {kind} is an encoder and a decoder. transformers would build its decoder alone, without "
            "what it attends to. Use a folder of a decoder."
        )
    plan = hf_plans().get(kind)
    implementation = {}
    if plan is not None and (plan.masked_attention or not plan.own_attention):
        implementation = {"attn_implementation": MASKED if plan.masked_attention else NAME}
    try:
        model: Any = _maker_of(config).from_config(
            config, trust_remote_code=False, dtype=torch.float32, **implementation
        )
    except Exception as err:  # a family's own code may raise anything
        reason = str(err).partition("\n")[0]  # of an unknown class, the rest names all others
        raise ValueError(
            f"model.name={name!r}: transformers cannot build a decoder of this {kind}: {type(err).__name__}: {reason}"
        ) from err
    keep_kernels_on_gpus(model)  # before its layers are taken over: they call what their module has then
    forward_of: type[HFModel] = HFDecoder if plan is not None else UnplannedDecoder
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    _check_causal(name, model.config, planned=plan is not None)
    model.published = published | {"architectures": published.get("architectures") or [type(model).__name__]}
    model.__class__ = class_with(type(model), forward_of)
    if plan is not None:
        _apply_plan(model, plan, split=split)
    else:
        model.takes_positions = takes_positions
        _swap_unplanned_experts(model, kind)
    return model


def _maker_of(config: Any) -> Any:
    """What makes a decoder of a configuration: transformers has some (Mistral 4) only in its table of models that see."""
    import transformers

    listed: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    seeing: Any = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    kind = type(config)
    if kind not in listed and kind in seeing and seeing[kind].__name__.endswith("ForCausalLM"):
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def _check_plan(name: str, config: Any, plan: HFPlan, seq_len: int) -> None:
    found = {key: value for key in DROPOUTS if (value := getattr(config, key, 0.0))}
    if found:
        wanted = ", ".join(f"model.args.{key}=0.0" for key in found)
        raise ValueError(
            f"model.name={name!r} has {', '.join(f'{k}={v}' for k, v in found.items())}: results would depend on the layout. "
            f"Set {wanted}."
        )
    if getattr(config, "attn_logit_softcapping", None) and not plan.own_attention:
        raise ValueError(
            f"model.name={name!r} has capped attention scores (attn_logit_softcapping), which attention here does not support. "
            "Use a model without them."
        )
    for key in plan.shorter_than:
        if (value := getattr(config, key, None)) and seq_len >= value:
            raise ValueError(
                f"model.seq_len={seq_len} is not shorter than {key}={value} of {folder_of(name)}, where attention of a "
                f"{config.model_type} changes in a way that is not known here. Use rows of fewer than {value} tokens."
            )


def _check_causal(name: str, config: Any, *, planned: bool) -> None:
    """Refuse attention to later tokens: the model would be shown what it is to predict."""
    if getattr(config, "use_bidirectional_attention", False) or getattr(config, "is_causal", True) is False:
        raise ValueError(
            f"model.name={name!r} has bidirectional attention: each token would see the next one, which it is to predict. Use a "
            "causal decoder."
        )
    if not planned and getattr(config, "is_decoder", True) is False:
        raise ValueError(
            f"model.name={name!r} has is_decoder=False, so its attention may see the next token, which it is to predict. Set "
            "model.args.is_decoder=true, or use a causal decoder."
        )


def _apply_plan(model: Any, plan: HFPlan, *, split: bool) -> None:
    """Attention, experts and (with ``split``) fused linears as parallelism wants them; the model computes the same."""
    from titan_train.models.hf.attention import attach, bring_context, without_weights
    from titan_train.models.hf.state import has_state, take_over

    model.plan = plan
    model.mtp = model.mtp_embeddings = None
    config = model.config
    windows: set[int] = set()
    for layer in model.get_submodule(plan.layers).children():
        for module in layer.children():
            if has_state(module):
                take_over(module)
                model.has_state = True
                if plan.convolution:
                    widths = {part: int(getattr(module, width)) for part, width in plan.convolution.items()}
                    module.conv1d = SplitConvolution(module.conv1d, widths)
        if plan.experts:
            _swap_experts(layer, plan, config)
        attention: Any = getattr(layer, plan.attention, None)
        if not hasattr(attention, "is_causal"):  # a layer of another sort
            if split:
                _split_fused(layer, plan)
            continue
        width, value = _head_widths(attention)
        heads = int(getattr(attention, "num_heads", config.num_attention_heads))
        kv_heads = heads // int(getattr(attention, "num_key_value_groups", 1))
        attach(attention, num_heads=heads, num_kv_heads=kv_heads, head_dim=width, value_dim=value)
        if isinstance(getattr(attention, "num_key_value_heads", None), int):
            attention.head_counts = [(attention, "num_key_value_heads")]
        if plan.drops_keywords:
            bring_context(layer, attention)
        if plan.own_attention:
            attention.register_forward_hook(without_weights)
        if plan.counts:
            attention.config = copy.copy(attention.config)  # its number of groups becomes the rank's own
            attention.head_counts = [_counter(attention, name) for name in plan.counts]
        windows |= _window_of(attention, config, plan)
        model.has_sinks |= isinstance(getattr(attention, "sinks", None), nn.Parameter)
        if split:
            _split_fused(layer, plan, heads, kv_heads, width)
    model.windows = tuple(sorted(windows))
    if plan.token_experts:
        _fill_tables(model.get_submodule(plan.layers.rpartition(".")[0]), plan.token_experts)


def _window_of(attention: Any, config: Any, plan: HFPlan) -> set[int]:
    """The sliding window that needs a mask, if there is one; it is noted for FLOP counting where this layer has it."""
    window = getattr(attention if hasattr(attention, "sliding_window") else config, "sliding_window", None)
    if not window:
        return set()
    if getattr(attention, "is_sliding", True) and not plan.masked_attention:
        attention.inner_attention.window = int(window)
    return set() if plan.own_attention else {int(window)}


def _fill_tables(body: Any, name: str) -> None:
    """Have what draws weights also fill the tables of experts by token, which transformers leaves to files."""
    own = type(body)._init_weights

    def init_weights(body: Any, module: Any) -> None:
        own(body, module)
        table = getattr(module, name, None)
        if isinstance(table, torch.Tensor):
            ids, turns = (torch.arange(size, device=table.device) for size in table.shape)
            table.copy_((ids[:, None] * len(turns) + turns) % module.num_experts)

    body._init_weights = types.MethodType(init_weights, body)


def _counter(attention: Any, name: str) -> tuple[Any, str]:
    """The object with an attribute of an attention, or of what it holds, and that attribute."""
    inner, _, attribute = name.rpartition(".")
    return (getattr(attention, inner) if inner else attention), attribute


def _head_widths(attention: Any) -> tuple[int, int]:
    """Channels of a key and of a value."""
    width = next(
        getattr(attention, name) for name in ("qk_head_dim", "head_dim", "head_size") if hasattr(attention, name)
    )
    return int(width), int(getattr(attention, "v_head_dim", width))


def _split_fused(layer: nn.Module, plan: HFPlan, heads: int = 0, kv_heads: int = 0, head_dim: int = 0) -> None:
    from titan_train.models.hf.names import SplitLinear

    modules: dict[str, Any] = dict(layer.named_modules())
    for name, parts in plan.fused.items():
        if (whole := modules.get(name)) is None:
            continue
        counts = {"query": heads * head_dim, "key_value": kv_heads * head_dim, "ffn": whole.out_features // 2}
        widths = {part: counts[count] for part, count in parts.items()}
        split = SplitLinear(whole, widths, num_heads=heads, num_kv_heads=kv_heads)
        layer.set_submodule(name, split)
        if "query" in parts.values():
            attention: Any = layer.get_submodule(plan.attention)
            attention.config = copy.copy(attention.config)  # its number of heads becomes the rank's own
            split.head_counts = [
                (attention.config, "num_attention_heads"), (attention, "num_key_value_heads"),
                (attention.inner_attention, "num_heads"), (attention.inner_attention, "num_kv_heads"),
            ]  # fmt: skip


def _swap_unplanned_experts(model: Any, kind: str) -> None:
    """Experts of a family without a plan, where files have a tensor for each expert and the model stacks them."""
    names = separate_experts(kind)
    if names is None:
        return
    config = model.config.get_text_config()
    for layer in model.repeated_layers():
        found = [name for name, module in layer.named_modules() if name.endswith(".experts") and _is_stack(module)]
        for name in found:
            _unstack_experts(layer.get_submodule(name.removesuffix(".experts")), config)


def _is_stack(module: nn.Module) -> bool:
    return {name for name, _ in module.named_parameters()} == {"gate_up_proj", "down_proj"}


def _swap_experts(layer: nn.Module, plan: HFPlan, config: Any) -> None:
    inner: Any = getattr(layer, plan.feed_forward, None)
    if getattr(inner, "experts", None) is None:
        return
    if plan.experts == STACKED or "down_proj" in plan.experts:
        StackedExperts.take_over(inner.experts, _experts_per_token(config))
    else:
        _unstack_experts(inner, config)


def _experts_per_token(config: Any) -> int:
    """The largest number, where layers have one each."""
    found: int | list[int] = next((n for key in _CHOSEN if (n := getattr(config, key, None)) is not None), 1)
    return max(found) if isinstance(found, list) else found


def _unstack_experts(inner: Any, config: Any) -> None:
    old = inner.experts
    count, width, hidden = old.gate_up_proj.shape
    new = RoutedExperts(
        count, hidden, width // 2, experts_per_token=_experts_per_token(config), init_std=config.initializer_range
    )
    new.limit = getattr(old, "limit", getattr(old, "swiglu_limit", None))
    values = torch.tensor([-1e3, *range(-4, 5), 1e3], device="cpu")  # beyond any limit too
    gate, up = torch.cartesian_prod(values, values).T
    with torch.no_grad():  # asked of the module: lfm2_moe's config names no activation
        alike = torch.allclose(old._apply_gate(torch.cat([gate, up])), new.gated(gate, up), atol=1e-6)
    if not alike:
        named = getattr(config, "hidden_act", "another")
        raise ValueError(
            f"hidden_act={named!r}: experts here compute SwiGLU only, with SiLU. Set model.args.hidden_act='silu', or use a "
            "model of another family."
        )
    inner.experts = new
