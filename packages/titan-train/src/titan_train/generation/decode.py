"""Generate tokens from a model, row by row of a batch, as a stream.

Prefill: one forward over all prompts, padded on the right to the longest. Decode: one token of each row a step, each
row at its own position. A model of transformers with windows, sinks or states keeps a cache by itself (`own_cache`). One
without either runs the whole sequence again at each step, which gives the same tokens at a higher cost.

Shapes: B rows, P longest prompt, V vocabulary.
"""

import sys
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from titan_train.generation.cache import CacheLength, kv_cache, supports_cache
from titan_train.generation.draft import DraftCount, drafted_tokens
from titan_train.generation.own_cache import keeps_own_cache, own_cache_logits
from titan_train.generation.sampling import Sampling, choose_tokens
from titan_train.models import unwrap
from titan_train.models.call import computes_on, evaluating
from titan_train.models.common.mtp import mtp_of
from titan_train.models.traits import traits_of
from titan_train.values import Range, check_values


def generate(model: nn.Module, prompts: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
    """Continue every prompt; options and errors as in `stream`.

    Returns:
        The new tokens of each row, without the stop token that ended it.
    """
    rows: list[list[int]] = [[] for _ in prompts]
    for step in stream(model, prompts, **options):
        for row, token in zip(rows, step, strict=True):
            if token is not None:
                row.append(token)
    return rows


_GREEDY = Sampling()


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoding:
    """How prompts are continued."""

    max_new_tokens: Annotated[int, Range(0)]
    """The most tokens to add to each row."""
    sampling: Sampling = _GREEDY
    """How tokens are chosen; the default takes the likeliest."""
    stop_ids: Collection[int] = ()
    """Tokens that end their row; they are not yielded."""
    seeds: Sequence[int] | None = None
    """One per row, which fixes the row's draws whatever else is in the batch; None takes 0, 1, 2, ..."""
    use_cache: bool | None = None
    """None uses the key-value cache where the model supports it; False never does."""
    compiled: bool = False
    """Compile the step of one token, with CUDA graphs on a GPU: worth it for many tokens. Needs the cache."""
    vocab_size: int | None = None
    """Choose among this many first tokens: the tokenizer's, where the model has more rows; None takes all."""
    multiple_of: int = 1
    """Call the model with a multiple of so many tokens, which sequence parallelism cuts evenly over its ranks."""
    draft: DraftCount | None = None
    """Let the model's modules for tokens further ahead draft, verify several tokens a forward, and count here how many are
    accepted: the same greedy tokens in fewer forwards."""

    def __post_init__(self) -> None:
        check_values("", self)


def stream(model: nn.Module, prompts: Sequence[Sequence[int]], **options: Any) -> Iterator[list[int | None]]:
    """Continue every prompt, yielding as tokens are chosen.

    Ranks that share a sharded model must all run this with the same arguments. The model must not be trained before
    the stream ends or is closed.

    Args:
        model: Any model of a run, with any wrappers.
        prompts: Token ids of each row, at least one; rows may differ in length.
        options: The fields of `Decoding`; ``max_new_tokens`` is required.

    Yields:
        For each step, the new token of each row, or None for a row that has ended.

    Raises:
        ValueError: No or empty prompts, the wrong number of seeds, a sequence longer than the model's learned
            positions, or ``use_cache=True`` on a model that does not support it.
    """
    how = Decoding(**options)
    if how.seeds is None:
        how = replace(how, seeds=range(len(prompts)))
    if how.use_cache is None:
        how = replace(how, use_cache=supports_cache(model) or (how.multiple_of == 1 and keeps_own_cache(model)))
    _check(model, prompts, how)
    return _stream(model, prompts, how)


def _stream(model: nn.Module, prompts: Sequence[Sequence[int]], how: Decoding) -> Iterator[list[int | None]]:
    device = computes_on(model)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    beyond = 0 if how.draft is None else len(mtp_of(model) or ()) + 1  # drafts behind the last token
    total = _rounded(int(lengths.max()) + how.max_new_tokens + beyond, how.multiple_of)
    tokens = torch.zeros(len(prompts), total, dtype=torch.int64, device=device)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(list(prompt), device=device)
    generators = [torch.Generator().manual_seed(seed) for seed in how.seeds or ()]
    next_logits: Callable[[nn.Module, Tensor, Tensor, int], Tensor] = partial(_recomputed_logits, how.multiple_of)
    seen: Tensor | None = None
    ended = [False] * len(prompts)
    with ExitStack() as restore:
        restore.enter_context(evaluating([model]))
        # an exported model keeps caches of its own
        own: Callable[[], Callable[[nn.Module, Tensor, Tensor, int], Tensor]] | None = getattr(
            model, "new_decoder", None
        )
        if how.draft is not None:
            yield from _drafted(model, prompts, tokens, restore.enter_context(kv_cache(model, total)), how)
            return
        if own is not None:
            next_logits = own()
        elif how.use_cache and not supports_cache(model):
            next_logits = restore.enter_context(own_cache_logits(unwrap(model), prompts))
        elif how.use_cache:
            in_use = restore.enter_context(kv_cache(model, total))
            next_logits = _CachedLogits(in_use, prompts, how, traits_of(model).rope_limits)
        for step in range(how.max_new_tokens):
            with torch.no_grad():  # not around the yield: that would turn the caller's gradients off, too
                with _eager_unless(how.compiled and step > 0):
                    logits = next_logits(model, tokens, lengths, step)[:, : how.vocab_size]
                if seen is None and how.sampling.repetition_penalty != 1:
                    seen = _seen(tokens, lengths, logits.shape[-1])
                chosen = choose_tokens(logits, seen, how.sampling, generators)
                tokens.scatter_(1, lengths[:, None], chosen[:, None])
                if seen is not None:
                    seen.scatter_(1, chosen[:, None], True)
                lengths = lengths + 1
            ids = chosen.tolist()
            ended = [was or token in how.stop_ids for was, token in zip(ended, ids, strict=True)]
            if all(ended):
                return
            yield [None if end else token for end, token in zip(ended, ids, strict=True)]


def _drafted(
    model: nn.Module, prompts: Sequence[Sequence[int]], tokens: Tensor, in_use: CacheLength, how: Decoding
) -> Iterator[list[int | None]]:
    """`_stream` with drafts."""
    assert how.draft is not None
    rows = drafted_tokens(model, prompts, tokens, in_use, vocab_size=how.vocab_size, count=how.draft)
    ended = [False] * len(prompts)
    for step in range(how.max_new_tokens):
        ids = rows.send(ended) if step else next(rows)
        ended = [was or token in how.stop_ids for was, token in zip(ended, ids, strict=True)]
        if all(ended):
            return
        yield [None if end else token for end, token in zip(ended, ids, strict=True)]


def _eager_unless(compiled: bool) -> AbstractContextManager[object]:
    """Run compiled blocks eagerly: sequences grow, and each length would be compiled again.

    Where nothing of torch's compiler is imported, nothing is compiled. `set_stance` would import it, for over a second.
    """
    if not compiled and "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("default" if compiled else "force_eager")


class _CachedLogits:
    """Logits after each row's last token, ``[B, V]``: the prompts at step 0, afterwards only the newest token.

    Where the longest row exceeds one of the model's ``rope_limits``, the whole rows again.
    """

    def __init__(
        self, in_use: CacheLength, prompts: Sequence[Sequence[int]], how: Decoding, limits: Sequence[int]
    ) -> None:
        lengths = [len(prompt) for prompt in prompts]
        self._in_use = in_use
        self._longest = max(lengths)
        self._multiple_of = how.multiple_of
        self._even = min(lengths) == self._longest and how.multiple_of == 1
        self._compiled = how.compiled
        self._limits = limits
        self._one_token: Callable[..., Tensor] | None = None

    def __call__(self, model: nn.Module, tokens: Tensor, lengths: Tensor, step: int) -> Tensor:
        width = _rounded(self._longest + step, self._multiple_of)
        if step == 0 or any(self._longest + step - 1 <= limit < width for limit in self._limits):
            self._in_use.prompts = lengths
            self._in_use.used = width
            positions = torch.arange(width, device=tokens.device).expand(tokens.shape[0], -1)
            with _head_of_last(model, lengths):
                return _last(model(tokens[:, :width], positions=positions), lengths)
        self._in_use.used = None if self._compiled else self._longest + step
        self._in_use.even = self._even and not self._compiled
        # the same token at the same position, as often as the ranks need it
        last = (lengths - 1)[:, None].expand(-1, self._multiple_of)
        if self._one_token is None:
            self._one_token = _compile(model) if self._compiled else model
        return self._one_token(tokens.gather(1, last), positions=last)[:, 0]


def _compile(model: nn.Module) -> Callable[..., Tensor]:
    mode = "reduce-overhead" if next(model.parameters()).is_cuda else "default"
    return torch.compile(unwrap(model), mode=mode, dynamic=False)  # type: ignore[return-value]


def _rounded(count: int, multiple_of: int) -> int:
    return -(-count // multiple_of) * multiple_of


def _recomputed_logits(multiple_of: int, model: nn.Module, tokens: Tensor, lengths: Tensor, step: int) -> Tensor:
    """The same from the whole rows; padding follows a row's last token, so causal attention never sees it."""
    with _head_of_last(model, lengths):
        return _last(model(tokens[:, : _rounded(int(lengths.max()), multiple_of)]), lengths)


@contextmanager
def _head_of_last(model: nn.Module, lengths: Tensor) -> Generator[None]:
    """Inside, a model that names its head computes logits of each row's last token alone, ``[B, 1, V]``."""
    whole = unwrap(model)
    name = traits_of(whole).loss_head
    if name is None:
        yield
        return

    def last(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (_last(inputs[0], lengths).unsqueeze(1), *inputs[1:])

    with whole.get_submodule(name).register_forward_pre_hook(last):
        yield


def _last(values: Tensor, lengths: Tensor) -> Tensor:
    """Of each row's last token, ``[B, S, ...]`` to ``[B, ...]``; a single one is the last."""
    last = lengths - 1 if values.shape[1] > 1 else torch.zeros_like(lengths)
    return values[torch.arange(values.shape[0], device=values.device), last]


def _seen(tokens: Tensor, lengths: Tensor, vocab_size: int) -> Tensor:
    """``[B, V]`` bool: the tokens of each row's prompt."""
    prompt = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
    # a prompt may hold tokens that are never chosen: those that stand for images
    most = max(vocab_size, int(tokens.max()) + 1)
    counts = torch.zeros(tokens.shape[0], most, dtype=torch.int32, device=tokens.device)
    return (counts.scatter_add_(1, tokens, prompt.int()) > 0)[:, :vocab_size]


def _check(model: nn.Module, prompts: Sequence[Sequence[int]], how: Decoding) -> None:
    if not prompts:
        raise ValueError("no prompt was given: give at least one row of token ids.")
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {row} is empty: a model continues something; start it with the BOS token.")
    if how.seeds is not None and len(how.seeds) != len(prompts):
        raise ValueError(f"{len(how.seeds)} seeds for {len(prompts)} prompts: give one for each row.")
    supported = supports_cache(model)
    if how.use_cache and not supported and (how.multiple_of > 1 or not keeps_own_cache(model)):
        raise ValueError(
            f"{type(unwrap(model)).__name__} does not support the key-value cache: its forward must take positions, "
            "its tokens must meet only in titan_train.models.CausalAttention, and it must say so by "
            "supports_kv_cache = True. Pass use_cache=None to run without."
        )
    if how.compiled and not (how.use_cache and supported):
        raise ValueError(
            "compiled=True needs the key-value cache, whose step has a fixed shape. Leave use_cache=None, and compiled=False for "
            "a model that keeps another cache or none."
        )
    given = max(len(prompt) for prompt in prompts)
    if how.draft is not None:
        _check_draft(model, how, given)
    limit = traits_of(model).max_seq_len
    if limit is not None and given + how.max_new_tokens > limit:
        raise ValueError(
            f"a prompt of {given} tokens and max_new_tokens={how.max_new_tokens} need {given + how.max_new_tokens} "
            f"positions, but the model has learned {limit}: the most it can add is {max(0, limit - given)}."
        )


def _check_draft(model: nn.Module, how: Decoding, given: int) -> None:
    if (modules := mtp_of(model)) is None:
        raise ValueError(
            f"drafts need modules that predict tokens further ahead, and this {type(unwrap(model)).__name__} has none: it was "
            "not trained with model.args.mtp_depth. Generate without drafts."
        )
    sampling = how.sampling
    if sampling.temperature != 0 or sampling.repetition_penalty != 1:
        raise ValueError(
            f"drafts with temperature={sampling.temperature} and repetition_penalty={sampling.repetition_penalty}: a draft is "
            "accepted if it is the likeliest token. Set temperature 0 and repetition_penalty 1, or generate without drafts."
        )
    if how.compiled or how.multiple_of > 1 or not (how.use_cache and supports_cache(model)):
        raise ValueError(
            "drafts need the key-value cache of plain attention, and forwards of as many tokens as there are drafts: leave "
            "use_cache=None, compiled=False and multiple_of=1; a model with windows or another cache generates without drafts."
        )
    crossed = [n for n in traits_of(model).rope_limits if given <= n < given + how.max_new_tokens + len(modules)]
    if crossed:
        raise ValueError(
            f"drafts with a prompt of {given} tokens and max_new_tokens={how.max_new_tokens}: rows of more than {crossed[0]} "
            "tokens are rotated by other factors (rope_type longrope), so that all keys are computed anew. Generate without "
            "drafts, or add fewer tokens."
        )
