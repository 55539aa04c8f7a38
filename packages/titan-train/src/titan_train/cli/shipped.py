"""Show what can be run: shipped configurations, models, tasks, pipeline schedules, packages, and the next command."""

import argparse
from collections.abc import Iterable, Sequence
from importlib import resources
from textwrap import wrap
from typing import get_args, get_type_hints

_WIDTH = 100


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Run the command."""
    parser.parse_args(words)

    from titan_pipeline.families import FAMILIES, load_installed_families

    from titan_train.cli.doctor import PACKAGES
    from titan_train.config import Float8Config, list_configs
    from titan_train.models.registry import families

    load_installed_families()
    print("configurations: titan-train run NAME")
    names = list_configs()
    for name in names:
        print(f"  {name:<{max(map(len, names))}}  {_first_comment(name)}")
    print("\nmodels: model.name in a configuration")
    for family in families().values():
        for line in _lines(f"{family.name}:", family.configs):
            print(line)
    print('  your own nn.Module: "module:Class"; a folder or a name of Hugging Face: "hf:DIR"')
    recipes = get_args(get_type_hints(Float8Config)["recipe"])
    for title, found in (
        ("pipeline schedules: pipeline.schedule", FAMILIES),
        ("float8 recipes: float8.recipe", [name for name in recipes if name != "none"]),
        ("packages, each usable alone", PACKAGES),
    ):
        print(f"\n{title}")
        for line in _lines("", found):
            print(line)
    print("\nnext: titan-train run quickstart        trains a small Llama here, in minutes")
    print("      titan-train check llama3_8b       layout, parameters and memory of a large one, without a GPU")
    return 0


def _first_comment(name: str) -> str:
    """The first sentence of a shipped configuration."""
    text = (resources.files("titan_train") / "configs" / f"{name}.toml").read_text(encoding="utf-8")
    first = text.partition("\n")[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""


def _lines(head: str, names: Iterable[str]) -> list[str]:
    text = " ".join([head, *(f"{name}," for name in names)]).strip().removesuffix(",")
    return wrap(
        text, _WIDTH, initial_indent="  ", subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
