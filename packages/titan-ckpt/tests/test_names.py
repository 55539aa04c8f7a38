import pytest
import torch
from family_maps import DEEPSEEK, KEY_MAPS, LLAMA, QWEN3
from safetensors.torch import load_file, save_file
from titan_ckpt import (
    Checkpointer,
    KeyMap,
    Pair,
    TrainState,
    export_hf,
    import_hf,
    load_key_map,
)
from titan_ckpt.interop.hf import import_hf_step
from titan_ckpt.interop.safetensors_folder import SafetensorsReader
from titan_testing import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def module_of(state: dict[str, torch.Tensor]) -> nn.Module:
    """A module whose state dict has these names."""
    root = nn.Module()
    for name, value in state.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module._modules[part]
        module.register_parameter(last, nn.Parameter(value.clone(), requires_grad=value.is_floating_point()))
    return root


def saved(root, state: dict[str, torch.Tensor]):
    return Checkpointer(root).save(1, TrainState(model=module_of(state), rng=False)).path


def tensors_of(folder) -> dict[str, torch.Tensor]:
    return {key: value for file in folder.glob("*.safetensors") for key, value in load_file(file).items()}


def assert_same(got, want):
    assert got.keys() == want.keys()
    assert not [name for name, value in want.items() if not torch.equal(got[name], value)]


@pytest.mark.parametrize("family", sorted(KEY_MAPS))
def test_key_maps_are_one_to_one_where_nothing_is_stacked(family):
    key_map = KEY_MAPS[family]
    for pair in key_map.pairs:
        ours, theirs = pair.native.format(i=31, j=7), pair.hf.format(i=31, j=7)
        assert any(found.native.format(**letters) == ours for found, letters in key_map.match_hf(theirs))
        if not pair.stacked and not pair.part and key_map.match_native(ours)[0] == pair:
            assert key_map.to_hf(ours) == theirs
    assert key_map.from_hf("model.layers.0.self_attn.rotary_emb.inv_freq") is None
    with pytest.raises(ValueError, match=f"unknown {family} parameter"):
        key_map.to_hf("layers.0.nonsense")
    with pytest.raises(ValueError, match=r"names\.ignoring"):
        key_map.from_hf("model.nonsense")


def test_key_maps_give_the_published_names():
    assert LLAMA.to_hf("lm_head.weight") == LLAMA.to_hf("output.weight") == "lm_head.weight"
    assert LLAMA.from_hf("lm_head.weight") == "lm_head.weight"
    assert LLAMA.to_hf("layers.3.feed_forward.w2.weight") == "model.layers.3.mlp.down_proj.weight"
    assert QWEN3.to_hf("layers.3.attention.q_norm.weight") == "model.layers.3.self_attn.q_norm.weight"
    assert QWEN3.to_hf("layers.3.moe.experts.w1") == "model.layers.3.mlp.experts.{j}.gate_proj.weight"
    assert DEEPSEEK.to_hf("layers.3.attention.wkv_a.weight") == "model.layers.3.self_attn.kv_a_proj_with_mqa.weight"
    assert DEEPSEEK.from_hf("model.layers.3.mlp.gate.e_score_correction_bias") == "layers.3.moe.expert_bias"
    assert DEEPSEEK.ignoring(r"model\.layers\.61\..*").from_hf("model.layers.61.eh_proj.weight") is None


