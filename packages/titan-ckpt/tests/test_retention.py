"""Steps in the order of their commits: what is newest, what is kept, what a reader sees meanwhile."""

import json
import shutil
from dataclasses import replace

import pytest
from titan_ckpt import Checkpointer, DamageError, Manifest, Retention, TrainState
from titan_ckpt.save.job import Lead, SaveLayout, WriteJob
from titan_ckpt.steps import commit, leftovers, listing
from torch import nn


def make_state(fill: float = 0.0) -> TrainState:
    model = nn.Linear(4, 4)
    nn.init.constant_(model.weight, fill)
    return TrainState(model=model, rng=False)


def save(root, *steps: int, **keep) -> Checkpointer:
    ck = Checkpointer(root, **keep)
    for step in steps:
        ck.save(step, make_state(float(step)))
    return ck


def listed(root) -> list[int]:
    return [step for step, _ in listing.step_folders(root)]


def folders(root) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir())


def test_retention_keeps_last_every_and_best():
    steps = {step: {"loss": abs(step - 7) + 0.5} for step in range(1, 13)}
    assert Retention(last=2).surplus(steps) == list(range(1, 11))
    assert [s for s in steps if s not in Retention(last=1, every=5).surplus(steps)] == [5, 10, 12]
    assert [s for s in steps if s not in Retention(last=1, best="loss").surplus(steps)] == [7, 12]
    assert [s for s in steps if s not in Retention(last=1, best="loss", best_is="max").surplus(steps)] == [1, 12]
    assert Retention().surplus(steps) == []
    assert Retention(last=2).surplus({50: {}, 200: {}, 60: {}}) == [50], "in the order given, that of the commits"
    assert Retention(last=1, best="loss").surplus({1: {"loss": float("nan")}, 2: {}}) == [1]
    with pytest.raises(ValueError, match="keep_last=0 would keep nothing"):
        Retention(last=0)
    for value in (True, 2.0, "2"):
        with pytest.raises(ValueError, match=r"keep_every=.* is not a whole number"):
            Retention(every=value)


def test_a_run_that_goes_back_to_an_older_step_goes_on_from_what_it_saves_there(tmp_path):
    save(tmp_path, 50, 100, 200)
    ck = Checkpointer(tmp_path, keep_last=2)
    assert ck.restore(make_state(), step=50) == 50
    assert ck.save(60, make_state(60.0)).path.exists()
    assert ck.steps() == listed(tmp_path) == [200, 60]
    ck.save(70, make_state(70.0))
    assert ck.steps() == [60, 70]
    assert ck.latest() == ck.restore(make_state()) == 70
    assert [Manifest.open(path).serial for _, path in listing.step_folders(tmp_path)] == [4, 5]


def test_the_step_after_a_damaged_one_is_kept_though_its_number_is_smaller(tmp_path):
    save(tmp_path, 100, 200)
    path = tmp_path / "step-00000150"
    save(tmp_path, 150)
    assert commit.purge(path, 150, Retention(last=1), distrusted=(200,)) != []
    assert listed(tmp_path) == [200, 150], "the damaged one is neither counted nor deleted"
    shutil.rmtree(tmp_path / "step-00000150")
    save(tmp_path, 200, keep_last=1)
    newest = dict(listing.step_folders(tmp_path))[200]
    assert commit.purge(newest, 200, Retention(last=1), distrusted=(200,)) == [], "saved again, it is trusted"


def test_a_distrusted_step_still_counts_for_nothing_with_keep_last_two(tmp_path):
    ck = save(tmp_path, 100, 200, 150)
    commit.purge(ck.path(150), 150, Retention(last=2), distrusted=[200])
    assert listed(tmp_path) == [100, 200, 150]


def test_jobs_take_the_distrusted_steps_to_the_saver(tmp_path):
    lead = Lead({}, {"torch": "2"}, {"loss": float("nan")}, Retention(last=1, best="loss"), (200, 300))
    job = WriteJob(tmp_path, 5, "0" * 16, 0, 1, SaveLayout(()), (), lead)
    told = WriteJob.decode(job.encode(), job.layout)
    assert repr(told) == repr(job)
    assert replace(job, lead=None) == WriteJob.decode(replace(job, lead=None).encode(), job.layout)


def test_a_step_whose_manifest_is_damaged_is_listed_after_the_last_smaller_number(tmp_path):
    save(tmp_path, 100, 200, 300, 60, 70)
    for step, order in ((70, [100, 200, 300, 60, 70]), (200, [100, 300, 60, 70, 200]), (60, [60, 100, 200, 300, 70])):
        file = tmp_path / f"step-{step:08d}" / "MANIFEST.json"
        whole = file.read_bytes()
        file.write_bytes(whole[:-9])
        assert listed(tmp_path) == order
        file.write_bytes(whole)
    assert listed(tmp_path) == [100, 200, 300, 60, 70]


