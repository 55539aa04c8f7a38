"""Start from published weights, ``model.init = "hf:DIR"``, or from those of another run, ``"run:DIR@STEP"``.

The folder's ``config.json`` must describe the model's arguments, one by one, and its tensors must be the model's, name by
name. Then each rank reads the boxes it holds straight from the files, under any layout: its memory never holds more than
its own parameters and one slice. A run's checkpoint is read as a resume reads it; its arguments are compared in the same way.
"""

import copy
import dataclasses
import inspect
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from titan_ckpt import KeyMap, LocalShard, import_hf
from titan_ckpt.interop.safetensors_folder import SafetensorsReader
from titan_ckpt.interop.translate import from_hf
from titan_ckpt.interop.views import View, whole_box
from titan_ckpt.load.reader import StepReader
from titan_ckpt.state.dtypes import DTYPES
from torch import nn

from titan_train.config.model import ModelConfig
from titan_train.config.published import TOKENIZER
from titan_train.models import named_parameters
from titan_train.models.arguments import model_args
from titan_train.models.hf.folder import PREFIX, folder_of, read_published, split_depth, stop_ids_of, with_changes
from titan_train.models.hf.names import as_files_have, unread
from titan_train.models.hf.plan import HFPlan
from titan_train.models.registry import family_of, find_model
from titan_train.models.traits import traits_of
from titan_train.parallel.tied import parameter_names, tied_to_first
from titan_train.run_folder import checkpoint_folders, find_start, read_config
from titan_train.trust.factory import import_factory
from titan_train.values import did_you_mean


def check_init(init: str, whole: nn.Module, config: ModelConfig) -> tuple[Path, KeyMap]:
    """Whether a folder's weights are those of a model. Reads the headers of the files only.

    Args:
        init: ``"hf:DIR"``.
        whole: The whole model, on any device.
        config: Its configuration, for the messages.

    Returns:
        The folder and the family's key map.

    Raises:
        ValueError: The folder is incomplete or damaged, its ``config.json`` describes another model, or tensors are missing
            or unexpected.
    """
    folder = folder_of(init)
    family = family_of(whole)
    if family is None:
        raise ValueError(
            f"model.init={init!r}: {config.name} belongs to no registered family, so its names on Hugging Face are unknown. "
            "Use a family's model, or remove model.init."
        )
    published = read_published(init, key="model.init")
    stop_ids_of(folder)  # refuses what the run could not keep
    hf = family.load_hf()
    args: Any = whole.args
    what = "its config.json describes another model"
    _compare(
        f"model.init={init!r}",
        what,
        family.settings(hf.args_from(published)),
        family.settings(args),
        config.init_changes,
    )
    key_map: KeyMap = hf.names(args)
    views = SafetensorsReader(folder).views()
    if config.name.startswith(PREFIX):
        key_map = as_files_have(key_map, views)
    _check_names(folder, views, key_map, whole)
    _check_tensors(folder, views, key_map, whole, grow=_vocabulary(config, whole))
    return folder, key_map


def load_init(
    init: str,
    parts: Sequence[nn.Module],
    *,
    whole: nn.Module,
    config: ModelConfig,
    shards: Mapping[str, LocalShard],
) -> None:
    """Fill this rank's parts of the model. Local; raises on every rank alike, before anything is changed.

    Args:
        init: ``"hf:DIR"``.
        parts: The model or this rank's pipeline stages, sharded in any way, materialized.
        whole: The whole model, on any device.
        config: Its configuration, for the messages.
        shards: Where parameters that tensor or expert parallelism cut lie in the whole ones.

    Raises:
        ValueError: As `check_init`, or a tensor has another shape.
    """
    folder, key_map = check_init(init, whole, config)
    first_of = tied_to_first(parameter_names(whole))
    whole_names = {name for name, _ in whole.named_parameters()}
    for part in parts:
        held = {name for name, _ in named_parameters(part)}
        # the last pipeline stage holds a copy of a tied matrix, which the files have under its first name only
        copies = {name: first for name, first in first_of.items() if name in held and first not in held}
        names = _with_copies(key_map, copies)
        complete = held >= whole_names
        import_hf(
            folder,
            part,
            names=names,
            strict=complete,
            shards=shards,
            grow=_vocabulary(config, whole),
            check_config=False,
        )  # `check_init` has compared it, but for model.init_changes