def rotate(x: torch.Tensor, neighbours: bool) -> torch.Tensor:
    """Rotary embedding of ``[S, H, D]`` with either pairing."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[0])[:, None, None] / 100 ** (torch.arange(half) / half)
    a, b = (x[..., ::2], x[..., 1::2]) if neighbours else (x[..., :half], x[..., half:])
    turned = a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()
    return torch.stack(turned, -1).flatten(-2) if neighbours else torch.cat(turned, -1)


def test_a_model_with_neighbouring_rotary_channels_is_the_same_model_after_the_permutation(tmp_path):
    torch.manual_seed(0)
    heads, width, dim = 4, 8, 24
    wq, wk = torch.randn(heads * width, dim), torch.randn(2 * width, dim)
    step = saved(tmp_path, {"layers.0.attention.wq.weight": wq, "layers.0.attention.wk.weight": wk})
    names = LLAMA.interleaved(head_dim=width)
    export_hf(step, tmp_path / "hf", names=names)
    theirs = tensors_of(tmp_path / "hf")
    x = torch.randn(5, dim)

    def scores(q, k, neighbours):
        q, k = (rotate((x @ w.T).unflatten(-1, (-1, width)), neighbours) for w in (q, k))
        return torch.einsum("shd,tgd->hgst", q, k)

    prefix = "model.layers.0.self_attn"
    halves = scores(theirs[f"{prefix}.q_proj.weight"], theirs[f"{prefix}.k_proj.weight"], False)
    # the same products, added in another order: float32 rounding of sums of 24 and 8 terms
    torch.testing.assert_close(halves, scores(wq, wk, True), atol=1e-4, rtol=1e-5)
    back = module_of({f"layers.0.attention.{n}.weight": torch.zeros_like(w) for n, w in (("wq", wq), ("wk", wk))})
    import_hf(tmp_path / "hf", back, names=names)
    assert_same(back.state_dict(), {"layers.0.attention.wq.weight": wq, "layers.0.attention.wk.weight": wk})
    with pytest.raises(ValueError, match="is not an even width"):
        LLAMA.interleaved(head_dim=7)
    with pytest.raises(ValueError, match="same order of rotary channels"):
        DEEPSEEK.interleaved(head_dim=64)


def experts(num: int = 3, width: int = 6, dim: int = 4) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    prefix = "layers.2.moe"
    return {
        f"{prefix}.experts.w1": torch.randn(num, width, dim),
        f"{prefix}.experts.w2": torch.randn(num, dim, width),
        f"{prefix}.experts.w3": torch.randn(num, width, dim),
        f"{prefix}.router.gate.weight": torch.randn(num, dim),
    }


@pytest.mark.parametrize("packed", [False, True], ids=["one-by-one", "packed"])
def test_stacked_experts_go_out_and_come_back_bit_for_bit(tmp_path, packed):
    state = experts()
    names = QWEN3.packed() if packed else QWEN3
    export_hf(saved(tmp_path, state), tmp_path / "hf", names=names)
    theirs = tensors_of(tmp_path / "hf")
    prefix = "model.layers.2.mlp.experts"
    if packed:
        gate, up = theirs[f"{prefix}.gate_up_proj"].chunk(2, dim=1)
        assert torch.equal(gate, state["layers.2.moe.experts.w1"])
        assert torch.equal(up, state["layers.2.moe.experts.w3"])
    else:
        assert len(theirs) == 3 * 3 + 1
        assert torch.equal(theirs[f"{prefix}.2.down_proj.weight"], state["layers.2.moe.experts.w2"][2])
    model = module_of({name: torch.zeros_like(value) for name, value in state.items()})
    import_hf(tmp_path / "hf", model, names=QWEN3)  # reads both forms
    assert_same(model.state_dict(), state)


def test_the_model_decides_whether_experts_are_stacked(tmp_path):
    state = experts()
    export_hf(saved(tmp_path, state), tmp_path / "hf", names=QWEN3)
    apart = {
        f"layers.2.moe.experts.{j}.{w}.weight": state[f"layers.2.moe.experts.{w}"][j]
        for j in range(3)
        for w in ("w1", "w2", "w3")
    }
    apart["layers.2.moe.router.gate.weight"] = state["layers.2.moe.router.gate.weight"]
    model = module_of({name: torch.zeros_like(value) for name, value in apart.items()})
    import_hf(tmp_path / "hf", model, names=QWEN3)
    assert_same(model.state_dict(), apart)


def test_a_missing_expert_and_a_missing_half_are_refused(tmp_path):
    save_file(
        {f"model.layers.0.mlp.experts.{j}.up_proj.weight": torch.ones(2, 2) for j in (0, 2)}, tmp_path / "a.safetensors"
    )
    with pytest.raises(ValueError, match=r"'layers.0.moe.experts.w3' is missing experts \[1\] of 3"):
        import_hf_step(tmp_path, tmp_path / "out", names=QWEN3)
    state = experts()
    del state["layers.2.moe.experts.w3"]
    with pytest.raises(ValueError, match="made of 2 tensors, but the step holds 1"):
        export_hf(saved(tmp_path / "half", state), tmp_path / "hf", names=QWEN3.packed())


def import_experts(folder: str) -> dict[str, torch.Tensor]:
    """Experts over one mesh axis and their rows over the other, on four ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "dp"))
    state = {name: torch.zeros_like(value) for name, value in experts().items()}
    model = module_of(state)
    for name in ("w1", "w2", "w3"):
        owner = model.get_submodule("layers.2.moe.experts")
        whole = getattr(owner, name).detach()
        setattr(owner, name, nn.Parameter(distribute_tensor(whole, mesh, [Shard(0), Shard(1)])))
    import_hf(folder, model, names=QWEN3)
    return {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in model.state_dict().items()}


