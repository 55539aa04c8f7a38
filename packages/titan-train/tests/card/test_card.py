"""Cards: what is equal is said equal, what is not is found, and a page says what was run."""

import math
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
from titan_train.card.layouts import LAYOUTS, Runs
from titan_train.card.page import Card, draw, page, verdict
from titan_train.card.proofs import Comparison, Proof, attempt
from titan_train.card.subject import Small, Subject, read_subject, settings, write_small
from titan_train.cli import main
from titan_train.config import load_config


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    work = tmp_path_factory.mktemp("card")
    small = write_small(read_subject("qwen3_30b_a3b"), work / "small")
    (work / "card.toml").write_text(settings(small, work, masked=True))
    return Comparison(load_config(str(work / "card.toml")), small.folder)


def test_a_small_model_of_a_shipped_one_is_equal_to_transformers(pair: Comparison) -> None:
    for proof in (pair.packed(), pair.logits(), pair.gradients()):
        assert proof.result == "equal", proof


def test_one_wrong_weight_is_found_in_logits_and_gradients(pair: Comparison) -> None:
    weight = pair.own.get_parameter("layers.3.ffn_norm.weight")
    with torch.no_grad():
        weight[0] += 1e-2
    try:
        assert {pair.packed().result, pair.logits().result, pair.gradients().result} == {"differs"}
    finally:
        with torch.no_grad():
            weight[0] -= 1e-2


def test_a_gradient_that_is_not_finite_differs(pair: Comparison) -> None:
    hook = pair.own.get_parameter("layers.3.ffn_norm.weight").register_hook(lambda grad: grad * math.nan)
    try:
        assert pair.gradients().result == "differs"
    finally:
        hook.remove()


def test_losses_that_are_not_finite_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runs, "_run", lambda *_: "")
    monkeypatch.setattr(Runs, "_losses", lambda *_: [1.0, math.nan, 1.0])
    runs = Runs(tmp_path / "card.toml", tmp_path)
    assert runs.compare(LAYOUTS[0], [1.0] * 3).result == "differs"
    assert runs.compare(LAYOUTS[0], [1.0, math.nan, 1.0]).result == "differs"


def test_a_proof_that_raises_is_a_row() -> None:
    def refuses() -> Proof:
        raise ValueError("parallel.cp=2 cannot be. Set 1.")

    assert attempt("cp 2", refuses).figure == "parallel.cp=2 cannot be"
    assert attempt("cp 2", refuses).result == "refused"
    assert attempt("x", lambda: 1 / 0).result == "fails"  # type: ignore[arg-type,return-value]


def test_the_page_has_every_row_and_the_picture_a_tile_for_each() -> None:
    rows = [Proof("logits", "equal", "1.0e-06"), Proof("cp 2", "refused", "a | b", command="titan-train run card.toml")]
    card = Card(
        Subject("hf:x", {"model_type": "llama"}), Small(Path("small"), 4, 1000), rows[:1], rows[1:],
        ("titan-train check", "8 x H100"), "today", "titan-train card hf:x", "[run]",
    )  # fmt: skip
    text = page(card, "card.svg")
    assert text.startswith("# hf:x: 1 equal, 1 refused\n")
    assert "| logits | equal | 1.0e-06 | 0 |" in text
    assert r"| cp 2 | refused | a \| b | 0 |" in text
    assert "$ titan-train run card.toml" in text
    assert draw(card).count("<rect") == 2
    assert verdict(rows) == "1 equal, 1 refused"


@pytest.mark.parametrize(
    ("name", "words"), [("flux_tiny", "no decoder"), ("llama9", "unknown model"), ("hf:none", "does not exist")]
)
def test_what_has_no_card_is_refused_in_one_line(
    name: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["card", name, "--out", str(tmp_path / "card")]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "card").exists()


def test_without_transformers_the_extra_is_named(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["card", "llama3_8b", "--out", str(tmp_path / "card")]) == 2
    assert (
        "titan-train card needs transformers, which is not installed. Install titan-train[hf]."
        in capsys.readouterr().err
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama3_8b", "qwen3_30b_a3b"])
def test_a_whole_card_is_equal_in_every_row_that_is_not_refused(name: str, tmp_path: Path) -> None:
    assert main(["card", name, "--out", str(tmp_path / "card")]) == 0
    text = (tmp_path / "card" / "card.md").read_text()
    refused = [line for line in text.splitlines() if "| refused |" in line]
    assert all(line.startswith("| ep 2 |") for line in refused)
    assert (tmp_path / "card" / "small" / "config.json").is_file()