def check_run_init(init: str, whole: nn.Module, config: ModelConfig) -> tuple[Path, int]:
    """Whether the weights of another run's checkpoint are those of a model. Reads its index only.

    Args:
        init: ``"run:DIR@STEP"``.
        whole: The whole model, on any device.
        config: Its configuration, for the messages.

    Returns:
        The run's folder and the step.

    Raises:
        ValueError: There is no such checkpoint, it is of a model with other arguments, or tensors are missing, unexpected or of
            another shape.
    """
    folder, step = find_start(init, "model.init")
    asked = f"model.init={init!r}"
    check_saved_model(asked, folder, StepReader(checkpoint_folders(folder)[step]), whole)
    check_saved_settings(asked, folder, whole, config, config.init_changes)
    return folder, step


def check_saved_model(asked: str, folder: Path, reader: StepReader, whole: nn.Module) -> None:
    """Whether a checkpoint's tensors are those of a model, by name and shape.

    Args:
        asked: The setting that names it, and its value, for the messages.
        folder: The folder of its run.
        reader: Its index.
        whole: The whole model, on any device.

    Raises:
        ValueError: Tensors are missing, unexpected or of another shape.
    """
    saved = reader.index.tensors["model"]
    first_of = tied_to_first(parameter_names(whole))
    wanted = {name: tensor for name, tensor in whole.state_dict(keep_vars=True).items() if name not in first_of}
    missing, unexpected = sorted(wanted.keys() - saved.keys()), sorted(saved.keys() - wanted.keys() - first_of.keys())
    if missing or unexpected:
        raise ValueError(
            f"{asked} holds another model, {read_config(folder).model.name}: {len(missing)} tensors are missing {missing[:4]}, "
            f"{len(unexpected)} are unexpected {unexpected[:4]}. Use that run's model.name and [model.args]."
        )
    problems = [
        f"{name} has shape {list(saved[name].shape)} there and {list(tensor.shape)} here"
        for name, tensor in wanted.items()
        if tuple(saved[name].shape) != tuple(tensor.shape)
    ]
    if problems:
        raise ValueError(
            f"{asked} holds a model of other sizes: {'; '.join(problems[:4])}. Use that run's [model.args] and tokenizer. "
            "For a larger vocabulary, export the run (titan-train export DIR --to hf), and set model.init to that folder."
        )


def check_saved_settings(
    asked: str, folder: Path, whole: nn.Module, ours: ModelConfig, changes: Sequence[str] | None
) -> None:
    """Whether a run's model computes what ours does with the same weights: a rotary base or a window shows in no shape.

    A module of the user's own is compared with another such module only: with one of another name, whose defaults are not known
    here, by the arguments that the run gave it and ours has too.

    Args:
        asked: The setting that names the run, and its value, for the messages.
        folder: Its folder.
        whole: Our whole model, with tensors as the run's, on any device.
        ours: Its configuration.
        changes: Arguments that may differ; None where none may.

    Raises:
        ValueError: The models have other arguments, each with its defaults filled in.
    """
    theirs = read_config(folder).model
    if _kind(theirs.name) != _kind(ours.name):
        return
    there, here = _settings(theirs, whole, ours), _settings(ours, whole, ours)
    if _kind(ours.name) == "own" and theirs.name != ours.name:
        there, here = ({key: one[key] for key in theirs.args.keys() & here.keys()} for one in (there, here))
    if "vocab_size" in here:  # decided by the tokenizer too, and the shapes are the same
        there = {**there, "vocab_size": here["vocab_size"]}
    _compare(asked, "that run's model is another one", there, here, changes, also={*theirs.args, *ours.args})


