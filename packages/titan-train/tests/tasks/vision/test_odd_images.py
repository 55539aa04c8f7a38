"""Images as they are found: taken as a viewer shows them, or named and left out. Nothing hangs, nothing leaves its folder."""

import errno
import io
import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
from titan_train.config import parse_config
from titan_train.models.vision_language.args import QWEN3_VL_CONFIGS
from titan_train.tasks.image_files import BrokenImage
from titan_train.tasks.vision.images import fit_grid, image_size, read_image
from titan_train.tasks.vision.jsonl import prepare_index
from titan_train.tasks.vision.task import VisionInputs

Image = pytest.importorskip("PIL.Image")
ARGS = QWEN3_VL_CONFIGS["qwen3_vl_debug"]
SIDE = 4 * ARGS.patch


def shown(path):
    """Mean colour of the upper left quarter and of the whole."""
    image_size(str(path), most=10_000)
    pixels = read_image(str(path), (4, 4), ARGS, most=10_000).astype(float)
    half = SIDE // 2
    return pixels[: half - 4, : half - 4].mean((0, 1)).round().tolist(), pixels.mean((0, 1)).round().tolist()


def marked(mode="RGB", size=(SIDE, SIDE)):
    """White, with a black upper left quarter."""
    image = Image.new("RGB", size, (255, 255, 255))
    image.paste((0, 0, 0), (0, 0, size[0] // 2, size[1] // 2))
    return image.convert(mode)


@pytest.mark.parametrize("mode", ["RGB", "L", "1", "P", "CMYK", "I;16"])
def test_every_kind_of_pixels_gives_the_same_colours(mode, tmp_path):
    image = marked("L" if mode == "I;16" else mode)
    if mode == "I;16":  # Pillow itself would clip 32768 to white
        image = Image.fromarray(np.asarray(image).astype(np.uint16) * 257)
        assert image.mode == "I;16"
    path = tmp_path / ("a.tif" if mode == "CMYK" else "a.png")
    image.save(path)
    corner, whole = shown(path)
    assert max(corner) <= 3
    assert all(185 <= value <= 198 for value in whole)  # three quarters of 255


def test_sixteen_bits_keep_their_shades(tmp_path):
    Image.fromarray(np.full((32, 32), 32768, np.uint16)).save(tmp_path / "a.png")
    assert shown(tmp_path / "a.png")[1] == [128.0] * 3


def test_transparency_is_white_whatever_colour_lies_below_it(tmp_path):
    image = Image.new("RGBA", (32, 32), (0, 0, 0, 0))
    image.paste((255, 0, 0, 255), (0, 0, 16, 16))
    image.save(tmp_path / "a.png")
    corner, whole = shown(tmp_path / "a.png")
    assert corner[0] >= 250
    assert max(corner[1:]) <= 5
    assert all(value > 180 for value in whole)
    flat = Image.new("P", (32, 32), 0)
    flat.putpalette([0, 0, 0, 255, 0, 0] + [0] * 762)
    flat.save(tmp_path / "b.png", transparency=0)
    assert shown(tmp_path / "b.png")[1] == [255.0] * 3


def test_a_photograph_on_its_side_is_turned_before_its_grid_is_chosen(tmp_path):
    image = marked(size=(60, 20))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise: the upper left quarter comes to the upper right
    image.save(tmp_path / "a.jpg", exif=exif, quality=95)
    assert image_size(str(tmp_path / "a.jpg"), most=10_000) == (60, 20)
    pixels = read_image(str(tmp_path / "a.jpg"), (8, 4), ARGS, most=10_000).astype(float)
    assert pixels[4:28, 20:28].mean() < 20
    assert pixels[4:28, 4:12].mean() > 235


def test_of_an_animation_the_first_frame_is_taken(tmp_path):
    frames = [Image.new("RGB", (32, 32), colour) for colour in ("red", "blue", "green")]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert shown(tmp_path / "a.gif")[1] == [255.0, 0.0, 0.0]


@pytest.mark.parametrize("size", [(1, 1), (1, 150), (150, 1)])
def test_a_pixel_or_a_line_of_them_is_enlarged(size, tmp_path):
    Image.new("RGB", size, (10, 200, 30)).save(tmp_path / "a.png")
    grid = fit_grid(*image_size(str(tmp_path / "a.png"), most=10_000), ARGS, least=4, most=20)
    pixels = read_image(str(tmp_path / "a.png"), grid, ARGS, most=10_000)
    assert pixels.shape == (grid[0] * 8, grid[1] * 8, 3)
    assert (pixels == (10, 200, 30)).all()


def test_a_person_sees_the_first_image_whole_and_white_where_there_is_none(tmp_path):
    ask = {"prompt": "q", "answer": "r"}
    Image.new("RGB", (400, 100), (10, 200, 30)).save(tmp_path / "wide.png")
    settings = config(tmp_path, [{"image": ["wide.png", "wide.png"], **ask}, ask])
    items = VisionInputs(settings).train.items
    shown = items.thumbnail(0)
    assert shown.shape == items.thumbnail(1).shape == (96, 96, 3)
    assert (shown[48] == (10, 200, 30)).all()
    assert (shown[[0, 30, 65, 95]] == 255).all()
    (tmp_path / "wide.png").unlink()
    assert (items.thumbnail(0) == 255).all()
    assert (items.thumbnail(1) == 255).all()


def test_an_empty_image_has_no_grid():
    with pytest.raises(BrokenImage, match="are none"):
        fit_grid(0, 0, ARGS, least=1, most=4)


def config(folder, lines, **vision):
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return parse_config(
        {
            "run": {"dir": str(folder / "runs")},
            "model": {"name": "qwen3_vl_debug", "seq_len": 96},
            "tokenizer": {"kind": "bytes"},
            "data": {"cache_dir": str(folder / "cache")},
            "vision": {"source": "jsonl", "paths": [str(folder / "*.jsonl")], "held_out": 0, "max_image_tokens": 20}
            | vision,
        }
    )


def test_what_cannot_be_used_is_named_with_its_reason_and_nothing_hangs(tmp_path):
    ask = {"prompt": "q", "answer": "r"}
    marked().save(tmp_path / "good.png")
    Image.new("1", (20_000, 20_000)).save(tmp_path / "bomb.png")
    Image.new("RGB", (2, 500)).save(tmp_path / "long.png")
    Image.fromarray(np.ones((8, 8), np.float32)).save(tmp_path / "float.tif")
    (tmp_path / "text.eps").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    names = [
        "bomb.png",
        "long.png",
        "text.eps",
        "folder",
        "pipe",
        "missing.png",
        "../missing.png",
        "a\0b.png",
        "x" * 300,
    ]
    lines = [{"image": name, **ask} for name in names]
    good = {"image": ["good.png", "good.png"], **ask}
    settings = config(tmp_path, [*lines, {"image": "float.tif", **ask}, good])
    index = prepare_index(settings, ARGS)
    quarantine = [json.loads(line) for line in (index.parent / "quarantine.jsonl").read_text().splitlines()]
    assert [bad["line"] for bad in quarantine] == list(range(1, len(names) + 1))
    for bad, reason in zip(quarantine, ("pixels", "200 times", "cannot identify", "regular", "regular"), strict=False):
        assert reason in bad["reason"]
    inputs = VisionInputs(settings)
    assert len(inputs.train.items) == 2
    assert inputs.train.items.grids(1) == inputs.train.items.grids(1)[:1] * 2
    assert (inputs.train.batch_of([[0]]).target == -100).all()  # its pixels, read only now, have no known range
    assert (inputs.train.batch_of([[1]]).target != -100).sum() == 2


def test_the_index_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    marked().save(tmp_path / "good.png")
    settings = config(tmp_path, [{"image": "good.png", "prompt": "q", "answer": "r"}])
    done, sync, rename = [], os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda file: done.append("sync") or sync(file))
    monkeypatch.setattr(Path, "replace", lambda self, to: done.append(Path(to)) or rename(self, to))
    index = prepare_index(settings, ARGS)
    assert done[done.index(index) - 1] == "sync"


def test_a_shard_gives_its_regular_files_only(tmp_path):
    marked().save(tmp_path / "outside.png")
    content = io.BytesIO()
    marked().save(content, "PNG")
    with tarfile.open(tmp_path / "s.tar", "w") as shard:
        member = tarfile.TarInfo("./in/a.png")
        member.size = len(content.getvalue())
        shard.addfile(member, io.BytesIO(content.getvalue()))
        for name, target, kind in (
            ("link.png", "../outside.png", tarfile.SYMTYPE),
            ("hard.png", "./in/a.png", tarfile.LNKTYPE),
            ("pipe.png", "", tarfile.FIFOTYPE),
        ):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = kind, target
            shard.addfile(link)
    assert image_size(str(tmp_path / "s.tar/in/a.png"), most=10_000) == (SIDE, SIDE)
    for name in ("link.png", "hard.png", "pipe.png", "in", "../outside.png", "in/../../outside.png"):
        with pytest.raises(BrokenImage, match="the shard has no such file"):
            image_size(str(tmp_path / "s.tar" / name), most=10_000)
    (tmp_path / "cut.tar").write_bytes((tmp_path / "s.tar").read_bytes()[:600])
    (tmp_path / "no.tar").write_bytes(b"no tar" * 200)
    for name in ("cut.tar/in/a.png", "no.tar/a.png"):
        with pytest.raises(BrokenImage, match=name):
            read_image(str(tmp_path / name), (4, 4), ARGS, most=10_000)


def test_a_shard_is_listed_once_and_again_when_it_has_changed(tmp_path, monkeypatch):
    listed = []
    real = tarfile.open
    monkeypatch.setattr(tarfile, "open", lambda *args: listed.append(args) or real(*args))

    def write(names):
        content = io.BytesIO()
        marked().save(content, "PNG")
        with real(tmp_path / "s.tar", "w") as shard:
            for name in names:
                member = tarfile.TarInfo(name)
                member.size = len(content.getvalue())
                shard.addfile(member, io.BytesIO(content.getvalue()))

    write(["a.png", "b.png"])
    for name in ("a.png", "b.png", "a.png"):
        image_size(str(tmp_path / "s.tar" / name), most=10_000)
    assert len(listed) == 1
    write([f"{n}.png" for n in range(40)])
    image_size(str(tmp_path / "s.tar/39.png"), most=10_000)
    assert len(listed) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [("[" * 100_000, "not JSON"), ('{"prompt": "\\ud800", "answer": "b"}', "lone surrogate")],
)
def test_a_line_that_no_tokenizer_takes_is_refused_by_name(line, message, tmp_path):
    settings = config(tmp_path, [])
    (tmp_path / "data.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=rf"data\.jsonl:1: .*{message}"):
        prepare_index(settings, ARGS)


def test_a_disk_that_does_not_answer_is_no_broken_image(tmp_path, monkeypatch):
    marked().save(tmp_path / "a.png")
    settings = config(tmp_path, [{"prompt": "q", "answer": "r", "image": "a.png"}])
    batches = VisionInputs(settings).train
    real = Path.open

    def fails(self, *args, **kwargs):
        if self.suffix == ".png":
            raise OSError(errno.EIO, "Input/output error")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", fails)
    with pytest.raises(OSError, match=r"Input/output error: .*a\.png"):
        batches.batch_of([[0]])


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM])
def test_an_image_that_may_not_be_read_is_quarantined_and_one_whose_disk_fails_stays_so(tmp_path, monkeypatch, number):
    for name in "ab":
        marked().save(tmp_path / f"{name}.png")
    settings = config(tmp_path, [{"prompt": "q", "answer": "r", "image": f"{name}.png"} for name in "ab"])
    real, failing = Path.open, [number]

    def fails(self, *args, **kwargs):
        if self.name == "a.png":
            raise OSError(failing[0], os.strerror(failing[0]))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", fails)
    for _ in range(2):
        index = prepare_index(settings, ARGS, again=True)
        assert "a.png: PermissionError" in (index.parent / "quarantine.jsonl").read_text()
        assert len(index.read_text().splitlines()) == 1
        failing[0] = errno.EIO  # which is no reason to end a run that does without it


