import pytest
from titan_train.config import Config, RunConfig, TrainConfig
from titan_train.observe import RunInfo, read_run_info
from titan_train.run_folder import changes, commit, discard, read_config, stage, staged_folder

FIRST, SECOND = Config(run=RunConfig(name="a"), train=TrainConfig(steps=5)), Config(train=TrainConfig(steps=7))


def test_an_attempt_takes_effect_when_it_is_committed_and_not_before(tmp_path):
    commit(tmp_path, FIRST)
    RunInfo(tmp_path, device="cpu", world_size=1).finish("finished", step=5)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    info = RunInfo(tmp_path, device="cpu", world_size=2, resume_step=5, staged=stage(SECOND, tmp_path))
    assert changes(SECOND, tmp_path) == ["run.name: a -> run", "train.steps: 5 -> 7"]
    info.finish("failed", step=5, error="refused")
    discard(tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before

    info = RunInfo(tmp_path, device="cpu", world_size=2, resume_step=5, staged=stage(SECOND, tmp_path))
    commit(tmp_path, FIRST)
    info.finish("finished", step=7)
    assert read_config(tmp_path) == SECOND
    assert [a["world_size"] for a in read_run_info(tmp_path)["attempts"]] == [1, 2]
    assert read_run_info(tmp_path)["attempts"][-1]["status"] == "finished"
    assert not staged_folder(tmp_path).exists()


def test_an_attempt_that_is_lost_before_it_takes_effect_leaves_the_one_before_it_killed(tmp_path):
    RunInfo(tmp_path, device="cpu", world_size=1, staged=stage(FIRST, tmp_path))
    commit(tmp_path, FIRST)
    RunInfo(tmp_path, device="cpu", world_size=1, resume_step=3, staged=stage(FIRST, tmp_path)).finish("failed", step=3)
    assert [a["status"] for a in read_run_info(tmp_path)["attempts"]] == ["killed"]


@pytest.mark.parametrize("content", ["[train\nsteps = ", "x = " + "[" * 9999], ids=["torn", "deep"])
def test_a_damaged_configuration_does_not_stop_the_next_attempt(tmp_path, content):
    (tmp_path / "config.toml").write_text(content)
    assert changes(FIRST, tmp_path) == []
    stage(FIRST, tmp_path)
    commit(tmp_path, SECOND)
    assert read_config(tmp_path) == FIRST
