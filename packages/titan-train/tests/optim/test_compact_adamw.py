"""AdamW with small states or weights: the same bits for a piece as for the whole, rounding right on average, and AdamW's path."""

import contextlib

import pytest
import torch
from titan_ckpt import LocalShard
from titan_ckpt.state.sharding import Chunk
from titan_train.config import parse_config
from titan_train.config.optimizer import OptimizerConfig
from titan_train.launch.validate import validate
from titan_train.optim import build_optimizer
from titan_train.optim.build import check_restored
from titan_train.optim.compact_adamw import CompactAdamW
from titan_train.optim.compact_states import block_length, decode, encode, random_bits, stochastic_bf16
from titan_train.parallel.structure import hold_weights
from torch import nn
from torch.func import functional_call

SHAPES = {"matrix": (24, 256), "stack": (4, 6, 128), "vector": (40,), "short": (24, 20)}
PIECES = {
    "matrix": ((0, 64, 24, 64), (0, 128, 24, 128), (5, 0, 7, 256)),
    "stack": ((1, 0, 0, 2, 6, 128), (0, 2, 0, 4, 3, 128)),
    "vector": ((0, 13), (13, 27)),
    "short": ((3, 5, 20, 7),),
}


def optimizer(tensors, states, shards):
    groups = [{"params": [(name, tensor) for name, tensor in tensors.items()], "lr": 1e-2, "weight_decay": 0.1}]
    return CompactAdamW(groups, states=states, names={}, shards=shards, cautious=True)


