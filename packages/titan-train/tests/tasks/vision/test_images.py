"""Images to patches, rows of whole documents, and files: what cannot be used is named."""

import io
import json
import tarfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from titan_train.config import CheckpointConfig, RunConfig, parse_config
from titan_train.models.vision_language.args import QWEN3_VL_CONFIGS
from titan_train.models.vision_language.encoder import image_tokens
from titan_train.run_folder import run_folder
from titan_train.tasks.image_files import BrokenImage
from titan_train.tasks.vision.batches import ImageTextBatches
from titan_train.tasks.vision.images import fit_grid, image_size, read_image, to_patches
from titan_train.tasks.vision.jsonl import prepare_index
from titan_train.tasks.vision.rows import pack_rows, write_document
from titan_train.tasks.vision.shapes import ShapeQuestions, draw
from titan_train.tasks.vision.task import VisionInputs, VisionTask
from titan_train.tokenizers import ByteTokenizer

Image = pytest.importorskip("PIL.Image")
ARGS = QWEN3_VL_CONFIGS["qwen3_vl_debug"]
PUBLISHED = QWEN3_VL_CONFIGS["qwen3_vl_8b"]


@pytest.mark.parametrize("size", [(480, 640), (100, 3000), (37, 41), (5000, 5000), (1, 150), (64, 64)])
def test_the_grid_keeps_the_bounds_and_nearly_the_aspect(size):
    rows, columns = fit_grid(*size, PUBLISHED, least=4, most=1024)
    assert 4 <= image_tokens(rows, columns, 2) <= 1024
    if min(rows, columns) >= 8:
        assert abs(rows / columns * size[1] / size[0] - 1) <= 0.3


@pytest.mark.parametrize("least", [1, 5])
def test_the_grid_never_leaves_narrow_bounds(least):
    for height in range(1, 200, 13):
        for width in range(1, 200, 7):
            if max(height, width) <= 200 * min(height, width):
                grid = fit_grid(height, width, ARGS, least=least, most=6)
                assert 1 <= image_tokens(*grid, 2) <= 6


def test_an_image_longer_than_any_is_refused():
    with pytest.raises(BrokenImage, match="over 200 times as long as wide"):
        fit_grid(1, 500, ARGS, least=1, most=100)


def test_patches_are_those_of_transformers():
    processor = pytest.importorskip(
        "transformers"
    ).models.qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil
    image = np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    made = processor(
        patch_size=16, merge_size=2, temporal_patch_size=2, do_resize=False, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )(Image.fromarray(image), return_tensors="pt")
    assert made["image_grid_thw"].tolist() == [[1, 4, 6]]
    assert np.abs(to_patches(image, PUBLISHED) - made["pixel_values"].numpy()).max() <= 1e-6  # one rounding of 1/255


def test_positions_of_images_are_those_of_transformers():
    transformers = pytest.importorskip("transformers")
    from titan_train.models.vision_language.hf import config_of

    with torch.device("meta"):
        model = transformers.Qwen3VLForConditionalGeneration(transformers.Qwen3VLConfig(**config_of(ARGS)))
    grids = [(4, 6), (8, 2)]
    document = write_document(ByteTokenizer(), ARGS, grids, "how many", "3")
    tokens = torch.from_numpy(document.tokens)[None]
    want, _ = model.model.get_rope_index(
        tokens, (tokens == ARGS.image_token).int(), image_grid_thw=torch.tensor([(1, *grid) for grid in grids])
    )
    assert torch.equal(want[:, 0], torch.from_numpy(document.positions).T)


def test_only_answers_are_learned_and_every_feature_has_its_token():
    document = write_document(ByteTokenizer(), ARGS, [(4, 6), (2, 2)], "what", "dog")
    assert document.tokens[document.learned].tolist() == [*b"dog", 257]
    assert document.image[document.image >= 0].tolist() == list(range(7))
    assert (document.tokens[document.image >= 0] == ARGS.image_token).all()
    assert not document.learned[document.image >= 0].any()


def test_documents_stay_whole_and_rows_are_filled():
    lengths = np.random.default_rng(1).integers(1, 60, 400).tolist()
    rows = pack_rows(lengths, 64)
    assert sorted(item for row in rows for item in row) == list(range(400))
    used = [sum(lengths[item] for item in row) for row in rows]
    assert max(used) <= 64
    assert sum(used) / (64 * len(rows)) > 0.9


