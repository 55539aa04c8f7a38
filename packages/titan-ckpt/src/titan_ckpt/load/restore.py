"""Restore: choose the step, match names, check the bytes, fill the state.

It takes the requested step or, with ``fallback``, an older one if that is damaged. Rank 0 lists the steps, and all ranks use
its list: a network file system may show each rank another one. If a run that saves to the same root deletes the step that is
being read, the steps are listed again. The state does not change before every rank has matched all names and checked all
blocks that it reads.
"""

import collections
import contextlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from titan_ckpt.comm import ByteComm
from titan_ckpt.errors import CheckpointError, DamageError, NoIntactStepError, NoSuchStepError, malformed_is_damage
from titan_ckpt.format.index import StoredTensor
from titan_ckpt.format.names import STATE_NAME, rank_state_name
from titan_ckpt.load.copies import (
    Block,
    Copy,
    Verify,
    assign_blocks,
    box_copies,
    check_blocks,
    encode_reads,
    plan_copies,
    read_tensor,
    run_copies,
    touched_blocks,
)
from titan_ckpt.load.reader import StepReader
from titan_ckpt.state import leaves
from titan_ckpt.state.dtypes import DTYPES
from titan_ckpt.state.leaves import reseed, set_rng_state
from titan_ckpt.state.model import ModelState, as_modules, model_state
from titan_ckpt.state.optimizer import OptimRestore
from titan_ckpt.state.sharding import is_dtensor
from titan_ckpt.state.train_state import LeftOut, Stateful, TrainState, check_state, listed, shard_of
from titan_ckpt.steps import leftovers, listing
from titan_ckpt.storage.paths import StorePath

_log = logging.getLogger("titan_ckpt")


# How often the steps are listed if other processes delete them.
_LISTINGS = 20


def restore_newest(
    root: StorePath,
    state: TrainState,
    step: int | Literal["latest"],
    comm: ByteComm,
    passed_over: list[tuple[int, DamageError]],
    *,
    verify: Verify,
    strict: bool,
    cast: bool,
    fallback: bool,
    inherited_wait_s: float,
) -> int:
    """As `Checkpointer.restore`. ``passed_over`` gets the damaged steps that were not used, newest first. Collective."""
    passed_over.clear()
    _refuse_different(step, comm)
    for attempt in range(1, _LISTINGS + 1):
        present = _listed(root, comm, inherited_wait_s)
        if step != "latest":  # it and the older ones
            numbers = [number for number, _ in present]
            if step not in numbers:
                raise NoSuchStepError(f"{root} has no step {step}; it has {numbers}.")
            present = present[: numbers.index(step) + 1]
        if not present:
            return 0
        passed_over.clear()
        for number, name in reversed(present):
            try:
                return restore_step(root / name, state, comm, verify, strict, cast)
            except Exception as err:  # raised on every rank, on the one that failed as its own: all continue alike
                if attempt < _LISTINGS and _gone(root / name, comm):
                    break
                if not isinstance(err, DamageError) or not fallback:
                    raise
                # A new error: the traceback of this one would keep buffers and maps alive.
                damage = DamageError(err.step, err.damages, err.seen_by)
                if number == present[0][0]:
                    raise NoIntactStepError(root, [*(known for _, known in passed_over), damage]) from None
                passed_over.append((number, damage))
                _log.warning("step %d is not used, an older one is tried: %s", number, err)
    raise AssertionError("unreachable: the last listing returns or raises")


def _refuse_different(step: int | Literal["latest"], comm: ByteComm) -> None:
    asked = [reply.decode() for reply in comm.all_gather(str(step).encode())]
    other = next((rank for rank, theirs in enumerate(asked) if theirs != asked[0]), None)
    if other is not None:
        raise ValueError(
            f"rank 0 asks for step {asked[0]}, and rank {other} for step {asked[other]}: the restored state would be a mixture. "
            "Choose the step on one rank, and send it to the others."
        )