def test_a_copied_or_renamed_folder_is_damage_that_says_so(tmp_path):
    ck = save(tmp_path, 100, 200)
    shutil.copytree(tmp_path / "step-00000100", tmp_path / "step-00000900")
    assert listed(tmp_path) == [100, 200, 900]
    with pytest.raises(DamageError, match="is of step 100, but the folder is called step-00000900"):
        ck.restore(make_state())
    assert ck.steps() == [100, 200]
    assert ck.latest() == 200
    shutil.rmtree(tmp_path / "step-00000900")
    (tmp_path / "step-00000100").rename(tmp_path / "x")
    (tmp_path / "step-00000200").rename(tmp_path / "step-00000100")
    (tmp_path / "x").rename(tmp_path / "step-00000200")
    assert ck.steps() == []
    (tmp_path / "step-00000200").rename(tmp_path / "best")
    assert Manifest.open(tmp_path / "best").step == 100, "any other name says nothing of a step"


def stale_revision(root, step: int) -> None:
    """Save a step twice, as if killed between the second commit and the deletion of the first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit, "purge", lambda *_: [])
        save(root, step, step)


def test_a_replaced_revision_is_swept_and_never_comes_back(tmp_path):
    stale_revision(tmp_path, 1)
    assert folders(tmp_path) == ["step-00000001", "step-00000001.r1"]
    assert leftovers.find_leftovers(tmp_path) == [tmp_path / "step-00000001"]
    assert leftovers.sweep(tmp_path) == [tmp_path / "step-00000001"]
    assert folders(tmp_path) == ["step-00000001.r1"]
    assert listed(tmp_path) == [1]


def test_the_revision_before_a_damaged_one_is_not_swept(tmp_path):
    stale_revision(tmp_path, 1)
    (tmp_path / "step-00000001.r1" / "MANIFEST.json").unlink()
    assert leftovers.sweep(tmp_path) == []
    assert len(folders(tmp_path)) == 2


def test_a_retired_step_goes_with_all_its_revisions_oldest_first(tmp_path, monkeypatch):
    stale_revision(tmp_path, 1)
    gone, real = [], commit.retire
    monkeypatch.setattr(commit, "retire", lambda path: gone.append(path.name) or real(path))
    assert commit.surplus(tmp_path, Retention(last=1)) == []
    ck = Checkpointer.__new__(Checkpointer)  # without the sweep
    monkeypatch.setattr(leftovers, "sweep", lambda *_: [])
    ck.__init__(tmp_path, keep_last=1)
    ck.save(2, make_state())
    assert gone == ["step-00000001", "step-00000001.r1"]
    assert folders(tmp_path) == ["step-00000002"]


def test_surplus_lists_whole_steps_in_the_order_of_commits(tmp_path):
    stale_revision(tmp_path, 9)
    save(tmp_path, 3, 5)
    assert [path.name for path in commit.surplus(tmp_path, Retention(last=1))] == ["step-00000009.r1", "step-00000003"]
    assert [path.name for path in commit.surplus(tmp_path, Retention(last=1), [5])] == ["step-00000009.r1"]


@pytest.mark.parametrize("name", ["MANIFEST.json", "INDEX.json.zst"])
def test_a_file_that_cannot_be_read_just_now_is_an_error_with_its_name_and_no_damage(tmp_path, monkeypatch, name):
    ck = save(tmp_path, 1, 2)
    kind, real = type(tmp_path), type(tmp_path).read_bytes

    def failing(path):
        if path.name == name and path.parent.name == "step-00000002":
            raise OSError(5, "Input/output error")
        return real(path)

    def unanswered() -> str:
        with pytest.raises(OSError, match="Input/output error") as caught:
            Manifest.open(tmp_path / "step-00000002").read_index()
        assert caught.value.errno == 5
        return str(caught.value)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "read_bytes", failing)
        assert f"step-00000002/{name} cannot be read" in unanswered()
        with pytest.raises(Exception, match=f"step-00000002/{name} cannot be read") as caught:
            ck.restore(make_state(), fallback=True)
        assert not isinstance(caught.value, DamageError)
    (tmp_path / "step-00000002" / name).unlink()
    assert ck.restore(make_state(), fallback=True) == 1


def test_a_listing_while_steps_are_deleted_is_taken_again(tmp_path, monkeypatch):
    save(tmp_path, 1)
    real, left = Manifest.open, [2, 3]

    def opened(path):  # the trainer saves the next step and deletes this one just before it is opened
        if left:
            save(tmp_path, left.pop(0), keep_last=1)
        return real(path)

    told = []
    for most in (None, 1):
        left[:] = [max(listed(tmp_path)) + 1, max(listed(tmp_path)) + 2]
        with monkeypatch.context() as patch:
            patch.setattr(listing.Manifest, "open", opened)
            found = listing.open_steps(tmp_path, lambda *why: told.append(why), most)
        assert [manifest.step for manifest in found] == listed(tmp_path)
    assert told == [], "what was deleted meanwhile is not damage"
    assert listing.is_gone(tmp_path / "step-00000001")


def test_a_look_that_meets_a_deleted_step_finds_the_one_that_replaced_it(tmp_path, monkeypatch):
    save(tmp_path, 1)
    real, left = listing._look, [2, 3]

    def look(path):  # the trainer saves the next step and deletes this one just before it is looked at
        if left:
            with monkeypatch.context() as patch:
                patch.setattr(listing, "_look", real)
                save(tmp_path, left.pop(0), keep_last=1)
        return real(path)

    monkeypatch.setattr(listing, "_look", look)
    assert listed(tmp_path) == [3]


def test_one_step_is_found_without_reading_any_manifest(tmp_path, monkeypatch):
    save(tmp_path, 7)
    stale_revision(tmp_path, 5)
    monkeypatch.setattr(Manifest, "read", None)
    assert listing.step_folder(tmp_path, 7) == tmp_path / "step-00000007"
    assert listing.step_folder(tmp_path, 5) == tmp_path / "step-00000005.r1"
    assert listing.step_folder(tmp_path, 6) is None


def test_valid_steps_are_opened_newest_first_and_the_others_told(tmp_path):
    save(tmp_path, 1, 2, 3)
    (tmp_path / "step-00000003" / "MANIFEST.json").unlink()
    told = []
    assert [m.step for m in listing.open_steps(tmp_path, lambda path, why: told.append((path.name, str(why))))] == [
        1,
        2,
    ]
    assert [m.step for m in listing.open_steps(tmp_path, lambda path, why: None, 1)] == [2]
    ((name, why),) = told
    assert name == "step-00000003"
    assert "MANIFEST.json: is missing" in why


def test_metrics_that_are_no_finite_numbers_are_valid_json_and_come_back(tmp_path):
    metrics = {"a": float("nan"), "b": float("inf"), "c": -float("inf"), "d": 0.5}
    path = Checkpointer(tmp_path).save(1, make_state(), metrics=metrics).path

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    told = json.loads((path / "MANIFEST.json").read_text(), parse_constant=refuse)
    assert told["metrics"] == {"a": {"$float": "nan"}, "b": {"$float": "inf"}, "c": {"$float": "-inf"}, "d": 0.5}
    assert repr(Manifest.open(path).metrics) == repr(metrics)


def test_a_manifest_without_a_field_is_damage(tmp_path):
    from titan_ckpt.format.manifest import _self_digest

    path = Checkpointer(tmp_path).save(1, make_state()).path
    value = json.loads((path / "MANIFEST.json").read_text())
    del value["digest"], value["serial"]
    (path / "MANIFEST.json").write_text(json.dumps({**value, "digest": _self_digest(value)}))
    with pytest.raises(DamageError, match="missing 'serial'"):
        Manifest.open(path)


def test_a_save_reads_no_more_of_kept_steps_than_their_commit_records(tmp_path, monkeypatch):
    """However many steps are kept: a manifest lists every file of a step, thousands where many ranks save."""
    with Checkpointer(tmp_path, keep_last=2, keep_every=2) as ck:
        for step in range(1, 9):
            ck.save(step, make_state(step))
        opened: list[str] = []
        real = Manifest.read.__func__
        with monkeypatch.context() as patch:
            noted = classmethod(lambda cls, folder: opened.append(folder.name) or real(cls, folder))
            patch.setattr(Manifest, "read", noted)
            ck.save(9, make_state(9))
        assert ck.steps() == [2, 4, 6, 8, 9]
    assert sorted(opened) == ["step-00000007", "step-00000008"], (
        "what decides: the one to delete, the other one to keep"
    )


def test_a_commit_record_that_does_not_belong_to_the_manifest_is_not_believed(tmp_path):
    with Checkpointer(tmp_path) as ck:
        for step in (5, 3):
            ck.save(step, make_state(step))
        first, second = (ck.path(step) / "COMMIT.json" for step in (5, 3))
        kept = first.read_bytes()
        for wrong in (second.read_bytes(), b"", b"{}", b"[]", kept.replace(b'"serial": 1', b'"serial": 9')):
            first.write_bytes(wrong)
            assert ck.steps() == [5, 3]
        first.unlink()
        assert ck.steps() == [5, 3]
