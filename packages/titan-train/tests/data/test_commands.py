import io

import pytest
from rich.console import Console
from titan_train.cli.data import prepare_sources, train_tokenizer
from titan_train.config import DataConfig, SourceConfig, TokenizerConfig
from titan_train.data import PrepareProgress, prepare, show_progress
from titan_train.data.shards.prepare import TRAIN, VALIDATION
from titan_train.tokenizers import load_tokenizer


@pytest.fixture
def corpus(tmp_path, write_jsonl):
    write_jsonl(tmp_path / "a.jsonl", 300)
    return SourceConfig(name="web", kind="jsonl", paths=(str(tmp_path / "a.jsonl"),))


def test_trained_tokenizer_is_saved_and_judged_on_held_out_text(tmp_path, corpus, capsys):
    out = io.StringIO()
    report = train_tokenizer(
        (corpus,),
        output_dir=tmp_path / "tok",
        vocab_size=300,
        held_out_fraction=0.2,
        console=Console(file=out, width=200),
    )
    assert load_tokenizer(tmp_path / "tok").vocab_size == report.vocab_size == 300
    assert 30 < report.documents < 100
    assert report.round_trips == report.documents
    assert 0.5 < report.bytes_per_token < 4
    assert f"{report.documents} of {report.documents} documents come back unchanged" in out.getvalue()
    assert f"{report.bytes_per_token:.2f} bytes/token" in out.getvalue()
    assert "read text for the tokenizer: 1/1 files" in capsys.readouterr().err


def test_prepare_prints_what_came_of_each_source(tmp_path, corpus, capsys):
    out = io.StringIO()
    data = DataConfig(sources=(corpus,), validation_fraction=0.2)
    (result,) = prepare_sources(
        data, TokenizerConfig(kind="bytes"), cache_dir=tmp_path / "cache", console=Console(file=out, width=200)
    )
    train, held_out = result.num_tokens(TRAIN), result.num_tokens(VALIDATION)
    assert result.num_documents(TRAIN) + result.num_documents(VALIDATION) == 300
    assert train > held_out > 0
    assert f"{train:,}" in out.getvalue()
    assert "tokenize web: 1/1 files" in capsys.readouterr().err


def test_preparation_of_one_large_file_reports_as_it_goes(tmp_path, write_jsonl, tokenizer, monkeypatch):
    monkeypatch.setattr("titan_train.data.sources.encoding._BATCH_ITEMS", 10)
    monkeypatch.setattr("titan_train.data.progress._REPORT_EVERY_S", 0.0)
    write_jsonl(tmp_path / "a.jsonl", 3000)
    source = SourceConfig(name="web", kind="jsonl", paths=(str(tmp_path / "a.jsonl"),))
    seen = []
    prepare(DataConfig(sources=(source,), num_threads=1), tokenizer, cache_dir=tmp_path, progress=seen.append)
    assert len(seen) > 100
    for field in ("bytes_done", "tokens"):
        values = [getattr(progress, field) for progress in seen]
        assert values == sorted(values)
        assert len(set(values)) > 3
    assert seen[-1].finished
    assert seen[-1].bytes_done == seen[-1].bytes_total == (tmp_path / "a.jsonl").stat().st_size


def test_progress_is_a_bar_on_a_terminal():
    out = io.StringIO()
    with show_progress(Console(file=out, force_terminal=True, width=120)) as update:
        update(
            PrepareProgress(
                stage="tokenize web", files_done=1, files_total=2, bytes_done=5, bytes_total=10, elapsed_s=1.0
            )
        )
        update(PrepareProgress(stage="tokenize web", files_done=2, files_total=2, tokens=3_000_000, finished=True))
    assert "tokenize web" in out.getvalue()
    assert "2/2 files" in out.getvalue()
    assert "3.00 M tokens" in out.getvalue()