@pytest.mark.parametrize("packed", [False, True], ids=["one-by-one", "packed"])
def test_experts_are_imported_into_an_expert_parallel_model(tmp_path, packed):
    export_hf(saved(tmp_path, experts()), tmp_path / "hf", names=QWEN3.packed() if packed else QWEN3)
    for got in run_ranks(import_experts, 4, str(tmp_path / "hf")):
        assert_same(got, experts())


@pytest.mark.parametrize(
    ("named", "dtype"), [("weight_scale_inv", torch.float32), ("scale", torch.float32), ("scale", torch.float8_e8m0fnu)]
)
def test_float8_weights_are_multiplied_with_their_block_scales_on_import(tmp_path, named, dtype):
    torch.manual_seed(0)
    values = torch.randn(300, 200).to(torch.float8_e4m3fn)
    scales = (torch.rand(3, 2) + 0.5).to(dtype)
    module = "model.layers.0.self_attn.kv_b_proj"
    save_file({f"{module}.weight": values, f"{module}.{named}": scales}, tmp_path / "model.safetensors")
    want = values.float() * scales.float().repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :200]
    model = module_of({"layers.0.attention.wkv_b.weight": torch.zeros(300, 200)})
    import_hf(tmp_path, model, names=DEEPSEEK)
    assert torch.equal(model.state_dict()["layers.0.attention.wkv_b.weight"], want)
    import_hf_step(tmp_path, tmp_path / "steps", names=DEEPSEEK)
    half = module_of({"layers.0.attention.wkv_b.weight": torch.zeros(300, 200, dtype=torch.bfloat16)})
    Checkpointer(tmp_path / "steps").restore(TrainState(model=half, rng=False))
    assert torch.equal(half.state_dict()["layers.0.attention.wkv_b.weight"], want.bfloat16())
    (tmp_path / "config.json").write_text('{"quantization_config": {"weight_block_size": [64, 64]}}')
    with pytest.raises(ValueError, match=r"blocks of \[64, 64\] need \[5, 4\]"):
        import_hf(tmp_path, model, names=DEEPSEEK)


