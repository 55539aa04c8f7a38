"""Latents and text features in shards: prepared by real encoders, read by number, refused by name."""

import io
import json
import os
import shutil
import socket
import tarfile
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_pipeline as tiny
import torch
from titan_train import cli
from titan_train.config import parse_config
from titan_train.config.diffusion import DiffusionConfig
from titan_train.task import load_task
from titan_train.tasks.diffusion.batches import FlowBatches
from titan_train.tasks.diffusion.flow import generator
from titan_train.tasks.diffusion.shards.encoders import Encoders
from titan_train.tasks.diffusion.shards.features import SampleSizes, ShardFeatures, are_indexed, pack, unpack
from titan_train.tasks.diffusion.shards.images import decode_image
from titan_train.tasks.diffusion.shards.prepare import encoding_device
from titan_train.tasks.diffusion.shards.shard import write_folder_shard, write_tar_shard, write_tensors
from titan_train.tasks.diffusion.source import ShardGallery, decode_latents

SIZES = SampleSizes(grid=2, channels=8, text_tokens=3, text_dim=5, pooled_dim=4)
WRITE = {"folder": (write_folder_shard, "safetensors"), "webdataset": (write_tar_shard, "tar")}


def sample(number, *, logvar=True):
    """Values that say which sample they are of."""
    draw = np.random.default_rng(number)
    shapes = SIZES.shapes() if logvar else {k: v for k, v in SIZES.shapes().items() if k != "logvar"}
    return {name: draw.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}


def write(folder, counts, form="folder", *, part="train", logvar=True):
    """Shards with so many samples, numbered through, and the empty text."""
    folder.mkdir(exist_ok=True)
    save, suffix = WRITE[form]
    start = 0
    for number, count in enumerate(counts):
        samples = [sample(start + n, logvar=logvar) for n in range(count)]
        save(folder / f"{part}-{number:05}.{suffix}", samples, [f"caption {start + n}" for n in range(count)])
        start += count
    empty = {"text": np.full((3, 5), 0.5, np.float16), "pooled": np.full(4, 0.25, np.float16)}
    write_tensors(folder / "empty.safetensors", empty)
    return folder


def opened(folder, *, part="train", sizes=SIZES, scale=1.0, shift=0.0):
    return ShardFeatures(folder, part, sizes, cache_dir=folder / "cache", scale=scale, shift=shift)


@pytest.mark.parametrize("form", WRITE)
def test_samples_are_read_by_number_over_all_shards(form, tmp_path):
    items = opened(write(tmp_path / "s", [3, 1, 4], form, logvar=False), scale=2.0, shift=0.5)
    assert len(items) == 8
    for number in (7, 0, 3, 4, 2):
        found, stored = items.read(number, seed=0, sample=9), sample(number, logvar=False)
        np.testing.assert_array_equal(found.text, stored["text"].astype(np.float32))
        np.testing.assert_array_equal(found.pooled, stored["pooled"].astype(np.float32))
        np.testing.assert_array_equal(found.latent, pack(2.0 * (stored["latent"].astype(np.float32) - 0.5)))
    assert items.captions([4, 0, 7]) == ["caption 4", "caption 0", "caption 7"]
    assert items.empty.text.tolist() == [[0.5] * 5] * 3


@pytest.mark.parametrize("form", WRITE)
def test_a_latent_is_drawn_from_its_mean_and_variance_by_seed_and_sample(form, tmp_path):
    items = opened(write(tmp_path / "s", [2], form))
    stored = {name: values.astype(np.float32) for name, values in sample(1).items()}
    noise = generator(5, 77, "latent").standard_normal((2, 4, 4), dtype=np.float32)
    expected = stored["latent"] + np.exp(0.5 * stored["logvar"]) * noise
    np.testing.assert_array_equal(items.read(1, seed=5, sample=77).latent, pack(expected))
    np.testing.assert_array_equal(items.read(1, seed=5, sample=77).latent, pack(expected))  # whatever was read before
    assert not np.array_equal(items.read(1, seed=5, sample=78).latent, pack(expected))


