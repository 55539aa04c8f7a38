"""Cached generation equals full recomputation; streams, stops and ragged prompts."""

import pytest
import torch
from titan_train.config.model import ModelConfig
from titan_train.generation import CachedAttention, Sampling, generate, kv_cache, stream, supports_cache
from titan_train.models import CausalAttention, SequenceContext, build_model, init_for
from titan_train.models.common.delta import GatedDeltaNet
from titan_train.models.shape import DeltaShape
from torch import Tensor, nn

FAMILIES = ["llama3_debug", "gpt_debug", "qwen3_debug", "qwen3_moe_debug", "deepseek_debug"]
PROMPTS = [[5, 17, 3], [40], [9, 9, 9, 2, 60, 11, 7]]


def make(name: str) -> nn.Module:
    model = build_model(ModelConfig(name=name), vocab_size=97, device="cpu")
    init = init_for(model)
    for i, (fqn, parameter) in enumerate(model.named_parameters()):
        init(fqn, parameter.data, torch.Generator().manual_seed(i))
        if parameter.ndim > 1:
            parameter.data.mul_(4)  # attention that looks somewhere, logits of order one
    return model


class NoCache(nn.Module):
    """A user's model: causal (a running mean), tokens only, no cache."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(97, 16)
        self.head = nn.Linear(16, 97)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        steps = torch.arange(1, x.shape[1] + 1).view(1, -1, 1)
        return self.head(x.cumsum(1) / steps)


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.attention = self.again = CausalAttention(2, 2, 8)

    def forward(self, x: Tensor, context: SequenceContext) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 8)) for part in self.qkv(x).chunk(3, -1))
        return self.out((self.attention(q, k, v, context) + self.again(k, q, v, context)).flatten(-2))


class Looped(nn.Module):
    """A user's model that runs through its block several times."""

    supports_kv_cache = True

    def __init__(self, passes: list[int], *, delta: bool) -> None:
        super().__init__()
        self.passes = passes
        self.embed, self.places = nn.Embedding(97, 16), nn.Embedding(64, 16)
        shape = DeltaShape(heads=2, key_heads=2, state=8, head_dim=8, taps=3)
        self.block = GatedDeltaNet(16, shape, 1e-5) if delta else Mixing()
        self.head = nn.Linear(16, 97)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        positions = torch.arange(tokens.shape[1])[None] if positions is None else positions
        x = self.embed(tokens) + self.places(positions)
        for _ in range(self.passes[0] if len(self.passes) == 1 else self.passes.pop(0)):
            x = x + self.block(x, SequenceContext(positions=positions))
        return self.head(x)


def looped(*passes: int, delta: bool = False) -> Looped:
    torch.manual_seed(0)
    model = Looped(list(passes), delta=delta)
    for parameter in model.parameters():
        parameter.data.mul_(2)
    return model


@pytest.mark.parametrize("delta", [False, True], ids=["attention", "delta rule"])
def test_a_block_that_is_called_several_times_has_a_cache_for_each_call(delta: bool) -> None:
    model = looped(3, delta=delta)
    before = list(model.named_modules(remove_duplicate=False))
    assert generate(model, PROMPTS, max_new_tokens=12) == generate(model, PROMPTS, max_new_tokens=12, use_cache=False)
    assert list(model.named_modules(remove_duplicate=False)) == before


@pytest.mark.parametrize("passes", [(2, 3), (3, 2, 3), (1, 2, 1)])
def test_a_call_whose_cache_lacks_earlier_tokens_is_refused(passes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"'block.attention' is called .* use_cache=False"):
        generate(looped(*passes), PROMPTS, max_new_tokens=6)