@pytest.mark.parametrize("suffix", ["_scale", "_scale_inv"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=["float8", "int8"])
@pytest.mark.parametrize("shape", [(), (1,), (5,), (5, 1), (1, 1)], ids=str)
def test_weights_are_multiplied_with_one_scale_a_tensor_or_a_row(tmp_path, suffix, dtype, shape):
    torch.manual_seed(0)
    values = (torch.randn(5, 300) * 20).to(dtype)
    scales = torch.rand(shape) + 0.5
    save_file({"weight": values, f"weight{suffix}": scales, "input_scale": torch.ones(())}, tmp_path / "a.safetensors")
    want = values.float() * scales.reshape(-1, 1)
    model = module_of({"weight": torch.zeros(5, 300), "input_scale": torch.zeros(())})
    import_hf(tmp_path, model)
    assert torch.equal(model.weight, want)
    part = torch.empty(3, 7)
    SafetensorsReader(tmp_path).views()["weight"].fill(((1, 290), (3, 7)), part)
    assert torch.equal(part, want[1:4, 290:297])


@pytest.mark.parametrize("beside", ["input_scale", "activation_scale", "k_scale"])
def test_scales_of_activations_are_ignored_where_config_json_announces_a_quantization(tmp_path, beside):
    tensors = {"weight": F8, "weight_scale": torch.full((), 2.0), beside: torch.ones(())}
    save_file(tensors, tmp_path / "model.safetensors")
    model = module_of({"weight": torch.zeros(4, 64)})
    with pytest.raises(ValueError, match=rf"1 unexpected \['{beside}'\]"):
        import_hf(tmp_path, model)
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    import_hf(tmp_path, model)
    assert torch.equal(model.weight, torch.full((4, 64), 2.0))
    own = module_of({"weight": torch.zeros(4, 64), beside: torch.zeros(())})
    import_hf(tmp_path, own)
    assert float(own.state_dict()[beside]) == 1.0


def test_two_values_of_four_bits_in_a_byte_are_read_with_an_exponent_for_32(tmp_path):
    gen = torch.Generator().manual_seed(0)
    packed = torch.randint(-128, 128, (5, 40), dtype=torch.int8, generator=gen)
    exponents = torch.randint(120, 130, (5, 3), dtype=torch.uint8, generator=gen).view(torch.float8_e8m0fnu)
    save_file({"experts.weight": packed, "experts.scale": exponents}, tmp_path / "model.safetensors")
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    table = [*values, *(-value for value in values)]
    want = torch.tensor(
        [[table[part] for byte in row for part in (byte & 15, byte >> 4)] for row in packed.view(torch.uint8).tolist()]
    )
    want *= exponents.float().repeat_interleave(32, 1)[:, :80]
    model = module_of({"experts.weight": torch.zeros(5, 80)})
    import_hf(tmp_path, model)
    assert torch.equal(model.state_dict()["experts.weight"], want)
    for column, columns in ((0, 80), (1, 1), (31, 2), (63, 17)):
        part = torch.empty(3, columns)
        SafetensorsReader(tmp_path).views()["experts.weight"].fill(((1, column), (3, columns)), part)
        assert torch.equal(part, want[1:4, column : column + columns])


F8 = torch.ones(4, 64).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("beside", "message"),
    [
        (
            {"weight_scale": torch.ones(4, 2)},
            r"'weight_scale' of shape \[4, 2\] fit neither one scale per tensor nor one per row",
        ),
        ({"weight_scale": torch.ones(4, 1, dtype=torch.uint8)}, "'weight_scale' are of dtype U8, not floating-point"),
        ({"weight_scale": torch.ones(4, 1), "weight_zero_point": torch.ones(4, 1)}, "'weight_zero_point' beside it"),
        ({"scale_weight": torch.ones(())}, "'scale_weight' beside it is not a scale that this version supports"),
    ],
    ids=["groups", "exponents", "zero-points", "other-name"],
)
def test_weights_whose_scales_are_not_understood_are_refused_only_by_who_asks_for_them(tmp_path, beside, message):
    save_file({"weight": F8, "bias": torch.ones(4), **beside}, tmp_path / "model.safetensors")
    other = module_of({"bias": torch.zeros(4)})
    import_hf(tmp_path, other, strict=False)
    assert torch.equal(other.bias, torch.ones(4))
    model = module_of({"weight": torch.zeros(4, 64), "bias": torch.zeros(4)})
    with pytest.raises(ValueError, match=rf"'weight' of shape \[4, 64\] is F8_E4M3.*{message}.*convert the folder"):
        import_hf(tmp_path, model, strict=False)
    assert torch.equal(model.bias, torch.zeros(4)), "untouched"
    with pytest.raises(ValueError, match=message):
        import_hf_step(tmp_path, tmp_path / "steps")


@pytest.mark.parametrize("scale", ["weight_scale", "weight_scale_inv", "scale_weight"])
@pytest.mark.parametrize("mapped", [False, True], ids=["own-names", "key-map"])
def test_scales_that_the_model_holds_itself_are_imported_beside_the_weight(tmp_path, scale, mapped):
    save_file({"weight": F8, scale: torch.full((4, 1), 3.0)}, tmp_path / "model.safetensors")
    names = KeyMap("mine", (Pair("w", "weight"), Pair("s", scale))) if mapped else None
    state = {"w" if mapped else "weight": F8, "s" if mapped else scale: torch.full((4, 1), 3.0)}
    model = module_of({name: torch.zeros_like(value) for name, value in state.items()})
    import_hf(tmp_path, model, names=names)
    assert all(torch.equal(model.state_dict()[name].float(), value.float()) for name, value in state.items())
    if scale != "scale_weight":
        plain = module_of({"w" if mapped else "weight": torch.zeros(4, 64)})
        import_hf(tmp_path, plain, names=names, strict=False)
        assert torch.equal(next(plain.parameters()), torch.full((4, 64), 3.0)), "multiplied"


