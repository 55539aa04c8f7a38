"""Several tokens a forward: the model's modules for tokens further ahead draft, the model verifies (DeepSeek-V3, section 5.4.3).

The module that was trained to predict the token after the next one knows, once the next token is chosen, a likely one after it;
with D modules there are D drafts. One forward of the model over the newest token and the drafts then gives what it would have
chosen after each of them: drafts are accepted up to the first that differs, and there the model's own choice follows. So the
tokens are those of decoding one by one (speculative decoding, arXiv:2211.17192). Only rounding could tell them apart: a forward
of several tokens sums in another order, which decides where two tokens are equally likely.

Greedy choices only. The rows of a batch advance together, by the fewest drafts that one of them accepts.

Shapes: B rows, n tokens of a forward, d width, D modules, V vocabulary.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from titan_train.generation.cache import CacheLength
from titan_train.models import unwrap
from titan_train.models.common.mtp import MTPModules, mtp_of
from titan_train.models.traits import traits_of


@dataclass(slots=True)
class DraftCount:
    """How drafts fared; a stream adds to it."""

    drafted: int = 0
    """Tokens that modules drafted and the model verified, over all rows that had not ended."""
    accepted: int = 0
    """Of them, those that were taken."""
    forwards: int = 0
    """Forwards of the model that verified."""

    def text(self) -> str:
        """One line on them."""
        share = self.accepted / max(1, self.drafted)
        return f"{self.accepted} of {self.drafted} drafted tokens accepted ({share:.0%}), in {self.forwards} forwards"


def drafted_tokens(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    tokens: Tensor,
    in_use: CacheLength,
    *,
    vocab_size: int | None,
    count: DraftCount,
) -> Generator[list[int], Sequence[bool], None]:
    """The likeliest next token of each row, without end; the caller sends which rows have ended.

    Args:
        model: With modules, inside `titan_train.generation.kv_cache`.
        prompts: Token ids of each row.
        tokens: ``[B, T]`` int64, the prompts padded on the right; written to.
        in_use: Of the caches.
        vocab_size: Choose among so many first tokens.
        count: What is added to.
    """
    whole: Any = unwrap(model)
    modules = mtp_of(whole)
    assert modules is not None
    depth, device = len(modules), tokens.device
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)  # of what is known
    longest = int(lengths.max())
    window = torch.arange(longest, device=device).expand(len(prompts), -1)
    chosen_after = (lengths - 1)[:, None]
    ended: Sequence[bool] = [False] * len(prompts)
    drafts = 0
    in_use.prompts = lengths
    while True:
        in_use.used = longest + drafts
        with torch.no_grad():
            # window: places of the tokens that the model is given; of chosen_after, those whose next token is asked for
            hidden, logits = _forward(model, tokens, window, chosen_after)
            best = logits[..., :vocab_size].argmax(-1)
            accepted = _agreeing(best, tokens, lengths, drafts, ended) if drafts else 0
            for n in range(accepted + 1):
                tokens.scatter_(1, (lengths + n)[:, None], best[:, n : n + 1])
            new = best[:, : accepted + 1].tolist()
            lengths, longest = lengths + accepted + 1, longest + accepted + 1
            in_use.accepted = accepted + 1
        if drafts:
            running = len(ended) - sum(ended)
            count.drafted += drafts * running
            count.accepted += accepted * running
            count.forwards += 1
        for n in range(accepted + 1):
            ended = yield [row[n] for row in new]
        with torch.no_grad():
            in_use.used = longest + depth
            _draft(whole, modules, hidden, tokens, window, lengths, vocab_size)
        drafts = depth
        window = chosen_after = (lengths - 1)[:, None] + torch.arange(depth + 1, device=device)


def _forward(model: nn.Module, tokens: Tensor, window: Tensor, asked: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states ``[B, n, d]`` at the places of ``window``, and logits ``[B, m, V]`` at those of ``asked`` among them."""
    with _head_at(unwrap(model), asked - window[:, :1]) as seen:
        logits = model(tokens.gather(1, window), positions=window)
    return seen[0], logits


@contextmanager
def _head_at(whole: Any, places: Tensor) -> Generator[list[Tensor]]:
    """Inside, the head computes the logits of these places alone; yields what it was given of all."""
    seen: list[Tensor] = []

    def keep(_module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        seen.append(inputs[0])
        return (_at(inputs[0], places),)

    with _head_of(whole).register_forward_pre_hook(keep):
        yield seen


def _head_of(whole: nn.Module) -> nn.Module:
    """The linear to the vocabulary."""
    return whole.get_submodule(str(traits_of(whole).loss_head))


def _draft(
    whole: Any,
    modules: MTPModules,
    hidden: Tensor,
    tokens: Tensor,
    window: Tensor,
    lengths: Tensor,
    vocab_size: int | None,
) -> None:
    """Write each module's draft behind the known tokens, of which ``hidden`` is what the model knows at ``window``."""
    context = whole.ahead_context(window)
    head = _head_of(whole)
    last = (lengths - 2)[:, None] - window[:, :1]
    for k, module in enumerate(modules.values()):
        hidden = module(hidden, whole.mtp_embeddings(tokens.gather(1, window + 1 + k)), context)
        logits = head(_at(hidden, last))
        tokens.scatter_(1, (lengths + k)[:, None], logits[..., :vocab_size].argmax(-1))


def _agreeing(best: Tensor, tokens: Tensor, lengths: Tensor, drafts: int, ended: Sequence[bool]) -> int:
    """How many drafts every row that has not ended accepts."""
    places = lengths[:, None] + torch.arange(drafts, device=tokens.device)
    agreeing = (tokens.gather(1, places) == best[:, :drafts]).int().cumprod(-1).sum(-1).tolist()
    return min(n for n, end in zip(agreeing, ended, strict=True) if not end)


def _at(values: Tensor, places: Tensor) -> Tensor:
    """``[B, n, d]`` at ``[B, m]`` to ``[B, m, d]``."""
    return values.gather(1, places.unsqueeze(-1).expand(-1, -1, values.shape[-1]))