def _listed(root: StorePath, comm: ByteComm, inherited_wait_s: float) -> list[tuple[int, str]]:
    """Number and folder name of every step, oldest first, as rank 0 sees them."""

    def find() -> list[tuple[int, str]]:
        leftovers.await_inherited(root, inherited_wait_s)
        return [(number, path.name) for number, path in listing.step_folders(root)]

    return comm.from_rank0(
        find, f"listing {root}", lambda err: CheckpointError(f"the steps below {root} cannot be listed: {err}")
    )


def _gone(path: StorePath, comm: ByteComm) -> bool:
    """Whether a step was deleted, as rank 0 sees it."""
    gone = False
    if comm.rank == 0:
        with contextlib.suppress(OSError):
            gone = listing.is_gone(path)
    return comm.broadcast(b"1" if gone else b"") == b"1"


def restore_step(
    path: StorePath, state: TrainState, comm: ByteComm, verify: Verify, strict: bool, cast: bool = False
) -> int:
    """Fill ``state`` from the step in ``path`` and return its number. Collective.

    All ranks return, or all raise. Damage that one rank finds is a `DamageError` on every rank, before the state of any
    rank changes. So all ranks can take another step. Only a frame that was crafted to match its digest is found while the state
    changes; another step then fills all of it.
    """
    doing = f"restore of {path.name}"

    def failure(err: OSError) -> CheckpointError:
        return CheckpointError(f"{path} cannot be read: {err}")

    restore = comm.attempt(lambda: _Restore(path, state, comm, strict, cast), doing, failure)
    positions = None
    if any(comm.all_gather(b"1" if restore.needs_positions else b"")):
        positions = comm.from_rank0(restore.saved_positions, doing, failure)
    comm.attempt(lambda: restore.match_place(positions), doing, failure)
    comm.agree(restore.unexpected_names(), doing)
    blocks = restore.my_share(verify, doing, failure)
    comm.attempt(lambda: restore.check(blocks), doing, failure)
    comm.attempt(restore.apply, f"{doing}, half done", failure)
    return restore.reader.manifest.step


