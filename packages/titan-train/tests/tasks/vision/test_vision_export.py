"""A vision-language run as a folder of transformers: its processor makes our patches, its model gives our logits."""

import json
import shutil

import numpy as np
import pytest
import torch
from titan_train.config import parse_config
from titan_train.export.run import export_run
from titan_train.generation import load_run
from titan_train.models.vision_language.args import QWEN3_VL_CONFIGS
from titan_train.models.vision_language.decoder import Qwen3VL
from titan_train.tasks.vision.images import fit_grid
from titan_train.tasks.vision.show import images_shown
from titan_train.tasks.vision.task import VisionTask
from titan_train.tokenizers.byte import CHARACTER_OF_BYTE
from titan_train.train import Trainer

Image = pytest.importorskip("PIL.Image")
transformers = pytest.importorskip("transformers")
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
EXPERTS = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_dim": 24}
ARGS = {
    "dim": 32, "num_layers": 2, "head_dim": 16, "rope_row_pairs": 2, "rope_column_pairs": 2, "vision_dim": 32,
    "image_token": 261, "image_start_token": 259, "image_end_token": 260,
}  # fmt: skip


def tokenizer_folder(folder):
    """Bytes, and the special tokens of Qwen3-VL."""
    folder.mkdir()
    added = [
        dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        | {"id": 256 + n, "content": name, "special": True}
        for n, name in enumerate(SPECIAL)
    ]  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    model = {"type": "BPE", "vocab": {CHARACTER_OF_BYTE[byte]: byte for byte in range(256)}, "merges": []}
    content = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level, "model": model,
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(content))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return folder / "tokenizer.json"


def settings(folder, **sections):
    base = {
        "run": {"dir": str(folder), "name": "run"},
        "model": {"name": "qwen3_vl_debug", "seq_len": 80, "args": ARGS},
        "tokenizer": {"kind": "hf", "path": str(tokenizer_folder(folder / "tokenizer"))},
        "vision": {"items": 20, "held_out": 4},
        "train": {"steps": 1, "global_batch": 2},
        "validation": {"every": 0},
        "metrics": {"progress": "off", "report": False},
        "launch": {"device": "cpu"},
    }
    return parse_config(base | {name: base.get(name, {}) | values for name, values in sections.items()})


def filled(self, fqn, tensor, generator):
    tensor.normal_(1.0 if "norm" in fqn and fqn.endswith("weight") else 0.0, 0.1, generator=generator)


@pytest.mark.parametrize("least", [4, 16])
@pytest.mark.parametrize(
    "size",
    [
        (480, 640),
        (100, 3000),
        (37, 41),
        (5000, 5000),
        (1, 150),
        (64, 64),
        (17, 900),
        (1040, 1040),
        (12, 600),
        (600, 12),
    ],
)
def test_a_grid_is_that_of_transformers(size, least):
    resize = transformers.models.qwen2_vl.image_processing_pil_qwen2_vl.smart_resize
    args = QWEN3_VL_CONFIGS["qwen3_vl_8b"]
    wanted = resize(*size, factor=32, min_pixels=least * 32**2, max_pixels=1024 * 32**2)
    assert tuple(16 * side for side in fit_grid(*size, args, least=least, most=1024)) == wanted


@pytest.mark.parametrize(
    "experts", [{}, {"num_experts": 4, "experts_per_token": 2, "expert_ffn_dim": 24}], ids=["dense", "experts"]
)
def test_transformers_sees_what_the_run_sees(experts, tmp_path, monkeypatch):
    monkeypatch.setattr(Qwen3VL, "init_weights", filled)
    with Trainer(settings(tmp_path, model={"args": ARGS | experts})) as trainer:
        trainer.fit()
    checks = export_run(tmp_path / "run", tmp_path / "out", dtype="fp32")
    assert all(check.passed for check in checks["hf"])
    folder = tmp_path / "out"
    assert json.loads((folder / "preprocessor_config.json").read_text())["processor_class"] == "Qwen3VLProcessor"
    maker = transformers.models.qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_tokens_to_ids("<|image_pad|>") == ARGS["image_token"]
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    run = load_run(tmp_path / "run", device="cpu")
    found = []
    for number in range(2):
        image = Image.fromarray(np.random.default_rng(number).integers(0, 256, (40, 70, 3), dtype=np.uint8))
        image.save(tmp_path / "a.png")
        made = maker(image, return_tensors="pt")
        text = (
            "<|vision_start|>"
            + "<|image_pad|>" * (int(made["image_grid_thw"].prod()) // 4)
            + "<|vision_end|>What is it?"
        )
        ids = tokenizer(text, return_tensors="pt").input_ids
        with torch.no_grad(), images_shown(run, [tmp_path / "a.png"], ["What is it?"]) as prompts:
            assert prompts == ids.tolist()
            ours = run.model(ids)
            types = (ids == ARGS["image_token"]).int()
            wanted = theirs(input_ids=ids, mm_token_type_ids=types, **made).logits
        # two orders of float32 sums
        assert (ours - wanted).abs().max() <= 1e-5 * wanted.abs().max()
        found.append(ours)
    assert (found[0] - found[1]).abs().max() > 1e-2 * found[0].abs().max()


def test_a_run_is_loaded_and_checked_without_its_tokenizer_s_file(tmp_path):
    config = settings(tmp_path)
    with Trainer(config) as trainer:
        trainer.save()
    assert VisionTask().vocab_size(config) == 263
    shutil.rmtree(tmp_path / "tokenizer")
    assert len(load_run(tmp_path / "run", device="meta").model.tok_embeddings.weight) == 263
    assert VisionTask().vocab_size(config) is None
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        VisionTask().check_inputs(config)


def test_a_check_trains_no_tokenizer(tmp_path):
    tokenizer, cache = {"kind": "sentencepiece", "path": "", "vocab_size": 400}, {"cache_dir": str(tmp_path / "cache")}
    config = settings(tmp_path, tokenizer=tokenizer, data=cache)
    assert VisionTask().vocab_size(config) == 400
    VisionTask().check_inputs(config)
    assert not list(tmp_path.glob("cache/*"))
