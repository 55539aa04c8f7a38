"""muP by initial weights and learning rates alone: what it is equal to, and what it does."""

import pytest
import torch
from titan_train.cli import main
from titan_train.config import parse_config
from titan_train.config.model import ModelConfig
from titan_train.config.optimizer import MuonConfig
from titan_train.models import build_model, init_for
from titan_train.models.parametrization import Parametrization
from titan_train.models.registry import find_model
from titan_train.optim import build_optimizer, plan_groups
from titan_train.optim.groups import muon_update
from titan_train.optim.newton_schulz import update_scale
from titan_train.train import coordinates
from titan_train.train.coordinates import check_coordinates, coordinates_svg


def built(name: str, mup: bool, **args: object) -> torch.nn.Module:
    """A model of width 64 and 2 layers; with ``mup``, twice as wide and twice as deep as its base."""
    scaled = {"parametrization": "mup", "base_dim": 32, "base_layers": 1} if mup else {}
    model = build_model(ModelConfig(name=name, args=args, seq_len=32, **scaled), vocab_size=None, device="cpu")
    init = init_for(model)
    with torch.no_grad():
        for i, (fqn, parameter) in enumerate(model.named_parameters()):
            init(fqn, parameter, torch.Generator().manual_seed(i))
    return model


def losses(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> list[float]:
    tokens = torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(0))
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


@pytest.mark.parametrize("tied", [False, True])
def test_scaled_weights_and_rates_equal_multipliers_in_the_forward(tied):
    """The textbook's form: the head's output / m, each layer's output / l, std and rates of their own."""
    folded = built("llama3_debug", True, tied_embeddings=tied).double()
    config = parse_config({"optimizer": {"lr": 1e-2, "eps": 1e-30}}).optimizer
    plain = built("llama3_debug", False, tied_embeddings=tied).double()
    m = layers = 2.0
    groups = []
    with torch.no_grad():
        for (name, own), (_, parameter) in zip(plain.named_parameters(), folded.named_parameters(), strict=True):
            writer = name.endswith(("wo.weight", "w2.weight"))
            own.copy_(parameter * (layers if writer else 1.0))
            hidden = own.ndim == 2 and name.startswith("layers")
            if name in ("lm_head.weight", "norm.weight") and (name == "norm.weight") == tied:
                own.mul_(m)
            decay = 0.1 if own.ndim == 2 else 0.0
            groups.append(
                {"params": [own], "lr": 1e-2 / (m if hidden else 1), "weight_decay": decay * (m if hidden else 1)}
            )
    for layer in plain.layers.values():
        for inner in (layer.attention, layer.feed_forward):
            inner.register_forward_hook(lambda _m, _i, out: out / layers)
    plain.norm.register_forward_hook(lambda _m, _i, out: out / m)
    explicit = torch.optim.AdamW(groups, betas=(config.beta1, config.beta2), eps=1e-30)
    # rounding in float64, which Adam divides by gradients of 1e-6
    assert losses(folded, build_optimizer(folded, config)) == pytest.approx(losses(plain, explicit), rel=1e-7)


def test_the_base_model_itself_is_not_changed():
    base = build_model(
        ModelConfig(name="llama3_debug", parametrization="mup", base_dim=64, base_layers=2), vocab_size=None
    )
    assert {(group.lr_scale, group.weight_decay) for group in plan_groups(base, parse_config({}).optimizer)} == {
        (1.0, 0.1), (1.0, 0.0),
    }  # fmt: skip
    init, plain = init_for(base), init_for(build_model(ModelConfig(name="llama3_debug"), vocab_size=None))
    for name, parameter in base.named_parameters():
        both = [torch.empty(parameter.shape) for _ in range(2)]
        for fill, tensor in zip((init, plain), both, strict=True):
            fill(name, tensor, torch.Generator().manual_seed(3))
        assert torch.equal(*both), name


def test_muon_rates_follow_the_size_of_its_update():
    scaled = Parametrization(width=4.0, depth=2.0, base_layers=2, tied=False)
    name = ["layers.0.attention.wq.weight"]
    assert [scaled.rate_scale(name, update) for update in ("adam", "rms", "spectral")] == [0.25, 0.5, 1.0]
    assert scaled.rate_scale(["layers.0.attention.wo.weight"], "spectral") == 0.5
    assert scaled.rate_scale(["lm_head.weight", "tok_embeddings.weight"]) == 1.0
    assert scaled.rate_scale(["layers.1.moe.router.gate.weight"]) == 0.25


@pytest.mark.parametrize(("scale", "whole", "part"), [("moonlight", 0.5, 0.25), ("original", 1.0, 0.5)])
def test_muon_s_rates_of_a_head_and_of_parts_whose_rows_stay_as_many(scale, whole, part):
    model = build_model(ModelConfig(name="llama3_debug", parametrization="mup", base_dim=16), vocab_size=None)
    muon = {"scale": scale, "groups": {"lm_head": "muon"}, "heads": {r"attention\.wq": 4}}
    groups = plan_groups(model, parse_config({"optimizer": {"name": "muon", "muon": muon}}).optimizer)
    found = {name: group.lr_scale for group in groups for name in group.fqns}
    assert found["lm_head.weight"] == found["layers.0.attention.wo.weight"] == whole
    assert found["layers.0.attention.wq.weight"] == part


