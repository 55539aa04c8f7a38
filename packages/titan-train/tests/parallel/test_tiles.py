"""Feed-forwards in tiles of the sequence: the same loss and gradients, a fraction of the memory, refusals in words."""

import pytest
import torch
from titan_train.config import ActivationsConfig, load_config
from titan_train.config.model import ModelConfig
from titan_train.models import build_model, init_for
from titan_train.models.common.blocks import SwiGLU
from titan_train.parallel.activations.recompute import apply_activation_checkpointing, check_activations
from titan_train.parallel.activations.tiles import tiled_modules
from titan_train.parallel.structure import blocks_of
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Alive(TorchDispatchMode):
    """The most bytes of storages that operators made and that live at one time."""

    def __init__(self):
        super().__init__()
        self._alive, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return out


def peak(make, tiles, tokens, dim, *, dtype):
    """Of forward and backward of what ``make`` builds, its input and their gradients; its weights not counted."""
    module = make()
    holder = nn.Module()
    holder.add_module("feed_forward", module)
    holder.token_wise = ("feed_forward",)
    apply_activation_checkpointing(holder, [], ActivationsConfig(mlp_tiles=tiles))
    with Alive() as alive:
        x = torch.zeros(1, tokens, dim, dtype=dtype, requires_grad=True)
        module(x).backward(torch.zeros(1, tokens, dim, dtype=dtype))
    return alive.peak - sum(p.numel() * p.element_size() for p in module.parameters())  # their gradients, made once


def test_an_8b_feed_forward_at_128k_tokens_peaks_at_a_quarter():
    def make():
        module = SwiGLU(1, 1)
        for linear, shape in ((module.w1, (14336, 4096)), (module.w2, (4096, 14336)), (module.w3, (14336, 4096))):
            linear.weight = nn.Parameter(torch.empty(shape, dtype=torch.bfloat16))
        return module

    with FakeTensorMode():
        whole, tiled = (peak(make, tiles, 131072, 4096, dtype=torch.bfloat16) for tiles in (1, 32))
    assert tiled <= 0.25 * whole, (whole, tiled)


def test_a_real_feed_forward_peaks_at_a_quarter():
    def make():
        torch.manual_seed(0)
        return SwiGLU(64, 224)

    whole, tiled = (peak(make, tiles, 8192, 64, dtype=torch.float32) for tiles in (1, 32))
    assert tiled <= 0.25 * whole, (whole, tiled)


@pytest.mark.parametrize("name", ["llama3_debug", "gpt_debug", "deepseek_debug", "qwen3_next_debug"])
@pytest.mark.parametrize("checkpoint", ["none", "full"])
def test_loss_and_gradients_are_those_of_whole_feed_forwards(name, checkpoint):
    tokens = torch.randint(300, (2, 50), generator=torch.Generator().manual_seed(0))
    found = []
    for tiles in (1, 7):
        model = build_model(ModelConfig(name=name), vocab_size=300, device="cpu")
        init = init_for(model)
        for i, (fqn, parameter) in enumerate(model.named_parameters()):
            init(fqn, parameter.data, torch.Generator().manual_seed(i))
        model.double()  # a gradient that is a sum of what cancels has no float32 digit that all processors agree on
        config = ActivationsConfig(mlp_tiles=tiles, checkpoint=checkpoint)
        apply_activation_checkpointing(model, blocks_of(model), config)
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        found.append((loss.detach(), {fqn: p.grad for fqn, p in model.named_parameters()}))
    (whole, grads), (tiled, again) = found
    # other sizes of products, and sums over tiles in another order: a few units of float64's last place
    assert float((whole - tiled).abs()) <= 1e-14 * float(whole)
    for fqn, grad in grads.items():
        assert float((grad - again[fqn]).abs().max()) <= 1e-12 * float(grad.abs().max()) + 1e-17, fqn


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("llama3_debug", {"checkpoint": "selective"}, "checkpoint='selective'"),
        ("qwen3_moe_debug", {}, "routed experts are not tiled"),
    ],
)
def test_tiles_that_would_do_nothing_are_refused(name, settings, words):
    model = build_model(ModelConfig(name=name), vocab_size=None)
    words_of = [f"--activations.{key}={value}" for key, value in ({"mlp_tiles": 4} | settings).items()]
    with pytest.raises(ValueError, match=words):
        check_activations(load_config("debug", words_of), model)


def test_shared_experts_are_tiled_and_one_tile_is_none():
    model = build_model(ModelConfig(name="qwen3_next_moe_debug"), vocab_size=None)
    assert len(tiled_modules(model, ActivationsConfig(mlp_tiles=2))) == 4
    assert tiled_modules(model, ActivationsConfig()) == []


@pytest.mark.parametrize(("kind", "count"), [("llama", 4), ("qwen3_moe", 1), ("nemotron_h", 1)])
def test_dense_feed_forwards_of_transformers_are_tiled_and_nothing_that_mixes_tokens(tmp_path, kind, count):
    pytest.importorskip("transformers", reason="transformers is not installed")
    from hf_folders import make

    folder = make(tmp_path, kind, vocab_size=96)
    tokens = torch.arange(24).reshape(1, 24)
    losses = []
    for tiles in (1, 5):
        model = build_model(ModelConfig(name=f"hf:{folder}", seq_len=24), vocab_size=96, device="cpu")
        torch.manual_seed(0)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.05)
        config = ActivationsConfig(mlp_tiles=tiles)
        assert len(tiled_modules(model, config)) == (count if tiles > 1 else 0)
        apply_activation_checkpointing(model, [], config)
        losses.append(model(tokens).logsumexp(-1).mean())
        losses[-1].backward()
    assert float((losses[0] - losses[1]).detach().abs()) < 1e-6


class Gated(nn.Module):
    """Takes more than hidden states: something of each token, and something of all."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, hidden, gate, mask, *, bias=None, scale=1.0):
        return self.down(torch.relu(self.up(hidden)) * gate * mask[..., None] + bias) * scale


@pytest.mark.parametrize("by_name", [False, True])
def test_a_feed_forward_with_more_arguments_is_given_those_of_its_tokens(by_name):
    torch.manual_seed(0)
    module, x, gate, mask, bias = (
        Gated(),
        torch.randn(2, 7, 8),
        torch.randn(2, 7, 24),
        torch.randn(2, 7),
        torch.randn(24),
    )
    holder = nn.Module()
    holder.add_module("mlp", module)
    holder.token_wise = ("mlp",)
    call = {"hidden": x, "gate": gate, "mask": mask}
    want = module(**call, bias=bias, scale=2.0)
    apply_activation_checkpointing(holder, [], ActivationsConfig(mlp_tiles=3))
    found = module(*([] if by_name else call.values()), **(call if by_name else {}), bias=bias, scale=2.0)
    torch.testing.assert_close(found, want)
    found.square().sum().backward()