def test_both_forms_hold_the_same_samples(tmp_path):
    wrote = [write(tmp_path / form, [2, 3], form) for form in WRITE]
    assert [are_indexed(folder, folder / "cache") for folder in wrote] == [True, False]
    folder, tar = (opened(folder) for folder in wrote)
    assert are_indexed(wrote[1], wrote[1] / "cache")
    for number in range(5):
        for a, b in zip(folder.read(number, seed=1, sample=2), tar.read(number, seed=1, sample=2), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("form", WRITE)
def test_a_shard_is_on_the_disk_before_it_has_its_name_and_is_counted(form, tmp_path, monkeypatch):
    done, sync, rename = [], os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda file: done.append("sync") or sync(file))
    monkeypatch.setattr(Path, "replace", lambda self, to: done.append(Path(to).stem) or rename(self, to))
    write(tmp_path, [2], form)
    assert done == ["sync", "train-00000", "sync", "empty"]


def test_arrays_that_do_not_lie_row_by_row_are_written_by_their_values(tmp_path):
    turned = {name: np.asfortranarray(values) for name, values in sample(0).items()}
    for form, (save, suffix) in WRITE.items():
        folder = write(tmp_path / form, [1], form, logvar=True)
        save(folder / f"train-00000.{suffix}", [turned, turned], ["", ""])
        np.testing.assert_array_equal(opened(folder).shards[0].read(1)["latent"], turned["latent"].astype(np.float32))


def test_packing_is_that_of_diffusers_and_is_undone():
    pipeline = pytest.importorskip("diffusers").FluxPipeline
    latent = np.random.default_rng(0).standard_normal((4, 6, 6)).astype(np.float32)
    theirs = pipeline._pack_latents(torch.from_numpy(latent)[None], 1, 4, 6, 6)[0]
    np.testing.assert_array_equal(pack(latent), theirs)
    np.testing.assert_array_equal(unpack(pack(latent), 3), latent)


