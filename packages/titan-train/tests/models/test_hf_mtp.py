"""Modules for tokens further ahead of transformers' decoders: plain formulas, published names, drafts, refusals."""

import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from titan_ckpt import Checkpointer, TrainState, export_hf, import_hf
from titan_train.config.model import ModelConfig
from titan_train.export.hf_model import HfModel
from titan_train.generation import DraftCount, generate
from titan_train.models import build_model, count_parameters, flops_per_token
from titan_train.models.common.loss import IGNORE_INDEX
from titan_train.models.common.mtp import AHEAD, look_ahead, mtp_of
from titan_train.models.hf.probe import probe
from titan_train.models.registry import family_of
from titan_train.parallel.head_loss import fuse_head_loss
from titan_train.train.warm_start import check_init

pytest.importorskip("transformers", reason="transformers is not installed")
sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
import hf_folders
import transformers

LAYERS, DEPTH, WEIGHT = 4, 2, 0.3
BOUNDS = [0, 5, 12]


def built(folder, depth, device="cpu", **more):
    """The model of a folder, with weights that are not those of its layers."""
    choice = ModelConfig(name=f"hf:{folder}", args={"mtp_depth": depth}, seq_len=32, **more)
    model = build_model(choice, vocab_size=96, device=device)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters() if device == "cpu" else ():
            parameter.copy_(torch.randn_like(parameter) * 0.1 + (1.0 if parameter.ndim == 1 else 0.0))
    return model


def their_copy(folder, model, tmp_path):
    """transformers' own model with one layer more for each module, and our weights, through an exported folder."""
    export(model, tmp_path)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = LAYERS + DEPTH
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, attn_implementation="eager"
    )
    return theirs.train(), {name: tensors[name] for name in tensors if name.endswith(OWN)}


OWN = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")


def export(model, folder):
    names = family_of(model).load_hf().names(model.args)
    with Checkpointer(folder / "steps") as checkpointer:
        checkpointer.save(0, TrainState(model=model, rng=False))
    config = family_of(model).load_hf().config_of(model.args)
    export_hf(folder / "steps" / "step-00000000", folder / "out", names=names, config=config)