def batches(part="train", **options):
    items = ShapeQuestions(60, ARGS)
    return ImageTextBatches(
        items, ByteTokenizer(), ARGS, **{"seq_len": 80, "seed": 3, "part": part, "threads": 2} | options
    )


def test_a_batch_holds_every_document_whole_with_its_own_image():
    data = batches()
    samples = np.array([5, 0, 77])
    batch = data.build_batch(samples, ignore_index=-100, samples_consumed=9)
    keywords = batch.keywords
    assert batch.samples_consumed == 9
    feature = 0
    for row, sample in enumerate(samples.tolist()):
        ends = [0]
        for item in data.row_of(sample):
            document = data.document(item)
            start, stop = ends[-1], ends[-1] + len(document.tokens) - 1
            assert batch.inputs[0][row, start:stop].tolist() == document.tokens[:-1].tolist()
            source = keywords["image_source"][row, start:stop]
            assert source[source >= 0].tolist() == list(range(feature, feature + 9))
            patches = keywords["pixels"][feature * 4 : feature * 4 + 36]
            assert torch.equal(patches, torch.from_numpy(to_patches(data.items.thumbnail(item), ARGS)))
            feature += 9
            ends.append(stop)
        assert keywords["cu_seqlens"][row].unique().tolist() == sorted({*ends, 80})
        assert (batch.target[row, ends[-1] :] == -100).all()
        assert keywords["padding"][row].tolist() == [place >= ends[-1] for place in range(80)]
    assert keywords["image_bounds"].tolist() == list(range(0, len(keywords["pixels"]) + 1, 36))
    learned = batch.target[batch.target >= 0]
    assert (learned < 259).all()


def test_a_sample_depends_on_its_number_alone_and_an_epoch_has_every_row_once():
    data = batches()
    rows = len(data.rows)
    whole = data.build_batch(np.arange(4), ignore_index=-100, samples_consumed=0)
    again = batches().build_batch(np.array([2]), ignore_index=-100, samples_consumed=0)
    assert torch.equal(whole.inputs[0][2], again.inputs[0][0])
    for epoch in (0, 1):
        taken = [tuple(data.row_of(sample)) for sample in range(epoch * rows, (epoch + 1) * rows)]
        assert sorted(taken) == sorted(map(tuple, data.rows))
    assert [data.row_of(sample) for sample in range(rows)] != [data.row_of(rows + sample) for sample in range(rows)]


def test_a_document_that_no_row_holds_is_refused_by_name():
    with pytest.raises(ValueError, match=r"shape image 1 takes \d+ tokens .* model\.seq_len=24: .* at least"):
        batches(seq_len=24)


def test_shapes_count_and_differ():
    data = ShapeQuestions(200, ARGS)
    for item in range(0, 200, 2):
        prompt, answer = data.texts(item)
        cells = draw(item).reshape(3, 16, 3, 16, 3).transpose(0, 2, 1, 3, 4).reshape(9, -1)
        assert prompt == "How many?"
        assert int(answer) == sum(len(set(cell.tolist())) > 1 for cell in cells)
    assert len({data.texts(item)[1] for item in range(1, 200, 2)}) > 15


def picture(path, size=(40, 30), colour=(200, 10, 10)):
    Image.new("RGB", size, colour).save(path)


def write_lines(folder, lines):
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def config(folder, **vision):
    return parse_config(
        {
            "run": {"dir": str(folder / "runs")},
            "model": {"name": "qwen3_vl_debug", "seq_len": 96},
            "tokenizer": {"kind": "bytes"},
            "data": {"cache_dir": str(folder / "cache")},
            "vision": {"source": "jsonl", "paths": [str(folder / "*.jsonl")], "held_out": 1, "max_image_tokens": 20}
            | vision,
        }
    )


