import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from titan_cp import plan
from titan_cp.cli import main
from titan_cp.planning.draw import draw_plan

LLAMA = ["explain", "--cp", "8", "--heads", "32", "--kv-heads", "8"]


def test_explain_prints_the_plan_and_writes_a_drawing(tmp_path, capsys):
    lengths = tmp_path / "documents.txt"
    lengths.write_text("300 40, 1500\n7 1 2000 248\n")
    svg = tmp_path / "plan.svg"
    assert main([*LLAMA, "--docs", str(lengths), "--method", "ring", "--svg", str(svg)]) == 0
    text = capsys.readouterr().out
    assert "4096 tokens, 7 documents, causal" in text
    assert "kernel      cuda: cuda_varlen" in text
    root = ET.parse(svg).getroot()
    words = [e.text for e in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "rank 7" in words
    colours = {e.get("fill") for e in root.iter("{http://www.w3.org/2000/svg}rect")}
    assert len(colours - {"white", "#fafafa"}) == 8


@pytest.mark.parametrize("method", ["ring", "allgather", "ulysses", "usp"])
def test_every_method_can_be_drawn(method, tmp_path):
    svg = tmp_path / "plan.svg"
    assert main([*LLAMA, "--seq-len", "4096", "--method", method, "--window", "700", "--full", "--svg", str(svg)]) == 0
    ET.parse(svg)


def test_a_plan_that_cannot_work_exits_with_2_and_says_why(capsys):
    assert main([*LLAMA, "--seq-len", "1001", "--method", "ring"]) == 2
    assert "Nearest: 992 or 1008" in capsys.readouterr().err


def test_explain_of_a_state_layer_gives_its_bytes_and_steps(capsys):
    state = [
        "explain",
        "--kind",
        "gated_delta",
        "--seq-len",
        "131072",
        "--cp",
        "8",
        "--heads",
        "32",
        "--kv-heads",
        "16",
    ]
    assert main([*state, "--convolution", "4", "--layout", "zigzag"]) == 0
    zigzag = capsys.readouterr().out
    # 7 others × 2 pieces × 32 heads × (128² + 128²) × 4 bytes
    assert "56.00 MiB forward, 56.00 MiB backward: independent of length" in zigzag
    assert "one all-gather each way, then 14 small products in turn" in zigzag
    assert main(state) == 0
    assert "contiguous" in (text := capsys.readouterr().out)
    assert "28.00 MiB forward" in text
    assert main([*state, "--window", "5"]) == 2
    assert "--window is for attention" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "12 x 3", "4 0 5", "-3 4"])
def test_a_documents_file_with_anything_but_lengths_is_refused(content, tmp_path, capsys):
    lengths = tmp_path / "documents.txt"
    lengths.write_text(content)
    assert main([*LLAMA, "--docs", str(lengths)]) == 2
    assert "should hold document lengths" in capsys.readouterr().err


def test_a_missing_documents_file_is_an_error_and_not_a_traceback(capsys):
    assert main([*LLAMA, "--docs", "no-such-file"]) == 2
    assert main([*LLAMA, "--docs", "/dev/zero"]) == 2
    assert "no-such-file" in capsys.readouterr().err


PACKED = [0, 3, 6, 9, 12, 14, 17, 20, 22, 25, 29, 32]


@pytest.mark.parametrize(("layout", "bounds"), [("zigzag", [0, 32]), ("per_document", PACKED), ("documents", PACKED)])
def test_the_pictures_of_the_concept_page_are_what_the_package_draws(layout, bounds):
    pictures = Path(__file__).parents[3] / "docs/concepts/pictures"
    if not pictures.exists():
        pytest.skip("not in a clone of the repository")
    p = plan(cu_seqlens=bounds, size=4, rank=0, num_heads=8, num_kv_heads=2, head_dim=64, method="ring", layout=layout)
    assert (pictures / f"context_{layout}.svg").read_text() == draw_plan(p)
