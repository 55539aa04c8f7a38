import time

import numpy as np
import pytest
from titan_train.config import DataConfig, SourceConfig
from titan_train.data import DataLoader, build_datasets


@pytest.mark.slow
def test_one_core_reads_20_million_tokens_a_processor_second_from_shards(tmp_path, tokenizer):
    rng = np.random.default_rng(0)
    for number in range(40):
        text = "".join(chr(c) for c in rng.integers(32, 127, size=100_000))
        (tmp_path / f"{number}.txt").write_text(text)
    config = DataConfig(sources=(SourceConfig(name="t", paths=(str(tmp_path),)),), validation_fraction=0.0)
    train, _ = build_datasets(config, tokenizer, seq_len=2048, seed=0, cache_dir=tmp_path / "cache")
    best = 0.0
    for _ in range(3):
        loader = DataLoader(train, global_batch=8, microbatch=8, prefetch=0, steps=500)
        started = time.process_time()  # other programs' load does not count
        tokens = sum(batch.tokens.numel() for batch in loader)
        best = max(best, tokens / (time.process_time() - started))
    assert best >= 20e6