@pytest.mark.parametrize("head", ["lm_head.weight", "output.weight"])
@pytest.mark.parametrize("family", sorted(KEY_MAPS))
def test_the_head_has_its_name_here_or_metas(tmp_path, head, family):
    names = KEY_MAPS[family]
    state = {"tok_embeddings.weight": torch.randn(5, 3), head: torch.randn(5, 3)}
    export_hf(saved(tmp_path, state), tmp_path / "hf", names=names)
    assert tensors_of(tmp_path / "hf").keys() == {"model.embed_tokens.weight", "lm_head.weight"}
    model = module_of({name: torch.zeros_like(value) for name, value in state.items()})
    import_hf(tmp_path / "hf", model, names=names)
    assert_same(model.state_dict(), state)


def test_an_export_refuses_two_tensors_that_are_one_there(tmp_path):
    step = saved(tmp_path, {"lm_head.weight": torch.ones(2, 2), "output.weight": torch.zeros(2, 2)})
    with pytest.raises(
        ValueError, match=r"'lm_head.weight' and 'output.weight' become the same Hugging Face.*leaving_out"
    ):
        export_hf(step, tmp_path / "hf", names=LLAMA)
    export_hf(step, tmp_path / "hf", names=LLAMA.leaving_out("lm_head.weight"))
    assert torch.equal(tensors_of(tmp_path / "hf")["lm_head.weight"], torch.zeros(2, 2))


def test_tensors_that_only_the_model_has_are_neither_exported_nor_missed(tmp_path):
    state = {
        "norm.weight": torch.randn(3),
        "freqs_cis": torch.randn(4),
        "layers.0.moe.tokens_per_expert": torch.ones(2),
    }
    step = saved(tmp_path, state | {"counter": torch.ones(1)})
    with pytest.raises(ValueError, match=r"unknown llama parameter 'counter'.*names\.leaving_out"):
        export_hf(step, tmp_path / "hf", names=LLAMA)
    export_hf(step, tmp_path / "other", names=LLAMA, leave_out=["counter"])
    names = LLAMA.leaving_out("counter")
    export_hf(step, tmp_path / "hf", names=names)
    assert tensors_of(tmp_path / "hf").keys() == tensors_of(tmp_path / "other").keys() == {"model.norm.weight"}
    model = module_of({**state, "norm.weight": torch.zeros(3), "counter": torch.ones(1)})
    import_hf(tmp_path / "hf", model, names=names)
    assert_same(model.state_dict(), state | {"counter": torch.ones(1)})
    with pytest.raises(ValueError, match=r"1 tensors missing \['counter'\]"):
        import_hf(tmp_path / "hf", model, names=LLAMA)


def test_names_of_no_family_are_refused_or_ignored_with_a_warning(tmp_path, caplog):
    theirs = {"model.norm.weight": torch.ones(3), "model.layers.61.eh_proj.weight": torch.ones(2)}
    save_file(theirs, tmp_path / "model.safetensors")
    stage = module_of({"norm.weight": torch.zeros(3), "lm_head.weight": torch.zeros(2, 3)})
    with pytest.raises(ValueError, match=r"unknown deepseek tensor 'model.layers.61.eh_proj.weight'"):
        import_hf(tmp_path, stage, names=DEEPSEEK)
    import_hf(tmp_path, stage, names=DEEPSEEK, strict=False)
    assert torch.equal(stage.norm.weight, torch.ones(3))
    ignored, kept = (record.getMessage() for record in caplog.records)
    assert "1 tensors are ignored, no names of the deepseek family: ['model.layers.61.eh_proj.weight']" in ignored
    assert "is missing 1 tensors of the model; they keep their values: ['lm_head.weight']" in kept


