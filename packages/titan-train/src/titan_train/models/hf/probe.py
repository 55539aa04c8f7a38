"""Does this family compute what the trainer takes for granted? A tiny model of its kind is tried, before any rank waits.

Nothing can be read off a family's name: masks are made without positions, convolutions and states run over the ends of
documents, stages scale what the stage before them has scaled. So a tiny model of the same kind (`titan_train.models.hf.cut`)
is built with random weights and tried on the CPU:

- a token's logits do not depend on later tokens;
- the logits of a packed row are those of its documents, one by one;
- logits and gradients of a chain of pipeline stages are those of the whole;
- where a family's plan takes over its attention, logits are those of transformers' own;
- one more layer, for a token further ahead, computes what the last one does, and mixes tokens of its document alone.

What fails is refused, with what to do. A family that packs right only if it is given masks is given them.
"""

import logging
from collections.abc import Mapping
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import titan_fsdp as fsdp
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING

from titan_train.models.build import SkipRandomFill
from titan_train.models.call import accepted_inputs, call_model
from titan_train.models.hf.ahead import LayerModule, add_modules
from titan_train.models.hf.build import assemble
from titan_train.models.hf.cut import VOCABULARY, cuts, layers_that_show_all
from titan_train.models.hf.decoder import HFDecoder, HFModel, UnplannedDecoder
from titan_train.models.hf.folder import DEPTH
from titan_train.models.initialize import InitFn, init_for

_logger = logging.getLogger(__name__)
_TOKENS = 32
_PARAMETERS = 200_000_000
"""A cut with more is not tried: it would take longer than a moment."""
_CLOSE = 1e-3
"""Of the spread of what is compared, in float32; a leak is above a hundredth."""
_ROUNDING = 1e-5
"""Likewise, of logits that are changed one by one."""


def probe(model: HFModel, name: str, *, packed: bool, staged: bool, drawn: bool) -> None:
    """Refuse a model of transformers that does not compute what this run needs; give it masks where it needs them.

    Args:
        model: The whole model, on the meta device.
        name: ``model.name``, for messages.
        packed: Whether rows hold several documents that must not see each other.
        staged: Whether pipeline stages are cut from it.
        drawn: Whether its weights are drawn, not read.

    Raises:
        ValueError: Says what differs, and what to do.
    """
    kind = str(model.published["model_type"])
    with torch.random.fork_rng(devices=()):
        tiny, failure, unfilled = _tiny(model, name)
        if drawn and unfilled:
            raise ValueError(
                f"model.name={name!r}: initial weights of this {kind} cannot be drawn one by one ({unfilled[0]}). Set "
                f"model.init={name!r}, to start from the folder's weights, or use another model."
            )
        ahead = getattr(model, "mtp", None) is not None
        if tiny is None and not (packed or staged or ahead):
            _logger.warning("a small model of the %s of %s could not be tried: %s", kind, name, failure)
            return
        if tiny is None:
            raise ValueError(
                f"model.name={name!r}: whether a {kind} keeps packed documents and pipeline stages apart could not be tried: a "
                f"small one fails in transformers ({failure}). Set data.document_mask=false and parallel.pp=1"
                f"{f', and model.args.{DEPTH}=0' if ahead else ''}."
            )
        tokens = _tokens(tiny)
        _check_causality(tiny, tokens, name, kind)
        if packed:
            model_masks = _check_documents(tiny, tokens, name, kind)
            if isinstance(model, UnplannedDecoder):
                model.takes_masks = model_masks
        if isinstance(tiny, HFDecoder) and isinstance(model, HFDecoder):
            if tiny.plan.masked_attention or not tiny.plan.own_attention:
                _check_attention(tiny, tokens, name, kind)
            model.changes_logits = _changes_logits(tiny, tokens)
            if staged:
                _check_stages(tiny, tokens, name, kind)
            if ahead:
                _check_ahead(tiny, tokens, name, kind, packed=packed, shared=not model.changes_logits)


