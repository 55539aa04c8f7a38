"""One family of transformers against transformers itself, on a small folder: packed rows, stages, one step, files, text.

Each column of the table is a function here. It returns a word for the table: that it is equal, or why it is refused. It
raises where anything differs. `family` runs them all for one ``model_type``.
"""

import json
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
import composition
from titan_train.card.proofs import by_native_name
from titan_train.card.subject import VOCABULARY, cut_small
from titan_train.config import parse_config

NEEDED: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "bert": {"is_decoder": True},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 16},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 8, "topk_group": None, "n_group": None},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
    # transformers writes names of dense layers, and parts of convolutions, that are not those of the published files
    "kimi_linear": {"mlp_layer_types": ["sparse"] * 27},
    "olmo_hybrid": {"linear_key_head_dim": 192, "linear_value_head_dim": 192},
}
"""What the default configuration of a family lacks, or does not mix."""
_LONG_CHUNKS = {"attention_chunk_size": 512, "floor_scale": 512}
WRITTEN: dict[str, dict[str, Any]] = {"llama4": _LONG_CHUNKS, "llama4_text": _LONG_CHUNKS}
"""What ``config.json`` of the small model says instead of what was cut: chunks are longer than rows."""
CLOSE = 2e-4
"""Of the spread of logits in float32: experts, scans and chunks are added in another order."""
COLUMNS = ("packed", "stages", "step", "files", "text")


def family(kind: str, folder: Path) -> dict[str, str]:
    """The row of one family; a column after a refusal of the family itself is empty."""
    source = publish(kind, folder)
    if isinstance(source, str):
        return {"packed": source}
    composition.prepare(folder)
    row: dict[str, str] = {}
    masked = True
    try:
        model = checked(_config(folder, source, masked=True))
    except ValueError as err:
        row["packed"], masked = _refused(err), False
        try:
            model = checked(_config(folder, source, masked=False))
        except ValueError as err:
            return {"packed": _refused(err)}
    checks: list[tuple[str, Callable[[], str]]] = [
        *([("packed", lambda: packed(model, source))] if masked else []),
        ("stages", lambda: stages(folder, source)),
        ("step", lambda: step(folder, source, masked=masked)),
        ("files", lambda: files(model, folder)),
        ("text", lambda: text(folder)),
    ]
    for column, check in checks:
        try:
            row[column] = check()
        except ValueError as err:
            row[column] = _refused(err)
        except Exception as err:
            row[column] = f"**fails**: {type(err).__name__}: {str(err).splitlines()[0][:160] if str(err) else ''}"
    return row


def checked(config: Any, ranks: int = 1) -> Any:
    """The model, after what `titan_train.launch.validate.validate` refuses."""
    from titan_train.models import build_model
    from titan_train.parallel.check import check_model
    from titan_train.parallel.layout.run import plan_run
    from titan_train.train.warm_start import check_init

    plan = plan_run(config, ranks)
    model = build_model(config.model, vocab_size=VOCABULARY)
    check_model(config, plan.layout, plan.batch, model)
    check_init(config.model.init, model, config.model)
    return model


def publish(kind: str, folder: Path) -> Path | str:
    """A small folder that transformers wrote; or why it has none."""
    from transformers import CONFIG_MAPPING

    try:
        found = cut_small(
            CONFIG_MAPPING[kind](**NEEDED.get(kind, {})), folder / "published", least_layers=1, spread=1.0
        )
    except Exception as err:
        return f"not built by transformers from its defaults: {type(err).__name__}"
    if isinstance(found, str):
        return found
    if kind in WRITTEN:
        file = found.folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | WRITTEN[kind]))
    return found.folder


def packed(model: Any, source: Path) -> str:
    """A packed row here is its documents alone in transformers."""
    reference = _theirs(source)
    _fill(model, source)
    bounds = [0, 5, 6, 17, 29]
    ids = _tokens(bounds[-1])
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(bounds)])[None]

    def off() -> float:
        with torch.no_grad():
            got = model(ids, positions=positions, cu_seqlens=torch.tensor([bounds], dtype=torch.int32))
            want = [reference(ids[:, a:b], use_cache=False).logits for a, b in pairwise(bounds)]
        return _off(got, torch.cat(want, dim=1))

    if off() > CLOSE:  # rounding, if it goes with more bits: gemma3n's is 4e-4
        model.double()
        reference.double()
        assert off() <= 1e-9, f"packed logits differ by {off():.2g} of their spread, in float64 too"
        model.float()
    return "equal, by masks" if getattr(model, "takes_masks", False) else "equal"


