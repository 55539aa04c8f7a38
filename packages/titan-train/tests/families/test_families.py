"""The table of families: a few of its rows, and what becomes of a family that hangs, crashes or fails."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
sys.path.insert(0, str(Path(__file__).parent))
import one
import table
from ends import ends_unlike_others
from titan_train.models.hf.plans import HF_PLANS

EQUAL = dict.fromkeys(one.COLUMNS, "equal")


@pytest.mark.parametrize(
    "kind", ["opt", *(pytest.param(k, marks=pytest.mark.slow) for k in ("starcoder2", "phimoe", "llama"))]
)
def test_a_family_is_equal_to_transformers_in_every_column(kind: str, tmp_path: Path) -> None:
    row = table.isolated(kind, 120.0)
    if kind not in HF_PLANS:
        assert row.pop("stages", str(row)).startswith("refused: ")  # without a plan
    assert row.pop("packed").startswith("equal")
    assert row.items() <= EQUAL.items()


def test_experts_are_asked_for_their_activation_where_config_json_names_none(tmp_path: Path) -> None:
    source = one.publish("lfm2_moe", tmp_path)
    one.composition.prepare(tmp_path)
    one.checked(one._config(tmp_path, source, masked=False))  # was an AttributeError


def test_a_head_that_a_family_cannot_tie_is_a_matrix_of_its_own_also_where_config_json_asks_to_tie_it() -> None:
    from titan_train.models.hf.family import HFModelArgs
    from transformers import BigBirdPegasusConfig, LlamaConfig

    def tied(kind: type) -> bool:
        return HFModelArgs.of({"model_type": kind.model_type, "tie_word_embeddings": True}, kind).tied_embeddings

    assert not tied(BigBirdPegasusConfig)  # its class ties nothing, so leaving the head out of an export would lose it
    assert tied(LlamaConfig)


def test_a_family_that_hangs_or_crashes_ends_its_own_row_only() -> None:
    assert table.isolated("slow", 0.5, ends_unlike_others) == {"packed": "**hangs**: no end in 0 s"}
    assert table.isolated("gone", 30.0, ends_unlike_others) == {"packed": "**crashes**: exit code 3"}
    assert table.isolated("wrong", 30.0, ends_unlike_others) == {
        "packed": "**fails**: ZeroDivisionError: division by zero"
    }


def test_the_page_has_a_row_for_each_family_and_counts_them(tmp_path: Path) -> None:
    rows = {"b": {"packed": "refused: a | b"}, "a": EQUAL, "c": {"step": "**fails**: x"}}
    table.write_table(rows, tmp_path / "page.md", 120.0)
    text = (tmp_path / "page.md").read_text()
    assert "| a | equal | equal | equal | equal | equal |\n| b | refused: a \\| b |" in text
    assert table.counts(rows) == "1 are refused; 1 are equal where they are not refused; 1 fail somewhere"
