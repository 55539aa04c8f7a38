"""GPT against a naive reference in float64: logits and every gradient."""

import math

import pytest
import torch
from naive import assert_matches, shaken
from titan_train.models import GPT, GPTArgs
from torch import Tensor


def make(**changes: object) -> GPT:
    shape = {"dim": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 61, "max_seq_len": 16}
    return shaken(GPT(GPTArgs(**{**shape, **changes})))  # type: ignore[arg-type]


def naive_gpt(w: dict[str, Tensor], args: GPTArgs, tokens: Tensor) -> Tensor:
    """Head by head, from the definitions; nothing shared with the package."""

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + args.norm_eps)
        return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    logits = []
    hd = args.dim // args.num_heads
    for row in tokens:
        n = len(row)
        x = w["tok_embeddings.weight"][row] + w["pos_embeddings.weight"][:n]
        for i in range(args.num_layers):
            layer = f"layers.{i}"
            y = norm(x, f"{layer}.attention_norm")
            q, k, v = (linear(y, f"{layer}.attention.{name}") for name in ("wq", "wk", "wv"))
            heads = []
            for h in range(args.num_heads):
                mine = slice(h * hd, (h + 1) * hd)
                scores = (q[:, mine] @ k[:, mine].T / math.sqrt(hd)).exp().tril()
                heads.append(scores / scores.sum(-1, keepdim=True) @ v[:, mine])
            x = x + linear(torch.cat(heads, -1), f"{layer}.attention.wo")
            y = linear(norm(x, f"{layer}.ffn_norm"), f"{layer}.feed_forward.w1")
            y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
            x = x + linear(y, f"{layer}.feed_forward.w2")
        logits.append(norm(x, "norm") @ w.get("lm_head.weight", w["tok_embeddings.weight"]).T)
    return torch.stack(logits)


@pytest.mark.parametrize("tied", [True, False])
def test_logits_and_every_gradient_match_the_naive_reference(tied: bool) -> None:
    # float64 throughout: rounding of sums of some thousand terms of order 10
    assert_matches(make(tied_embeddings=tied), naive_gpt, 1e-11)


def test_a_row_longer_than_the_learned_positions_is_refused() -> None:
    model = make()
    with pytest.raises(ValueError, match=r"17 tokens in a row, but the model has 16 learned positions"):
        model(torch.zeros(1, 17, dtype=torch.int64))


@pytest.mark.parametrize(
    ("changes", "word"),
    [({"dim": 33}, "dim=32"), ({"max_seq_len": 0}, "max_seq_len=0"), ({"ffn_dim": -1}, "ffn_dim=-1")],
)
def test_shapes_that_cannot_work_are_refused(changes: dict[str, object], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        make(**changes)
