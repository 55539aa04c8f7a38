"""Shipped models have the published shapes: parameter counts to the digit, without memory."""

import time

import pytest
from titan_train.config.model import ModelConfig
from titan_train.models import build_model, count_active_parameters, count_parameters, list_models
from titan_train.models.registry import families, find_model

# Llama 3.x model cards and arXiv:2407.21783 table 3; GPT-3 arXiv:2005.14165 table 2.1 ("175.0B", with 2048 positions);
# Qwen3 arXiv:2505.09388 tables 1 and 2; DeepSeek arXiv:2405.04434 and arXiv:2412.19437 ("671B"), without V3's extra layer
PUBLISHED = {
    "llama3_1b": 1_235_814_400,
    "llama3_3b": 3_212_749_824,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "gpt3_175b": 174_604_259_328,
    "qwen3_0.6b": 596_049_920,
    "qwen3_1.7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
    "deepseek_v2_lite": 15_706_484_224,
    "deepseek_v3": 671_026_404_352,
}
# "3B", "22B", "2.4B", "37B" in the names and reports; here with the embedding and the head
ACTIVE = {
    "llama3_8b": 8_030_261_248,
    "qwen3_30b_a3b": 3_353_032_704,
    "qwen3_235b_a22b": 22_190_763_520,
    "deepseek_v2_lite": 2_661_150_208,
    "deepseek_v3": 37_552_282_624,
}


# a text model with an encoder of images before it has the arguments of the text model
BUILT = [
    name
    for family in families().values()
    for name in family.configs
    if family.name not in ("llama_vl", "gpt_vl", "deepseek_vl") or "debug" in name
]


@pytest.mark.parametrize("name", BUILT)
def test_a_shipped_model_builds_on_meta_in_a_moment_with_the_parameters_of_its_shape(name: str) -> None:
    started = time.process_time()  # processor time: what else runs on the machine does not count
    model = build_model(ModelConfig(name=name), vocab_size=None)
    assert time.process_time() - started < 5.0  # with memory and random numbers it would be hours
    assert all(p.is_meta for p in model.parameters())
    family, args = find_model(name)
    if family.task == "text":
        shape = family.shape(args)
        assert (shape.parameters(), shape.active_parameters()) == (
            count_parameters(model),
            count_active_parameters(model),
        )


def test_parameter_counts_are_the_published_ones() -> None:
    shapes = {name: family.shape(args) for name in PUBLISHED for family, args in (find_model(name),)}
    assert {name: shape.parameters() for name, shape in shapes.items()} == PUBLISHED
    assert {name: shapes[name].active_parameters() for name in ACTIVE} == ACTIVE


def test_only_deepseek_v3s_expert_biases_are_buffers() -> None:
    v3 = build_model(ModelConfig(name="deepseek_v3"), vocab_size=None)
    assert {name.rpartition(".")[2] for name, _ in v3.named_buffers()} == {"expert_bias"}
    assert sum(buffer.numel() for buffer in v3.buffers()) == 58 * 256
    assert list(build_model(ModelConfig(name="qwen3_30b_a3b"), vocab_size=None).buffers()) == []


def test_a_configuration_takes_every_name_that_is_listed() -> None:
    assert [ModelConfig(name=name).name for name in list_models()] == list_models()


def test_tied_parameters_are_counted_once() -> None:
    tied = build_model(ModelConfig(args={"tied_embeddings": True}), vocab_size=100)
    untied = build_model(ModelConfig(args={"tied_embeddings": False}), vocab_size=100)
    assert count_parameters(untied) - count_parameters(tied) == 100 * 64