def _kind(name: str) -> str:
    return PREFIX if name.startswith(PREFIX) else "own" if ":" in name else "shipped"


def _settings(config: ModelConfig, whole: nn.Module, ours: ModelConfig) -> dict[str, Any]:
    """The arguments that decide the logits of ``config``'s model, which is of the kind of ours: ``whole``."""
    if _kind(config.name) == "own":
        return _given(config, ours)
    if _kind(config.name) == "shipped":
        return find_model(config.name)[0].settings(model_args(config, vocab_size=None))
    family, args = family_of(whole), cast("Any", whole.args)
    assert family is not None
    if config is not ours:
        _, changes = split_depth(config.name, config.args)
        published = read_published(config.name)
        known = args.kind.from_dict(copy.deepcopy(published)).to_dict()
        args = family.load_hf().args_from(with_changes(published, changes, known=known))
    return family.settings(args) | ({"lora_alpha": config.lora_alpha} if config.lora_rank else {})


def _given(config: ModelConfig, ours: ModelConfig) -> dict[str, Any]:
    """The arguments of a user's callable; those that are not given are the defaults of ours."""
    parameters = inspect.signature(import_factory(ours.name)).parameters.values()
    defaults = {held.name: held.default for held in parameters if held.default is not held.empty}
    return {key: tuple(v) if isinstance(v, list) else v for key, v in {**defaults, **config.args}.items()}


def _compare(
    asked: str,
    what: str,
    published: Mapping[str, object],
    model: Mapping[str, object],
    changes: Sequence[str] | None,
    also: Collection[str] = (),
) -> None:
    """Refuse settings that differ and are not in ``changes``, which may name those of ``also`` too."""
    known = {**published, **model}
    allowed = [name.partition(".")[0] for name in changes or () if name != TOKENIZER]
    for name in allowed:
        if name not in known and name not in also:
            raise ValueError(
                f"model.init_changes: this model has no argument {name!r}. {did_you_mean(name, known)}They are "
                f"{', '.join(sorted(known))}."
            )
    differing = {name for name in known if name not in allowed and published.get(name) != model.get(name)}
    if differing:
        lines = "; ".join(f"{name}={model.get(name)!r} should be {published.get(name)!r}" for name in sorted(differing))
        otherwise = (
            "to train on with others, take the weights alone: model.init='run:DIR@STEP', with their names in model.init_changes."
            if changes is None
            else "or, for continued training with others, name them in model.init_changes."
        )
        raise ValueError(
            f"{asked}: {what}: {lines}. The weights would give other logits. Set these values under [model.args]; {otherwise}"
        )


def _vocabulary(config: ModelConfig, whole: nn.Module) -> frozenset[str]:
    """Parameters with a row for each token, where the vocabulary may be larger than the published one."""
    if "vocab_size" not in config.init_changes:
        return frozenset()
    first_of = tied_to_first(parameter_names(whole))
    rows = max(module.num_embeddings for module in whole.modules() if isinstance(module, nn.Embedding))
    holders = {
        f"{name}.{own}"
        for name, module in whole.named_modules()
        if isinstance(module, nn.Embedding | nn.Linear)
        for own, parameter in module.named_parameters(recurse=False)
        if parameter.shape[:1] == (rows,)  # weights, and biases of a head
    }
    return frozenset(holders | {first_of.get(name, name) for name in holders})