def stages(folder: Path, source: Path) -> str:
    """A chain of two stages here is the whole in transformers."""
    pp = {"parallel": {"pp": 2}, "pipeline": {"schedule": "1f1b"}}
    model = checked(_config(folder, source, masked=False, more=pp), 2)
    _fill(model, source)
    reference = _theirs(source)
    depth = len(model.repeated_layers())
    ids = states = _tokens(24)
    with torch.no_grad():
        want = reference(states, use_cache=False).logits
        for layers in (range(1), range(1, depth)):
            states = model.take_stage(layers, first=layers.start == 0, last=layers.stop == depth)(states, token_ids=ids)
    _same(states, want, "logits of the chain")
    return "equal"


def step(folder: Path, source: Path, *, masked: bool) -> str:
    """A step of the trainer is a plain loop over transformers' model: loss, and every weight after it."""
    from titan_train.train import Trainer
    from titan_train.train.step import OptimizerStep

    seen: list[Any] = []
    own = OptimizerStep._forward_backward

    def look(self: Any, batches: Any, num_labels: Any) -> Tensor:
        seen.extend(batches)
        return own(self, batches, num_labels)

    OptimizerStep._forward_backward = look
    try:
        with Trainer(_config(folder, source, masked=masked), run_dir=folder / "runs" / "run") as trainer:
            trainer.fit()
            losses = list(trainer.losses)
    finally:
        OptimizerStep._forward_backward = own
    documents = [
        (batch.tokens[row, a:b], batch.labels[row, a:b])
        for batch in seen
        for row in range(len(batch.tokens))
        for a, b in pairwise([0, batch.tokens.shape[1]] if batch.cu_seqlens is None else batch.cu_seqlens[row].tolist())
        if a < b
    ]
    torch.save(documents, folder / "documents.pt")
    model = _theirs(source)
    total = _plain_step(model, documents)
    assert abs(total - losses[0]) <= 2e-5 * max(1.0, abs(total)), f"loss {losses[0]} here, {total} there"
    model.save_pretrained(folder / "stepped")
    return "equal"


def _plain_step(model: Any, documents: list[tuple[Tensor, Tensor]]) -> float:
    """Their loss and a step of SGD from it, a document at a time."""
    import torch.nn.functional as F

    model.train()
    number, total = sum(int((labels >= 0).sum()) for _, labels in documents), 0.0
    for tokens, labels in documents:
        logits = model(tokens[None], use_cache=False).logits[0]
        logits = logits.float() if logits.dtype != torch.float64 else logits
        loss = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum") / number
        loss.backward()
        total += float(loss.detach())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
    return total


def _rounding(folder: Path) -> dict[str, float]:
    """By tensor, how far that step of transformers in float32 is from the same in float64, of the largest value."""
    from safetensors.torch import load_file

    model = _theirs(folder / "published").double()
    if hasattr(model, "set_experts_implementation"):  # torch's grouped product knows no float64
        model.set_experts_implementation("eager")
    _plain_step(model, torch.load(folder / "documents.pt"))
    model.save_pretrained(folder / "stepped64")
    narrow, wide = (load_file(folder / name / "model.safetensors") for name in ("stepped", "stepped64"))
    return {name: float((narrow[name].double() - x.double()).abs().max() / x.abs().max()) for name, x in wide.items()}