@pytest.mark.parametrize("scale", ["moonlight", "original"])
@pytest.mark.parametrize(
    ("name", "heads", "shape"),
    [
        ("layers.0.attention.wq.weight", 1, lambda width: (width, width)),
        ("layers.0.feed_forward.w2.weight", 1, lambda width: (width, 4 * width)),
        ("layers.0.attention.wq.weight", 8, lambda width: (8 * 16, width)),
        ("lm_head.weight", 1, lambda width: (2048, width)),
        ("lm_head.weight", 1, lambda width: (16, width)),
        ("layers.0.moe.router.gate.weight", 1, lambda width: (16, width)),
    ],
)
def test_outputs_move_as_far_at_any_width_by_muon_s_update_times_its_rate(scale, name, heads, shape):
    """The orthogonal matrix of a gradient of few tokens, and what it does to them."""
    config, moved = MuonConfig(scale=scale, heads={name: heads}), []
    for m in (1, 4):
        rows, columns = shape(128 * m)
        rows //= heads
        draw = torch.Generator().manual_seed(m)
        inputs, gradients = (torch.randn(8, n, dtype=torch.float64, generator=draw) for n in (columns, rows))
        u, _, v = torch.linalg.svd(gradients.T @ inputs, full_matrices=False)
        outputs = update_scale(scale, rows, columns) * inputs @ (u[:, :8] @ v[:8]).T
        by = muon_update(config, [name], (rows * heads, columns))
        rate = Parametrization(width=m, depth=1.0, base_layers=1, tied=False).rate_scale([name], by)
        moved.append(rate * float(outputs.square().mean().sqrt()))
    assert moved[1] == pytest.approx(
        moved[0], rel=0.1
    )  # of random inputs; a power of m that is wrong by a half is a factor of 2


@pytest.mark.parametrize("name", ["llama3_debug", pytest.param("deepseek_debug", marks=pytest.mark.slow)])
def test_activations_move_as_far_at_any_width_under_mup_and_further_without(name):
    optimizer = {"lr": 3e-3}
    mup = {"name": name, "parametrization": "mup", "base_dim": 64}
    flat = check_coordinates(parse_config({"model": mup, "optimizer": optimizer}), (64, 128, 256))
    assert flat.flat, flat.slopes
    plain = check_coordinates(parse_config({"model": {"name": name}, "optimizer": optimizer}), (64, 128, 256))
    assert min(plain.slopes.values()) > 0.5, plain.slopes
    assert coordinates_svg(plain).count("<polyline") == len(plain.slopes)


def test_a_narrow_model_has_its_own_heads_and_no_patterns_for_layers_that_it_lacks():
    muon = {"heads": {"wq": 32, "w[kv]": 8, r"layers\.30\.mlp": 2}}
    optimizer = {"name": "muon", "muon": muon, "lr_scales": {r"layers\.30\.": 2.0, r"layers\.3\.": 0.5}}
    config = parse_config({"model": {"name": "llama3_8b"}, "optimizer": optimizer})
    family, whole = find_model("llama3_8b")
    for width, heads in ((64, {"wq": 4, "w[kv]": 1}), (128, {"wq": 8, "w[kv]": 2})):
        args = coordinates._narrow(whole, width)
        model = family.build(args)
        found = coordinates._settings(config, args, [name for name, _ in model.named_parameters()])
        assert found.muon.heads == heads
        assert found.lr_scales == {r"layers\.3\.": 0.5}
        plan_groups(model, found)


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "lr"), [("moonlight", 3e-3), ("original", 0.02)])
def test_activations_move_as_far_at_any_width_under_muon(scale, lr):
    optimizer = {"name": "muon", "lr": 3e-3, "muon": {"scale": scale, "lr_scale": lr / 3e-3, "dtype": "fp32"}}
    mup = {"name": "llama3_debug", "parametrization": "mup", "base_dim": 64}
    assert check_coordinates(parse_config({"model": mup, "optimizer": optimizer})).flat


def test_check_prints_the_rates_of_groups(capsys):
    words = ["quickstart", "--model.parametrization", "mup", "--model.base-dim", "96", "--model.base-layers", "3"]
    args = "{ dim = 192, num_layers = 4, num_heads = 4, num_kv_heads = 2, ffn_dim = 512 }"
    assert main(["check", *words, "--model.args", args, "--optimizer.name", "adamw"]) == 0
    printed = capsys.readouterr().out
    assert "(x 0.5), weight decay 0.2" in printed
    assert "(x 0.375), weight decay 0.267" in printed


def test_the_rates_of_muons_groups_have_its_scale(capsys):
    words = ["debug", "--model.parametrization", "mup", "--model.base-dim", "64", "--optimizer.lr", "0.001"]
    assert main(["check", *words, "--optimizer.name", "muon", "--optimizer.muon.lr-scale", "50"]) == 0
    groups = [line for line in capsys.readouterr().out.splitlines() if "weight decay" in line and " in layers." in line]
    assert any("lr 0.05 (x 50)" in line for line in groups), groups


@pytest.mark.parametrize(
    ("model", "optimizer", "message"),
    [
        ({"parametrization": "mup"}, {}, "'mup' needs base_dim"),
        ({"base_dim": 64}, {}, "nothing else takes it"),
        ({"parametrization": "mup", "base_dim": 64, "init": "hf:x"}, {}, "has its own"),
        ({"parametrization": "mup", "base_dim": 32}, {"name": "sgd"}, "Set optimizer.name='adamw'"),
        ({"name": "flux_tiny", "parametrization": "mup", "base_dim": 32}, {}, "does not know how"),
    ],
)  # fmt: skip
def test_what_it_cannot_serve_is_refused_by_name(model, optimizer, message):
    def plan():
        config = parse_config({"model": model, "optimizer": optimizer})
        plan_groups(build_model(config.model, vocab_size=None), config.optimizer)

    with pytest.raises(ValueError, match=message):
        plan()
