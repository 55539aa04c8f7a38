"""Activation checkpointing: the same bits, less memory, and what is recomputed is what was asked for."""

import collections
import copy
import dataclasses

import pytest
import torch
import torch.distributed as dist
from titan_testing import run_ranks
from titan_testing.held_bytes import held_bytes
from titan_train.config import ActivationsConfig, load_config
from titan_train.models import Llama, LlamaArgs
from titan_train.parallel.activations.recompute import (
    KeepCostly,
    apply_activation_checkpointing,
    check_activations,
    check_patterns,
    recomputed_modules,
)
from titan_train.parallel.structure import blocks_of
from titan_train.parallel.tensor.apply import apply_tensor_parallel
from titan_train.parallel.tensor.styles import table_for
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

ARGS = LlamaArgs(dim=64, num_layers=4, num_heads=4, num_kv_heads=2, ffn_dim=256, vocab_size=128)


class Calls(TorchDispatchMode):
    """Counts operators."""

    def __init__(self):
        super().__init__()
        self.calls = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def run(config):
    torch.manual_seed(0)
    model = Llama(ARGS)
    apply_activation_checkpointing(model, blocks_of(model), config)
    tokens = torch.randint(128, (4, 128))
    loss, held = held_bytes(lambda: model(tokens).square().sum())
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    with Calls() as calls:
        model(tokens).square().sum().backward()
    return loss.detach(), gradients, held, calls.calls


MODES = {
    "none": ActivationsConfig(),
    "selective": ActivationsConfig(checkpoint="selective"),
    "pattern": ActivationsConfig(checkpoint="pattern", patterns=("layers.*.feed_forward",)),
    "every": ActivationsConfig(checkpoint="every", every=2),
    "full": ActivationsConfig(checkpoint="full"),
}


@pytest.fixture(scope="module")
def results():
    return {name: run(config) for name, config in MODES.items()}


@pytest.mark.parametrize("mode", [name for name in MODES if name != "none"])
def test_recomputation_gives_the_same_bits(results, mode):
    loss, gradients, *_ = results[mode]
    want_loss, want, *_ = results["none"]
    assert torch.equal(loss, want_loss)
    assert gradients.keys() == want.keys()
    for name in want:
        assert torch.equal(gradients[name], want[name]), name


@pytest.mark.parametrize(
    "settings", [{"checkpoint": "full"}, {"checkpoint": "selective"}, {"mlp_tiles": 2}, {"offload": True}], ids=str
)
def test_a_copy_computes_with_its_own_weights(settings):
    model = Llama(ARGS)
    apply_activation_checkpointing(model, blocks_of(model), ActivationsConfig(**settings))
    copied, tokens = copy.deepcopy(model), torch.randint(128, (1, 8))
    with torch.no_grad():
        for parameter in copied.layers.parameters():
            if parameter.ndim > 1:
                parameter.zero_()  # its blocks add nothing
    assert torch.equal(copied(tokens), copied.lm_head(copied.norm(copied.tok_embeddings(tokens))))


@pytest.mark.parametrize("pattern", ["layers*", "layers.*"])
def test_a_pattern_that_also_names_the_list_of_layers_recomputes_the_layers(pattern):
    model = Llama(ARGS)
    config = ActivationsConfig(checkpoint="pattern", patterns=(pattern,))
    assert recomputed_modules(model, blocks_of(model), config) == list(model.layers.values())


def test_what_forward_keeps_falls_in_the_order_of_the_modes(results):
    held = {name: result[2] for name, result in results.items()}
    assert held["none"] > held["every"] > held["selective"] > held["full"]
    assert held["none"] > held["pattern"] > held["full"]
    assert held["full"] < held["none"] / 9  # a block holds its input alone, not what 7 products and 2 norms read


def test_only_what_was_asked_for_is_recomputed(results):
    products = {name: result[3]["mm"] for name, result in results.items()}
    attention = {
        name: sum(n for op, n in result[3].items() if op.endswith("for_cpu")) for name, result in results.items()
    }
    # A block has 7 products; recomputation stops before the last of a region, whose result no backward reads.
    assert products["full"] - products["none"] == 4 * 6
    assert products["every"] - products["none"] == 2 * 6
    assert products["pattern"] - products["none"] == 4 * 2
    assert products["selective"] - products["none"] == 4 * 3
    assert attention["selective"] == attention["none"] == 4
    assert attention["full"] == 8


def test_a_pattern_that_matches_nothing_names_what_there_is():
    with pytest.raises(ValueError, match=r"'layers.\*.mlp' matches no module of Llama"):
        check_patterns(Llama(ARGS), ActivationsConfig(checkpoint="pattern", patterns=("layers.*.mlp",)))