def test_files_and_tar_shards_are_read_and_broken_images_are_named_and_left_out(tmp_path):
    picture(tmp_path / "a.png")
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    picture(tmp_path / "huge.png", size=(500, 500))
    content = io.BytesIO()
    Image.new("L", (64, 16), 90).save(content, "PNG")
    with tarfile.open(tmp_path / "shard.tar", "w") as shard:
        member = tarfile.TarInfo("in/b.png")
        member.size = len(content.getvalue())
        content.seek(0)
        shard.addfile(member, content)
    ask = {"prompt": "colour?", "answer": "red"}
    lines = [
        {"image": "a.png", **ask}, {"image": "broken.png", **ask}, {"image": "huge.png", **ask},
        {"image": "missing.png", **ask}, {"image": ["shard.tar/in/b.png", "a.png"], **ask}, {"image": "shard.tar/c.png", **ask},
        ask,
    ]  # fmt: skip
    write_lines(tmp_path, lines)
    settings = config(tmp_path, max_pixels=10_000)
    VisionTask().prepare(settings)
    quarantine = [
        json.loads(line)
        for line in (prepare_index(settings, ARGS).parent / "quarantine.jsonl").read_text().splitlines()
    ]
    assert [bad["line"] for bad in quarantine] == [2, 3, 4, 6]
    assert "500 x 500 pixels are more than vision.max_pixels=10000" in quarantine[1]["reason"]
    inputs = VisionInputs(settings)
    assert len(inputs.validation.items) == 1
    batch = inputs.train.batch_of([[0], [1]])
    grids = [(2, 8), (4, 4)]
    assert inputs.train.items.grids(0) == grids
    assert batch.keywords["image_bounds"].tolist() == [0, 16, 32]
    assert (batch.keywords["image_source"][1] == -1).all()
    assert [int((row >= 0).sum()) for row in batch.target] == [4, 4]


def test_ranks_count_no_tokens_that_were_counted_when_the_data_was_prepared(tmp_path, monkeypatch):
    write_lines(tmp_path, [{"prompt": "colour?", "answer": "red" * (1 + number % 3)} for number in range(9)])
    settings = config(tmp_path)
    counted = VisionInputs(settings).train.rows  # counted here
    VisionTask().prepare(settings)
    monkeypatch.setattr(ByteTokenizer, "encode", None)
    assert VisionInputs(settings).train.rows == counted


def test_an_image_that_is_there_by_now_is_taken_when_the_data_is_prepared_again(tmp_path):
    ask = {"prompt": "colour?", "answer": "red"}
    write_lines(tmp_path, [ask, ask, {"image": "late.png", **ask}])
    settings = config(tmp_path)
    assert not VisionTask().is_prepared(settings)
    for _ in range(2):
        VisionTask().prepare(settings)
        assert VisionTask().is_prepared(settings)
        assert len(VisionInputs(settings).train.items) == 1
    picture(tmp_path / "late.png")
    assert len(VisionInputs(settings).train.items) == 1  # ranks take what was prepared
    checkpoint = tmp_path / "runs" / "run" / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "MANIFEST.json").write_text("{}")
    VisionTask().prepare(settings)
    assert len(VisionInputs(settings).train.items) == 1  # as does a run that resumes
    checkpoint.rename(tmp_path / "another")
    VisionTask().prepare(settings)
    assert len(VisionInputs(settings).train.items) == 2
    assert (prepare_index(settings, ARGS).parent / "quarantine.jsonl").read_text() == ""


def test_runs_and_branches_keep_their_samples_when_another_run_takes_a_repaired_image(tmp_path):
    ask = {"prompt": "colour?", "answer": "red"}
    write_lines(tmp_path, [ask, ask, {"image": "late.png", **ask}])
    first, second = (replace(config(tmp_path), run=RunConfig(dir=str(tmp_path / "runs"), name=name)) for name in "ab")

    def begin(settings):
        VisionTask().prepare(settings)
        inputs = VisionInputs(settings)
        checkpoint = run_folder(settings) / "checkpoints" / "step-00000001"
        checkpoint.mkdir(parents=True, exist_ok=True)
        inputs.keep(run_folder(settings))
        (checkpoint / "MANIFEST.json").write_text("{}")
        return inputs.train.fingerprint

    began = begin(first)
    picture(tmp_path / "late.png")
    later = begin(second)
    assert later != began
    branch = replace(
        first, run=replace(first.run, name="c"), checkpoint=CheckpointConfig(start_from=f"{run_folder(first)}@1")
    )
    for settings, expected in ((first, began), (second, later), (branch, began)):
        assert VisionInputs(settings).train.fingerprint == expected
        assert begin(settings) == expected


def test_rows_of_text_alone_still_have_an_image_for_the_encoder(tmp_path):
    write_lines(tmp_path, [{"prompt": "one", "answer": "two"}] * 3)
    batch = VisionInputs(config(tmp_path)).train.batch_of([[0, 1]])
    assert batch.keywords["image_bounds"].tolist() == [0, 4]
    assert (batch.keywords["image_source"] == -1).all()


