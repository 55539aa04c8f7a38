"""A state layer on whole rows is the token-by-token reference, values and gradients, for any documents and from any state."""

import pytest
import torch
from titan_cp import linear_attention, local_linear_attention, plan, reference_linear_attention
from titan_cp.state.local import _increasing

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


def test_numbers_of_documents_may_come_again():
    given = inputs(40, delta=True, channels=False)
    bounds = [0, 11, 12, 30, 40]
    documents = torch.zeros(2, 40, dtype=torch.int64)
    for start in (11, 30):
        documents[:, start:] += 1
    documents[:, 12:30] = 0
    out, _ = local_linear_attention(*given, documents=documents)
    assert torch.allclose(out, reference_linear_attention(*given, cu_seqlens=bounds), atol=1e-10)


@pytest.mark.parametrize("reset", [-1e4, -1e9, float("-inf")])
@pytest.mark.parametrize(("delta", "channels"), [(True, False), (True, True), (False, False), (False, True)])
def test_a_decay_that_forgets_everything_keeps_what_follows(delta, channels, reset):
    """As a reset: what the state was is gone, and later tokens are as exact as without one. In float32."""
    given = [None if x is None else x.detach().float() for x in inputs(90, delta=delta, channels=channels)]
    given[3][:, :, [10, 17, 70]] = reset
    leaves = [x.requires_grad_() for x in given if x is not None]
    out, last = local_linear_attention(*given)
    want = reference_linear_attention(*given)
    # Exponents of 64 tokens add up to 64 · 104 at most, so a float32 one is off by 2^-24 of that; here by three resets.
    assert (out - want).abs().max() <= 1e-4 * want.abs().max()
    assert last.isfinite().all()
    probe = torch.randn(want.shape, generator=torch.Generator().manual_seed(0))
    both = (torch.autograd.grad((x * probe).sum(), leaves) for x in (out, want))
    for got, expected in zip(*both, strict=True):
        assert (got - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_boundaries_that_are_filled_anew_are_read_anew():
    boundaries = torch.tensor([0, 3, 3, 8])
    assert _increasing(boundaries).tolist() == [0, 3, 8]
    assert _increasing(boundaries) is _increasing(boundaries)
    boundaries.copy_(torch.tensor([0, 5, 8, 8]))
    with torch.inference_mode():
        assert _increasing(boundaries).tolist() == [0, 5, 8]
    assert not _increasing(boundaries).is_inference()


@pytest.mark.parametrize("packed", [False, True])
def test_meta_tensors_and_rows_of_no_tokens_give_shapes(packed):
    for tokens, device in ((8, "meta"), (0, "cpu"), (0, "meta")):
        q, k, v, decay, beta = (x.detach().to(device) for x in inputs(tokens, delta=True, channels=False))
        documents = torch.zeros(2, tokens, dtype=torch.int64, device=device) if packed else None
        out, state = local_linear_attention(q, k, v, decay, beta, documents=documents)
        assert (out.shape, state.shape) == ((2, 4, tokens, 5), (2, 4, 6, 5))
        assert device == "meta" or not state.any()
    p = plan(8, size=1, rank=0, num_heads=4)
    q, k, v, decay, beta = (x.detach().to("meta") for x in inputs(8, delta=True, channels=False))
    assert linear_attention(q, k, v, decay, beta, plan=p).shape == v.shape


def test_documents_and_resets_are_one_graph_inside_autocast():
    given = [x.detach().float() for x in inputs(70, delta=True, channels=False)]
    documents = (torch.arange(70) > 30).long().expand(2, -1)
    compiled = torch.compile(local_linear_attention, fullgraph=True, backend="aot_eager")
    want, _ = local_linear_attention(*given, documents=documents)
    with torch.autocast("cpu", torch.bfloat16):
        got, _ = compiled(*given, documents=documents)
    assert torch.allclose(got, want, atol=1e-5)


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