class _Restore:
    """A restore. The constructor makes every check that needs no other rank, `match_place` those of what each rank saved."""

    def __init__(self, path: StorePath, state: TrainState, comm: ByteComm, strict: bool, cast: bool) -> None:
        check_state(state)
        self.state, self.comm, self.strict = state, comm, strict
        self._cast = cast or not strict
        self.reader = StepReader(path, all_sizes=comm.rank == 0)
        shared = self.reader.shared_state()
        self._encoded_extra: dict[str, Any] = shared.pop("extra")
        optim: dict[str, Any] = shared.pop("optim")
        self.shared: dict[str, Any] = {k: self._decode(v) for k, v in shared.items()}
        # Large tensors wait until it is known where they belong.
        self.shared["optim"] = {
            k: self._decode(v, tensor=None if k == "groups" else self._stored) for k, v in optim.items()
        }
        self.model: ModelState = model_state(as_modules(state.model), state.tied)
        self.copies: dict[str, list[Copy]] = {}
        self.read_later: dict[str, list[Copy]] = {}
        self.optim_used: set[str] | None = None
        self.apply_steps: list[Callable[[], Any]] = []
        asked = [name for name in ("model", "optim", "sched", "data") if getattr(state, name) is not None]
        missing = [name for name in asked if name not in self.shared["has"]]
        self._refuse(
            bool(missing),
            f"{self.reader.path} was saved without {', '.join(missing)}. Leave it out of TrainState, or pass strict=False "
            "to load the rest.",
        )
        self._match_model()
        self._match_optim()
        self._match_sched()
        self._match_extra()
        self._own_position = self._find_own_position()

    @property
    def needs_positions(self) -> bool:
        """Whether this rank has a data position to restore, and none was saved at its place among as many ranks."""
        return self.state.data is not None and "data" in self.shared["has"] and self._own_position is None

    def match_place(self, positions: Sequence[tuple[int, Any]] | None) -> None:
        """Match what each rank saved for itself. ``positions``: `saved_positions`, where a rank needs them."""
        self._match_data(positions or ())
        self._match_rng()

    def apply(self) -> None:
        """Fill the state, random generators last."""
        run_copies(self.reader, self.copies)
        for step in self.apply_steps:
            step()

    def my_share(self, verify: Verify, doing: str, failure: Callable[[OSError], Exception]) -> set[Block]:
        """The blocks that this rank must check. Collective; errors are raised as `ByteComm.attempt` says."""
        if verify == "none":
            return set()
        blocks = touched_blocks(self.reader, {**self.copies, **self.read_later})
        if self.comm.size > 1:
            mine = self.comm.attempt(lambda: encode_reads(blocks, self.reader.path, self.comm.rank), doing, failure)
            blocks = assign_blocks(blocks, self.comm.all_gather(mine), self.comm.rank)
        if verify == "all":
            files = self.reader.index.files
            for file in range(self.comm.rank, len(files), self.comm.size):
                blocks |= {(file, block) for block in range(len(files[file].blocks))}
        return blocks

    def check(self, blocks: set[Block]) -> None:
        """Check blocks, and the sizes of all files to read. Raises `DamageError` if one is damaged."""
        copies = [copy for found in (self.copies, self.read_later) for listed in found.values() for copy in listed]
        for file in {copy.chunk.file for copy in copies}:
            self.reader.bytes_of(file)  # maps it; other ranks may check its blocks
        damages = check_blocks(self.reader, blocks)
        if damages:
            raise DamageError(str(self.reader.path), damages)

    def unexpected_names(self) -> Exception | None:
        """The error for names of the step that are on no rank. Collective."""
        if not self.strict:
            return None
        names = None if self.state.model is None else [*self.model.tensors, *self.model.tied, *self.model.leaves]
        optim = None if self.optim_used is None else sorted(self.optim_used)
        replies = {*self.comm.all_gather(json.dumps([names, optim]).encode())}
        models, optims = zip(*(json.loads(reply) for reply in replies), strict=True)
        if any(model is not None for model in models):
            known = {name for model in models for name in model or ()}
            known |= {first for alias, first in self.reader.index.tied.items() if alias in known}
            extra = [n for n in [*self.reader.index.tensors["model"], *self.shared["model"]] if n not in known]
            if extra:
                return ValueError(
                    f"the step holds {len(extra)} model entries that the model does not have: {extra[:6]}. Build the "
                    "model it was saved from, or pass strict=False to leave them out."
                )
        if any(optim is not None for optim in optims):
            known = {name for optim in optims for name in optim or ()}
            extra = [n for group in self.shared["optim"]["groups"] for n in group["params"] if n not in known]
            if extra and self.state.own_settings:
                if self.comm.rank == 0:
                    text = "%s has optimizer state of %d parameters that are not trained now; it is left out: %s"
                    _log.warning(text, self.reader.path, len(extra), extra[:6])
            elif extra:
                return ValueError(
                    f"the step holds optimizer state of {len(extra)} parameters that the optimizer does not have: "
                    f"{extra[:6]}. Give it the same parameters, or pass strict=False to leave them out."
                )
        return None

    def _refuse(self, wrong: bool, text: str) -> None:
        if wrong and self.strict:
            raise ValueError(text)

    def _match_model(self) -> None:
        index = self.reader.index
        missing = [name for name in self.model.leaves if name not in self.shared["model"]]
        loaded: dict[str, Any] = {}
        for name, aliases in self.model.names_of().items():
            tensor = self.model.tensors[name]
            stored = next((found for alias in aliases if (found := index.find("model", alias))), None)
            if stored is None:
                missing.append(name)
                continue
            self._check_tied_equal([alias for alias in aliases if alias in index.tensors["model"]])
            target = torch.empty_like(tensor) if name in self.model.detached else tensor
            self._copy(stored, target, "model", name)
            for number, other in enumerate(self.model.copies.get(name, ()), 1):
                self._copy(stored, other, "model", name, f" (copy {number})")
            if name in self.model.detached:
                loaded[name] = target
        self._refuse(
            bool(missing),
            f"{len(missing)} entries of the model are not in {self.reader.path}: {missing[:6]}. Build the "
            "model it was saved from, or pass strict=False to keep their current values.",
        )
        if missing:
            _log.warning("%s does not hold these; they keep their values: %s", self.reader.path, missing)
        loaded |= {name: self.shared["model"][name] for name in self.model.leaves if name in self.shared["model"]}
        if loaded:
            self.apply_steps.append(lambda: self.model.load(loaded))

    def _check_tied_equal(self, names: list[str]) -> None:
        """A weight with several names in this model must not have been saved as different weights."""
        if len(names) > 1:
            first, *others = (read_tensor(self.reader, "model", name) for name in names)
            if not all(torch.equal(first, other) for other in others):
                raise ValueError(
                    f"{names} are one tied weight in this model, but different weights in {self.reader.path}. "
                    "Build the model untied."
                )

    def _match_optim(self) -> None:
        optims = listed(self.state.optim)
        if not optims or "optim" not in self.shared["has"]:
            return
        stored = self.reader.index.tensors
        restore = OptimRestore(
            optims,
            self.model.owners,
            self.reader.index,
            self.shared["optim"],
            self.state.shards,
            place=self._placed,
            stored_dtypes={name: DTYPES[kind.dtype] for name, kind in stored["model"].items()},
            strict=self.strict,
            own_settings=self.state.own_settings,
            keys=self.state.optim_keys,
        )
        # A weight that is tied here may have been saved as several weights.
        self.optim_used = restore.used | {alias for alias, first in self.model.tied.items() if first in restore.names}
        for key, (own, target) in restore.targets.items():
            self._copy(stored["optim"][key], target, "optim", own)
        if restore.unknown:
            text = "%s has no optimizer state for %d parameters; they keep what they have: %s"
            _log.warning(text, self.reader.path, len(restore.unknown), restore.unknown[:6])
        self.apply_steps.append(restore.finish)

    def _copy(self, stored: StoredTensor, target: Tensor, section: str, key: str, note: str = "") -> None:
        """Plan to fill ``target``, which is called ``key`` here and may have another name in the step."""
        shard = shard_of(self.state.shards, section, key, tuple(target.shape), self.model)
        path = f"{section}.{key}{note}"
        self.copies.setdefault(path, []).extend(plan_copies(stored, target, path, cast=self._cast, shard=shard))

    def _match_sched(self) -> None:
        scheds, saved = listed(self.state.sched), self.shared["sched"]
        self._refuse(
            len(scheds) != len(saved) and bool(scheds),
            f"{len(saved)} schedulers were saved, but TrainState has {len(scheds)}. Pass the same ones.",
        )
        for sched, value in zip(scheds, saved, strict=False):
            self.apply_steps.append(lambda sched=sched, value=value: sched.load_state_dict(value))

    def _match_extra(self) -> None:
        if isinstance(self.state.extra, LeftOut) and not self.state.extra:
            return
        absent = [key for key in self.state.extra if key not in self._encoded_extra]
        self._refuse(
            bool(absent), f"extra values {absent} were not saved; pass strict=False to keep their current values."
        )
        for key, encoded in self._encoded_extra.items():
            current = self.state.extra.get(key)
            like = current.state_dict() if isinstance(current, Stateful) else current
            self._set_extra(key, current, self._placed(self._decode(encoded, tensor=self._stored), like))

    def _set_extra(self, key: str, current: Any, value: Any) -> None:
        if isinstance(current, Stateful):
            self.apply_steps.append(lambda: current.load_state_dict(value))
        elif not isinstance(current, Tensor):
            self.apply_steps.append(lambda: self.state.extra.__setitem__(key, value))
        elif (
            isinstance(value, Tensor) and value.shape == current.shape and (value.dtype == current.dtype or self._cast)
        ):
            self.apply_steps.append(lambda: current.detach().copy_(value))
        else:
            saved = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"extra {key!r} is {current.dtype} {list(current.shape)}, but {saved} was saved.")

    def _placed(self, value: Any, current: Any, owner: Tensor | None = None) -> Any:
        """Decoded state, with each tensor where the one at the same place in ``current`` is, in its layout if it is a `DTensor`.

        If there is none, as ``owner``: the parameter that the state is of.
        """
        if type(value) in (list, tuple, set, frozenset):
            fits = isinstance(current, list | tuple) and len(current) == len(value)
            likes: Any = current if fits else [None] * len(value)
            return type(value)(self._placed(item, like, owner) for item, like in zip(value, likes, strict=True))
        if type(value) in (dict, collections.OrderedDict, collections.Counter):
            inside = current if isinstance(current, Mapping) else {}
            pairs = [(self._placed(k, None, owner), self._placed(v, inside.get(k), owner)) for k, v in value.items()]
            return type(value)(dict(pairs))  # a Counter would count pairs
        like = current if isinstance(current, Tensor) else owner
        if isinstance(value, _Stored):
            stored = value.tensor
            if like is not None and is_dtensor(like) and (like is current or tuple(like.shape) == stored.shape):
                target = torch.empty_like(
                    like, dtype=None if like is current else DTYPES[stored.dtype], requires_grad=False
                )
                self._copy(stored, target, "extra", value.key)
                return target
            value = self._decode({"$stored": value.key})
        return value if like is None or like.is_meta or not isinstance(value, Tensor) else value.to(like.device)

    def _find_own_position(self) -> tuple[int, Any] | None:
        """The data position that was saved at this rank's place, if as many places were saved: of which rank, and encoded."""
        if self.state.data is None or "data" not in self.shared["has"]:
            return None
        place, size = self.state.dp or (self.comm.rank, self.comm.size)
        return self._data_at({place}).get(place) if self.shared["dp"][0][1] == size else None

    def saved_positions(self) -> list[tuple[int, Any]]:
        """Every saved data position, in the order of the places: of which rank, and encoded."""
        return [found for _, found in sorted(self._data_at({place for place, _ in self.shared["dp"]}).items())]

    def _match_data(self, positions: Sequence[tuple[int, Any]]) -> None:
        data = self.state.data
        if data is None or "data" not in self.shared["has"]:
            return
        if self._own_position is not None:
            rank, encoded = self._own_position
            position = self._decode(encoded, rank_state_name(rank))
            self.apply_steps.append(lambda: data.load_state_dict(position))
            return
        size, saved = (self.state.dp or (self.comm.rank, self.comm.size))[1], self.shared["dp"]
        states = [(encoded, rank_state_name(rank)) for rank, encoded in positions]
        if all(encoded == states[0][0] for encoded, _ in states) or (
            not hasattr(data, "reshard") and all(self._same(encoded, states[0][0]) for encoded, _ in states)
        ):
            position = self._decode(*states[0])
            self.apply_steps.append(lambda: data.load_state_dict(position))
        elif hasattr(data, "reshard"):
            for state in states:
                self._decode(*state, self._read_later)
            later = _States([partial(self._decode, *state) for state in states])
            self.apply_steps.append(lambda: data.reshard(later))  # type: ignore[attr-defined]
        else:
            raise ValueError(
                f"the {saved[0][1]} data-parallel ranks saved different data positions, which cannot be given to {size}. "
                f"Give {type(data).__name__} a reshard(states) method, or count globally."
            )

    def _same(self, one: Any, other: Any) -> bool:
        """Whether two encoded states are equal, with the bits of their stored tensors in place of their names."""
        if type(one) is not type(other) or not isinstance(one, dict | list):
            return one == other
        if isinstance(one, list):
            return len(one) == len(other) and all(map(self._same, one, other))
        if one.keys() != other.keys() or "$stored" not in one:
            return one.keys() == other.keys() and all(self._same(one[key], other[key]) for key in one)
        first, second = (read_tensor(self.reader, "extra", found["$stored"]) for found in (one, other))
        alike = (first.dtype, first.shape) == (second.dtype, second.shape)
        return alike and leaves.tensor_bytes(first) == leaves.tensor_bytes(second)

    def _match_rng(self) -> None:
        if not self.state.rng:
            return
        manifest, rank = self.reader.manifest, self.comm.rank
        if manifest.world_size == self.comm.size:
            own = self._rank_state(rank).get("rng")
            self._refuse(
                own is None, f"{manifest.path} was saved without random generators; pass TrainState(rng=False)."
            )
            if own is not None:
                self.apply_steps.append(lambda: set_rng_state(own))
            return
        first = self._rank_state(0).get("rng")
        seed = 0 if first is None else first["seed"]
        _log.warning(
            "%s was saved by %d ranks and is loaded by %d: random generators are reseeded from (seed %d, step %d, "
            "rank), so what is drawn from them, such as dropout, differs from an uninterrupted run",
            *(manifest.path, manifest.world_size, self.comm.size, seed, manifest.step),
        )
        self.apply_steps.append(lambda: reseed(seed, manifest.step, rank))

    def _data_at(self, places: set[int]) -> dict[int, tuple[int, Any]]:
        """For each place among the data-parallel ranks: the first rank that saved data, and its encoded state.

        Several ranks share a place. Those of some pipeline stages may have no data.
        """
        found: dict[int, tuple[int, Any]] = {}
        for rank, (place, _) in enumerate(self.shared["dp"]):
            if place in places and place not in found and "data" in (own := self.reader.rank_state(rank)):
                found[place] = rank, own["data"]
        return found

    def _rank_state(self, rank: int) -> dict[str, Any]:
        return self._decode(self.reader.rank_state(rank), rank_state_name(rank))

    def _decode(self, value: Any, name: str = STATE_NAME, tensor: Callable[[str], Any] | None = None) -> Any:
        with malformed_is_damage(self.reader.path, name):
            return leaves.decode(value, tensor or (lambda key: read_tensor(self.reader, "extra", key)))

    def _stored(self, key: str) -> "_Stored":
        stored = self.reader.index.find("extra", key)
        if stored is None:
            raise ValueError(f"{self.reader.path} has no extra tensor {key!r}.")
        return _Stored(key, stored)

    def _read_later(self, key: str) -> Tensor:
        """Have the blocks of an extra tensor checked with all others, and make none of it."""
        stored = self._stored(key).tensor
        blank = torch.empty(stored.shape, dtype=torch.uint8, device="meta")
        self.read_later[key] = box_copies(stored, ((0,) * len(stored.shape), stored.shape), blank)
        return blank


@dataclass(frozen=True, slots=True, eq=False)  # as a tensor, each is its own in a set or as a key
class _Stored:
    """Stands in decoded state for a tensor of the ``extra`` section."""

    key: str
    tensor: StoredTensor


class _States(Sequence[Any]):
    """The states of the ranks that saved, each decoded when it is looked at: they may hold tensors as large as the model."""

    def __init__(self, decoders: Sequence[Callable[[], Any]]) -> None:
        self._decoders = decoders

    def __len__(self) -> int:
        return len(self._decoders)

    def __getitem__(self, at: Any) -> Any:
        found = self._decoders[at]
        return [decode() for decode in found] if isinstance(at, slice) else found()
