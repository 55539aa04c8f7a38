"""A state layer on whole rows is the token-by-token reference, values and gradients, for any documents and from any state."""

import pytest
import torch
from titan_cp import local_linear_attention, reference_linear_attention

SHAPE = {"batch": 2, "key_heads": 2, "heads": 4, "key_dim": 6, "value_dim": 5}


def inputs(tokens, *, delta, channels, seed=0):
    make = torch.Generator().manual_seed(seed)
    b, g, h, k, v = SHAPE.values()
    draw = lambda *shape: torch.randn(*shape, generator=make, dtype=torch.float64)  # noqa: E731
    q, key = draw(b, g, tokens, k), torch.nn.functional.normalize(draw(b, g, tokens, k), dim=-1)
    decay = -draw(b, h, tokens, *((k,) if channels else ())).abs()
    beta = draw(b, h, tokens).sigmoid() if delta else None
    found = [q, key, draw(b, h, tokens, v), decay, beta]
    return [None if x is None else x.requires_grad_() for x in found]


@pytest.mark.parametrize(("delta", "channels"), [(True, False), (True, True), (False, False), (False, True)])
@pytest.mark.parametrize("tokens", [1, 63, 200])
def test_whole_rows_match_the_reference(tokens, delta, channels):
    given = inputs(tokens, delta=delta, channels=channels)
    bounds = [[0, tokens], sorted({0, 1 % tokens, tokens // 2, tokens})]
    documents = torch.zeros(2, tokens, dtype=torch.int64)
    for row, cuts in enumerate(bounds):
        for start in cuts[1:-1]:
            documents[row, start:] += 1
    out, _ = local_linear_attention(*given, documents=documents)
    want = torch.cat(
        [
            reference_linear_attention(*(None if x is None else x[row : row + 1] for x in given), cu_seqlens=cuts)
            for row, cuts in enumerate(bounds)
        ]
    )
    assert torch.allclose(out, want, atol=1e-10)
    wanted = [x for x in given if x is not None]
    probe = torch.randn_like(want)
    one_token = {"allow_unused": True, "materialize_grads": True}  # forgets nothing: the reference leaves its decay out
    both = (torch.autograd.grad((x * probe).sum(), wanted, **one_token) for x in (out, want))
    for got, expected in zip(*both, strict=True):
        assert torch.allclose(got, expected, atol=1e-9)


def test_a_row_in_pieces_goes_on_from_its_state():
    given = inputs(90, delta=True, channels=False)
    whole, last = local_linear_attention(*given)
    state, parts = None, []
    for start, stop in ((0, 70), (70, 71), (71, 90)):
        part, state = local_linear_attention(*(x[:, :, start:stop] for x in given), state=state)
        parts.append(part)
    assert torch.allclose(torch.cat(parts, 2), whole, atol=1e-10)
    assert torch.allclose(state, last, atol=1e-10)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q": torch.zeros(2, 2, 8, 7)}, "q has shape"),
        ({"decay": torch.zeros(2, 2, 8)}, "decay has shape"),
        ({"v": torch.zeros(2, 3, 8, 5)}, "divide those of v"),
        ({"documents": torch.zeros(1, 8)}, "documents has shape"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change, words):
    names = ("q", "k", "v", "decay", "beta")
    given = dict(zip(names, inputs(8, delta=True, channels=False), strict=True)) | change
    with pytest.raises(ValueError, match=words):
        local_linear_attention(**given)
