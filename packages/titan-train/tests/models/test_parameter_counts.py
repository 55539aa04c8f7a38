"""Shipped models have the published shapes: parameter counts to the digit, without memory."""

import time

import pytest
from titan_train.config.model import SHIPPED_MODELS, ModelConfig
from titan_train.models import build_model, count_parameters, list_models

# Llama 3.x model cards and arXiv:2407.21783 table 3; GPT-3 arXiv:2005.14165 table 2.1 ("175.0B", with 2048 positions)
PUBLISHED = {
    "llama3_1b": 1_235_814_400,
    "llama3_3b": 3_212_749_824,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "gpt3_175b": 174_604_259_328,
}


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_parameter_count_is_the_published_one(name: str, count: int) -> None:
    model = build_model(ModelConfig(name=name), vocab_size=None)
    assert count_parameters(model) == count


def test_all_shipped_models_build_on_the_meta_device_in_seconds() -> None:
    started = time.process_time()  # processor time: what else runs on the machine does not count
    models = [build_model(ModelConfig(name=name), vocab_size=None) for name in list_models()]
    assert time.process_time() - started < 5.0
    assert all(p.is_meta for model in models for p in model.parameters())


def test_config_names_the_shipped_models_that_exist() -> None:
    assert list(SHIPPED_MODELS) == list_models()


def test_tied_parameters_are_counted_once() -> None:
    tied = build_model(ModelConfig(args={"tied_embeddings": True}), vocab_size=100)
    untied = build_model(ModelConfig(args={"tied_embeddings": False}), vocab_size=100)
    assert count_parameters(untied) - count_parameters(tied) == 100 * 64