@pytest.mark.parametrize("name", FAMILIES)
def test_cached_logits_equal_full_recompute(name: str) -> None:
    model = make(name).requires_grad_(False)
    tokens = torch.randint(97, (3, 40), generator=torch.Generator().manual_seed(0))
    want = model(tokens)
    with kv_cache(model, 40):
        parts = [model(tokens[:, :20], positions=torch.arange(20).expand(3, -1))]  # prefill
        parts.append(model(tokens[:, 20:27], positions=torch.arange(20, 27).expand(3, -1)))  # several at once
        parts += [model(tokens[:, i : i + 1], positions=torch.full((3, 1), i)) for i in range(27, 40)]
    # float32, logits of order one, another order of summation
    assert float((torch.cat(parts, dim=1) - want).abs().max()) <= 1e-5


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=5.0, top_k=3, repetition_penalty=1.2)])
def test_rows_beyond_the_tokenizer_are_never_chosen(sampling: Sampling) -> None:
    model = make("llama3_debug")
    assert max(max(row) for row in generate(model, PROMPTS, max_new_tokens=32, sampling=sampling)) > 61
    chosen = generate(model, PROMPTS, max_new_tokens=32, sampling=sampling, vocab_size=61)
    assert all(token < 61 for row in chosen for token in row)


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_64_tokens_of_ragged_prompts_equal_full_recompute(name: str) -> None:
    model = make(name)
    cached = generate(model, PROMPTS, max_new_tokens=64)
    assert [len(row) for row in cached] == [64, 64, 64]
    assert cached == generate(model, PROMPTS, max_new_tokens=64, use_cache=False)
    for row, prompt in zip(cached, PROMPTS, strict=True):  # and each row alone, without padding
        assert row == generate(model, [prompt], max_new_tokens=64)[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_sampled_row_does_not_depend_on_the_rest_of_the_batch(name: str) -> None:
    model = make(name)
    sampling = Sampling(temperature=1.0, top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.1)
    together = generate(model, PROMPTS, max_new_tokens=20, sampling=sampling, seeds=[7, 8, 9])
    alone = generate(model, PROMPTS[2:], max_new_tokens=20, sampling=sampling, seeds=[9])
    assert together[2] == alone[0]
    other_seed = generate(model, PROMPTS[2:], max_new_tokens=20, sampling=sampling, seeds=[10])
    assert other_seed != alone


def test_rows_stop_at_their_own_stop_token() -> None:
    model = make("llama3_debug")
    free = generate(model, PROMPTS, max_new_tokens=24)
    stop = free[0][5]
    stopped = generate(model, PROMPTS, max_new_tokens=24, stop_ids=[stop])
    assert stopped == [row[: row.index(stop)] if stop in row else row for row in free]
    assert len(stopped[0]) <= 5
    alone = list(stream(model, PROMPTS[:1], max_new_tokens=24, stop_ids=[stop]))
    assert [step[0] for step in alone] == stopped[0]  # and the stream itself ends there


def test_stream_yields_each_token_as_it_is_chosen() -> None:
    model = make("llama3_debug")
    want = generate(model, PROMPTS, max_new_tokens=8)
    steps = stream(model, PROMPTS, max_new_tokens=8)
    assert [next(steps) for _ in range(3)] == [[row[i] for row in want] for i in range(3)]
    assert torch.is_grad_enabled()  # between tokens the caller's gradients are on
    assert any(isinstance(module, CachedAttention) for module in model.modules())
    steps.close()  # type: ignore[attr-defined]
    assert not any(isinstance(module, CachedAttention) for module in model.modules())
    assert sum(isinstance(module, CausalAttention) for module in model.modules()) == 2
    assert model.training


def test_a_model_without_cache_support_runs_in_full() -> None:
    torch.manual_seed(0)
    model = NoCache()
    assert not supports_cache(model)
    rows = generate(model, PROMPTS, max_new_tokens=10)
    for prompt, row in zip(PROMPTS, rows, strict=True):
        sequence = list(prompt)
        for token in row:
            assert token == int(model(torch.tensor([sequence]))[0, -1].argmax())
            sequence.append(token)


def test_generating_leaves_training_as_it_was() -> None:
    model = make("llama3_debug")
    tokens = torch.randint(97, (2, 16), generator=torch.Generator().manual_seed(0))
    before = model(tokens).detach()
    model.get_submodule("layers.0").eval()
    modes = [module.training for module in model.modules()]
    generate(model, PROMPTS, max_new_tokens=4)
    assert [module.training for module in model.modules()] == modes
    after = model(tokens)
    assert torch.equal(before, after.detach())
    after.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "prompts", "options", "words"),
    [
        ("llama3_debug", [], {}, "no prompt was given"),
        ("llama3_debug", [[1], []], {}, "prompt 1 is empty"),
        ("llama3_debug", [[1]], {"seeds": [1, 2]}, "2 seeds for 1 prompts"),
        ("llama3_debug", [[1]], {"max_new_tokens": -1}, "max_new_tokens=-1"),
        ("gpt_debug", [[1] * 510], {"max_new_tokens": 3}, "has learned 512: the most it can add is 2"),
    ],
)
def test_requests_that_cannot_work_are_refused_at_once(
    name: str, prompts: list[list[int]], options: dict[str, object], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        stream(make(name), prompts, **{"max_new_tokens": 2, **options})  # type: ignore[arg-type]


def test_a_cache_that_the_model_does_not_support_is_refused() -> None:
    with pytest.raises(ValueError, match="NoCache does not support the key-value cache"):
        generate(NoCache(), PROMPTS, max_new_tokens=2, use_cache=True)
