"""What the decoder families share: pipeline stages."""

import pytest
import torch
from titan_train.config.model import ModelConfig
from titan_train.models import build_model, init_for
from titan_train.parallel.stages import take_stage
from torch import nn

NAMES = ["llama3_debug", "qwen3_debug", "qwen3_moe_debug", "qwen3_next_debug", "deepseek_debug", "gpt_debug"]


def make(name: str) -> nn.Module:
    model = build_model(ModelConfig(name=name, args={"num_layers": 3}), vocab_size=None, device="cpu")
    init = init_for(model)
    for number, (fqn, parameter) in enumerate(model.named_parameters()):
        init(fqn, parameter.data, torch.Generator().manual_seed(number))
    return model


@pytest.mark.parametrize("name", NAMES)
def test_stages_of_a_pipeline_compute_what_the_whole_model_does(name: str) -> None:
    model = make(name)
    stages = [take_stage(model, range(a, b), first=a == 0, last=b == 3) for a, b in ((0, 1), (1, 2), (2, 3))]
    tokens, positions = torch.randint(300, (2, 9)), torch.arange(9).expand(2, -1)
    x = tokens
    for stage in stages:
        x = stage(x, positions=positions)
        assert x.shape[:2] == (2, 9)
    assert torch.equal(x, model(tokens))
