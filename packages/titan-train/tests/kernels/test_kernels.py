"""Elementwise kernels: each equals the plain form, runs where it is put, and is refused where it cannot run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from titan_train.config import Config, KernelsConfig, TrainConfig, parse_config
from titan_train.kernels.apply import apply_kernels, check_kernels, check_taken, choose_kernels, kernel_loss
from titan_train.kernels.measure import agrees, example_inputs, measure_kernels, run_both_ways
from titan_train.kernels.registry import OPERATIONS, kernels_of
from titan_train.models import build_model
from titan_train.models.llama import LlamaArgs
from titan_train.models.llama.model import Llama
from titan_train.parallel.check import check_model
from titan_train.parallel.layout.run import plan_run
from torch import nn

CPU = torch.device("cpu")
# Float32 sums of up to 1,024 terms (a row of the examples) in any order are within 1,024 * 2^-24 of the sum of magnitudes.
WITHIN = 1024 * 2.0**-24


def llama() -> Llama:
    torch.manual_seed(0)
    return Llama(LlamaArgs(vocab_size=61, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=48))


@pytest.fixture(scope="module")
def interpreted():
    pytest.importorskip("liger_kernel")
    script = Path(__file__).with_name("interpreted.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)], capture_output=True, text=True, env=environment
    )
    if "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip("the interpreter of this triton needs an older numpy")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_kernel_equals_the_plain_form_in_values_and_gradients(interpreted):
    found = interpreted["differences"]
    assert sorted(found) == sorted(f"{k.operation}-{k.name}" for o in OPERATIONS for k in kernels_of(o)[1:])
    assert {name: max(errors) for name, errors in found.items() if not max(errors) <= WITHIN} == {}


def test_rotations_of_every_width_and_both_layouts_have_the_bits_of_the_formula(interpreted):
    assert interpreted["rotations"] == []


def test_a_model_computes_with_the_kernels_it_is_given():
    tokens = torch.arange(10)[None] % 61
    plain, changed = llama(), llama()
    calls: list[str] = []

    def counted(name, function):
        return lambda *operands: calls.append(name) or function(*operands)

    chosen = {name: counted(name, kernels_of(name)[0].load()) for name in ("rms_norm", "swiglu", "rope")}
    assert apply_kernels(changed, chosen) == {"rms_norm": 5, "swiglu": 2, "rope": 2}
    torch.testing.assert_close(changed(tokens), plain(tokens))
    assert {name: calls.count(name) for name in chosen} == {"rms_norm": 5, "swiglu": 2, "rope": 2}


def test_what_was_measured_decides_where_nothing_is_said(tmp_path):
    file = tmp_path / "machine.toml"
    file.write_text('[kernels]\nrms_norm = { chosen = "titan" }\nswiglu = { chosen = "titan" }\n')
    chosen = choose_kernels(KernelsConfig(measured=str(file), swiglu="torch"), CPU)
    assert sorted(chosen) == ["rms_norm", "swiglu"]
    found = run_both_ways(chosen["rms_norm"], example_inputs("rms_norm", CPU, 4))
    assert agrees(found, run_both_ways(kernels_of("rms_norm")[1].load(), example_inputs("rms_norm", CPU, 4)))
    assert choose_kernels(KernelsConfig(), CPU) == {}


def test_the_bench_names_the_fastest_that_is_right():
    table = measure_kernels("cpu")
    assert sorted(table) == sorted(OPERATIONS)
    for found in table.values():
        assert found["chosen"] == min(found["microseconds"], key=found["microseconds"].__getitem__)
        assert "differ" not in found


def test_a_kernel_that_computes_something_else_does_not_agree():
    inputs = example_inputs("swiglu", CPU, 4)
    right = run_both_ways(kernels_of("swiglu")[0].load(), inputs)
    assert not agrees(run_both_ways(lambda gate, up: gate.sigmoid() * up, inputs), right)
    assert not agrees(run_both_ways(lambda gate, up: gate * up * float("nan"), inputs), right)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_kernels_for_cuda_are_refused_on_the_cpu(operation):
    pytest.importorskip("liger_kernel")
    with pytest.raises(ValueError, match=rf"kernels.{operation}='liger' cannot run.*for CUDA devices.*Use 'auto'"):
        choose_kernels(KernelsConfig(**{operation: "liger"}), CPU)


CHECKED = {
    "kernels.rope='liger' cannot run": {"kernels": {"rope": "liger"}, "launch": {"device": "cpu"}},
    "kernels.rope='titan' cannot run": {"kernels": {"rope": "titan"}, "launch": {"device": "cpu"}},
    "there is no such file": {"kernels": {"measured": "nowhere.toml"}, "launch": {"device": "cpu"}},
    "kernels.swiglu='titan': gpt_debug has no module": {
        "kernels": {"swiglu": "titan"},
        "model": {"name": "gpt_debug"},
    },
    "needs train.fused_loss=false": {"kernels": {"cross_entropy": "liger"}},
}


@pytest.mark.parametrize("message", CHECKED)
def test_check_refuses_what_a_rank_would_refuse_later(message):
    pytest.importorskip("liger_kernel")
    tree = {"model": {"name": "llama3_debug", "seq_len": 64}, "train": {"global_batch": 8}}
    for section, values in CHECKED[message].items():
        tree[section] = tree.get(section, {}) | values
    config = parse_config(tree)
    plan = plan_run(config, 1)
    with pytest.raises(ValueError, match=message):
        check_model(config, plan.layout, plan.batch, build_model(config.model, vocab_size=None, device="meta"))


def test_check_accepts_kernels_that_only_the_cluster_has():
    config = parse_config({"model": {"name": "flux_tiny"}, "kernels": {"rope": "titan"}, "train": {"global_batch": 8}})
    check_kernels(config, build_model(config.model, vocab_size=None, device="meta"), tp=1)


def test_a_file_is_read_with_care(tmp_path):
    with pytest.raises(ValueError, match="there is no such file"):
        choose_kernels(KernelsConfig(measured=str(tmp_path / "none.toml")), CPU)
    file = tmp_path / "machine.toml"
    file.write_text('[kernels.rope]\nchosen = "warp"\n')
    with pytest.raises(
        ValueError, match=r"rope.chosen='warp': there is no such kernel. Use one of auto, torch, titan, liger"
    ):
        choose_kernels(KernelsConfig(measured=str(file)), CPU)


def test_a_choice_that_changes_nothing_is_refused():
    chosen = choose_kernels(KernelsConfig(rms_norm="titan"), CPU)
    with pytest.raises(ValueError, match="has no module that takes a kernel for it"):
        check_taken(apply_kernels(nn.Linear(2, 2), chosen), KernelsConfig(rms_norm="titan"), "mine")
    config = Config(kernels=KernelsConfig(cross_entropy="torch"))
    chosen = choose_kernels(config.kernels, CPU)
    with pytest.raises(ValueError, match=r"needs train.fused_loss=false"):
        kernel_loss(lambda a, b: a.sum(), chosen, config, 61, whole_vocabulary=True)


def test_the_loss_on_whole_logits_is_the_kernels():
    config = Config(kernels=KernelsConfig(cross_entropy="torch"), train=TrainConfig(fused_loss=False))
    chosen = {"cross_entropy": lambda logits, labels: logits.new_tensor(7.0)}
    loss = kernel_loss(lambda a, b: a.sum(), chosen, config, 61, whole_vocabulary=True)
    assert loss(torch.zeros(1, 2, 61), torch.zeros(1, 2, dtype=torch.int64)) == 7