def _tiny(model: HFModel, name: str) -> tuple[Any, str, list[str]]:
    """A small model that runs, or why none does; and why weights could not be drawn."""
    layers = model.repeated_layers()
    kind: Any = CONFIG_MAPPING[model.published["model_type"]]
    filled: Mapping[str, Any] = kind.from_dict(dict(model.published)).to_dict()
    failures: list[str] = []
    for cut in cuts(filled, depth=len(layers), layers=layers_that_show_all(layers)):
        try:
            config = kind.from_dict(cut)
            config.use_cache = False
            with torch.device("meta"), SkipRandomFill():
                tiny = assemble(config, cut, name=name)
        except Exception as err:  # a family's own code may raise anything: these widths do not fit
            failures.append(_words(err))
            continue
        if sum(p.numel() for p in tiny.parameters()) > _PARAMETERS:
            failures.append("no small model of this kind could be built")
            continue
        unfilled: list[str] = []
        try:
            fsdp.materialize(tiny, "cpu", _filling(tiny, unfilled), seed=0)
            _stir(tiny)
            tiny.eval()
            call_model(tiny, _rows(_tokens(tiny), None)).float().square().mean().backward()
        except Exception as err:
            if _words(err) in failures:  # it is not the widths
                break
            failures.append(_words(err))
            continue
        tiny.zero_grad()
        return tiny, "", unfilled
    return None, failures[-1], []


def _words(err: Exception) -> str:
    return f"{type(err).__name__}: {err}"


def _filling(tiny: nn.Module, unfilled: list[str]) -> InitFn:
    """How the run fills each parameter; ``unfilled`` gets the reason where it cannot."""
    own = init_for(tiny)

    def fill(fqn: str, tensor: Tensor, generator: torch.Generator) -> None:
        try:
            own(fqn, tensor, generator)
        except ValueError as err:
            tensor.normal_(0, 0.02, generator=generator)
            unfilled.append(str(err))

    return fill


@torch.no_grad()
def _stir(tiny: nn.Module) -> None:
    """Weights that hide nothing: biases that are not zero, products as large as what they are added to."""
    generator = torch.Generator().manual_seed(0)
    for parameter in tiny.parameters():
        spread = 0.1 if parameter.ndim < 2 else parameter.shape[-1] ** -0.5
        parameter += torch.randn(parameter.shape, generator=generator) * spread


def _tokens(tiny: Any) -> Tensor:
    """Two rows."""
    config = tiny.config.get_text_config()
    longest = getattr(config, "max_position_embeddings", None)
    length = min(_TOKENS, longest) if isinstance(longest, int) and longest > 0 else _TOKENS
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, min(VOCABULARY, config.vocab_size) - 2, (2, length), generator=generator)


def _rows(tokens: Tensor, bounds: list[list[int]] | None) -> Any:
    """A batch as the trainer hands it on; ``bounds`` are where documents of each row begin, and the end."""
    if bounds is None:
        return SimpleNamespace(tokens=tokens, token_ids=tokens, positions=None, cu_seqlens=None)
    most = max(len(row) for row in bounds)
    cu_seqlens = torch.tensor([row + [row[-1]] * (most - len(row)) for row in bounds], dtype=torch.int32)
    positions = torch.stack([torch.cat([torch.arange(b - a) for a, b in pairwise(row)]) for row in bounds])
    return SimpleNamespace(tokens=tokens, token_ids=tokens, positions=positions, cu_seqlens=cu_seqlens)