def _check_names(folder: Path, views: Mapping[str, View], key_map: KeyMap, whole: nn.Module) -> None:
    """Every parameter must be in the files, and every tensor of the files must be a parameter or buffer."""
    first_of = tied_to_first(parameter_names(whole))
    plan: HFPlan | None = traits_of(whole).plan
    tables = (name for name, _ in whole.named_buffers() if plan is not None and plan.is_table(name))
    wanted = {name for name, _ in whole.named_parameters() if not key_map.leaves_out(name)} | {*tables}
    known = wanted | first_of.keys() | {name for name, _ in whole.named_buffers()}
    found: set[str] = set()
    unexpected: list[str] = []
    for name in views:
        matches = key_map.match_hf(name) if key_map.maps(name) else []
        native = {pair.native.format(**letters) for pair, letters in matches} & known
        found |= native
        if not native and not key_map.ignores(name):
            unexpected.append(name)
    missing = sorted(wanted - {first_of.get(name, name) for name in found})
    kind: str | None = (traits_of(whole).published or {}).get("model_type")
    if (missing or unexpected) and kind is not None and plan is None and (steps := unread(kind)):
        raise ValueError(
            f"{folder}: transformers converts the tensors of a {kind} when it reads a folder ({'; '.join(steps[:3])}), which is "
            f"not done here: {len(missing)} parameters have no tensor {missing[:4]}. Leave model.init empty, to train "
            "from random weights, or use a model of another family."
        )
    method = _quantized_by(folder)
    if (missing or unexpected) and method not in ("", "fp8", "mxfp4"):
        raise ValueError(
            f"{folder}: its weights are quantized by {method!r} (quantization_config of config.json), which is not read here: "
            f"{len(missing)} parameters have no tensor {missing[:4]}. Take the folder that it was made from, or convert it to "
            "bfloat16 with the tool that wrote it."
        )
    if missing or unexpected:
        raise ValueError(
            f"{folder} does not hold this model: {len(missing)} parameters are missing {missing[:4]}, {len(unexpected)} "
            f"tensors are unexpected {sorted(unexpected)[:4]}. Fetch the complete folder, or check [model.args]."
        )


def _quantized_by(folder: Path) -> str:
    """``quant_method`` of the folder's ``config.json``; empty where it says none."""
    found = (
        read_published(f"{PREFIX}{folder}").get("quantization_config") if (folder / "config.json").is_file() else None
    )
    return str(cast("Mapping[str, Any]", found).get("quant_method") or "") if isinstance(found, dict) else ""


def _check_tensors(
    folder: Path, views: Mapping[str, View], key_map: KeyMap, whole: nn.Module, *, grow: Collection[str]
) -> None:
    """Every tensor must have its parameter's shape and kind of dtype; those in ``grow`` may have fewer rows."""
    first_of = tied_to_first(parameter_names(whole))
    tensors = dict(whole.named_parameters()) | dict(whole.named_buffers())
    known = tensors.keys() | first_of.keys()
    mapped = {name: view for name, view in views.items() if key_map.maps(name) or key_map.ignores(name)}
    problems: list[str] = []
    wanted = dict.fromkeys(known) | {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name, view in from_hf(mapped, key_map, wanted).items():
        tensor = tensors.get(first_of.get(name, name))
        if tensor is None:
            continue
        view.check(whole_box(view.shape))  # raises for what cannot be read at all
        want, have = tuple(tensor.shape), tuple(view.shape)
        fewer_rows = name in grow and have[1:] == want[1:] and have[0] <= want[0]
        if want != have and not fewer_rows:
            problems.append(f"{name} has shape {list(have)} there and {list(want)} here")
        elif DTYPES[view.dtype].is_floating_point != tensor.dtype.is_floating_point:
            problems.append(f"{name} is {view.dtype} there, which is not converted to {tensor.dtype}")
    if problems:
        raise ValueError(
            f"{folder} does not hold this model: {'; '.join(problems[:4])}{'; ...' if len(problems) > 4 else ''}. Fetch the "
            "complete folder, or check [model.args]."
        )


def _with_copies(key_map: KeyMap, copies: Mapping[str, str]) -> KeyMap:
    """The key map in which a tied copy has the Hugging Face name of its first."""
    added = [
        dataclasses.replace(pair, native=name)
        for name, first in copies.items()
        for pair in key_map.pairs
        if pair.native == first
    ]
    return dataclasses.replace(key_map, pairs=(*added, *key_map.pairs)) if added else key_map
