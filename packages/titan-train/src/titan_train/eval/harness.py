"""A model as lm-evaluation-harness calls it: ``lm_eval.simple_evaluate(model=HarnessModel(...), tasks=[...])``.

It encodes, cuts and scores requests as the harness's own model ``hf`` does, so that both give the same numbers on a run and
its export. On several ranks the harness gives each rank its requests and gathers through this class.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from lm_eval import evaluator
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from torch import Tensor

from titan_train.eval.model import EvalModel
from titan_train.eval.perplexity import rolling_windows, score
from titan_train.eval.ranks import Ranks
from titan_train.terminal import first_line

_DEFAULT_NEW_TOKENS = 256  # as the harness's own models have it
_NAMES_OF_NEW_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # the first counts
_PLAIN = (bool, int, float, str, bytes, set, frozenset)


class HarnessModel(TemplateLM):
    """A run or an exported folder."""

    def __init__(self, model: EvalModel, *, batch_size: int = 8, ranks: Ranks | None = None) -> None:
        super().__init__()
        ranks = Ranks() if ranks is None else ranks
        self.model, self.batch_size, self._ranks = model, batch_size, ranks
        self._rank, self._world_size = ranks.rank, ranks.world_size

    @property
    def eot_token_id(self) -> int:
        return self.model.eos_id

    @property
    def prefix_token_id(self) -> int:
        return self.model.prefix_id

    @property
    def max_length(self) -> int:
        return self.model.max_length

    @property
    def tokenizer_name(self) -> str:
        return self.model.name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self.model.encode(string) if add_special_tokens is False else self.model.encode_begun(string)

    def _loglikelihood_tokens(self, requests: Any, **kwargs: Any) -> list[tuple[float, bool]]:
        pairs = [(context, continuation) for _, context, continuation in requests]
        return score(self.model, pairs, batch_size=self.batch_size)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        sums: list[float] = []
        for (text,) in (request.args for request in requests):
            windows = list(rolling_windows(self.tok_encode(text), self.prefix_token_id, self.max_length))
            sums.append(sum(likely for likely, _ in score(self.model, windows, batch_size=self.batch_size)))
        return sums

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        found: list[str] = []
        for context, settings in (request.args for request in requests):
            count = _new_tokens(settings)
            room = self.max_length - count
            if room < 1:
                raise ValueError(
                    f"the task wants {count} new tokens, and the model reads {self.max_length}. Use fewer."
                )
            text = self.model.decode(self.model.greedy(self.tok_encode(context)[-room:], count))
            until = settings.get("until") or []
            for word in [*([until] if isinstance(until, str) else until), *self.model.end_words]:
                text = text.split(word)[0] if word else text
            found.append(text)
        return found

    # what the harness calls on several ranks

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.stack([torch.as_tensor(value) for value in self._ranks.gather(tensor.tolist())])

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any]:
        found = self._ranks.gather(_plain(obj))
        return found if self.rank == dst else []

    def barrier(self) -> None:
        self._ranks.gather(None)


def _plain(value: Any) -> Any:
    """A value with what ranks cannot exchange as its text: documents may hold dates, images and more."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        items = [_plain(item) for item in cast("list[Any]", value)]
        return tuple(items) if isinstance(value, tuple) else items
    known = value is None or type(value) in _PLAIN or hasattr(value, "tolist")
    return value if known else str(value)


def _new_tokens(settings: Mapping[str, Any]) -> int:
    """How many tokens a task's ``generation_kwargs`` ask for, read as the harness reads them.

    Raises:
        ValueError: They do not ask for the most likely tokens.
    """
    sampled, beams = settings.get("do_sample"), settings.get("num_beams")
    if sampled or (sampled is None and settings.get("temperature")):
        raise ValueError("the task samples its answers, and evaluation takes the most likely token.")
    if beams is not None and beams > 1:
        raise ValueError(f"the task searches with num_beams={beams}, and evaluation takes the most likely token.")
    given = (settings[name] for name in _NAMES_OF_NEW_TOKENS if settings.get(name) is not None)
    return int(next(given, _DEFAULT_NEW_TOKENS))


def run_tasks(
    model: EvalModel,
    tasks: list[str],
    *,
    batch_size: int,
    ranks: Ranks,
    include: Path | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
) -> dict[str, Any] | None:
    """Run tasks of lm-evaluation-harness.

    Args:
        model: What answers.
        tasks: Names of tasks, groups or tags.
        batch_size: Rows of one forward.
        ranks: Who shares the work.
        include: A folder with further task files.
        limit: Documents of each task; None takes all.
        num_fewshot: Solved examples before each question; None takes the task's own number.

    Returns:
        The harness's result, with its samples; None on ranks other than the first.

    Raises:
        ValueError: A task is not known.
        RuntimeError: A task's file or its data cannot be used.
    """
    manager = TaskManager(include_path=None if include is None else str(include))
    known = {*manager.all_tasks, *manager.all_groups, *manager.all_tags}
    if unknown := [name for name in tasks if name not in known]:
        raise ValueError(
            f"lm-evaluation-harness has no tasks {unknown}. Name some of its tasks, or give a folder of task files with "
            "--include-path."
        )
    run: Any = evaluator.simple_evaluate
    try:
        return run(
            model=HarnessModel(model, batch_size=batch_size, ranks=ranks),
            tasks=tasks,
            task_manager=manager,
            limit=limit,
            num_fewshot=num_fewshot,
            bootstrap_iters=0,
            log_samples=True,
            confirm_run_unsafe_code=False,
        )
    except Exception as err:  # of the task's file, its data, or the library that loads them
        raise RuntimeError(
            f"{', '.join(tasks)}: lm-evaluation-harness failed ({type(err).__name__}: {first_line(err)[:300]})"
        ) from err