class First(nn.ModuleDict):
    pass


class Second(nn.ModuleDict):
    pass


class Alternating(nn.Module):
    """Layers of two classes in one list, as hybrid decoders have them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(kind([("part", nn.Linear(8, 8))]) for kind in (First, Second) * 2)


def test_layers_of_several_classes_are_blocks_and_a_model_without_any_is_refused():
    model = Alternating()
    assert blocks_of(model) == list(model.layers)
    assert blocks_of(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))) == []
    assert blocks_of(nn.ModuleDict({"image": nn.Linear(8, 8), "text": model})) == list(model.layers)
    for words, said in (
        (["--activations.checkpoint", "full"], "checkpoint='full'"),
        (["--activations.offload", "true"], "offload=true"),
        (["--compile.enabled", "true"], "compile.enabled=true"),
    ):
        config = load_config("debug", words)
        check_activations(config, model)
        with pytest.raises(ValueError, match=rf"{said}: Linear has no repeated blocks"):
            check_activations(config, nn.Linear(8, 8))


def test_parameter_names_stay_as_they_are():
    model = Llama(ARGS)
    names = [name for name, _ in model.named_parameters()]
    apply_activation_checkpointing(model, blocks_of(model), ActivationsConfig(checkpoint="full"))
    assert [name for name, _ in model.named_parameters()] == names


class InPlaceRouter(nn.Module):
    """As routers of transformers are: the chosen probabilities are divided by their sum in place."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values, chosen = self.gate(x).softmax(-1).topk(2)
        values /= values.sum(-1, keepdim=True)
        return x * values.sum(-1, keepdim=True).square() * (1 + chosen.sum(-1, keepdim=True)) * values[..., :1]


def test_selective_keeps_choices_that_the_model_changes_in_place() -> None:
    torch.manual_seed(0)
    plain, x = InPlaceRouter(), torch.randn(6, 8)
    kept = copy.deepcopy(plain)
    apply_activation_checkpointing(kept, [kept], ActivationsConfig(checkpoint="selective"))
    for model in (plain, kept):
        model(x).sum().backward()
    assert torch.equal(plain.gate.weight.grad, kept.gate.weight.grad)
    assert plain.gate.weight.grad.abs().max() > 0


def kept_under_tensor_parallelism(checkpoint: str) -> tuple[int, list[torch.Tensor]]:
    """Bytes that the regions of two blocks keep on this rank, and its gradients."""
    torch.manual_seed(0)
    model = Llama(dataclasses.replace(ARGS, num_layers=2))
    apply_tensor_parallel(model, dist.group.WORLD, table=table_for(model), sequence_parallel=True)
    regions: list[KeepCostly] = []
    enter = KeepCostly.__enter__
    KeepCostly.__enter__ = lambda self: (regions.append(self), enter(self))[1]
    try:
        apply_activation_checkpointing(model, blocks_of(model), ActivationsConfig(checkpoint=checkpoint))
        loss = model(torch.arange(512).reshape(4, 128) % 128).square().sum()
    finally:
        KeepCostly.__enter__ = enter
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for r in regions for t in r.kept_tensors()}
    loss.backward()
    assert not any(region.kept for region in regions)  # all of it was read
    return sum(storage.nbytes() for storage in storages.values()), [p.grad for p in model.parameters()]


def test_selective_keeps_no_partial_sum_that_backward_does_not_read() -> None:
    """The last product of a block is row-parallel: on every rank as large as all tokens are wide."""
    selective, plain = (run_ranks(kept_under_tensor_parallelism, 2, kind) for kind in ("selective", "none"))
    half = (
        64 // 2 + 32 // 2 + 256 // 2 + 64 // 2 + 4 // 2
    )  # queries, values, the gate, attention's result, its log-sum-exp
    for (kept, gradients), (_, want) in zip(selective, plain, strict=True):
        assert kept == 2 * 4 * 512 * half
        assert all(torch.equal(a, b) for a, b in zip(gradients, want, strict=True))


def test_a_kept_result_that_the_model_changes_in_place_is_an_error() -> None:
    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            z = self.second(y)
            with torch.no_grad():
                y.mul_(2)
            return z.square()

    model = Doubled()
    apply_activation_checkpointing(model, [model], ActivationsConfig(checkpoint="selective"))
    with pytest.raises(RuntimeError, match="changed in place afterwards"):
        model(torch.randn(4, 8, requires_grad=True)).sum().backward()