def test_a_users_own_map_can_join_projections(tmp_path):
    joined = KeyMap("mine", tuple(Pair(w, "qkv", part=(n, 3, 0)) for n, w in enumerate("qkv")))
    state = {w: torch.randn(4, 3) for w in "qkv"}
    export_hf(saved(tmp_path, state), tmp_path / "hf", names=joined)
    assert torch.equal(tensors_of(tmp_path / "hf")["qkv"], torch.cat([state[w] for w in "qkv"]))
    model = module_of({w: torch.zeros(4, 3) for w in "qkv"})
    import_hf(tmp_path / "hf", model, names=joined)
    assert_same(model.state_dict(), state)


def test_a_users_own_map_can_join_projections_of_different_widths(tmp_path):
    """Fewer key heads than query heads, as in Phi's qkv_proj."""
    widths = {"q": (0, 4), "k": (4, 2), "v": (6, 2)}
    joined = KeyMap("mine", tuple(Pair(w, "qkv", part=(n, 3, 0), rows=widths[w]) for n, w in enumerate("qkv")))
    assert KeyMap.from_json(joined.to_json()) == joined
    state = {w: torch.randn(size, 3) for w, (_, size) in widths.items()}
    export_hf(saved(tmp_path, state), tmp_path / "hf", names=joined)
    assert torch.equal(tensors_of(tmp_path / "hf")["qkv"], torch.cat([state[w] for w in "qkv"]))
    model = module_of({w: torch.zeros(size, 3) for w, (_, size) in widths.items()})
    import_hf(tmp_path / "hf", model, names=joined)
    assert_same(model.state_dict(), state)
    short = KeyMap("mine", (Pair("q", "qkv", part=(0, 1, 0), rows=(6, 4)),))
    with pytest.raises(ValueError, match=r"'qkv' of shape \[8, 3\] has no places 6 to 10 along dimension 0"):
        import_hf(tmp_path / "hf", module_of({"q": torch.zeros(4, 3)}), names=short)


def test_a_map_is_a_value_that_a_file_or_another_package_holds(tmp_path, monkeypatch):
    own = KeyMap(
        "own", (Pair("a.{i}", "b.{i}", rotary=True, head_dim=4), Pair("q", "qkv", part=(0, 3, 0))), ("x",), ("y",)
    )
    for key_map in (own, *KEY_MAPS.values()):
        (tmp_path / "map.json").write_text(key_map.to_json())
        assert load_key_map(str(tmp_path / "map.json")) == key_map

    class Entry:
        name = "own"

        def load(self):
            return own

    monkeypatch.setattr(
        "importlib.metadata.entry_points", lambda *, group: [Entry()] * (group == "titan_ckpt.key_maps")
    )
    assert load_key_map("own") is own
    with pytest.raises(ValueError, match=r"unknown key map 'other'; installed are \['own'\]"):
        load_key_map("other")
    monkeypatch.setattr(Entry, "load", lambda self: 5)
    with pytest.raises(ValueError, match="is a int, not a KeyMap"):
        load_key_map("own")
    for text in ("", "[]", "{}", '{"family": "a", "pairs": [{"ours": "a"}]}', '{"family": "a", "pairs": [5]}'):
        (tmp_path / "map.json").write_text(text)
        with pytest.raises(ValueError, match=r"cannot read the key map .*map\.json: not a key map"):
            load_key_map(str(tmp_path / "map.json"))
    with pytest.raises(ValueError, match="cannot read the key map"):
        load_key_map(str(tmp_path / "none.json"))


def test_a_copy_that_differs_is_refused_by_both_imports(tmp_path):
    names = KeyMap("mine", (Pair("embed", "embed"),), copies=(("ahead.embed", "embed"),))
    save_file({"embed": torch.ones(3), "ahead.embed": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"ahead\.embed and embed are one weight"):
        import_hf(tmp_path, module_of({"embed": torch.zeros(3)}), names=names)
    with pytest.raises(ValueError, match=r"ahead\.embed and embed are one weight"):
        import_hf_step(tmp_path, tmp_path / "root", names=names)
    assert not (tmp_path / "root").exists()
