"""`model.init = "hf:DIR"`: weights come in under any layout and leave bit for bit; a folder that does not fit is refused."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from titan_testing import run_ranks
from titan_train.config import parse_config
from titan_train.config.model import ModelConfig
from titan_train.models import build_model
from titan_train.models.registry import family_of
from titan_train.train.warm_start import check_init, load_init

PARALLEL = Path(__file__).parents[1] / "parallel"
LLAMA = {"num_layers": 4, "num_kv_heads": 4, "rope_factor": 8.0, "rope_original_seq_len": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama3_debug", LLAMA),
    "llama-tied": ("llama3_debug", LLAMA | {"tied_embeddings": True}),
    "gpt-tied": ("gpt_debug", {"num_layers": 4}),
    "gpt": ("gpt_debug", {"num_layers": 4, "tied_embeddings": False}),
    "qwen3": ("qwen3_debug", {"num_layers": 4}),
    "qwen3-moe": ("qwen3_moe_debug", {"num_layers": 4}),
    "deepseek": ("deepseek_debug", {"num_layers": 4}),
    "qwen3-tied": ("qwen3_debug", {"num_layers": 4, "tied_embeddings": True}),
    "qwen3-moe-tied": ("qwen3_moe_debug", {"num_layers": 4, "tied_embeddings": True}),
    "deepseek-tied": ("deepseek_debug", {"num_layers": 4, "tied_embeddings": True}),
    "deepseek-mtp": ("deepseek_debug", {"num_layers": 3, "mtp_depth": 1}),
    "qwen3-next-mtp": ("qwen3_next_moe_debug", {"mtp_depth": 1}),
    "llama-tied-mtp": ("llama3_debug", LLAMA | {"tied_embeddings": True, "mtp_depth": 2}),
}
LARGE = {"large": ("llama3_debug", {"num_layers": 1, "dim": 64, "vocab_size": 262_144})}
PP = {"parallel": {"pp": 2}, "pipeline": {"schedule": "1f1b"}}
TP = {"parallel": {"tp": 2}}
CASES = [
    ("llama", 1, {}),
    ("llama-tied", 2, {"parallel": {"pp": 2}, "pipeline": {"schedule": "zbv"}}),
    ("llama-tied", 4, {"parallel": {"tp": 2, "pp": 2}, "pipeline": {"schedule": "1f1b"}}),
    ("gpt-tied", 4, {"parallel": {"tp": 2, "pp": 2}, "pipeline": {"schedule": "1f1b"}}),
    ("qwen3-moe", 2, {"parallel": {"ep": 2}}),
    ("deepseek", 4, {"parallel": {"ep": 2, "tp": 2}}),
    ("deepseek-mtp", 2, {"parallel": {"pp": 2}, "pipeline": {"schedule": "1f1b"}}),
    *(
        pytest.param(name, ranks, layout, marks=pytest.mark.slow)
        for name in MODELS
        for ranks, layout in ((1, {}), (2, {}), (2, PP), (2, TP), (4, {}), (4, {**PP, "parallel": {"tp": 2, "pp": 2}}))
    ),
    *(
        pytest.param(name, 2, {"parallel": {"ep": 2}}, marks=pytest.mark.slow)
        for name in ("qwen3-moe-tied", "deepseek", "deepseek-tied")
    ),
]


def config(folder: Path, name: str, layout: dict[str, Any], init: str) -> Any:
    model, args = (MODELS | LARGE)[name]
    sys.path.insert(0, str(PARALLEL))
    import composition

    sections = {"model": {"name": model, "seq_len": 32, "args": args, "init": init}, "train": {"microbatch": 2}}
    return parse_config(composition.tree(folder, "warm", sections | layout))


def publish(folder: Path, name: str) -> Path:
    """A folder as Hugging Face would have it, written without our exporter."""
    model_name, args = (MODELS | LARGE)[name]
    model: Any = build_model(ModelConfig(name=model_name, args=args), vocab_size=259, device="cpu")
    family = family_of(model)
    assert family is not None
    hf = family.load_hf()
    generator = torch.Generator().manual_seed(1)
    published: dict[str, torch.Tensor] = {}
    packed: dict[tuple[str, int], dict[int, torch.Tensor]] = {}
    names = hf.names(model.args)
    for key, value in model.state_dict().items():
        if key == "mtp_embeddings.weight" or (key == "lm_head.weight" and model.args.tied_embeddings):
            continue
        value = torch.randn(value.shape, generator=generator)
        pair, letters = names.match_native(key)
        value = value.t() if pair.transposed else value
        if pair.stacked:
            published |= {pair.hf.format(**letters, j=j): value[j].clone() for j in range(len(value))}
        elif pair.part:
            packed.setdefault((pair.hf.format(**letters), pair.part[2]), {})[pair.part[0]] = value
        else:
            published[pair.hf.format(**letters)] = value.contiguous()
    for (key, dim), parts in packed.items():
        published[key] = torch.cat([parts[i] for i in range(len(parts))], dim=dim).contiguous()
    published |= {copy: published[other].clone() for copy, other in names.copies}
    out = folder / "published"
    out.mkdir()
    save_file(published, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text(json.dumps(hf.config_of(model.args)))
    return out


def test_a_family_here_is_filled_with_the_changes_that_are_named(tmp_path: Path) -> None:
    source = publish(tmp_path, "llama")
    args = LLAMA | {"rope_theta": 4e6, "vocab_size": 264}
    named = ModelConfig(name="llama3_debug", args=args, init=f"hf:{source}", init_changes=("rope_theta", "vocab_size"))
    model: Any = build_model(named, vocab_size=None, device="cpu")
    load_init(named.init, [model], whole=model, config=named, shards={})
    table = load_file(source / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(model.tok_embeddings.weight[:259], table)
    torch.testing.assert_close(model.tok_embeddings.weight[259:].detach(), table.mean(0).expand(5, -1))


def start_and_save(folder: Path, name: str, layout: dict[str, Any], init: str) -> float:
    from titan_train.train import Trainer

    with Trainer(config(folder, name, layout, init), run_dir=folder / "run") as trainer:
        trainer.save()
        trainer.fit(until=1)
        return trainer.losses[0]


def prepare(folder: Path) -> None:
    sys.path.insert(0, str(PARALLEL))
    import composition

    composition.prepare(folder)


@pytest.mark.parametrize(("name", "ranks", "layout"), CASES)
def test_published_weights_come_in_and_leave_bit_for_bit(
    name: str, ranks: int, layout: dict[str, Any], tmp_path: Path
) -> None:
    from titan_ckpt import export_hf

    run_ranks(prepare, 1, tmp_path, init=False)
    source = publish(tmp_path, name)
    losses = run_ranks(start_and_save, ranks, tmp_path, name, layout, f"hf:{source}", timeout_s=120, init=ranks > 1)
    assert all(0 < loss < 1000 for loss in losses)
    model: Any = build_model(ModelConfig(name=MODELS[name][0], args=MODELS[name][1]), vocab_size=None)
    family = family_of(model)
    assert family is not None
    names = family.load_hf().names(model.args)
    names = names.leaving_out("lm_head.weight") if "tied" in name else names
    export_hf(tmp_path / "run" / "checkpoints" / "step-00000000", tmp_path / "back", names=names)
    want, got = load_file(source / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert want.keys() == got.keys()
    assert all(torch.equal(want[key], got[key]) for key in want)


def changed(source: Path, folder: Path, **fields: object) -> str:
    shutil.copytree(source, folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return f"hf:{folder}"


def test_a_folder_that_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    name, args = MODELS["llama-tied"]
    choice = ModelConfig(name=name, args=args)
    model = build_model(choice, vocab_size=259)
    source = publish(tmp_path, "llama-tied")
    check_init(f"hf:{source}", model, choice)

    def refused(init: str, *words: str) -> None:
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            check_init(init, model, choice)
        assert all(word in str(caught.value) for word in words), caught.value

    refused(changed(source, tmp_path / "a", rms_norm_eps=1e-3), "norm_eps=1e-05 should be 0.001", "[model.args]")
    refused(changed(source, tmp_path / "b", tie_word_embeddings=False), "tied_embeddings=True should be False")
    refused(changed(source, tmp_path / "c", mystery=3), "mystery=3 is not a field that this family reads")
    refused(f"hf:{tmp_path / 'nowhere'}", "config.json does not exist")
    tensors = load_file(source / "model.safetensors")
    for folder, content in (
        ("missing", {k: v for k, v in tensors.items() if k != "model.norm.weight"}),
        ("extra", tensors | {"model.vision.weight": torch.zeros(1)}),
    ):
        changed(source, tmp_path / folder)
        save_file(content, tmp_path / folder / "model.safetensors", {"format": "pt"})
    refused(f"hf:{tmp_path / 'missing'}", "1 parameters are missing ['norm.weight']")
    refused(f"hf:{tmp_path / 'extra'}", "1 tensors are unexpected ['model.vision.weight']")
    changed(source, tmp_path / "empty")
    (tmp_path / "empty" / "model.safetensors").write_bytes(b"")
    refused(f"hf:{tmp_path / 'empty'}", "model.safetensors")
    with pytest.raises(ValueError, match="Write 'hf:DIR'"):
        ModelConfig(init="DIR")


def test_a_run_of_a_folder_with_other_arguments_is_refused_by_name(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    sys.path.insert(0, str(PARALLEL))
    import composition
    import hf_folders
    import titan_fsdp as fsdp
    from titan_ckpt import Checkpointer, TrainState
    from titan_train.config import dump_config
    from titan_train.models import init_for
    from titan_train.run_folder import keep_model
    from titan_train.train.warm_start import check_run_init

    source, run = hf_folders.make(tmp_path / "published", "llama", vocab_size=264), tmp_path / "runs" / "parent"
    theirs = {"name": f"hf:{source}", "seq_len": 32, "args": {"rms_norm_eps": 1e-5}}
    parent = parse_config(composition.tree(tmp_path, "parent", {"model": theirs}))
    run.mkdir(parents=True)
    (run / "config.toml").write_text(dump_config(parent))
    keep_model(parent, run)
    model = build_model(parent.model, vocab_size=264)
    fsdp.materialize(model, "cpu", init_for(model), seed=0)
    with Checkpointer(run / "checkpoints") as checkpointer:
        checkpointer.save(4, TrainState(model=model, rng=False))

    def check(args: dict[str, Any], name: str = f"hf:{source}", changes: tuple[str, ...] = ()) -> None:
        ours = ModelConfig(name=name, seq_len=32, init=f"run:{run}@4", args=args, init_changes=changes)
        check_run_init(ours.init, build_model(ours, vocab_size=264), ours)

    for name in (f"hf:{source}", f"hf:{run / 'model'}"):
        check({"rms_norm_eps": 1e-5}, name)
        with pytest.raises(ValueError, match=r"model.init='run:.*rms_norm_eps=0.1 should be 1e-05"):
            check({"rms_norm_eps": 0.1}, name)
    with pytest.raises(
        ValueError, match=r"rope_parameters=.*'rope_theta': 1000000.0.* should be .*'rope_theta': 500000.0"
    ):
        check({"rms_norm_eps": 1e-5, "rope_parameters.rope_theta": 1e6})
    longer = {"rms_norm_eps": 1e-5, "rope_parameters.rope_theta": 1e6}
    check(longer, changes=("rope_parameters",))
    again = changed(source, tmp_path / "changed", rms_norm_eps=1e-5)  # the same by another folder's file
    check({}, again)


def test_own_modules_are_compared_by_their_arguments_with_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from titan_train.config import dump_config
    from titan_train.train.warm_start import check_saved_settings
    from titan_train.trust import use_code

    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setenv("TITAN_TRAIN_CODE", "")
    lines = (
        "class Scaled(nn.Module):",
        "    def __init__(self, scale: float = 1.0, sizes=[1, 2]):",
        "        super().__init__()",
        "class Renamed(Scaled):",
        "    def __init__(self, scale: float = 1.0, width=3):",
        "        super().__init__(scale)",
    )
    (tmp_path / "scaled_by.py").write_text("\n".join(("from torch import nn", *lines)))
    use_code([str(tmp_path)])
    (tmp_path / "run").mkdir()
    name = "scaled_by:Scaled"
    parent = parse_config({"model": {"name": name, "args": {"scale": 2.0}}})
    (tmp_path / "run/config.toml").write_text(dump_config(parent))

    def check(args: dict[str, Any], changes: tuple[str, ...] | None = None, name: str = name) -> None:
        ours = ModelConfig(name=name, args=args)
        check_saved_settings("asked", tmp_path / "run", build_model(ours, vocab_size=None), ours, changes)

    check({"scale": 2.0, "sizes": (1, 2)})
    check({"scale": 3.0}, ("scale",))
    with pytest.raises(ValueError, match=r"scale=1.0 should be 2.0.*model.init='run:DIR@STEP'"):
        check({})
    check({"scale": 2.0, "width": 5}, name="scaled_by:Renamed")
    with pytest.raises(ValueError, match=r"another one: scale=1.0 should be 2.0\. "):
        check({}, name="scaled_by:Renamed")


def test_a_head_with_a_bias_takes_new_tokens(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    sys.path.insert(0, str(PARALLEL))
    import hf_folders
    import titan_fsdp as fsdp
    from titan_train.models import init_for
    from titan_train.train.warm_start import load_init

    folder = hf_folders.make(tmp_path / "phi", "phi")
    choice = ModelConfig(
        name=f"hf:{folder}", init=f"hf:{folder}", seq_len=32, args={"vocab_size": 100}, init_changes=("vocab_size",)
    )
    model = build_model(choice, vocab_size=100)
    fsdp.materialize(model, "cpu", init_for(model), seed=0)
    load_init(choice.init, [model], whole=model, config=choice, shards={})
    bias, want = model.get_parameter("lm_head.bias"), load_file(folder / "model.safetensors")["lm_head.bias"]
    assert bias.shape == (100,)
    assert torch.equal(bias[:96], want)


@pytest.mark.parametrize("kind", ["kimi_linear", "olmo_hybrid"])
def test_adapters_are_put_on_convolutions_that_files_have_in_parts(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    sys.path.insert(0, str(PARALLEL))
    import hf_folders
    import titan_fsdp as fsdp
    from titan_train.models import init_for
    from titan_train.train.warm_start import load_init

    folder = hf_folders.make(tmp_path / kind, kind)
    logits: list[torch.Tensor] = []
    for rank in (0, 4):
        choice = ModelConfig(name=f"hf:{folder}", init=f"hf:{folder}", seq_len=32, lora_rank=rank)
        model = build_model(choice, vocab_size=96)
        fsdp.materialize(model, "cpu", init_for(model), seed=0)
        load_init(choice.init, [model], whole=model, config=choice, shards={})
        with torch.no_grad():
            logits.append(model.eval()(torch.arange(32)[None]))
    assert torch.equal(*logits)  # adapters begin as none


def memory_of_a_start(folder: Path, init: str) -> tuple[float, float]:
    """MiB of this rank's own memory: its parameters, and the most above what it held before the model was built."""
    import threading

    from titan_train.train import Trainer

    def own() -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024

    # the first Trainer brings in all code and buffers that any run needs
    with Trainer(config(folder, "llama", {}, ""), run_dir=folder / "small") as trainer:
        trainer.fit(until=0)
    large = config(folder, "large", {}, init)
    before, most, over = own(), [0.0], threading.Event()

    def watch() -> None:
        while not over.wait(0.0005):
            most[0] = max(most[0], own())

    watcher = threading.Thread(target=watch)
    watcher.start()
    with Trainer(large, run_dir=folder / "large") as trainer:
        over.set()
        watcher.join()
        part = trainer.model.parts[0]
        local = [p.to_local() if hasattr(p, "to_local") else p for p in part.parameters()]
        return sum(p.numel() * p.element_size() for p in local) / 2**20, most[0] - before


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads this process's memory from /proc")
def test_a_warm_start_needs_the_shards_and_one_slice(tmp_path: Path) -> None:
    run_ranks(prepare, 1, tmp_path, init=False)
    source = publish(tmp_path, "large")
    for shards, peak in run_ranks(memory_of_a_start, 4, tmp_path, f"hf:{source}", timeout_s=200):
        assert 20 < shards < 40  # a quarter of two matrices of 64 MiB
        # a slice of 8 MiB on its way, a quarter of a matrix that is transposed, and 8 MiB for everything that is not weights;
        # one whole matrix more would be 64
        assert peak < shards + 32