def rms(weight, x, eps):
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
def test_losses_and_gradients_are_those_of_the_formulas_over_layers_of_transformers(kind, tmp_path):
    folder = hf_folders.make(tmp_path / "in", kind)
    model = built(folder, DEPTH)
    theirs, own = their_copy(folder, model, tmp_path)
    own = {name: tensor.requires_grad_() for name, tensor in own.items()}
    body, eps = theirs.model, theirs.config.rms_norm_eps
    tokens = torch.randint(96, (1, BOUNDS[-1]), generator=torch.Generator().manual_seed(1))

    def through(layer, x, positions):
        mask = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)[None, None]
        rotary = body.rotary_emb(x, position_ids=positions)
        out = body.layers[layer](x, attention_mask=mask, position_embeddings=rotary, position_ids=positions)
        return out if isinstance(out, torch.Tensor) else out[0]

    def sum_of(hidden, labels):
        return F.cross_entropy((hidden @ theirs.lm_head.weight.T)[0], labels, reduction="sum")

    want, objective = [0.0] * (DEPTH + 1), 0
    for start, stop in pairwise(BOUNDS):
        row, length = tokens[:, start:stop], stop - start
        positions = torch.arange(length)[None]
        hidden = body.embed_tokens(row)
        for layer in range(LAYERS):
            hidden = through(layer, hidden, positions)
        hidden = body.norm(hidden)
        for k in range(DEPTH + 1):
            if k:
                at = f"model.layers.{LAYERS + k - 1}."
                later = torch.cat([row[:, k:], torch.zeros_like(row[:, :k])], 1)
                joined = torch.cat(
                    [
                        rms(own[at + "enorm.weight"], body.embed_tokens(later), eps),
                        rms(own[at + "hnorm.weight"], hidden, eps),
                    ],
                    -1,
                )
                x = through(LAYERS + k - 1, joined @ own[at + "eh_proj.weight"].T, positions)
                hidden = rms(own[at + "shared_head.norm.weight"], x, eps)
            inside = length - 1 - k
            loss = sum_of(hidden[:, :inside], row[0, k + 1 :])
            want[k] += float(loss.detach())
            objective = objective + loss * (1 if k == 0 else WEIGHT / DEPTH)
    objective.backward()

    labels = torch.full_like(tokens, IGNORE_INDEX)
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(BOUNDS)])[None]
    for start, stop in pairwise(BOUNDS):
        labels[:, start : stop - 1] = tokens[:, start + 1 : stop]
    assert fuse_head_loss(model, z_loss=0.0, vocab_size=96) == "lm_head"
    sums = mtp_of(model).begin(WEIGHT, torch.device("cpu"))
    ahead = dict(zip(AHEAD, look_ahead(tokens, labels, positions, DEPTH), strict=True))
    cuts = torch.tensor([BOUNDS], dtype=torch.int32)
    model.train()
    loss = model(tokens, positions=positions, cu_seqlens=cuts, labels=labels, **ahead)
    loss.backward()
    assert [loss.item(), *sums[:, 0].tolist()] == pytest.approx(want, rel=2e-6)  # float32
    expected = {name: p.grad for name, p in theirs.named_parameters()} | {n: t.grad for n, t in own.items()}
    largest = max(float(grad.abs().max()) for grad in expected.values())
    names = family_of(model).load_hf().names(model.args)
    for fqn, parameter in model.named_parameters():
        pair, letters = names.match_native(fqn)
        hf = pair.hf.format(**{"j": "{j}", **letters})
        if "{j}" in hf:  # transformers stacks experts, gate and up in one
            stack, _, leaf = hf.partition(".{j}.")
            packed = expected[f"{stack}.{'down_proj' if 'down' in leaf else 'gate_up_proj'}"]
            grad = packed if "down" in leaf else packed.chunk(2, 1)[leaf.startswith("up")]
        else:
            grad = expected[hf]
        # float32 sums of some hundred terms in another order
        assert (parameter.grad - grad).abs().max() <= 4e-6 * max(float(grad.abs().max()), 0.05 * largest), fqn


