"""Microbatches that a program iterates over, in place of numbered samples: a list, a torch ``DataLoader``, a generator.

A `titan_train.data.BatchSource` is better where it can be written: its samples have numbers, so that a run sees the same data
on any ranks and after any resume. An iterable has only an order. A resume loads the state that it saved, if it has
``state_dict`` and ``load_state_dict`` (as torchdata's ``StatefulDataLoader``), on as many data-parallel ranks, and else takes
and drops the microbatches of the steps that were made. What iterates anew (a list, a ``DataLoader``) begins again at its end, and
what it draws from torch's generator as it begins, such as the order of ``shuffle=True``, follows from the run's seed and the
samples before, alike on every rank; ``set_epoch`` gets the number of the pass, where it, its samplers or its dataset have that. A
generator ends the run.
"""

import contextlib
import hashlib
from collections.abc import Generator, Iterable, Iterator, Mapping, Sized
from typing import TYPE_CHECKING, Any, Self, cast

from titan_train.config.ramp import BatchRamp
from titan_train.data.loader.batch import Batch, row_boundaries
from titan_train.data.loader.data_loader import ITERATED, DataLoader

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_PLACE, _PASS = "iterable_of", "iterable_pass"
_END = object()
_DROP_LAST = "Pass drop_last=True to the DataLoader."
_KEYS = {"input_ids", "labels", "attention_mask", "position_ids"}


