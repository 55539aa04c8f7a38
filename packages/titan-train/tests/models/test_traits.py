"""What a model may tell the trainer is declared in one place, read through one function, and stands in the guide.

python packages/titan-train/tests/models/test_traits.py    # writes the table of the guide anew from `Traits`
"""

import ast
import inspect
import re
import typing
from pathlib import Path

import pytest
import titan_train
from titan_train.config.help import field_docs
from titan_train.models.traits import Traits, traits_of
from torch import nn

GUIDE = Path(__file__).parents[4] / "docs" / "guides" / "your_own_model.md"
TABLE = re.compile(r"(?<=<!-- traits -->\n).*?(?=<!-- end -->)", re.S)
SOURCE = Path(titan_train.__file__).parent


def table() -> str:
    docs = field_docs(Traits)
    rows = []
    for node in ast.parse(inspect.getsource(Traits)).body[0].body:  # type: ignore[attr-defined]
        if isinstance(node, ast.AnnAssign):
            name, kind = ast.unparse(node.target), ast.unparse(node.annotation).replace(" | None", "")
            kind = "method" if kind.startswith("Callable") else kind.replace(" | ", " or ")
            rows.append(f"| `{name}` | {kind} | `{ast.unparse(node.value)}` | {docs[name]} |")
    return "\n".join(["", "| attribute | type | default | meaning |", "|---|---|---|---|", *rows, "", ""])


def test_the_guide_has_the_table_of_all_traits() -> None:
    assert TABLE.search(GUIDE.read_text(encoding="utf-8"))[0] == table(), "run this file with python to write the table"  # type: ignore[index]


def test_every_trait_has_a_docstring() -> None:
    assert field_docs(Traits).keys() == typing.get_type_hints(Traits).keys()


def test_traits_are_read_through_traits_of_alone() -> None:
    probe = re.compile(r"(?:getattr|hasattr)\([^()]*, \"(\w+)\"")
    names = typing.get_type_hints(Traits).keys() - {"max_seq_len"}  # the arguments of a model have one too
    found = {
        (file.relative_to(SOURCE).as_posix(), name)
        for file in SOURCE.rglob("*.py")
        for name in probe.findall(file.read_text(encoding="utf-8"))
        if name in names
    }
    assert not found


def test_a_trait_is_found_inside_wrappers_and_has_its_default_elsewhere() -> None:
    class Model(nn.Module):
        loss_head = "head"
        windows = (4, 8)

    model = nn.Sequential()
    model.add_module("_orig_mod", Model())  # as torch.compile wraps
    assert traits_of(model).loss_head == "head"
    assert traits_of(model).windows == (4, 8)
    assert traits_of(nn.Linear(1, 1)).pipeline_layers == "layers"
    with pytest.raises(AttributeError):
        traits_of(model).loss_heads  # type: ignore[attr-defined]


def test_an_attribute_of_another_type_is_not_a_trait() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.loss_head, self.fsdp_units = nn.Linear(1, 1), "vision"

    assert traits_of(Model()).loss_head is None
    assert traits_of(Model()).fsdp_units == ()


if __name__ == "__main__":
    GUIDE.write_text(TABLE.sub(lambda _: table(), GUIDE.read_text(encoding="utf-8")), encoding="utf-8")