def test_damaged_bytes_that_ask_for_all_memory_are_a_broken_image_and_decoding_that_does_is_named(
    tmp_path, monkeypatch
):
    marked().save(tmp_path / "a.jp2")
    content = bytearray((tmp_path / "a.jp2").read_bytes())
    start = content.index(b"jp2h") - 4
    content[start : start + 8] = (1).to_bytes(4, "big") + b"jp2h" + (2**45).to_bytes(8, "big")
    (tmp_path / "a.jp2").write_bytes(content)
    with pytest.raises(BrokenImage, match=r"a\.jp2"):
        image_size(str(tmp_path / "a.jp2"), most=10_000)
    marked().save(tmp_path / "b.png")

    def load(self):
        raise MemoryError

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", load)
    with pytest.raises(MemoryError, match=r"b\.png cannot be decoded"):
        read_image(str(tmp_path / "b.png"), (4, 4), ARGS, most=10_000)


def test_images_that_have_gone_cost_their_answers_up_to_a_limit(tmp_path):
    marked().save(tmp_path / "a.png")
    settings = config(tmp_path, [{"prompt": "q", "answer": "r", "image": "a.png"}] * 11)
    batches = VisionInputs(settings).train
    (tmp_path / "a.png").unlink()
    assert (batches.batch_of([[item] for item in range(10)]).target == -100).all()
    with pytest.raises(ValueError, match=r"11 of 11 documents .* this rank .* data\.max_bad_fraction=0\.001 allows"):
        batches.batch_of([[10]])
