"""Folders of `kind = "tokens"` that are not what `titan-train data prepare` wrote are refused when they are prepared again."""

import json
import shutil

import pytest
from titan_train.config.data import DataConfig, SourceConfig
from titan_train.data import build_datasets, prepare
from titan_train.tokenizers import ByteTokenizer


def with_manifest(change):
    def damage(folder):
        path = folder / "manifest.json"
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return damage


def cut(name, count):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:count])


def flip(name, at):
    def damage(folder):
        data = bytearray((folder / name).read_bytes())
        data[at] ^= 0x40
        (folder / name).write_bytes(data)

    return damage


DAMAGE = {
    "a folder of something else": (lambda folder: [file.unlink() for file in folder.glob("*")], "has no manifest.json"),
    "no folder": (shutil.rmtree, "has no manifest.json"),
    "a manifest that is not JSON": (cut("manifest.json", 40), "is not a readable manifest"),
    "a manifest of nothing": (cut("manifest.json", 0), "is not a readable manifest"),
    "a manifest nested without end": (lambda f: (f / "manifest.json").write_text("[" * 9999), "is not a readable manifest"),
    "a manifest that is a list": (lambda f: (f / "manifest.json").write_text("[]"), "is not a readable manifest"),
    "a manifest without splits": (with_manifest(lambda c: c.pop("splits")), "splits: Field required"),
    "splits that are a list": (with_manifest(lambda c: c.update(splits=[])), "splits: "),
    "tokens that are text": (
        with_manifest(lambda c: c["splits"]["train"][0].update(tokens="many")), "splits.train.0.tokens",
    ),
    "fewer tokens": (with_manifest(lambda c: c["splits"]["train"][0].update(tokens=3)), "was edited"),
    "a shard of another folder": (
        with_manifest(lambda c: c["splits"]["train"][0].update(name="../secret")), "not a file of its folder",
    ),
    "another tokenizer": (with_manifest(lambda c: c.update(tokenizer="00" * 32, fingerprint="x")), "was edited"),
    "a later format": (with_manifest(lambda c: c.update(format=9)), "format 9"),
    "a missing shard": (lambda folder: (folder / "train-00000.tok").unlink(), "is missing, though the manifest names it"),
    "a missing index": (lambda folder: (folder / "train-00000.idx").unlink(), "is missing"),
    "a shard cut": (cut("train-00000.tok", 200), "it was cut"),
    "a shard without a header": (cut("train-00000.tok", 10), "an intact header"),
    "an index cut": (cut("train-00000.idx", 76), "it was cut"),
    "a flipped token": (flip("train-00000.tok", 100), "does not match its checksum"),
    "a flipped document end": (flip("train-00000.idx", 70), "does not match its checksum"),
    "a flipped header": (flip("train-00000.tok", 12), "an intact header"),
}  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    (folder / "text.txt").write_text("some text that is long enough\n" * 40)
    source = SourceConfig(name="a", kind="text", paths=(str(folder / "text.txt"),))
    (made,) = prepare(DataConfig(sources=(source,)), ByteTokenizer(), cache_dir=folder)
    return made


@pytest.mark.parametrize("case", DAMAGE, ids=str)
def test_a_wrong_token_folder_is_refused_and_left_as_it_was(case, good, tmp_path):
    damage, expected = DAMAGE[case]
    folder = tmp_path / "tokens"
    shutil.copytree(good, folder)
    damage(folder)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    config = DataConfig(sources=(SourceConfig(name="t", kind="tokens", paths=(str(folder),)),))
    with pytest.raises(ValueError, match=str(folder)) as caught:
        prepare(config, ByteTokenizer(), cache_dir=tmp_path / "cache", verify="full")
    assert expected in str(caught.value)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


def test_the_folder_as_it_was_written_is_taken(good, tmp_path):
    config = DataConfig(sources=(SourceConfig(name="t", kind="tokens", paths=(str(good),)),))
    assert prepare(config, ByteTokenizer(), cache_dir=tmp_path, verify="full") == []


@pytest.mark.parametrize("add_bos", [False, True])
def test_documents_that_were_prepared_to_begin_otherwise_are_named(add_bos, good, caplog):
    config = DataConfig(sources=(SourceConfig(name="t", kind="tokens", paths=(str(good),)),), add_bos=add_bos)
    build_datasets(config, ByteTokenizer(), seq_len=8, seed=0)
    assert (f"data.add_bos=true, but the documents in {good} begin without the" in caplog.text) == add_bos
    assert ("data.add_bos" in caplog.text) == add_bos


def test_globs_and_exclude_choose_folders_of_tokens(good, tmp_path, caplog):
    for name in ("a-1", "b-1", "b-2"):
        shutil.copytree(good, tmp_path / name)
    (tmp_path / "c-1").mkdir()  # nothing was prepared in it

    def tokens(pattern, **options):
        source = SourceConfig(name="t", kind="tokens", paths=(str(tmp_path / pattern),), **options)
        return build_datasets(DataConfig(sources=(source,)), ByteTokenizer(), seq_len=8, seed=0)[0].num_tokens

    one = tokens("a-1")
    assert [tokens("?-1"), tokens("*"), tokens("*", exclude=("b-*",))] == [2 * one, 3 * one, one]
    # no setting of this run holds out more of what is prepared
    assert "skipping it. Prepare its text again with a larger data.validation_fraction" in caplog.text
    with pytest.raises(ValueError, match=r"x-\*' matches no folder with a manifest.json"):
        tokens("x-*")
    with pytest.raises(ValueError, match=r"exclude=\['\*'\] leaves none of 3 folders"):
        tokens("*", exclude=("*",))
