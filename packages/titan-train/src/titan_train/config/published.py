"""Settings that the first weights decide: ``model.init = "hf:DIR"`` and ``"run:DIR"`` fill in what the user did not set.

Names and shapes of weights say little about what a model computes with them, and ids mean nothing without their tokenizer.
So the folder's ``config.json``, or the run's ``config.toml``, decides the model's arguments, and its tokenizer the ids. What the
user set stays as it is; where it contradicts the folder, `titan_train.train.warm_start` and
`titan_train.train.published_tokenizer` refuse it.

A run that resumes after its folder has gone takes both from what it was started with. No torch is imported.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from titan_train.files import PARTS_NAME, download_hint, local_path, read_toml
from titan_train.models.family import Family
from titan_train.models.hf.folder import PREFIX, folder_of, read_published
from titan_train.models.registry import families, find_model, list_models

RUN = "run:"
"""Begins a ``model.init`` that is another run of this program."""
TOKENIZER = "tokenizer"
"""In ``model.init_changes``: the ids may be those of another tokenizer."""
_RATE = "bias_rate"
"""An argument of training, except that with 0 the experts have no bias: another model."""
_FILES = {"model.init": ("config.json", "*.safetensors"), "model.name": ("config.json",)}
"""What a folder has if it is more than a tokenizer: one that was loaded for another key may lack it."""


def with_published(tree: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """A configuration with the model's arguments and the tokenizer that ``model.init`` decides.

    Args:
        tree: Plain values, as TOML gives them; not validated yet.

    Returns:
        The tree, and one line that says what was taken; empty if nothing was.
    """
    model, tokenizer = _table(tree, "model"), _table(tree, "tokenizer")
    init = None if model is None else model.get("init")
    if model is None or tokenizer is None or not isinstance(init, str) or not init.startswith((PREFIX, RUN)):
        return tree, ""
    if init.startswith(RUN):
        return _from_run(tree, model, tokenizer, init)
    if init == PREFIX:
        return tree, ""
    if not (folder_of(init) / "config.json").is_file():
        return _as_started(tree, model, tokenizer, init)
    try:
        published = read_published(init, key="model.init")
    except ValueError:
        return tree, ""  # refused with the model, by the same message
    taken = _arguments(model, published, init)
    folder = folder_of(init)
    same = TOKENIZER not in _strings(model.get("init_changes"))
    kind = _tokenizer(tokenizer, folder) if same else {}
    begun = _begins(tree, init, (same or _is_named(tokenizer, folder)) and _begins_documents(folder))
    return _merged(tree, taken, kind, begun), _line(init, taken, kind, begun)


def split_start(start: str) -> tuple[Path, str]:
    """Folder and step of ``DIR``, ``DIR@STEP`` or ``DIR@best``, with or without ``run:`` before it; the step may be empty."""
    start = start.removeprefix(RUN)
    folder, _, step = start.rpartition("@")
    if not folder or not (step == "best" or step.isdecimal()) or Path(start).expanduser().is_dir():
        folder, step = start, ""
    return Path(folder).expanduser(), step


def missing_repositories(tree: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Keys and values of a configuration that name a repository of the Hugging Face hub whose folder is missing or unfinished."""
    model, tokenizer, data = (_table(tree, name) or {} for name in ("model", "tokenizer", "data"))
    named = [
        ("model.init", model.get("init")),
        ("model.name", model.get("name")),
        ("tokenizer.path", tokenizer.get("path")),
    ]
    for kind in ("sources", "validation_sources"):
        sources = data.get(kind)
        for source in cast("list[Any]", sources) if isinstance(sources, list) else []:
            paths = _strings(source.get("paths") if isinstance(source, dict) else None)
            named += [(f"data.{kind}.paths", path) for path in paths]
    seen: set[str] = set()
    for key, value in named:
        if not isinstance(value, str) or value in seen or not download_hint(value):
            continue
        folder = local_path(value)
        lacks = [pattern for pattern in _FILES.get(key, ()) if not any(folder.glob(pattern))]
        if lacks or not folder.exists() or (folder / PARTS_NAME).is_dir():
            seen.add(value)
            yield key, value


