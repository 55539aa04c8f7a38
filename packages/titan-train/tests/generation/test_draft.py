"""Drafts change no token: with modules that guess well, badly, and for ragged rows; what was accepted is counted."""

import pytest
import torch
from titan_train.config.model import ModelConfig
from titan_train.generation import DraftCount, Sampling, generate, stream
from titan_train.models import build_model, init_for
from titan_train.models.common.mtp import mtp_of

PROMPTS = [[5, 17, 3], [40], [9, 9, 9, 2, 60, 11, 7]]


def make(name, depth):
    model = build_model(ModelConfig(name=name, args={"mtp_depth": depth}), vocab_size=97, device="cpu").double()
    init = init_for(model)
    for i, (fqn, parameter) in enumerate(model.named_parameters()):
        init(fqn, parameter.data, torch.Generator().manual_seed(i))
        if parameter.ndim > 1:
            parameter.data.mul_(4)  # attention that looks somewhere, logits of order one
    return model


def sure(model):
    """A model whose next token is its last one's successor, and whose modules know that."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 3 or (parameter.ndim == 2 and parameter.shape[0] != 97):
                parameter.zero_()  # blocks add nothing to the residual stream
        embedding = model.tok_embeddings.weight
        embedding.copy_(torch.nn.functional.one_hot(torch.arange(97) % 64, 64) * 8.0)
        model.lm_head.weight.copy_(embedding.roll(1, 0))
        for module in mtp_of(model).values():
            module.proj.weight[:, :64] = torch.eye(64)  # the embedding of the token that it is given
    return model


@pytest.mark.parametrize("name", ["llama3_debug", "qwen3_moe_debug", "deepseek_debug", "qwen3_next_moe_debug"])
@pytest.mark.parametrize("depth", [1, 3])
def test_greedy_tokens_of_ragged_prompts_are_those_without_drafts(name, depth):
    model = make(name, depth).requires_grad_(False)
    want = generate(model, PROMPTS, max_new_tokens=24)
    count = DraftCount()
    assert generate(model, PROMPTS, max_new_tokens=24, draft=count) == want
    assert count.drafted >= depth * len(PROMPTS)
    # one token comes of the prompt, one and the accepted drafts of each forward
    assert 23 <= count.forwards + count.accepted // len(PROMPTS) <= 23 + depth
    assert generate(model, PROMPTS[:1], max_new_tokens=24, draft=DraftCount(), vocab_size=61) == generate(
        model, PROMPTS[:1], max_new_tokens=24, vocab_size=61
    )


def test_modules_that_know_the_text_have_every_draft_accepted():
    model = sure(make("llama3_debug", 2)).requires_grad_(False)
    count = DraftCount()
    want = generate(model, [[3], [40, 41]], max_new_tokens=21)
    assert generate(model, [[3], [40, 41]], max_new_tokens=21, draft=count) == want
    assert want[0][:3] == [4, 5, 6]
    # 21 tokens: one of the prompt, then three a forward
    assert (count.accepted, count.drafted, count.forwards) == (28, 28, 7)
    assert count.text() == "28 of 28 drafted tokens accepted (100%), in 7 forwards"


def test_rows_end_at_stop_tokens_as_without_drafts():
    model = sure(make("llama3_debug", 2)).requires_grad_(False)
    options = {"max_new_tokens": 21, "stop_ids": [9, 50]}
    assert generate(model, [[3], [40, 41]], draft=DraftCount(), **options) == generate(
        model, [[3], [40, 41]], **options
    )


def test_what_drafts_cannot_serve_is_refused_by_name():
    with pytest.raises(ValueError, match=r"this Llama has none: it was not trained with model.args.mtp_depth"):
        stream(make("llama3_debug", 0), [[1]], max_new_tokens=1, draft=DraftCount())
    model = make("llama3_debug", 1)
    with pytest.raises(ValueError, match=r"drafts with temperature=1.0"):
        stream(model, [[1]], max_new_tokens=1, draft=DraftCount(), sampling=Sampling(temperature=1.0))
    for options in ({"use_cache": False}, {"compiled": True}, {"multiple_of": 2}):
        with pytest.raises(ValueError, match=r"leave use_cache=None"):
            stream(model, [[1]], max_new_tokens=1, draft=DraftCount(), **options)
    model.rope_limits = (16,)
    stream(model, [[1] * 17], max_new_tokens=20, draft=DraftCount())
    stream(model, [[1] * 10], max_new_tokens=5, draft=DraftCount())
    with pytest.raises(ValueError, match=r"rows of more than 16 tokens are rotated by other factors"):
        stream(model, [[1] * 10], max_new_tokens=6, draft=DraftCount())