def published(tmp_path, kind, prefix, own, *, shared):
    """A folder with one module, as the family is published."""
    folder = hf_folders.make(tmp_path / "in", kind)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.startswith("model.layers.3.")]:
        tensors[name.replace("model.layers.3", prefix[0], 1)] = torch.randn_like(tensors[name])
    for name in own:
        tensors[f"{prefix[1]}.{name}.weight"] = torch.randn(*((32, 64) if name in ("eh_proj", "fc") else (32,)))
    if shared:
        tensors[f"{prefix[1]}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{prefix[1]}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, tensors


FURTHER = (("model.layers.4", "model.layers.4"), ("enorm", "hnorm", "eh_proj", "shared_head.norm"), True)
APART = (("mtp.layers.0", "mtp"), ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"), False)


@pytest.mark.parametrize(
    ("kind", "prefix", "own", "shared"),
    [
        ("deepseek_v3", *FURTHER),
        pytest.param("glm4_moe", *FURTHER, marks=pytest.mark.slow),
        pytest.param("qwen3_next", *APART, marks=pytest.mark.slow),
    ],
)
def test_the_published_module_comes_in_and_leaves_bit_for_bit(kind, prefix, own, shared, tmp_path):
    folder, tensors = published(tmp_path, kind, prefix, own, shared=shared)
    model = built(folder, 1)
    _, names = check_init(f"hf:{folder}", model, ModelConfig(name=f"hf:{folder}", args={"mtp_depth": 1}))
    import_hf(folder, model, names=names)
    assert torch.equal(mtp_of(model)["0"].proj.weight, tensors[f"{prefix[1]}.{own[2]}.weight"])
    export(model, tmp_path)
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == tensors.keys()
    assert all(torch.equal(exported[name], tensors[name]) for name in tensors)
    HfModel(tmp_path / "out")  # a folder that transformers reads: what it does not know is announced
    # a model without the module passes it over
    without = built(tmp_path / "out", 0)
    check_init(f"hf:{tmp_path / 'out'}", without, ModelConfig(name=f"hf:{folder}"))
    assert family_of(without).load_hf().config_of(without.args)["num_nextn_predict_layers"] == 0


def test_parameters_and_flops_are_those_that_the_shape_states(tmp_path):
    folder = hf_folders.make(tmp_path, "deepseek_v3")
    model, without = built(folder, 2, "meta"), built(folder, 0, "meta")
    shape = model.args.shape("m")
    assert shape.parameters() == count_parameters(model)
    assert flops_per_token(model, 64) == pytest.approx(shape.flops_per_token(64, causal=False), rel=1e-2)
    assert flops_per_token(model, 64) > flops_per_token(without, 64) + 2 * 6 * without.lm_head.weight.numel()


def test_drafts_change_no_token(tmp_path):
    model = built(hf_folders.make(tmp_path, "deepseek_v3"), 2).double().requires_grad_(False)
    prompts, count = [[5, 17, 3], [40], [9, 9, 9, 2, 60, 11, 7]], DraftCount()
    want = generate(model, prompts, max_new_tokens=16)
    assert generate(model, prompts, max_new_tokens=16, draft=count) == want
    assert count.drafted >= 2 * len(prompts)
    assert generate(model, prompts[:1], max_new_tokens=4) == [want[0][:4]]  # as before the drafts


def test_drafts_of_a_model_with_windows_are_refused(tmp_path):
    model = built(hf_folders.make(tmp_path, "mistral"), 1)
    with pytest.raises(ValueError, match=r"drafts need the key-value cache of plain attention"):
        generate(model, [[1, 2]], max_new_tokens=2, draft=DraftCount())


def test_what_has_no_modules_is_refused_by_name(tmp_path):
    kinds = {
        "gpt2": "the family 'gpt2' of transformers has no plan",
        "granitemoehybrid": "last layer of this granitemoehybrid carries a state",
        "nemotron_h": "last layer of this nemotron_h is not attention with a feed-forward",
    }
    for kind, words in kinds.items():
        with pytest.raises(ValueError, match=words):
            built(hf_folders.make(tmp_path / kind, kind), 1, "meta")
    folder = hf_folders.make(tmp_path / "llama", "llama")
    with pytest.raises(ValueError, match=r"mtp_depth=True .* must be a whole number from 0 to 100"):
        built(folder, True, "meta")
    with pytest.raises(ValueError, match=r"mtp_depth=1 with model.lora_rank=4"):
        built(folder, 1, "meta", lora_rank=4)


def test_a_layer_that_works_in_its_place_only_is_refused(tmp_path, monkeypatch):
    """It knows which one it is, or does not mix tokens: the code of a family may do anything."""
    from transformers.models.llama import modeling_llama

    folder = hf_folders.make(tmp_path, "llama")
    own = modeling_llama.LlamaDecoderLayer.forward
    places = {}

    def placed(self, hidden_states, *args, **keywords):
        return own(self, hidden_states * (1 + 0.1 * places.setdefault(self, len(places))), *args, **keywords)

    def alone(self, hidden_states, *args, **keywords):
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))

    for forward, words in (
        (placed, "gives other hidden states"),
        (alone, "what it attends to is not what it is given"),
    ):
        monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "forward", forward)
        with pytest.raises(ValueError, match=words):
            probe(built(folder, 1, "meta"), f"hf:{folder}", packed=False, staged=False, drawn=True)
