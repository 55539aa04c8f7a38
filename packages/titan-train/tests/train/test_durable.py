"""A power cut after a checkpoint loses nothing that the checkpoint relies on."""

import json
import os
from pathlib import Path

from tiny_run import tiny_run, write_text
from titan_ckpt import Checkpointer
from titan_train.train import Trainer


def test_what_a_checkpoint_relies_on_is_synced_before_it_is_saved(tmp_path, monkeypatch):
    write_text(tmp_path)
    run_dir = tmp_path / "runs" / "run"
    synced, survives, sync, save = {}, {}, os.fsync, Checkpointer.save

    def recording_sync(descriptor):
        sync(descriptor)
        synced[str(Path(f"/proc/self/fd/{descriptor}").readlink())] = os.fstat(descriptor).st_size

    def recording_save(self, step, state, **options):
        """What a power cut leaves at worst, at the moment at which the checkpoint may begin to count."""
        files = [path for path in run_dir.rglob("*") if path.is_file() and "checkpoints" not in path.parts]
        survives[step] = {path.name: path.read_bytes()[: synced.get(str(path), 0)] for path in files}
        assert {path.name for path in files if path.stat().st_size != len(survives[step][path.name])} == set()
        assert {str(run_dir), str(run_dir / "tokenizer")} <= set(synced)  # the names too
        return save(self, step, state, **options)

    monkeypatch.setattr(os, "fsync", recording_sync)
    monkeypatch.setattr(Checkpointer, "save", recording_save)
    with Trainer(tiny_run(tmp_path, checkpoint={"every": 4}), run_dir=run_dir) as trainer:
        trainer.fit()
    assert list(survives) == [4, 8, 12]
    for step, files in survives.items():
        lines = [json.loads(line) for line in files["metrics.jsonl"].splitlines()]
        assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(1, step + 1))
        assert files["config.toml"]
