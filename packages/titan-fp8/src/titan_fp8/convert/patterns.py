"""Names of layers, and patterns over them.

A pattern is one or more dotted parts, each a shell glob, and matches a name that holds them as consecutive parts:
``lm_head`` matches ``lm_head`` and ``model.lm_head``, never ``lm_head_norm``; ``layers.0`` matches all in layer 0;
``layers.*.wk`` does not match ``layers.0.attention.wk``, ``attention.wk`` does.
"""

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

# What torch's wrappers for checkpointing and compilation add to names.
_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")


def clean_fqn(fqn: str) -> str:
    """The name without the parts that torch's checkpoint and compile wrappers insert."""
    return ".".join(part for part in fqn.split(".") if part not in _WRAPPERS)


def matching_pattern(fqn: str, patterns: Sequence[str]) -> str | None:
    """The first pattern that matches ``fqn``, or None."""
    return next((pattern for pattern in patterns if _matches(fqn, pattern)), None)


def check_patterns(patterns: Sequence[str], fqns: Iterable[str]) -> None:
    """Refuse patterns that match nothing: a filter that silently matches nothing converts what it should protect.

    Raises:
        ValueError: If a pattern matches none of ``fqns``; names the nearest parts.
    """
    names = list(fqns)
    for pattern in patterns:
        if any(_matches(name, pattern) for name in names):
            continue
        parts = sorted({part for name in names for part in name.split(".")})
        near = difflib.get_close_matches(pattern.split(".")[-1], parts, n=3, cutoff=0.4)
        hint = (
            f"Did you mean {' or '.join(near)}?" if near else f"Its linear layers are {', '.join(names[:8]) or 'none'}."
        )
        raise ValueError(
            f"skip pattern {pattern!r} matches no linear layer of the model. {hint} "
            "Correct it, drop it, or pass strict_filters=False."
        )


def _matches(fqn: str, pattern: str) -> bool:
    parts, wanted = fqn.split("."), pattern.split(".")
    return any(
        all(fnmatchcase(part, glob) for part, glob in zip(parts[start:], wanted, strict=False))
        for start in range(len(parts) - len(wanted) + 1)
    )