def published_tokenizer(folder: Path) -> dict[str, str]:
    """``kind`` and ``path`` of the tokenizer in a published folder; empty if there is none that can be read here."""
    from titan_train.tokenizers.huggingface import TOKENIZER_JSON  # needs numpy, which other configurations do not
    from titan_train.tokenizers.protocol import MODEL_NAME

    if (folder / TOKENIZER_JSON).is_file():
        return {"kind": "hf", "path": str(folder)}
    if (folder / MODEL_NAME).is_file():
        from titan_train.tokenizers.load import load_tokenizer

        try:
            kind = load_tokenizer(folder / MODEL_NAME).kind
        except (ValueError, RuntimeError, OSError):  # a vocabulary of another library
            return {}
        return {"kind": kind, "path": str(folder / MODEL_NAME)}
    return {}


def _from_run(
    tree: dict[str, Any], model: Mapping[str, Any], tokenizer: Mapping[str, Any], init: str
) -> tuple[dict[str, Any], str]:
    """What of a run's ``config.toml`` is taken: the model's name and arguments, and the tokenizer in its folder."""
    folder, _ = split_start(init)
    try:
        started = read_toml(folder / "config.toml")
        theirs, ids = dict(started["model"]), dict(started["tokenizer"])
        args, given = dict(theirs["args"]), dict(model.get("args", {}))
    except (OSError, ValueError, KeyError, TypeError):
        return _as_started(tree, model, tokenizer, init)  # a new run is refused when the other is looked for, by name
    changes = _strings(model.get("init_changes"))
    taken: dict[str, Any] = {}
    if model.get("name") in (None, theirs.get("name")):
        taken = {"args": {key: value for key, value in args.items() if key not in given and key not in changes}}
        if "name" not in model:
            taken["name"] = theirs.get("name")
    saved, kind = folder / TOKENIZER, {}
    free = not tokenizer.get("path") and tokenizer.get("kind", "sentencepiece") == "sentencepiece"
    if saved.is_dir() and free and TOKENIZER not in changes:
        kind = {"kind": str(ids.get("kind", ""))} | ({} if ids.get("kind") == "bytes" else {"path": str(saved)})
    begun = _begins(tree, init, TOKENIZER not in changes and _began(started))
    return _merged(tree, taken, kind, begun), _line(init, taken, kind, begun)


def _arguments(model: Mapping[str, Any], published: Mapping[str, Any], init: str) -> dict[str, Any]:
    """What of the section ``model`` is taken: ``name`` where there is none, and ``args``."""
    name, given = model.get("name"), model.get("args", {})
    changes = _strings(model.get("init_changes"))
    if (name is not None and name not in list_models()) or not isinstance(given, dict):
        return {}
    known = families() if name is None else {"": find_model(name)[0]}
    for family in known.values():
        args = _args_of(family, published)
        if args is None:
            continue
        own = {name: find_model(name)[1]} if name is not None else family.configs
        keys = [*family.load_hf().settings_of(args), *([_RATE] if hasattr(args, _RATE) else [])]
        decided = [key for key in keys if key not in given and key not in changes]
        found = {
            candidate: {key: getattr(args, key) for key in decided if _differ(args, shipped, key)}
            for candidate, shipped in own.items()
        }
        nearest = min(found, key=lambda candidate: len(found[candidate]))
        taken: dict[str, Any] = {"args": found[nearest]}
        return taken if name is not None else {"name": nearest, **taken}
    return {} if name is not None else {"name": init}


def _differ(args: Any, shipped: Any, key: str) -> bool:
    ours, theirs = getattr(shipped, key), getattr(args, key)
    return bool(ours) != bool(theirs) if key == _RATE else ours != theirs


def _args_of(family: Family, published: Mapping[str, Any]) -> Any:
    """The arguments of a family's model that ``config.json`` describes; None for what the family cannot build."""
    try:
        hf = family.load_hf()
        kind = published.get("model_type", published.get("_class_name"))
        return hf.args_from(published) if kind in hf.kinds else None
    except (ValueError, TypeError, KeyError):  # refused with the model, by name
        return None


