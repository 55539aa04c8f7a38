"""Filters against their definitions, one row at a time, and the draws."""

import pytest
import torch
from titan_train.generation import Sampling, choose_tokens, filter_logits, penalize_repetition

VOCAB = 37


def logits(seed: int = 0, rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def generators(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def naive_kept(row: list[float], sampling: Sampling) -> set[int]:
    """Which tokens stay: temperature, then top-k, top-p and min-p, each on what the one before left."""
    scaled = [x / sampling.temperature for x in row]
    kept = sorted(range(len(row)), key=lambda i: -scaled[i])

    def probabilities() -> dict[int, float]:
        weights = {i: float(torch.tensor(scaled[i], dtype=torch.float64).exp()) for i in kept}
        return {i: w / sum(weights.values()) for i, w in weights.items()}

    if sampling.top_k:
        kept = kept[: sampling.top_k]
    total, nucleus = 0.0, []
    for token, p in probabilities().items():
        if total >= sampling.top_p:
            break
        nucleus.append(token)
        total += p
    kept = nucleus
    p = probabilities()
    kept = [i for i in kept if p[i] >= sampling.min_p * max(p.values())]
    return set(kept)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.7),
        Sampling(temperature=1.5, top_k=5),
        Sampling(temperature=1.0, top_p=0.8),
        Sampling(temperature=1.0, top_p=1e-6),
        Sampling(temperature=2.0, min_p=0.1),
        Sampling(temperature=1.3, top_k=12, top_p=0.9, min_p=0.02),
        Sampling(temperature=1.0, top_k=1000),
    ],
)
def test_filters_keep_what_their_definitions_keep(sampling: Sampling) -> None:
    filtered = filter_logits(logits(), sampling)
    for row, want in zip(filtered, logits().tolist(), strict=True):
        kept = set(row.isfinite().nonzero().flatten().tolist())
        assert kept == naive_kept(want, sampling)
        assert kept  # at least one token
    finite = filtered.isfinite()
    assert torch.equal(filtered[finite], (logits() / sampling.temperature)[finite])


def test_repetition_penalty_pushes_seen_tokens_down_only() -> None:
    given = torch.tensor([[2.0, -2.0, 1.0, -1.0]])
    seen = torch.tensor([[True, True, False, False]])
    assert penalize_repetition(given, seen, 2.0).tolist() == [[1.0, -4.0, 1.0, -1.0]]
    chosen = choose_tokens(given, seen, Sampling(repetition_penalty=4.0), generators(0))
    assert chosen.tolist() == [2]  # greedy, too


def test_greedy_takes_the_likeliest() -> None:
    nothing_seen = torch.zeros(4, VOCAB, dtype=torch.bool)
    chosen = choose_tokens(logits(), nothing_seen, Sampling(), generators(0, 1, 2, 3))
    assert torch.equal(chosen, logits().argmax(-1))


def test_draws_follow_the_probabilities() -> None:
    row = torch.tensor([[1.0, 0.0, 2.0, -1.0]]).bfloat16()
    nothing_seen = torch.zeros(1, 4, dtype=torch.bool)
    source = generators(0)
    n = 2000
    drawn = [int(choose_tokens(row, nothing_seen, Sampling(temperature=1.0), source)) for _ in range(n)]
    want = row.float().softmax(-1)[0]
    for token in range(4):
        p = float(want[token])
        # five standard deviations of a binomial count
        assert abs(drawn.count(token) - n * p) < 5 * (n * p * (1 - p)) ** 0.5


def test_a_row_draws_the_same_whatever_else_is_in_the_batch() -> None:
    nothing_seen = torch.zeros(4, VOCAB, dtype=torch.bool)
    sampling = Sampling(temperature=1.0, top_p=0.9)
    together = choose_tokens(logits(), nothing_seen, sampling, generators(5, 6, 7, 8))
    alone = choose_tokens(logits()[2:3], nothing_seen[:1], sampling, generators(7))
    assert together[2] == alone[0]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_p": 0.0}, r"top_p=0.0 must be above 0 and at most 1"),
        ({"min_p": 1.1}, r"min_p=1.1 must be at least 0 and at most 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0"),
    ],
)
def test_settings_that_cannot_work_are_refused(values: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Sampling(**values)  # type: ignore[arg-type]