@pytest.mark.parametrize("form", WRITE)
def test_every_item_comes_once_an_epoch_and_any_sample_is_drawn_without_those_before(form, tmp_path):
    items = opened(write(tmp_path / "s", [4, 3], form))
    batches = lambda: FlowBatches(  # noqa: E731
        items, DiffusionConfig(grid=2, text_tokens=3), seed=3, part="train", guided=False
    )
    source = batches()
    epochs = [[source.item_of(7 * epoch + n) for n in range(7)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    whole = source.build_batch(np.arange(14), ignore_index=-100, samples_consumed=14)
    later = batches().build_batch(np.arange(11, 14), ignore_index=-100, samples_consumed=14)  # a resumed run
    for a, b in zip(whole.tensors(), later.tensors(), strict=True):
        assert torch.equal(a[11:] if len(a) == 14 else a, b)


def test_other_values_or_shards_change_the_fingerprint(tmp_path):
    one, again = (opened(write(tmp_path / name, [3])).fingerprint for name in "ab")
    assert one == again
    assert opened(write(tmp_path / "c", [3, 1])).fingerprint != one
    assert opened(tmp_path / "a", shift=0.1).fingerprint != one
    other = [sample(n + 1) for n in range(3)]
    write_folder_shard(tmp_path / "b" / "train-00000.safetensors", other, ["caption 0"] * 3)
    assert opened(tmp_path / "b").fingerprint != one


def truncated(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2 if path.suffix == ".safetensors" else 1100])


def in_tar(path, files):
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def npy(values):
    content = io.BytesIO()
    np.save(content, values)
    return content.getvalue()


def tar_files(**changes):
    files = {f"k.{name}.npy": npy(values) for name, values in sample(0).items()}
    return {name: content for name, content in (files | changes).items() if content is not None}


PICKLED = npy(np.array([{"a": 1}], dtype=object))
DAMAGE = {
    "cut": (truncated, "train-00000", None),
    "no pooled": (lambda p: in_tar(p, tar_files(**{"k.pooled.npy": None})), "sample 'k' lacks pooled", "webdataset"),
    "pickled": (lambda p: in_tar(p, tar_files(**{"k.text.npy": PICKLED})), r"k\.text\.npy", "webdataset"),
    "float64": (lambda p: in_tar(p, tar_files(**{"k.text.npy": npy(np.zeros((3, 5)))})), "holds float64", "webdataset"),
    "not an array": (lambda p: in_tar(p, tar_files(**{"k.text.npy": b"text"})), "not an array in .npy form", "webdataset"),
    "nothing": (lambda p: in_tar(p, {"k.txt": b"caption"}), "holds no sample", "webdataset"),
    "compressed": (lambda p: p.write_bytes(b"\x1f\x8b" + bytes(2000)), "not a complete tar file", "webdataset"),
    "short array": (
        lambda p: in_tar(p, tar_files(**{"k.text.npy": npy(np.zeros((3, 5), np.float16))[:-4]})),
        "its size is not that of its array", "webdataset",
    ),
    "another shape": (
        lambda p: in_tar(p, tar_files(**{"l" + n[1:]: c for n, c in tar_files().items()}
                         | {"l.text.npy": npy(np.zeros((4, 5), np.float16))})),
        r"l\.text\.npy has the shape \[4, 5\], but k\.text\.npy has \[3, 5\]", "webdataset",
    ),
    "integers": (
        lambda p: write_folder_shard(p, [sample(0) | {"text": np.zeros((3, 5), np.int64)}], [""]),
        "text I64 is not a floating-point dtype", "folder",
    ),
    "no text": (
        lambda p: write_folder_shard(p, [{k: v for k, v in sample(0).items() if k != "text"}], [""]), "lacks text", "folder",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "form"), [(name, form) for name, (_, _, only) in DAMAGE.items() for form in WRITE if only in (None, form)]
)
def test_a_malformed_shard_is_refused_by_its_name(name, form, tmp_path):
    damage, message, _ = DAMAGE[name]
    folder = write(tmp_path / "s", [2], form)
    path = folder / f"train-00000.{WRITE[form][1]}"
    damage(path)
    with pytest.raises(ValueError, match=message) as caught:
        opened(folder)
    assert path.name in str(caught.value)


def test_a_tar_shard_that_is_damaged_at_a_header_or_cut_between_files_is_refused(tmp_path):
    folder = write(tmp_path / "s", [3], "webdataset")
    path = folder / "train-00000.tar"
    whole = path.read_bytes()
    with tarfile.open(path) as archive:
        header = archive.getmember("000001.txt").offset
    damaged = bytearray(whole)
    damaged[header + 3] ^= 1
    for content, reason in (
        (damaged, f"is damaged, .* at byte {header} "),
        (whole + whole, "is damaged, or several tar files in one"),
        (whole[:header], f"ends at byte {header} without"),
        (whole[: header + 100], f"is damaged, .* at byte {header} "),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"train-00000\.tar {reason}"):
            opened(folder)


@pytest.mark.parametrize("form", WRITE)
def test_values_that_are_not_finite_are_refused_by_shard_and_sample(form, tmp_path):
    folder = write(tmp_path / "s", [1], form)
    broken = sample(1) | {"pooled": np.full(4, np.nan, np.float16)}
    WRITE[form][0](folder / f"train-00001.{WRITE[form][1]}", [sample(0), broken], ["", ""])
    items = opened(folder)
    items.read(1, seed=0, sample=0)
    with pytest.raises(ValueError, match=r"train-00001\.\w+, sample '?0*1'?: pooled holds values that are not finite"):
        items.read(2, seed=0, sample=0)


def test_shards_of_other_sizes_and_missing_files_are_refused_with_what_to_set(tmp_path):
    folder = write(tmp_path / "s", [2])
    with pytest.raises(ValueError, match=r"text \[3, 5\] instead of \[7, 5\] \(diffusion\.text_tokens=7"):
        opened(folder, sizes=SampleSizes(grid=2, channels=8, text_tokens=7, text_dim=5, pooled_dim=4))
    with pytest.raises(ValueError, match=r"holds no shard validation-\*"):
        opened(folder, part="validation")
    (folder / "empty.safetensors").unlink()
    with pytest.raises(ValueError, match=r"empty\.safetensors does not exist"):
        opened(folder)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    pytest.importorskip("diffusers")
    return tiny.write_pipeline(tmp_path_factory.mktemp("pipeline"))


def tree(tmp_path, pipeline, **diffusion):
    """A tiny model on images of 32 pixels."""
    args = {
        "dim": 32, "num_heads": 2, "in_channels": tiny.CHANNELS, "text_dim": tiny.TEXT_DIM, "pooled_dim": tiny.POOLED_DIM,
        "rope_index_dim": 4, "rope_row_dim": 6, "rope_column_dim": 6,
    }  # fmt: skip
    return {
        "model": {"name": "flux_tiny", "seq_len": tiny.TEXT_TOKENS + tiny.GRID**2, "args": args},
        "diffusion": {
            "source": "shards", "path": str(tmp_path / "shards"), "images": str(tmp_path / "photos" / "*.jsonl"),
            "encoders": str(pipeline), "grid": tiny.GRID, "text_tokens": tiny.TEXT_TOKENS, "shard_samples": 4,
        } | diffusion,
        "data": {"validation_fraction": 0.25, "cache_dir": str(tmp_path / "cache")},
        "train": {"steps": 2, "global_batch": 4},
        "schedule": {"warmup_steps": 1},
        "validation": {"every": 2, "steps": 1},
        "run": {"dir": str(tmp_path / "runs"), "name": "r"},
        "metrics": {"progress": "off", "report": False},
        "launch": {"device": "cpu"},
    }  # fmt: skip


@pytest.mark.parametrize("form", WRITE)
def test_images_are_encoded_as_the_pipeline_of_diffusers_encodes_them(form, pipeline, tmp_path, capsys):
    from diffusers import AutoencoderKL, FluxPipeline
    from transformers import AutoTokenizer, CLIPTextModel, T5EncoderModel

    tiny.write_images(tmp_path / "photos", 10)
    config = parse_config(tree(tmp_path, pipeline, shard_format=form))
    load_task(config).prepare(config)
    assert "10 images" not in capsys.readouterr().out  # some are held out
    source = load_task(config).open(config)
    items = [source.train.items, source.validation.items]
    assert sum(map(len, items)) == 10
    reference = FluxPipeline(
        scheduler=None, transformer=None, vae=AutoencoderKL.from_pretrained(pipeline / "vae"),
        text_encoder=CLIPTextModel.from_pretrained(pipeline / "text_encoder"),
        text_encoder_2=T5EncoderModel.from_pretrained(pipeline / "text_encoder_2"),
        tokenizer=AutoTokenizer.from_pretrained(pipeline / "tokenizer"),
        tokenizer_2=AutoTokenizer.from_pretrained(pipeline / "tokenizer_2"),
    )  # fmt: skip
    for module in (reference.vae, reference.text_encoder, reference.text_encoder_2):
        module.requires_grad_(False)
    for part in items:
        for number, caption in enumerate(part.captions(range(len(part)))):
            text, pooled, _ = reference.encode_prompt(caption, max_sequence_length=tiny.TEXT_TOKENS)
            shard, place = part._place(number)
            stored = shard.read(place)
            # float16 holds 11 bits of values of size 1 to 4
            np.testing.assert_allclose(stored["text"], text[0].numpy(), atol=2e-3)
            np.testing.assert_allclose(stored["pooled"], pooled[0].numpy(), atol=2e-3)
            content = (tmp_path / "photos" / f"{int(caption.rpartition(' ')[2]):03}.png").read_bytes()
            pixels = torch.from_numpy(decode_image(content, tiny.SIDE))[None]
            found = reference.vae.encode(pixels).latent_dist
            scaled = 0.3611 * (found.mean - 0.1159)
            np.testing.assert_allclose(stored["latent"], scaled[0].numpy(), atol=2e-3)
            deviation = 0.3611 * found.std
            np.testing.assert_allclose(np.exp(0.5 * stored["logvar"]), deviation[0].numpy(), rtol=4e-3)
    empty, _, _ = reference.encode_prompt("", max_sequence_length=tiny.TEXT_TOKENS)
    np.testing.assert_allclose(items[0].empty.text, empty[0].numpy(), atol=2e-3)
    load_task(config).prepare(config)
    assert capsys.readouterr().out == ""  # everything is there


def test_padding_of_a_text_is_encoded_and_attended_to_as_in_the_published_models(pipeline):
    """The reference has no mask: what stands at padding places reaches the image, and the shards keep it."""
    encoders = Encoders(pipeline, text_tokens=tiny.TEXT_TOKENS)
    short, longer = (encoders.encode_texts([text])[0][0] for text in ("red", "red disc"))
    padding = short[3:]  # "red", end, padding
    assert padding.abs().min() > 0
    assert not torch.allclose(short[4:], longer[4:])  # words reach it: it is not a constant that a mask could replace
    from titan_train.models.flux.args import FLUX_CONFIGS
    from titan_train.models.flux.model import Flux
    from titan_train.models.flux.rope import grid_positions, time_features

    torch.manual_seed(0)
    model = Flux(FLUX_CONFIGS["flux_tiny"])
    text = torch.randn(1, 5, 64)
    call = lambda text: model(  # noqa: E731
        torch.ones(1, 4, 64), text, positions=grid_positions(5, 2, 2)[None], pooled=torch.ones(1, 32),
        time=time_features(torch.tensor([0.5])),
    )  # fmt: skip
    changed = torch.cat((text[:, :4], text[:, 4:] + 1.0), dim=1)
    assert not torch.allclose(call(text), call(changed), atol=1e-5)


def test_an_empty_caption_is_the_empty_text_and_a_long_one_is_cut_as_by_diffusers(pipeline):
    from diffusers import AutoencoderKL, FluxPipeline
    from transformers import AutoTokenizer, CLIPTextModel, T5EncoderModel

    reference = FluxPipeline(
        scheduler=None, transformer=None, vae=AutoencoderKL.from_pretrained(pipeline / "vae"),
        text_encoder=CLIPTextModel.from_pretrained(pipeline / "text_encoder"),
        text_encoder_2=T5EncoderModel.from_pretrained(pipeline / "text_encoder_2"),
        tokenizer=AutoTokenizer.from_pretrained(pipeline / "tokenizer"),
        tokenizer_2=AutoTokenizer.from_pretrained(pipeline / "tokenizer_2"),
    )  # fmt: skip
    captions = ["", "a red disc at the top left " * 30]
    text, pooled = Encoders(pipeline, text_tokens=tiny.TEXT_TOKENS).encode_texts(captions)
    assert text.shape == (2, tiny.TEXT_TOKENS, tiny.TEXT_DIM)
    for number, caption in enumerate(captions):
        with torch.no_grad():
            expected, expected_pooled, _ = reference.encode_prompt(caption, max_sequence_length=tiny.TEXT_TOKENS)
        # one text or two in a batch: other orders of float32 sums
        torch.testing.assert_close(text[number], expected[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(pooled[number], expected_pooled[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("scale", "shift"), [(0.3611, 0.1159), (0.18215, None), (1.0, 0.5)])
def test_latents_of_any_autoencoder_and_raw_ones_are_decoded_as_they_were_encoded(scale, shift, pipeline, tmp_path):
    from diffusers import AutoencoderKL

    folder = tmp_path / "pipeline"
    shutil.copytree(pipeline, folder)
    config = json.loads((folder / "vae" / "config.json").read_text())
    (folder / "vae" / "config.json").write_text(json.dumps(config | {"scaling_factor": scale, "shift_factor": shift}))
    encoders = Encoders(folder, text_tokens=tiny.TEXT_TOKENS, text=False)
    vae = AutoencoderKL.from_pretrained(folder / "vae")
    pixels = torch.rand(1, 3, tiny.SIDE, tiny.SIDE, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.no_grad():
        raw = vae.encode(pixels).latent_dist.mean
        expected = vae.decode(raw).sample[0].permute(1, 2, 0)
    scaled, _ = encoders.encode_images(pixels)
    torch.testing.assert_close(scaled, scale * (raw - (shift or 0.0)), atol=1e-6, rtol=1e-6)
    # what prepare wrote; and raw latents, which the run scales its own way when it reads them
    for own in ({}, {"latent_scale": 0.7, "latent_shift": -0.3}):
        read = scaled[0].numpy() if not own else 0.7 * (raw[0].numpy() + 0.3)
        diffusion = DiffusionConfig(grid=tiny.GRID, text_tokens=tiny.TEXT_TOKENS, **own)
        (found,) = decode_latents(encoders, diffusion, pack(read.astype(np.float32))[None])
        # float32, scaled there and back
        np.testing.assert_allclose(found, expected.numpy(), atol=1e-4)


def test_encoders_compute_on_a_ranks_own_gpu_and_leave_its_memory(pipeline, tmp_path, monkeypatch):
    tiny.write_images(tmp_path / "photos", 4)
    config, weights, alive = parse_config(tree(tmp_path, pipeline)), [], []
    load = Encoders.__init__

    def loaded(self, folder, **options):
        load(self, folder, **options)
        weights.extend(weakref.ref(part) for part in (self._vae, self._t5, self._clip))

    monkeypatch.setattr(Encoders, "__init__", loaded)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: alive.append([ref() for ref in weights]))
    load_task(config).prepare(config, quiet=True)
    assert alive == [[None] * 3]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert encoding_device(config) == torch.device("cpu")
    config = replace(config, launch=replace(config.launch, device="auto"))
    assert encoding_device(config) == torch.device("cuda", 3)


@pytest.mark.parametrize("full", [False, True])
def test_samples_are_decoded_on_the_models_device_unless_it_is_full(full):
    class Decoder:
        def __init__(self):
            self.places, self.decoded = [], []

        def move_decoder(self, device):
            self.places.append(torch.device(device).type)

        def decode(self, latents):
            self.decoded.append(self.places[-1])
            if full and self.places[-1] == "cuda":
                raise torch.OutOfMemoryError("full")
            return torch.zeros(1, 3, 8, 8)

    gallery = ShardGallery(SimpleNamespace(empty=None), DiffusionConfig(grid=2, text_tokens=3))
    gallery.__dict__["_decoder"] = decoder = Decoder()
    images = gallery.images(np.zeros((2, 4, 8), np.float32), torch.device("cuda"))
    assert [image.shape for image in images] == [(8, 8, 3)] * 2
    assert decoder.decoded == (["cuda", "cpu", "cpu"] if full else ["cuda"] * 2)
    assert decoder.places[-1] == "cpu"


def test_an_interrupted_preparation_continues_and_ends_with_the_same_bytes(pipeline, tmp_path, monkeypatch):
    tiny.write_images(tmp_path / "photos", 10)
    config = parse_config(tree(tmp_path, pipeline))
    load_task(config).prepare(config, quiet=True)
    folder = tmp_path / "shards"
    whole = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    assert {"train-00000.safetensors", "train-00002.safetensors", "empty.safetensors"} <= whole.keys()
    (folder).rename(tmp_path / "whole")
    encode, calls = Encoders.encode_images, []

    def killed(self, pixels):
        calls.append(len(pixels))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return encode(self, pixels)

    monkeypatch.setattr(Encoders, "encode_images", killed)
    with pytest.raises(KeyboardInterrupt):
        load_task(config).prepare(config, quiet=True)
    begun = json.loads((folder / "prepared.json").read_text())
    assert (begun["complete"], begun["read"]) == (False, 4)
    alone = parse_config(tree(tmp_path, pipeline, images=""))
    with pytest.raises(ValueError, match="was not prepared to its end: 4 images are done"):
        load_task(alone).open(alone)
    load_task(config).prepare(config, quiet=True)
    assert len(calls) == 4  # the first block was not encoded again
    assert {path.name: path.read_bytes() for path in folder.glob("*.safetensors")} == whole
    other = parse_config(tree(tmp_path, pipeline, shard_samples=3))
    with pytest.raises(ValueError, match="made of other images, encoders or settings"):
        load_task(other).prepare(other, quiet=True)


def test_a_broken_image_is_named_and_left_out_where_that_is_asked_for(pipeline, tmp_path):
    jsonl = tiny.write_images(tmp_path / "photos", 6)
    (tmp_path / "photos" / "003.png").write_bytes(b"not a picture")
    jsonl.write_text(jsonl.read_text() + '{"image": "absent.png", "text": "a"}\n{"image": 3}\n')
    from PIL import Image

    Image.new("RGB", (31, 99)).save(tmp_path / "photos" / "small.png")
    jsonl.write_text(jsonl.read_text() + '{"image": "small.png", "text": "a"}\n')
    jsonl.write_text(jsonl.read_text() + '{"image": "001.png", "text": "half \\ud83d"}\n')
    sections = tree(tmp_path, pipeline)
    config = parse_config(sections)
    with pytest.raises(ValueError, match=r"images\.jsonl, line 4, .*003\.png: UnidentifiedImageError"):
        load_task(config).prepare(config, quiet=True)
    strict = parse_config(sections | {"data": sections["data"] | {"on_error": "skip"}})
    with pytest.raises(ValueError, match=r"1 of 4 documents are malformed .*more than data\.max_bad_fraction=0\.001"):
        load_task(strict).prepare(strict, quiet=True)
    sections["diffusion"]["path"] = str(tmp_path / "kept")
    lenient = parse_config(sections | {"data": sections["data"] | {"on_error": "quarantine", "max_bad_fraction": 0.5}})
    load_task(lenient).prepare(lenient, quiet=True)
    prepared = json.loads((tmp_path / "kept" / "prepared.json").read_text())
    assert (sum(prepared["samples"].values()), prepared["bad"], prepared["small"]) == (5, 4, 1)
    reasons = (tmp_path / "kept" / "quarantine.jsonl").read_text()
    assert reasons.count("\n") == 4
    assert "absent.png" in reasons
    assert "half of a character" in reasons


def test_a_preparation_that_failed_in_its_first_block_begins_again_in_its_folder(pipeline, tmp_path):
    tiny.write_images(tmp_path / "photos", 6)
    image = tmp_path / "photos" / "003.png"
    content = image.read_bytes()
    image.write_bytes(b"not a picture")
    config = parse_config(tree(tmp_path, pipeline))
    with pytest.raises(ValueError, match=r"003\.png"):
        load_task(config).prepare(config, quiet=True)
    image.write_bytes(content)
    (tmp_path / "shards" / "train-00000.tar").write_bytes(b"of a preparation of other settings that was killed")
    load_task(config).prepare(config, quiet=True)
    assert json.loads((tmp_path / "shards" / "prepared.json").read_text())["complete"]
    assert not list((tmp_path / "shards").glob("*.tar"))


def test_a_photograph_is_decoded_as_it_is_shown():
    from PIL import Image

    def decoded(image, side, **options):
        content = io.BytesIO()
        image.save(content, **options)
        return decode_image(content.getvalue(), side)

    image, exif = Image.new("RGB", (64, 32), "white"), Image.Exif()
    image.paste("black", (16, 0, 32, 16))
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    pixels = decoded(image, 32, format="JPEG", exif=exif, quality=95)
    assert pixels[:, 2:14, 18:30].max() < -0.8  # the upper right quarter of the middle square
    assert pixels[:, 18:30].min() > 0.8
    assert pixels[:, :, 2:14].min() > 0.8
    assert decoded(Image.new("RGBA", (32, 32), (255, 0, 0, 0)), 32, format="PNG").min() == 1.0  # on white
    assert abs(decoded(Image.new("I;16", (32, 32), 2**15), 32, format="PNG")).max() < 0.01


def test_images_in_tar_files_are_encoded_too(pipeline, tmp_path):
    tiny.write_images(tmp_path / "photos", 4)
    files = {}
    for number in range(4):
        files[f"a/{number}.png"] = (tmp_path / "photos" / f"{number:03}.png").read_bytes()
        files[f"a/{number}.txt"] = f"caption {number}".encode()
    in_tar(tmp_path / "photos.tar", files)
    config = parse_config(tree(tmp_path, pipeline, images=str(tmp_path / "*.tar")))
    load_task(config).prepare(config, quiet=True)
    source = load_task(config).open(config)
    captions = source.train.items.captions(range(len(source.train.items)))
    if source.validation is not None:
        captions += source.validation.items.captions(range(len(source.validation.items)))
    assert sorted(captions) == [f"caption {n}" for n in range(4)]


@pytest.mark.parametrize("form", WRITE)
def test_prepare_and_run_train_on_shards_and_sample_through_the_autoencoder_without_a_network(
    form, pipeline, tmp_path, monkeypatch
):
    """Also that tiny random encoders fetch nothing, not even a config.json by name."""
    from titan_train import Trainer

    def refused(*args):
        raise AssertionError(f"a connection was opened: {args}")

    monkeypatch.setattr(socket.socket, "connect", refused)
    tiny.write_images(tmp_path / "photos", 12)
    sections = tree(tmp_path, pipeline, shard_format=form, sample_images=3, sample_steps=2)
    toml = tmp_path / "run.toml"
    import tomli_w

    toml.write_text(tomli_w.dumps(sections))
    assert cli.main(["data", "prepare", str(toml)]) == 0
    with Trainer(parse_config(sections)) as trainer:
        trainer.fit()
        losses = trainer.losses
    assert len(losses) == 2
    assert np.isfinite(losses).all()
    found = json.loads((tmp_path / "runs" / "r" / "samples" / "step_00000002.json").read_text())
    assert len(found["captions"]) == 3
    assert all(caption.startswith("a ") for caption in found["captions"])
    assert (tmp_path / "runs" / "r" / "samples" / "step_00000002.png").read_bytes().startswith(b"\x89PNG")
    words = [
        "generate",
        str(tmp_path / "runs" / "r"),
        "--prompt",
        "a red disc",
        "--prompt",
        "",
        "--out",
        str(tmp_path / "a.png"),
    ]
    assert cli.main(words) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": ""}, "needs diffusion.path"),
        ({"source": "shapes"}, "Set diffusion.source='shards'"),
        ({"encoders": ""}, "needs diffusion.encoders"),
        ({"images": "", "encoders": "", "sample_images": 2}, "whose vae decodes latents"),
        ({"encoders": "black-forest-labs/FLUX.1-dev"}, "Name a folder on this machine .* nothing is fetched"),
        ({"images": "nowhere/*.jsonl"}, "matches no file"),
        ({"latent_scale": 0.0}, "latent_scale=0.0 must be above 0"),
        ({"latent_shift": 0.1159}, r"scaled the latents of diffusion\.path=.* already"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message, pipeline, tmp_path):
    with pytest.raises(ValueError, match=message):  # noqa: PT012
        config = parse_config(tree(tmp_path, pipeline, **settings))
        load_task(config).prepare(config, quiet=True)


def test_latents_that_were_prepared_are_not_scaled_again(tmp_path):
    sections = tree(tmp_path, tmp_path, images="", encoders="", latent_scale=0.3611)
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "prepared.json").write_text("{}")
    with pytest.raises(ValueError, match=r"latent_scale=0\.3611 .* scaled twice\. Remove both"):
        load_task(parse_config(sections)).open(parse_config(sections))


def test_encoders_that_do_not_fit_the_model_are_refused_with_what_to_set(pipeline, tmp_path):
    tiny.write_images(tmp_path / "photos", 2)
    sections = tree(tmp_path, pipeline)
    sections["model"]["args"]["text_dim"] = 24
    config = parse_config(sections)
    with pytest.raises(ValueError, match=r"gives text \[6, 16\] instead of \[6, 24\]"):
        load_task(config).prepare(config, quiet=True)