@pytest.mark.parametrize(
    ("states", "dtype"),
    [("bf16", torch.float32), ("int8", torch.float32), ("fp32", torch.bfloat16), ("bf16", torch.bfloat16)],
)
def test_a_piece_of_a_parameter_gets_the_bits_of_the_whole(states, dtype, monkeypatch):
    monkeypatch.setattr("titan_train.optim.compact_adamw._STRETCH", 600)  # several stretches of rows
    generator = torch.Generator().manual_seed(0)
    whole = {name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in SHAPES.items()}
    both = [(optimizer(whole, states, {}), whole, dict.fromkeys(SHAPES, ...))]
    for number in range(3):
        boxes = {name: pieces[number % len(pieces)] for name, pieces in PIECES.items()}
        cuts = {name: (box[: len(box) // 2], box[len(box) // 2 :]) for name, box in boxes.items()}
        where = {name: tuple(slice(o, o + n) for o, n in zip(*cut, strict=True)) for name, cut in cuts.items()}
        parts = {name: nn.Parameter(whole[name].detach()[where[name]].clone()) for name in SHAPES}
        shards = {name: LocalShard(SHAPES[name], offset) for name, (offset, _) in cuts.items()}
        both.append((optimizer(parts, states, shards), parts, where))
    for _ in range(4):
        gradients = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}
        for found, tensors, where in both:
            for name, tensor in tensors.items():
                tensor.grad = gradients[name][where[name]].clone()
            found.step()
    (reference, _, _), *others = both
    for found, tensors, where in others:
        for name, tensor in tensors.items():
            assert torch.equal(tensor.detach(), whole[name].detach()[where[name]]), name
            for key, value in found.state[tensor].items():
                wanted = reference.state[whole[name]][key]
                block = SHAPES[name][-1] // wanted.shape[-1] if wanted.ndim else 1
                at = where[name]
                if block > 1:
                    at = (*at[:-1], slice(at[-1].start // block, at[-1].stop // block))
                assert torch.equal(value, wanted[at] if wanted.ndim else wanted), (name, key)
    kinds = {name: set(reference.state[tensor]) - {"step"} for name, tensor in whole.items()}
    small = {f"{mean}_{states}" if states == "bf16" else mean for mean in ("exp_avg", "exp_avg_sq")}
    assert kinds["vector"] == kinds["short"] == small
    assert len(kinds["matrix"]) == (4 if states == "int8" else 2)


@pytest.mark.parametrize(
    ("states", "weights"), [("bf16", "fp32"), ("int8", "fp32"), ("fp32", "bf16"), ("bf16", "bf16")]
)
def test_training_goes_as_with_adamw(states, weights):
    """A regression with features of very different sizes, where a second moment that rounds to zero would explode."""
    losses = {}
    for name, held in (("fp32", "fp32"), (states, weights)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 8))
        hold_weights(model, held)
        found = build_optimizer(model, OptimizerConfig(lr=3e-3, states=name, weights=held, weight_decay=0.01))
        x = torch.randn(64, 128) * torch.logspace(-4, 0, 128)
        target = torch.randn(64, 8)
        for _ in range(150):
            loss = (
                (functional_call(model, {n: p.float() for n, p in model.named_parameters()}, x) - target)
                .square()
                .mean()
            )
            loss.backward()
            found.step()
            found.zero_grad()
        losses[name, held] = float(loss.detach())
    assert losses["fp32", "fp32"] < 0.3
    # from 1.1 down to 0.001: rounded weights jitter about the minimum, by far less than they have come down
    floor = 1e-3 if weights == "bf16" else 0.0
    assert losses[states, weights] == pytest.approx(losses["fp32", "fp32"], rel=0.1, abs=floor)


def test_small_weights_move_by_their_updates_on_average_where_rounding_to_nearest_leaves_them():
    """Steps of 1e-4 from 1.0, where the next bfloat16 is 2^-7 away: a weight moves in one of 78, or never."""
    steps, rate, size = 20, 1e-4, 40_000
    weight = nn.Parameter(torch.ones(size, dtype=torch.bfloat16))
    group = {"params": [("w", weight)], "lr": rate, "weight_decay": 0.0}
    found = CompactAdamW([group], states="fp32", names={}, shards={})
    for _ in range(steps):
        weight.grad = torch.full((size,), -1.0, dtype=torch.bfloat16)  # AdamW's update is then the rate
        found.step()
    moved = weight.detach().double() - 1
    # each step adds 2^-7 with probability rate * 2^7: a binomial, and its mean within five standard deviations
    chance = rate * 2**7
    deviation = 2**-7 * (steps * chance * (1 - chance) / size) ** 0.5
    assert abs(float(moved.mean()) - steps * rate) < 5 * deviation
    assert torch.equal(torch.ones(size, dtype=torch.bfloat16) + rate, torch.ones(size, dtype=torch.bfloat16))


def test_stochastic_rounding_is_right_on_average_and_keeps_what_is_not_finite():
    bits = random_bits("a", 3, Chunk((0,), (40_000,)), (40_000,), torch.device("cpu"))
    value = torch.full((40_000,), 1.0 + 2**-9)  # a quarter of the way to the next bfloat16
    rounded = stochastic_bf16(value, bits).float()
    assert set(rounded.tolist()) == {1.0, 1.0 + 2**-7}
    # the share that is rounded up, 0.25, within five standard deviations
    assert abs(float((rounded > 1).float().mean()) - 0.25) < 5 * (0.25 * 0.75 / 40_000) ** 0.5
    other = random_bits("a", 4, Chunk((0,), (40_000,)), (40_000,), torch.device("cpu"))
    for left, right in ((bits, other), (bits[1:], bits[:-1]), (bits, bits >> 16)):
        same = ((left & 0xFFFF) >= 0x8000) == ((right & 0xFFFF) >= 0x8000)
        assert abs(float(same.float().mean()) - 0.5) < 5 * 0.5 / 40_000**0.5
    odd = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0, -1.5])
    kept = stochastic_bf16(odd, torch.full((5,), -1, dtype=torch.int32)).float()
    assert torch.equal(kept[[0, 1, 3, 4]], odd[[0, 1, 3, 4]])
    assert kept[2].isnan()


def test_codes_are_near_their_values_and_a_second_moment_stays_above_zero():
    values = torch.randn(8, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 2, 8)[:, None]
    values[3] = 0.0
    for signed, given in ((True, values), (False, values.square())):
        codes, magnitudes = torch.empty(8, 256, dtype=torch.uint8), torch.empty(8, 16)
        encode(given, codes, magnitudes, signed=signed)
        found = decode(codes, magnitudes, signed=signed)
        # the widest gap between neighbouring values: 0.9 / 64 or 0.9 / 128 of the block's largest, and half of it
        allowed = magnitudes.repeat_interleave(16, 1) * (0.9 / (128 if signed else 256))
        assert bool(((found - given).abs() <= allowed * 1.0001).all())
        assert torch.equal(found == 0, given == 0) or signed
    assert [block_length(shape) for shape in ((4096,), (8, 4096), (8, 11008), (2, 8, 1536), (8, 128), (8, 64), (8, 100))] == [
        0, 128, 16, 32, 8, 0, 0
    ]  # fmt: skip


def test_what_small_states_cannot_do_is_refused_by_name():
    matrix = {"w": nn.Parameter(torch.zeros(4, 72))}
    with pytest.raises(
        ValueError, match=r"optimizer.states='int8': w with rows of 128 elements is cut into columns 20 to 92"
    ):
        optimizer(matrix, "int8", {"w": LocalShard((4, 128), (0, 20))})
    widths = {"dim": 256, "num_heads": 16, "num_kv_heads": 16, "ffn_dim": 256}
    for tp in (8, 16):  # rows of 256 elements have blocks of 16
        config = parse_config({
            "model": {"name": "llama3_debug", "args": widths}, "parallel": {"tp": tp}, "optimizer": {"states": "int8"},
        })  # fmt: skip
        said = pytest.raises(
            ValueError, match=r"layers\.0\.attention\.wo\.weight with rows of 256 elements .* 16 to 32"
        )
        with said if tp == 16 else contextlib.nullcontext():
            validate(config, tp)
    with pytest.raises(ValueError, match=r"optimizer\.states='bf16' with optimizer\.name='muon'"):
        OptimizerConfig(name="muon", states="bf16")
    for name in ("muon", "schedule_free", "sgd"):
        with pytest.raises(ValueError, match=rf"optimizer\.weights='bf16' with optimizer\.name='{name}'"):
            OptimizerConfig(name=name, weights="bf16")
    with pytest.raises(ValueError, match=r"optimizer\.weights='bf16' with train\.dtype='fp32'"):
        parse_config({"optimizer": {"weights": "bf16"}})
    with pytest.raises(ValueError, match=r"qk_clip\.threshold=100\.0 with optimizer\.weights='bf16'"):
        parse_config({"optimizer": {"weights": "bf16"}, "train": {"dtype": "bf16"}, "qk_clip": {"threshold": 100.0}})
    model = nn.Linear(128, 4)
    found = build_optimizer(model, OptimizerConfig(states="int8"))
    check_restored(found, "adamw")
    found.state[model.weight] = {"exp_avg": torch.zeros(4, 128)}
    with pytest.raises(
        ValueError,
        match=r"updates weight by \"adamw with states='int8'\", and the checkpoint holds the state of 'adamw'",
    ):
        check_restored(found, "adamw")
