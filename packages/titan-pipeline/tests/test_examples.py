"""The examples run, and pipelined equals whole."""

import re
import runpy
from pathlib import Path

import pytest

pytest.importorskip("torch")

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_a_plain_cnn_learns(capsys):
    runpy.run_path(str(EXAMPLES / "cnn.py"))
    before, after = map(float, re.findall(r"\d+\.\d+", capsys.readouterr().out))
    assert after < before


@pytest.mark.parametrize("name", ["transformer", "hf_llama"])
def test_a_third_party_transformer_gives_the_loss_of_the_whole_model(name, capsys):
    if name == "hf_llama":
        pytest.importorskip("transformers")
    runpy.run_path(str(EXAMPLES / f"{name}.py"))
    pipelined, whole = map(float, re.findall(r"\d+\.\d+", capsys.readouterr().out)[-2:])
    # six decimals are printed; a mean of 4 float32 losses below 8 in another order is off by at most 4 x 8 x 2^-24
    assert pipelined == pytest.approx(whole, abs=5e-6)
