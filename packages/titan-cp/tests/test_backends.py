import random
from types import SimpleNamespace

import pytest
import torch
from titan_cp import backends, reference_attention
from titan_cp.backends import BACKENDS, Backend, Grads, Saved, cuda_dense
from titan_cp.backends.backend import split_tiles
from titan_cp.planning.tiles import Tile, plan_tiles
from titan_testing import assert_close
from torch._subclasses.fake_tensor import FakeTensorMode

MASKS = {
    "full": {"causal": False},
    "causal": {"causal": True},
    "causal-window": {"causal": True, "window": 5},
    "window": {"causal": False, "window": 5},
    "packed": {"causal": True, "cu_seqlens": [0, 1, 9, 30, 48]},
    "packed-single-tokens": {"causal": True, "cu_seqlens": [0, 8, 9, 10, 11, 30, 47, 48]},
    "packed-not-causal": {"causal": False, "cu_seqlens": [0, 1, 2, 3, 30, 48]},
    "window-over-many-rows": {"causal": True, "window": 300},
}
# Against float64, values of order one: the sum over 48 to 700 keys rounds in the tensor's own precision.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 6e-2}


def run_backend(backend, q, k, v, grad_out, tiles):
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    scale = q.shape[-1] ** -0.5
    out = torch.zeros(q.shape, dtype=wide, device=q.device)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=wide, device=q.device)
    backend.forward(q, k, v, tiles, scale, out, lse)
    grads = Grads(*(torch.zeros(t.shape, dtype=wide, device=q.device) for t in (q, k, v)))
    backend.backward(Saved(grad_out, q, k, v, out.to(q.dtype), lse), tiles, scale, grads)
    return out, lse, grads


def compare_with_reference(backend, mask, dtype, device, *, seq_len, head_dim=8):
    torch.manual_seed(0)
    q, k, v, grad_out = (torch.randn(2, h, seq_len, head_dim, dtype=dtype, device=device) for h in (4, 2, 2, 4))
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    want, want_lse = reference_attention(*wide, **mask)
    want_grads = torch.autograd.grad(want, wide, grad_out.double())
    bounds = mask.get("cu_seqlens", [0, seq_len])
    tiles = plan_tiles(((0, seq_len),), ((0, seq_len),), bounds, causal=mask["causal"], window=mask.get("window"))
    out, lse, grads = run_backend(backend, q, k, v, grad_out, tiles)
    got = {"out": out, "lse": lse, "dq": grads.q, "dk": grads.k, "dv": grads.v}
    expected = dict(zip(got, (want.detach(), want_lse.detach(), *want_grads), strict=True))
    assert_close(got, expected, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["cpu_flash", "naive"])
def test_backend_matches_the_float64_reference(name, dtype, mask):
    seq_len = 700 if mask == "window-over-many-rows" else 48
    compare_with_reference(BACKENDS[name], MASKS[mask], dtype, "cpu", seq_len=seq_len)


@pytest.mark.gpu
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["cuda_varlen", "cuda_flash", "cudnn", "efficient", "naive"])
def test_cuda_backend_matches_the_float64_reference(name, dtype, mask):
    request = backends.Request(torch.device("cuda"), dtype, 64, True, "window" in MASKS[mask])
    if (problem := BACKENDS[name].why_not(request)) is not None:
        pytest.skip(problem)
    seq_len = 700 if mask == "window-over-many-rows" else 48
    compare_with_reference(BACKENDS[name], MASKS[mask], dtype, "cuda", seq_len=seq_len, head_dim=64)


def random_tiles(seed):
    """Documents, a layout of two or three ranks, and the tiles of two of them: without a window."""
    choose = random.Random(seed)
    tokens = 24
    bounds = [0, *sorted(choose.sample(range(1, tokens), choose.randint(0, tokens - 1))), tokens]
    ranks = choose.randint(1, 3)
    owner = [choose.randrange(ranks) for _ in range(tokens)]
    held = [tuple((t, t + 1) for t in range(tokens) if owner[t] == rank) for rank in range(ranks)]
    q_ranges, k_ranges = choose.choice(held), choose.choice(held)
    if not q_ranges or not k_ranges:
        return random_tiles(seed + 10_000)
    return plan_tiles(q_ranges, k_ranges, bounds, causal=choose.random() < 0.5, window=None)