class IteratedBatches:
    """Takes the place of a `titan_train.data.DataLoader`.

    Args:
        batches: Gives this rank's microbatches, each one of

            - a pair ``(tokens, labels)``, int64 ``[B, S]`` each, where labels are the next tokens and -100 is not learned;
            - a mapping as collators of transformers make it: ``input_ids``, ``labels`` (not shifted; by default the inputs),
              ``attention_mask`` (padding on the right only) and ``position_ids`` (without a mask, a document begins where they
              restart);
            - a `titan_train.TaskBatch` that is on the device already, for other tasks than text.
        ramp: Samples of an optimizer step over all ranks.
        dp_size: Number of data-parallel ranks.
        dp_rank: This one.
        documents: Whether documents that ``position_ids`` show are kept apart.
        multiple_of: S must be a multiple of it: of the ranks that share a row under sequence parallelism.
        seed: The run's, which decides what later passes draw.
        rows: B of a microbatch.
        seq_len: The largest S; the only one if ``fixed``.
        fixed: Every microbatch must be of S = ``seq_len``, as pipeline and context parallelism need it.
        vocab_size: Ids must be below it; None for no check.
        device: Where batches are put.
        steps: Stop after this many optimizer steps; None never stops.
        name: Of the argument, for messages.

    Raises:
        ValueError: It cannot be iterated over, or is a torch ``DataLoader`` that `check_steps` refuses for ``steps``.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        *,
        ramp: BatchRamp,
        dp_size: int,
        rows: int,
        seq_len: int,
        fixed: bool,
        vocab_size: int | None,
        device: "torch.device",
        steps: int | None = None,
        name: str = "data",
        dp_rank: int = 0,
        documents: bool = True,
        multiple_of: int = 1,
        seed: int = 0,
    ) -> None:
        if not isinstance(cast("object", batches), Iterable):
            raise ValueError(
                f"{name} is {type(batches).__name__}, which gives no batches. Pass a BatchSource, or an iterable of "
                "(tokens, labels), of mappings with input_ids, or of task batches."
            )
        self._given = batches
        self._name, self._ramp, self._dp_size, self._dp_rank, self._steps = name, ramp, dp_size, dp_rank, steps
        self._rows, self._seq_len, self._fixed, self._vocab_size, self._device = (
            rows,
            seq_len,
            fixed,
            vocab_size,
            device,
        )
        self._documents, self._multiple_of, self._seed = documents, multiple_of, seed
        self._passes = 0  # that began
        self._iterator: Iterator[Any] | None = None
        self._samples = 0  # of the steps that were taken whole, over all ranks
        self._made = 0  # those steps, since this was built
        self._number = 0  # microbatches taken of the step in progress
        self._taken = 0  # samples of all ranks, those of the step in progress too
        self._since_start = 0  # microbatches since the iterator began anew
        self._loaded = False  # the iterable continues where it was saved, which may be its end
        if steps is not None:
            self.check_steps(steps)

    @property
    def global_batch(self) -> int:
        """Samples of the optimizer step in progress, or of the next one."""
        return self._ramp.at(self._samples)

    @property
    def microbatches_per_step(self) -> int:
        """Microbatches that this rank takes in that step."""
        return self.global_batch // (self._dp_size * self._rows)

    @property
    def place(self) -> tuple[int, int]:
        """The data-parallel rank, and how many there are."""
        return self._dp_rank, self._dp_size

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._steps is not None and self._made >= self._steps:
            raise StopIteration
        item = self._next()
        self._count()
        return item if hasattr(item, "samples_consumed") else self._batch(item, self._samples)

    def lacking(self, batches: Iterable[Any]) -> int:
        """The tokens that microbatches of text are short of rows of ``seq_len``."""
        return sum(self._rows * self._seq_len - b.tokens.numel() for b in batches if isinstance(b, Batch))

    def check_steps(self, steps: int) -> None:
        """Refuse a torch ``DataLoader`` whose smaller last microbatch of a pass is among those of ``steps`` further steps.

        Raises:
            ValueError: It needs ``drop_last=True``.
        """
        from torch.utils.data import DataLoader as TorchLoader

        given = self._given
        if (
            not isinstance(given, TorchLoader)
            or given.batch_size != self._rows  # its samples are no rows: a collator packs them
            or given.drop_last
            or not isinstance(given.sampler, Sized)
        ):
            return
        left = len(given.sampler) % self._rows
        samples = self._taken + self._ramp.consumed_after(steps, self._samples) - self._samples
        if left and samples // (self._dp_size * self._rows) >= len(given):
            raise ValueError(
                f"{self._name} is a DataLoader of {len(given.sampler)} samples with batch_size={given.batch_size}: the last "
                f"batch of a pass has {left}, and microbatches must be of one size. {_DROP_LAST}"
            )

    def state_dict(self) -> dict[str, Any]:
        """Samples taken, and the iterable's own state if it has one."""
        state: dict[str, Any] = {ITERATED: self._samples}
        saves = getattr(self._given, "state_dict", None)
        own = {} if saves is None else {"iterable": saves(), _PLACE: [*self.place], _PASS: max(self._passes - 1, 0)}
        return state | own

    def load_state_dict(self, state: dict[str, Any], allow_data_change: bool = False) -> None:
        """Go to where `state_dict` was called; ``allow_data_change`` continues a run of other data from the beginning, and one of
        other ranks by taking and dropping microbatches.

        Raises:
            ValueError: The run had numbered samples before, or the iterable's own state is that of another rank.
        """
        if ITERATED not in state:
            if allow_data_change:
                return
            raise ValueError(
                "the checkpoint's data position is that of numbered samples, and data is an iterable now. Pass the data that the "
                "run began with, or set checkpoint.allow_data_change to begin with the first batch of this one."
            )
        loads = "iterable" in state and hasattr(self._given, "load_state_dict")
        if loads and state.get(_PLACE, [*self.place]) != [*self.place]:
            if not allow_data_change:
                rank, size = state[_PLACE]
                raise ValueError(
                    f"the state of {self._name} was saved by data-parallel rank {rank} of {size}, and this is rank "
                    f"{self._dp_rank} of {self._dp_size}: where this rank's microbatches continue does not follow from it. "
                    "Resume on as many data-parallel ranks, pass a BatchSource, or set checkpoint.allow_data_change to begin "
                    "anew and drop as many microbatches as were taken."
                )
            loads = False
        position = int(state[ITERATED])
        if loads:
            cast("Any", self._given).load_state_dict(state["iterable"])
            self._taken, self._passes = position, int(state.get(_PASS, 0))
        else:
            for _ in range(position // (self._dp_size * self._rows)):
                self._next()
        self._samples, self._number, self._loaded = position, 0, loads

    def close(self) -> None:
        """Drop the iterator, which ends the workers of a ``DataLoader``."""
        self._iterator = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _count(self) -> None:
        self._number += 1
        if self._number == self.microbatches_per_step:
            self._number, self._samples, self._made = 0, self._samples + self.global_batch, self._made + 1

    def _next(self) -> Any:
        for _ in range(2):
            with contextlib.nullcontext() if self._iterator is not None else self._draws_of_a_pass():
                if self._iterator is None:
                    self._set_epoch()
                    self._iterator, self._since_start = iter(self._given), 0
                item = next(self._iterator, _END)
            if item is _END:
                if (self._since_start == 0 and not self._loaded) or self._iterator is self._given:
                    break
                self._iterator, self._loaded = None, False
                continue
            self._since_start, self._loaded = self._since_start + 1, False
            self._taken += self._dp_size * self._rows
            return item
        raise RuntimeError(
            f"{self._name} ended after {self._samples} samples, {self._made} steps. Give as many as the "
            "run takes, or something that can be iterated over anew, such as a list or a DataLoader."
        )

    @contextlib.contextmanager
    def _draws_of_a_pass(self) -> Generator[None]:
        """Where a pass begins; the first one of training finds the generator as every start of the run sets it."""
        import torch

        if not self._taken and self._steps is None:
            yield
            return
        text = f"{self._seed} pass after {self._taken}"
        with torch.random.fork_rng([]):
            torch.default_generator.manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1)
            yield

    def _set_epoch(self) -> None:
        """Tell whatever draws the order of a pass, such as a ``DistributedSampler``, which pass begins."""
        batched = getattr(self._given, "batch_sampler", None)
        drawn = (getattr(self._given, "sampler", None), batched, getattr(batched, "sampler", None))
        for part in (self._given, *drawn, getattr(self._given, "dataset", None)):
            if hasattr(part, "set_epoch"):
                cast("Any", part).set_epoch(self._passes)
        self._passes += 1

    def _batch(self, item: Any, samples: int) -> Batch:
        import torch

        tokens, labels, positions, starts, padding = self._tensors(item)
        rows, length = tokens.shape
        if rows != self._rows or length > self._seq_len or (self._fixed and length != self._seq_len):
            raise ValueError(
                f"{self._name} gave tokens of {list(tokens.shape)}, and a microbatch here is [{self._rows}, {self._seq_len}]: "
                "train.microbatch (train.global_batch over the data-parallel ranks, where it is 0) by model.seq_len"
                + ("." if self._fixed else " at most.")
                + (
                    f" The batches before it were larger. {_DROP_LAST}"
                    if rows < self._rows and self._since_start > 1
                    else ""
                )
            )
        if length % self._multiple_of:
            raise ValueError(
                f"{self._name} gave rows of {length} tokens, which sequence parallelism cannot split evenly over the "
                f"{self._multiple_of} ranks of parallel.tp. Pad to a multiple (pad_to_multiple_of in collators of transformers), "
                "with labels of -100."
            )
        self._check_ids("token", tokens)
        self._check_ids("label", labels)
        if positions is None:
            positions = torch.arange(length, device=tokens.device).expand(rows, -1)
        tokens, labels, positions = (
            x.to(self._device, torch.int64, non_blocking=True).contiguous() for x in (tokens, labels, positions)
        )
        if padding is not None:
            padding = padding.to(self._device, non_blocking=True)
        if starts is None:
            return Batch(tokens, labels, positions, None, length, samples, padding=padding)
        bounds = row_boundaries(starts, length)
        longest = int((bounds[:, 1:] - bounds[:, :-1]).max())
        on_device = torch.from_numpy(bounds).to(self._device)
        return Batch(tokens, labels, positions, on_device, longest, samples, boundaries=bounds)

    def _check_ids(self, kind: str, ids: "Tensor") -> None:
        if self._vocab_size is None or ids.device.type != "cpu":
            return  # to look at it would wait for the device
        wrong = (ids < 0) | (ids >= self._vocab_size)
        if kind == "label":
            wrong &= ids != -100
        if wrong.any():
            raise ValueError(
                f"{self._name} gave the {kind} {int(ids[wrong][0])}, but the tokenizer has the ids 0 to {self._vocab_size - 1}, "
                "and a label that is not learned is -100. Set the section tokenizer to the one that made the ids, and use -100 "
                "in place of another ignore_index, such as -1."
            )

    def _tensors(self, item: Any) -> "tuple[Tensor, Tensor, Tensor | None, list[Any] | None, Tensor | None]":
        """Tokens, next tokens, positions, where documents begin inside each row (None: a row is one document), and padding."""
        import torch

        if isinstance(item, Mapping):
            given = cast("Mapping[str, Tensor]", item)
            unknown = given.keys() - _KEYS
            if "input_ids" not in given or unknown:
                what = "has no input_ids" if "input_ids" not in given else f"has {min(unknown)!r}"
                raise ValueError(f"a batch of {self._name} {what}: it may have {', '.join(sorted(_KEYS))}.")
            tokens = given["input_ids"]
            labels, padding = given.get("labels", tokens), None
            if (mask := given.get("attention_mask")) is not None:
                if mask.shape != tokens.shape or bool((mask[:, 1:] > mask[:, :-1]).any()):
                    raise ValueError(
                        f"a batch of {self._name} is padded on the left, or has an attention_mask of other shape than input_ids. "
                        "Pad on the right."
                    )
                padding = mask == 0
                labels = labels.masked_fill(padding, -100)
            labels = torch.cat([labels[:, 1:], labels.new_full((len(labels), 1), -100)], 1)
            positions = given.get("position_ids")
            if positions is None or mask is not None or not self._documents:
                return tokens, labels, positions, None, padding
            positions = positions.expand_as(tokens)
            begins = positions[:, 1:] != positions[:, :-1] + 1  # as transformers finds packed documents
            labels[:, :-1] = labels[:, :-1].masked_fill(begins, -100)
            return tokens, labels, positions, [1 + row.nonzero().flatten().numpy() for row in begins.cpu()], None
        pair = cast("tuple[Any, ...]", item) if isinstance(item, tuple | list) else ()
        if (
            len(pair) != 2
            or not all(isinstance(x, torch.Tensor) and x.ndim == 2 for x in pair)
            or pair[0].shape != pair[1].shape
        ):
            raise ValueError(
                f"{self._name} gave {type(item).__name__}, not a batch of text. Give (tokens, labels), tensors [B, S] of one "
                "shape, or a mapping with input_ids."
            )
        return pair[0], pair[1], None, None, None


Loader = DataLoader | IteratedBatches
"""What gives a rank its microbatches, and keeps the position among them."""