def _tokenizer(given: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """``kind`` and ``path`` of the folder's tokenizer, where the user named no other."""
    if given.get("path") or given.get("kind", "sentencepiece") not in ("sentencepiece", "hf"):
        return {}
    return published_tokenizer(folder)


def _is_named(given: Mapping[str, Any], folder: Path) -> bool:
    """Whether the user named the folder's own tokenizer."""
    path = given.get("path")
    if given.get("kind") != "hf" or not isinstance(path, str) or not path:
        return False
    named = local_path(path).resolve()
    return folder.resolve() in (named, named.parent)


def _begins_documents(folder: Path) -> bool:
    """Whether the folder's tokenizer begins texts with a special token: the model has hardly seen one without."""
    from titan_train.tokenizers.huggingface import adds_bos

    try:
        return adds_bos(folder)
    except (ValueError, LookupError, TypeError, AttributeError, OSError):  # refused with the tokenizer, by name
        return False


def _began(started: Mapping[str, Any]) -> bool:
    """Whether documents of a run began with a special token."""
    return (_table(started, "data") or {}).get("add_bos") is True


def _begins(tree: Mapping[str, Any], init: str, as_there: bool) -> bool:
    """Whether documents are to begin with a special token, where the user has left that open.

    Args:
        tree: The configuration.
        init: Its ``model.init``.
        as_there: Whether documents of ``init`` do. A run that goes on keeps to what it began with.
    """
    data = _table(tree, "data")
    if data is None or "add_bos" in data:
        return False
    run_dir, started = _begun_run(tree, init)
    goes_on = started and any((run_dir / "checkpoints").glob("step-*/MANIFEST.json"))
    return _began(started) if goes_on else as_there


def _begun_run(tree: Mapping[str, Any], init: str) -> tuple[Path, dict[str, Any]]:
    """The run's folder, and its ``config.toml`` if the run has begun with ``init``; else empty."""
    run = _table(tree, "run") or {}
    run_dir = Path(str(run.get("dir", "runs"))).expanduser() / str(run.get("name", "run"))
    try:
        started = read_toml(run_dir / "config.toml")
        before = str(started["model"]["init"])
    except (OSError, ValueError, KeyError, TypeError):
        return run_dir, {}
    return run_dir, started if split_start(before)[0] == split_start(init)[0] else {}


def _as_started(
    tree: dict[str, Any], model: Mapping[str, Any], tokenizer: Mapping[str, Any], init: str
) -> tuple[dict[str, Any], str]:
    """Where the folder has gone: what the run of this name took from it when it was started."""
    run_dir, started = _begun_run(tree, init)
    try:
        before, ids = dict(started["model"]), dict(started["tokenizer"])
        was = {"kind": str(ids["kind"]), "path": str(ids["path"])}
        taken = {"name": before["name"], "args": before["args"]} if model.get("name") in (None, before["name"]) else {}
    except (ValueError, KeyError, TypeError):
        return tree, ""
    kind: dict[str, str] = {}
    named, kept = tokenizer.get("path"), run_dir / TOKENIZER
    if not named or (named == was["path"] and not local_path(named).exists()):
        kind = was | ({"path": str(kept)} if was["kind"] != "bytes" and kept.is_dir() else {})
    return _merged(tree, taken, kind, _begins(tree, init, _began(started))), ""


def _merged(tree: dict[str, Any], taken: Mapping[str, Any], kind: Mapping[str, str], begun: bool) -> dict[str, Any]:
    model = dict(tree["model"])
    if "args" in taken:
        model["args"] = {**taken["args"], **model.get("args", {})}
    if "name" in taken:
        model["name"] = taken["name"]
    tree = {**tree, "model": model}
    if kind:
        tree["tokenizer"] = {**tree.get("tokenizer", {}), **kind}
    if begun:
        tree["data"] = {**tree.get("data", {}), "add_bos": True}
    return tree


def _line(init: str, taken: Mapping[str, Any], kind: Mapping[str, str], begun: bool) -> str:
    parts = [f"model.name={taken['name']}"] if "name" in taken else []
    parts += [f"model.args.{key}={value}" for key, value in taken.get("args", {}).items()]
    parts += [f"tokenizer.{key}={value}" for key, value in kind.items()]
    parts += ["data.add_bos=true"] if begun else []
    return f"{init} sets {', '.join(parts)}" if parts else ""


def _table(tree: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    found = tree.get(name, {})
    return cast("dict[str, Any]", found) if isinstance(found, dict) else None


def _strings(values: Any) -> list[str]:
    return [str(value) for value in cast("list[Any]", values)] if isinstance(values, list) else []