def files(model: Any, folder: Path) -> str:
    """The exported tensors are transformers' own after that step; read and written by transformers, every bit is the same."""
    from safetensors.torch import load_file
    from titan_ckpt import export_hf

    out = folder / "out"
    hf = model.own_family.load_hf()
    names = hf.names(model.args)
    if model.args.tied_embeddings:
        names = names.leaving_out(r"lm_head\.weight")
    at = next((folder / "runs" / "run" / "checkpoints").glob("step-*1"))
    export_hf(at, out, names=names, dtype=torch.float32, config=hf.config_of(model.args))
    _theirs(out).save_pretrained(folder / "again")
    ours, again, stepped = (load_file(folder / name / "model.safetensors") for name in ("out", "again", "stepped"))
    published = ours.keys() != again.keys()  # transformers read these names, and wrote others
    ours, again, stepped = (by_native_name(names, each) if published else each for each in (ours, again, stepped))
    assert ours.keys() == stepped.keys(), f"names differ: {sorted(ours.keys() ^ stepped.keys())[:4]}"
    rounding: dict[str, float] = {}
    for name, value in stepped.items():
        assert torch.equal(ours[name], again[name]), f"{name} is not bitwise the same"
        scale = float(value.float().abs().max().clamp_min(1e-3))
        off = float((ours[name].float() - value.float()).abs().max()) / scale
        if off > CLOSE:
            # no further than 3 times what their own step in float32 is from float64 (gemma3n: sparse activations), or than that
            # is where it is furthest (qwen3_5_moe: 4e-4)
            rounding = rounding or (by_native_name(names, _rounding(folder)) if published else _rounding(folder))
            limit = max(3 * rounding[name], *rounding.values())
            assert off <= limit, f"{name} differs by {off:.1g} after one step"
    return "equal, by the published names" if published else "equal"


def text(folder: Path) -> str:
    """Greedy tokens are those of transformers."""
    from titan_train.generation import load_run
    from titan_train.generation.decode import generate

    prompt = _tokens(9)
    published = _theirs(folder / "out")

    def want(*, cached: bool) -> list[int]:
        """Their tokens; some families set up ``generate`` in their own ways."""
        found = published.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=8,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            forced_eos_token_id=None,
            use_cache=cached,
        )
        return found[0, 9:].tolist()

    try:
        theirs = want(cached=True)
    except Exception as err:
        return f"not generated by transformers: {type(err).__name__}"
    got = generate(load_run(folder / "runs" / "run", device="cpu").model, prompt.tolist(), max_new_tokens=8)[0]
    if got == theirs:
        return "equal"
    assert got == want(cached=False), f"{got} here, {theirs} there"
    return "equal to transformers without its cache, with which its tokens differ"


def _config(folder: Path, source: Path, *, masked: bool, more: dict[str, dict[str, Any]] | None = None) -> Any:
    tree = {
        "model": {"name": f"hf:{source}", "seq_len": 24, "init": f"hf:{source}", "args": {}},
        "data": {"document_mask": masked},
        "train": {"steps": 1, "global_batch": 2, "max_grad_norm": 0.0, "microbatch": 2},
        "validation": {"every": 0},
        "optimizer": {"name": "sgd", "lr": 0.1, "beta1": 0.0, "weight_decay": 0.0},
        "schedule": {"warmup_steps": 0},
        "checkpoint": {"every": 1, "async_save": False},
    }
    return parse_config(composition.tree(folder, "run", composition.joined(tree, more or {})))


def _fill(model: Any, source: Path) -> None:
    import titan_fsdp as fsdp
    from titan_ckpt import import_hf
    from titan_train.models import init_for

    fsdp.materialize(model, "cpu", init_for(model), seed=3)
    import_hf(source, model, names=model.own_family.load_hf().key_map)
    model.eval()


def _theirs(source: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()


def _tokens(length: int) -> Tensor:
    return torch.randint(3, 250, (1, length), generator=torch.Generator().manual_seed(4))


def _same(got: Tensor, want: Tensor, what: str) -> None:
    assert (off := _off(got, want)) <= CLOSE, f"{what} differ by {off:.2g} of their spread"


def _off(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().max() / want.std())


def _refused(err: ValueError) -> str:
    """The reason, in the words of the message."""
    words = str(err).splitlines()[-1].strip()
    words = (words.partition(": ")[2] or words) if words.startswith(("model.", "parallel.")) else words
    return f"refused: {words.split('. ')[0][:200]}"


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        print(json.dumps(family(sys.argv[1], Path(scratch)), indent=1))
