"""The encoder on the first pipeline stage weighs in the balance, and commands that plan a run take it."""

import titan_pipeline
from titan_train.config import parse_config
from titan_train.config.model import ModelConfig
from titan_train.models import build_model
from titan_train.parallel.stages import stage_layers


def cut(**args):
    model = {"name": "qwen3_vl_2b", "seq_len": 4096, "args": args}
    config = parse_config({"model": model, "parallel": {"pp": 4}, "tokenizer": {"kind": "bytes"}})
    whole = build_model(ModelConfig(**model), vocab_size=None)
    return [len(layers) for layers in stage_layers(config, whole, titan_pipeline.build_schedule("1f1b", 4, 8))]


def test_the_cut_follows_the_size_of_the_encoder():
    none, published = cut(image_share=0.0), cut(image_share=0.25)
    assert sum(none) == sum(published) == 28
    assert none[0] > published[0] >= 3


def test_a_heavy_encoder_leaves_the_first_stage_the_layers_that_only_it_can_feed():
    """Features of three encoder blocks are added to the first three layers; by FLOPs alone the stage would get one."""
    heavy = cut(image_share=1.0)
    assert heavy[0] == 3
    assert sum(heavy) == 28
    assert heavy[1] == heavy[2] > heavy[3]  # which has the head