@pytest.mark.parametrize("seed", range(200))
def test_without_a_window_no_kernel_is_given_a_mask_or_a_single_key(seed):
    """FlashAttention and cuDNN take no mask, and cuDNN takes no single key."""
    tiles = random_tiles(seed)
    for part in split_tiles(tiles, "cpu", one_key_apart=True):
        assert part.mask is None
        keys = part.k.stop - part.k.start
        assert part.one_key == (keys == 1 or (part.one_key and keys == part.q.stop - part.q.start))
    seen = {
        part_of: {(r, c) for part in split_tiles(tiles, "cpu", one_key_apart=part_of) for r, c in pairs(part)}
        for part_of in (False, True)
    }
    assert seen[True] == seen[False]
    assert len(seen[True]) == sum(tile.pairs for tile in tiles)


def pairs(part):
    """Which queries see which keys, in local rows."""
    rows, columns = range(part.q.start, part.q.stop), range(part.k.start, part.k.stop)
    if part.one_key:
        return [(row, columns[index if len(columns) > 1 else 0]) for index, row in enumerate(rows)]
    sees = [[not part.causal or c <= r for c in range(len(columns))] for r in range(len(rows))]
    if part.mask is not None:
        sees = part.mask.tolist()
    return [(row, column) for r, row in enumerate(rows) for c, column in enumerate(columns) if sees[r][c]]


@pytest.mark.parametrize("shared", [False, True], ids=["a-key-a-row", "one-key"])
def test_rows_of_one_key_are_what_the_whole_score_matrix_gives(shared):
    """As a part of a longer attention: the backward is given the output and the log-sum-exp of all keys."""
    tiles = (Tile(2, 7, 3, 8, causal=True, sliding=True), Tile(0, 9, 0, 1)) if not shared else (Tile(0, 9, 4, 5),)
    torch.manual_seed(0)
    q, k, v, grad_out = (torch.randn(2, h, 9, 8, dtype=torch.float64) for h in (4, 2, 2, 4))
    out, lse, grads = run_backend(BACKENDS["cpu_flash"], q, k, v, grad_out, tiles)
    want_out, want_lse, want = run_backend(BACKENDS["naive"], q, k, v, grad_out, tiles)
    assert_close({"out": out, "lse": lse}, {"out": want_out, "lse": want_lse}, atol=1e-12)
    assert_close(dict(zip("qkv", grads, strict=True)), dict(zip("qkv", want, strict=True)), atol=1e-12)


def test_cpu_flash_gives_lse_zero_for_a_fully_masked_row():
    """The trap itself, in torch's operator: merged as it is, such a row would count as weight exp(0)."""
    q = torch.randn(1, 1, 2, 8)
    mask = torch.tensor([[0.0, 0.0], [-torch.inf, -torch.inf]])
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, attn_mask=mask)
    assert lse[0, 0, 1] == 0
    assert torch.equal(out[0, 0, 1], torch.zeros(8))


@pytest.mark.parametrize("name", ["cpu_flash", "naive"])
def test_rows_without_keys_keep_lse_minus_infinity_and_zero_gradients(name):
    q = torch.randn(1, 2, 6, 8)
    tiles = (Tile(2, 4, 0, 3),)
    out, lse, grads = run_backend(BACKENDS[name], q, q, q, torch.randn_like(q), tiles)
    empty = torch.tensor([0, 1, 4, 5])
    assert lse[:, :, empty].isneginf().all()
    assert lse[:, :, 2:4].isfinite().all()
    assert torch.count_nonzero(out[:, :, empty]) == 0
    assert torch.count_nonzero(grads.q[:, :, empty]) == 0
    assert torch.count_nonzero(grads.k[:, :, 3:]) == 0


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", ["cuda_varlen", "cuda_flash", "cudnn", "efficient"])
def test_cuda_backend_calls_its_operators_with_fitting_signatures_and_shapes(name, batch):
    """Without a GPU: fake tensors run every operator's own shape function, not its kernel."""
    tiles = [Tile(0, 10, 0, 12, causal=True), Tile(10, 20, 12, 40), Tile(24, 40, 8, 40), Tile(0, 10, 0, 1)]
    tiles.append(Tile(2, 6, 3, 7, causal=True, sliding=True))
    if name in ("cuda_varlen", "efficient"):
        tiles.append(Tile(20, 24, 3, 12, causal=True, sliding=True))
    dtype = torch.float32 if name == "efficient" else torch.bfloat16
    with FakeTensorMode():
        q, grad_out = (torch.empty(batch, 8, 40, 64, dtype=dtype, device="cuda") for _ in range(2))
        k = torch.empty(batch, 2, 40, 64, dtype=dtype, device="cuda")
        out, lse, grads = run_backend(BACKENDS[name], q, k, k, grad_out, tiles)
    assert out.shape == q.shape
    assert lse.shape == q.shape[:3]
    assert grads.k.shape == k.shape