def _documents(length: int) -> list[list[int]]:
    """Of two rows: unequal documents, one of a single token among them."""
    return [[0, length // 4, length // 4 + 1, 5 * length // 8, length], [0, 3 * length // 5, length]]


def _check_causality(tiny: Any, tokens: Tensor, name: str, kind: str) -> None:
    half = tokens.shape[1] // 2
    with torch.no_grad():
        whole, first = (call_model(tiny, _rows(part, None)) for part in (tokens, tokens[:, :half]))
    if (found := _difference(whole[:, :half], first)) > _CLOSE:
        raise ValueError(
            f"model.name={name!r}: in this {kind}, the logits of a token depend on the tokens after it, one of which it is to "
            f"predict ({found:.2g} of their spread, on a small model of the same kind). Use a causal decoder."
        )


def _check_documents(tiny: Any, tokens: Tensor, name: str, kind: str) -> bool:
    """Whether the model is to be given masks."""
    bounds = _documents(tokens.shape[1])
    with torch.no_grad():
        alone = [
            torch.cat([call_model(tiny, _rows(row[None, a:b], None)) for a, b in pairwise(places)], dim=1)
            for row, places in zip(tokens, bounds, strict=True)
        ]
        found: list[float] = []
        for masks in (False, True) if isinstance(tiny, UnplannedDecoder) else (False,):
            if isinstance(tiny, UnplannedDecoder):
                tiny.takes_masks = masks
            try:
                found.append(_difference(call_model(tiny, _rows(tokens, bounds)), torch.cat(alone)))
            except Exception:  # its own code takes no such mask
                break
            if found[-1] <= _CLOSE:
                return masks
    raise ValueError(
        f"model.name={name!r}: in this {kind}, documents of one row leak into each other: a packed row and its documents alone "
        f"differ by {min(found, default=1.0):.2g} of the spread of the logits, on a small model of the same kind. Its code in "
        "transformers carries masks, convolutions or states over the end of a document. Set data.document_mask=false, to "
        "train with documents that see each other, as in most pretraining."
    )


def _check_attention(tiny: HFDecoder, tokens: Tensor, name: str, kind: str) -> None:
    """Whether attention here is what transformers computes for a row: its windows, its sinks and nothing else."""
    limits = [int(n) for key in tiny.plan.shorter_than if (n := getattr(tiny.config, key, None))]
    row = _rows(tokens[:, : min(limits, default=tokens.shape[1] + 1) - 1], None)
    configs: dict[int, Any] = {
        id(module.config): module.config for module in tiny.modules() if hasattr(module, "config")
    }
    here = {key: config._attn_implementation for key, config in configs.items()}
    with torch.no_grad():
        got = call_model(tiny, row)
        try:
            for config in configs.values():
                config._attn_implementation = "eager"
            want = call_model(tiny, row)
        finally:
            for key, config in configs.items():
                config._attn_implementation = here[key]
    if (found := _difference(got, want)) > _CLOSE:
        raise ValueError(
            f"model.name={name!r}: attention of this {kind} is not what its plan says: logits here and in transformers differ "
            f"by {found:.2g} of their spread, on a small model of the same kind. Its config.json asks for something that is not "
            "known here. Use another folder, or a plan with own_attention=True."
        )


def _changes_logits(tiny: HFDecoder, tokens: Tensor) -> bool:
    """Whether logits are other than what the head, and the change that is known, make of the last hidden states."""
    seen: list[Tensor] = []

    def keep(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen.extend((inputs[0], output))

    with torch.no_grad(), tiny.get_submodule(tiny.plan.head).register_forward_hook(keep):
        logits = tiny(tokens)
        tiny.holds_head = False
        states = tiny(tokens)
        tiny.holds_head = True
    known = seen[1] if tiny.logits_change is None else tiny.logits_change(seen[1])
    return not torch.equal(seen[0], states) or _difference(known, logits) > _ROUNDING


def _check_stages(tiny: HFDecoder, tokens: Tensor, name: str, kind: str) -> None:
    batch = _rows(tokens, _documents(tokens.shape[1]))
    depth = len(tiny.repeated_layers())
    first: dict[int, str] = {}
    tied = {key: first.setdefault(id(p), key) for key, p in tiny.named_parameters(remove_duplicate=False)}
    want, wanted = _gradients([tiny], batch, tied)
    for bounds in ([*range(depth + 1)], [0, (depth + 1) // 2, depth]):
        stages = [tiny.take_stage(range(a, b), first=a == 0, last=b == depth) for a, b in pairwise(bounds) if a < b]
        try:
            got, gradients = _gradients(stages, batch, tied)
            off = {"logits": _difference(got, want)}
            off |= {key: _difference(gradients[key], wanted[key]) if key in gradients else 1.0 for key in wanted}
            worst = max(off, key=off.__getitem__)
            if off[worst] <= _CLOSE:
                continue
            why = f"{'the gradient of ' if worst != 'logits' else ''}{worst} differ by {off[worst]:.2g} of their spread"
        except Exception as err:  # a family's own code may raise anything
            why = f"it fails ({_words(err)})"
        raise ValueError(
            f"parallel.pp with model.name={name!r}: a chain of pipeline stages of this {kind} does not compute what the whole "
            f"model does: {why}, on a small model of the same kind. Its code in transformers does something around or between "
            "its layers that its plan does not say. Set parallel.pp=1."
        )


def _check_ahead(tiny: HFDecoder, tokens: Tensor, name: str, kind: str, *, packed: bool, shared: bool) -> None:
    """Whether modules for tokens further ahead can be made of the model's last layer, and share its head."""
    asked = f"model.args.{DEPTH} with model.name={name!r}"
    if not shared:
        raise ValueError(
            f"{asked}: this {kind} changes its logits after the head, and the modules' losses are computed in the head "
            f"(seen on a small model of the same kind). Set {DEPTH}=0."
        )
    try:
        add_modules(tiny, 1, name)
        why = _unlike_last(tiny, tokens) or _not_apart(tiny, tokens, packed=packed)
    except ValueError:
        raise
    except Exception as err:  # a family's own code may raise anything
        why = f"it fails ({_words(err)})"
    if why:
        raise ValueError(
            f"{asked}: a module for a token further ahead is the last layer once more, and that of a {kind} works in its place "
            f"only: {why}, on a small model of the same kind. Set {DEPTH}=0, or use a model of another family."
        )


def _unlike_last(tiny: HFDecoder, tokens: Tensor) -> str:
    """What the copy of the last layer does otherwise; empty where it does the same and reads the tokens that it is given."""
    seen: list[Any] = []

    def keep(_: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        seen[:] = [args[0] if args else keywords["hidden_states"], output if isinstance(output, Tensor) else output[0]]

    last = tiny.repeated_layers()[-1]
    module = cast("LayerModule", next(iter(tiny.mtp.values()))) if tiny.mtp is not None else None
    assert module is not None
    with torch.no_grad(), last.register_forward_hook(keep, with_kwargs=True):
        tiny(tokens)
    given, want = seen
    if given.ndim != 3 or want.shape != given.shape:
        return f"it takes {list(given.shape)} and gives {list(want.shape)}, not hidden states [B, S, d]"
    with torch.no_grad():
        call = tiny.ahead_context()
        if (found := _difference(module.through_block(given, call), want)) > _CLOSE:
            return f"a copy gives other hidden states, by {found:.2g} of their spread"
        changed = given.clone()
        changed[:, 0] = given[:, 1]
        if _difference(module.through_block(changed, call)[:, 2:], want[:, 2:]) == 0:
            return "what it attends to is not what it is given"
    return ""


def _not_apart(tiny: HFDecoder, tokens: Tensor, *, packed: bool) -> str:
    """How the first module's hidden states of packed rows differ from those of their documents alone; empty: not at all."""
    if not packed:
        return ""
    bounds = _documents(tokens.shape[1])

    def states(rows: Tensor, places: list[list[int]] | None) -> Tensor:
        assert tiny.mtp is not None
        assert tiny.mtp_embeddings is not None
        seen: list[Tensor] = []
        head = tiny.get_submodule(tiny.plan.head)
        with torch.no_grad(), head.register_forward_pre_hook(lambda _, args: seen.append(args[0])):
            call_model(tiny, _rows(rows, places))
            module = next(iter(tiny.mtp.values()))
            return module(seen[0], tiny.mtp_embeddings(rows.roll(-1, 1)), tiny.ahead_context())

    got, worst = states(tokens, bounds), 0.0
    for row, (whole, places) in enumerate(zip(tokens, bounds, strict=True)):
        for a, b in pairwise(places):
            if b - a > 1:  # a document's last token is followed by another one here
                worst = max(worst, _difference(got[row, a : b - 1], states(whole[None, a:b], None)[0, :-1]))
    return "" if worst <= _CLOSE else f"documents of one row leak into each other, by {worst:.2g} of the spread"


def _gradients(stages: list[Any], batch: Any, tied: Mapping[str, str]) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits of a chain of stages, and the gradient of every parameter, added where several stages or names hold it."""
    states = batch.tokens
    for stage in stages:
        stage.zero_grad()
        given = {key: getattr(batch, key) for key in accepted_inputs(stage, ("positions", "cu_seqlens", "token_ids"))}
        states = stage(states, **given)
    weights = torch.linspace(-1, 1, states.shape[-1])
    (states.float() * weights).square().mean().backward()
    found: dict[str, Tensor] = {}
    for stage in stages:
        for key, parameter in stage.named_parameters():
            if parameter.grad is not None:
                name = tied.get(key, key)
                found[name] = found[name] + parameter.grad if name in found else parameter.grad.clone()
    return states.detach(), found


def _difference(got: Tensor, want: Tensor) -> float:
    """The largest difference, in spreads of ``want`` (one number: in its size); infinite where either is not finite."""
    spread = want.double().std() if want.numel() > 1 else want.double().abs()
    off = (got.double() - want.double()).abs().max() / spread.clamp_min(1e-12)
    return float(off) if bool(off.isfinite()) else float("inf")