def test_an_image_that_breaks_after_preparation_is_named_and_its_answer_not_learned(tmp_path, caplog):
    for name in "abc":
        picture(tmp_path / f"{name}.png")
    write_lines(tmp_path, [{"image": f"{name}.png", "prompt": "q", "answer": "r"} for name in "abc"])
    inputs = VisionInputs(config(tmp_path))
    whole = (tmp_path / "b.png").read_bytes()
    (tmp_path / "b.png").write_bytes(whole[: len(whole) - 30])
    batch = inputs.train.batch_of([[0], [1]])
    inputs.train.batch_of([[0]])
    assert (batch.target[0] == -100).all()
    assert (batch.target[1] != -100).sum() == 2
    assert [record.getMessage().count("data.jsonl:2") for record in caplog.records] == [1]


def test_an_image_that_was_replaced_by_one_of_another_size_is_refused_until_a_new_run_indexes_it(tmp_path, caplog):
    for name in "ab":
        picture(tmp_path / f"{name}.png")
    write_lines(tmp_path, [{"image": f"{name}.png", "prompt": "q", "answer": "r"} for name in "ab"])
    settings = config(tmp_path)
    VisionTask().prepare(settings)
    picture(tmp_path / "b.png", size=(640, 160))
    inputs = VisionInputs(settings)
    assert (inputs.train.batch_of([[0]]).target == -100).all()
    assert "b.png has 640 x 160 pixels, but had 40 x 30 when it was indexed" in caplog.text
    VisionTask().prepare(settings)
    inputs = VisionInputs(settings)
    assert inputs.train.items.grids(0) == [(4, 16)]
    assert (inputs.train.batch_of([[0]]).target != -100).any()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"data\.jsonl:1: not JSON"),
        ('{"prompt": "a"}', "'answer' is not a text"),
        ('{"prompt": "a", "answer": "b", "image": 3}', "'image' is neither a path nor a list"),
        ('{"prompt": "a", "answer": "b", "images": "x"}', "unknown field 'images'"),
        ('{"prompt": "a", "answer": "b"}', "nothing is left to train on"),
        ('{"prompt": "a", "answer": "b", "image": "no.png"}', r"1 in quarantine \(.*no\.png"),
    ],
)
def test_lines_that_cannot_be_used_are_refused_by_name(line, message, tmp_path):
    (tmp_path / "data.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=message):
        VisionTask().prepare(config(tmp_path))


def test_a_file_of_too_many_pixels_is_not_decoded(tmp_path):
    picture(tmp_path / "big.png", size=(300, 300))
    for use in (
        lambda: image_size(str(tmp_path / "big.png"), most=100),
        lambda: read_image(str(tmp_path / "big.png"), (2, 2), ARGS, most=100),
    ):
        with pytest.raises(BrokenImage, match="300 x 300 pixels are more"):
            use()


def test_a_limit_of_pixels_that_pillow_does_not_reach_is_refused(tmp_path):
    most = 2 * Image.MAX_IMAGE_PIXELS
    assert config(tmp_path, max_pixels=most).vision.max_pixels == most
    with pytest.raises(ValueError, match=f"at most {most}; Pillow opens no larger image"):
        config(tmp_path, max_pixels=most + 1)


def test_image_tokens_that_are_bytes_are_refused(tmp_path):
    settings = config(tmp_path)
    broken = parse_config(
        {"model": {"name": "qwen3_vl_debug", "args": {"image_token": 65}}, "tokenizer": {"kind": "bytes"}}
    )
    with pytest.raises(ValueError, match="image token 65 is a byte"):
        VisionTask().check(broken, None)
    VisionTask().check(settings, None)


def test_images_before_the_damage_of_a_shard_are_read(tmp_path):
    for name in ("a", "b", "c"):
        Image.new("RGB", (8, 8), "red").save(tmp_path / f"{name}.png")
    with tarfile.open(tmp_path / "shard.tar", "w") as shard:
        for name in ("a", "b", "c"):
            shard.add(tmp_path / f"{name}.png", f"{name}.png")
    with tarfile.open(tmp_path / "shard.tar") as shard:
        header = shard.getmember("b.png").offset
    content = bytearray((tmp_path / "shard.tar").read_bytes())
    content[header] ^= 1
    (tmp_path / "shard.tar").write_bytes(content)
    assert image_size(str(tmp_path / "shard.tar" / "a.png"), most=100) == (8, 8)
    with pytest.raises(BrokenImage, match="no such file"):
        image_size(str(tmp_path / "shard.tar" / "c.png"), most=100)