def test_the_efficient_backward_is_given_what_its_kernel_reads_without_asking(monkeypatch):
    """The output in the layout that its half-precision kernels take for granted, and masks in rows of aligned length."""
    seen = []

    def backward(grad_out, q, k, v, bias, out, lse, *rest, **keywords):
        seen.append((bias, out, lse))
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), None

    operators = SimpleNamespace(_scaled_dot_product_efficient_attention_backward=backward)
    monkeypatch.setattr(cuda_dense.torch, "ops", SimpleNamespace(aten=operators))
    q, k = torch.randn(2, 4, 40, 8), torch.randn(2, 2, 40, 8)
    tiles = (Tile(0, 7, 0, 12, causal=True, sliding=True), Tile(7, 40, 0, 33, causal=True))
    grads = Grads(*(torch.zeros_like(x) for x in (q, k, k)))
    BACKENDS["efficient"].backward(Saved(q, q, k, k, q + 1, torch.zeros(2, 4, 40)), tiles, 1.0, grads)
    for (bias, out, lse), tile in zip(seen, tiles, strict=True):
        assert out.stride() == (4 * 8 * tile.q_len, 8, 4 * 8, 1)
        assert torch.equal(out, q[:, :, tile.q_start : tile.q_stop] + 1)
        assert lse.shape[-1] == 32 * -(-tile.q_len // 32)
        assert (bias is None) == (not tile.sliding)
        if bias is not None:
            assert bias.shape == (2, 4, tile.q_len, tile.k_len)
            assert bias.stride() == (0, 0, 16, 1)
            assert torch.equal(bias[1, 3] == 0, tile.mask())


def test_explain_names_the_used_backend_and_why_the_others_are_not():
    text = str(backends.explain("cpu", torch.float32))
    assert "cpu_flash    used" in text
    assert "cuda_flash   passed over: needs CUDA tensors, got cpu" in text
    assert "naive        would do" in text


@pytest.mark.parametrize(
    ("options", "used"),
    [
        ({"dtype": torch.bfloat16}, "cuda_flash"),
        ({"dtype": torch.bfloat16, "packed": True}, "cuda_varlen"),
        ({"dtype": torch.bfloat16, "window": True}, "cuda_varlen"),
        ({"dtype": torch.float32}, "efficient"),
        ({"dtype": torch.float32, "packed": True}, "efficient"),
        ({"dtype": torch.float32, "window": True}, "efficient"),
        ({"dtype": torch.float64}, "naive"),
        ({"dtype": torch.bfloat16, "head_dim": 100}, "naive"),
    ],
)
def test_auto_takes_the_first_cuda_backend_that_serves(options, used):
    assert backends.explain("cuda", **options).used.name == used


@pytest.mark.parametrize(
    ("capability", "version", "enabled", "head_dim", "used"),
    [
        ((9, 0), 91800, True, 128, "cudnn"),
        ((10, 0), 92000, True, 64, "cudnn"),
        ((9, 0), 91800, True, 192, "cuda_flash"),
        ((9, 0), 91000, True, 128, "cuda_flash"),
        ((9, 0), 91800, False, 128, "cuda_flash"),
        ((8, 0), 92000, True, 128, "cuda_flash"),
        ((12, 0), 92000, True, 128, "cuda_flash"),
    ],
)
def test_on_hopper_and_blackwell_cudnn_comes_before_flash_attention_2(
    monkeypatch, capability, version, enabled, head_dim, used
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: enabled)
    choice = backends.explain("cuda", torch.bfloat16, head_dim=head_dim)
    assert choice.used.name == used
    if used == "cudnn":
        assert "made for this GPU" in choice.reasons["cuda_flash"]


def test_a_named_backend_that_cannot_run_is_refused_with_the_one_that_can():
    request = backends.Request(torch.device("cpu"), torch.float32, 64, False, False)
    with pytest.raises(ValueError, match=r"'cuda_flash' cannot run here: needs CUDA tensors.*takes 'cpu_flash'"):
        backends.select("cuda_flash", request)
    with pytest.raises(ValueError, match="'flash3' does not exist"):
        backends.select("flash3", request)


def test_a_backend_of_ones_own_is_used_as_given():
    class Mine(Backend):
        name = "mine"
        summary = "mine"

        def why_not(self, request):
            return None

        def forward(self, q, k, v, tiles, scale, out, lse):
            out.fill_(7)

        def backward(self, saved, tiles, scale, grads):
            pass

    mine = Mine()
    assert backends.select(mine, backends.Request(torch.device("cpu"), torch.float32, 64, False, False)) is mine
