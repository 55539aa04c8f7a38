"""The documents of a run's first steps: what they make of attention, and when they are not known."""

from pathlib import Path

import pytest
from titan_train.cli import main
from titan_train.config import Config, load_config
from titan_train.inputs import prepare_inputs, prepared_rows
from titan_train.planner.documents import DocumentWork, document_work
from titan_train.planner.setup import Setup


def configure(folder: Path, *settings: str) -> Config:
    """Documents of 40 bytes, and one of 1,000 among them."""
    texts = folder / "texts"
    texts.mkdir(exist_ok=True)
    for n in range(60):
        (texts / f"{n:03}.txt").write_text("x" * (999 if n == 7 else 39))
    (folder / "own.toml").write_text(
        f"""
        extends = "debug"
        model = {{seq_len = 128}}
        train = {{global_batch = 8}}
        [tokenizer]
        kind = "bytes"
        [data]
        cache_dir = "{folder / "cache"}"
        validation_fraction = 0.0
        sources = [{{name = "t", kind = "text", paths = ["{texts}"]}}]
        """
    )
    return load_config(str(folder / "own.toml"), settings)


def test_work_is_that_of_the_documents_and_ranks_wait_for_the_longest() -> None:
    rows = [[8], [2, 2, 2, 2], [4, 4], [1] * 8]
    two = Setup(seq_len=8, global_batch=4, microbatch=1, dp_shard=2)
    found = DocumentWork.of(rows, two)
    # pairs of the rows: 64, 16, 32, 8; rank 0 has the first two and rank 1 the others, a row at a time
    assert found.share == pytest.approx((64 + 16 + 32 + 8) / (4 * 64))
    assert found.static == pytest.approx((64 + 16) * 2 / 120)
    assert (found.count, found.longest, found.dynamic) == (15, 8, None)
    assert found.attention_share(dynamic=True) == found.share * found.static, "nothing is shared without cp"
    shared = DocumentWork.of(rows, two.changed(cp=2))
    assert shared.dynamic is not None
    assert shared.dynamic < shared.static


def test_documents_of_the_prepared_corpus_are_those_that_the_run_reads(tmp_path: Path) -> None:
    config = configure(tmp_path)
    assert prepared_rows(config, 8) is None
    assert not (tmp_path / "cache").exists(), "looking makes nothing"
    prepare_inputs(config, quiet=True)
    rows = prepared_rows(config, 8)
    assert rows is not None
    assert [sum(row) for row in rows] == [128] * 8
    assert {n for row in rows for n in row[1:-1]} <= {40, 1000}
    assert prepared_rows(configure(tmp_path, "--data.document-mask", "false"), 8) is None
    assert (
        prepared_rows(configure(tmp_path, "--tokenizer.kind", "sentencepiece", "--tokenizer.train", "true"), 8) is None
    )


def test_a_prediction_knows_the_documents_once_they_are_prepared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configure(tmp_path, "--parallel.cp", "2")
    words = ["check", str(tmp_path / "own.toml"), "--hardware", "h100", "--devices", "4", "--parallel.cp", "2"]
    assert main(words) == 0
    assert "documents" not in capsys.readouterr().out
    prepare_inputs(config, quiet=True)
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "in 64 rows, the longest of 128 tokens" in said
    assert "with context.dynamic = true: 1." in said
    work = document_work(config, Setup(seq_len=128, global_batch=8, microbatch=4, dp_shard=2, cp=2))
    assert work is not None
    assert f"{work.static:.2f} times the mean" in said
