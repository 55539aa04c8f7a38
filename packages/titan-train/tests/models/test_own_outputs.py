"""A user's module returns its logits as it likes, and one that returns none is refused in one line, by `check` as by `run`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import titan_train.task as tasks
import torch
from titan_train.cli import main
from titan_train.config import load_config
from titan_train.config.model import ModelConfig
from titan_train.export.load import load_exported
from titan_train.generation import generate, load_run
from titan_train.models import build_model
from titan_train.parallel.check import check_model
from titan_train.parallel.layout.run import plan_run
from titan_train.parallel.stages import take_stage
from titan_train.parallel.tensor.checks import check_dropout
from titan_train.serve.folder import load_served
from titan_train.tasks.text import TextTask
from titan_train.train import Trainer
from titan_train.trust.factory import use_code

MODULE = """
import types
import torch
from torch import nn


class Base(nn.Module):
    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, 8)
        self.head = nn.Linear(8, vocab_size)

    def logits(self, tokens):
        return self.head(self.embed(tokens))


class Plain(Base):
    def forward(self, tokens):
        return self.logits(tokens)


class LogitsLoss(Base):
    def forward(self, idx, targets=None):  # nanoGPT's: the last position alone without targets
        logits = self.logits(idx)
        if targets is None:
            return self.logits(idx[:, [-1]]), None
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class LossLogits(Base):
    def forward(self, tokens, labels=None):
        return torch.zeros(()), self.logits(tokens)


class Keys(Base):
    def forward(self, tokens):
        return {"loss": None, "logits": self.logits(tokens)}


class Attribute(Base):
    def forward(self, tokens):
        return types.SimpleNamespace(logits=self.logits(tokens), past=None)


class NoLogits(Base):
    def forward(self, tokens):
        return {"scores": self.logits(tokens)}


class Narrow(Base):
    def forward(self, tokens):
        return self.embed(tokens).sum(-1)


class Few(Base):
    def forward(self, tokens):
        return self.head(self.embed(tokens))[..., :100]


class Window(Base):  # nanoGPT's way to learn positions
    max_seq_len = 24

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.block_size = 24
        self.wpe = nn.Embedding(self.block_size, 8)

    def forward(self, idx, targets=None):
        b, t = idx.size()
        assert t <= self.block_size, f"{t} tokens are too many"
        x = self.embed(idx) + self.wpe(torch.arange(0, t, dtype=torch.long, device=idx.device))
        heads = x.view(b, t, 2, 4).transpose(1, 2)
        x = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).reshape(b, t, 8)
        logits = self.head(x)
        if targets is None:
            return self.head(x[:, [-1], :]), None
        return logits, nn.functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1), ignore_index=-1)


class Remembers(Base):  # keeps what its first call computed
    kept = None

    def forward(self, tokens, targets=None):
        if self.kept is None:
            self.kept = torch.arange(tokens.shape[1], device=tokens.device)
        return self.logits(tokens)


class Half(Base):
    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.embed.to(torch.bfloat16)
        self.head.weight = self.embed.weight


class Casts(Base):
    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head((x.to(torch.bfloat16) @ x.mT).softmax(-1) @ x)  # of one dtype where weights are bf16


class Staged(Base):
    first_stage_parts, last_stage_parts = ("embed",), ("head",)

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.layers = nn.ModuleDict({str(i): nn.Linear(8, 8) for i in range(2)})

    def forward(self, x, skipped=None):
        x = x if self.embed is None else self.embed(x)
        for layer in self.layers.values():
            x, skipped = layer(x), x
        return (x, skipped) if self.head is None else self.head(x + skipped)


class Branches(Base):
    def forward(self, tokens):
        return self.logits(tokens) * (2.0 if tokens.device.type != "meta" and bool(tokens.sum() > 3) else 1.0)


class Broken(Base):
    def forward(self, tokens):
        return self.head(self.embed(tokens).transpose(1, 2))
"""


@pytest.fixture
def code(tmp_path, monkeypatch):
    (tmp_path / "outputs_model.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setenv("TITAN_TRAIN_CODE", "")
    monkeypatch.delitem(sys.modules, "outputs_model", raising=False)
    use_code([str(tmp_path)])
    (tmp_path / "text.txt").write_text("some text\n" * 400)
    (tmp_path / "c.toml").write_text(
        '[model]\nname = "outputs_model:Plain"\nseq_len = 16\n[tokenizer]\nkind = "bytes"\n[data]\ncache_dir = "cache"\n'
        '[[data.sources]]\nname = "a"\nkind = "text"\npaths = ["text.txt"]\n[launch]\ndevice = "cpu"\nnproc = 1\n'
    )
    return tmp_path


def built(name):
    torch.manual_seed(0)
    return build_model(ModelConfig(name=f"outputs_model:{name}"), vocab_size=30, device="cpu")


@pytest.mark.parametrize("name", ["LogitsLoss", "LossLogits", "Keys", "Attribute"])
def test_logits_are_taken_from_what_a_module_returns_them_in(code, name):
    tokens = torch.arange(12).view(2, 6)
    plain, model = built("Plain"), built(name)
    assert torch.equal(model(tokens), plain(tokens))
    model(tokens).square().sum().backward()
    plain(tokens).square().sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_forward_that_needs_targets_is_given_some_that_any_part_of_the_vocabulary_has(code):
    """Under tensor parallelism a rank has part of the logits, and under pipeline parallelism a stage gets hidden states."""
    model = built("LogitsLoss")
    whole = model(torch.full((1, 4), 29))
    model.head = torch.nn.Linear(8, 15)
    assert whole.shape == (1, 4, 30)
    assert model(torch.full((1, 4), 29)).shape == (1, 4, 15)


def test_a_trial_leaves_no_trace_in_the_model(code):
    (code / "d.toml").write_text((code / "c.toml").read_text().replace("Plain", "Remembers"))
    config = load_config("d.toml")
    model = build_model(config.model, vocab_size=259)
    plan = plan_run(config, 1)
    check_model(config, plan.layout, plan.batch, model, vocab_size=259)
    check_dropout(model, {"head": "region"}, 16)
    assert model.kept is None


def test_a_module_of_half_precision_has_float32_masters_and_its_ties(code):
    model = built("Half")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.head.weight is model.embed.weight


def test_a_forward_that_asks_for_half_precision_is_taken_where_a_run_computes_in_it(code):
    words = ["c.toml", "--model.name", "outputs_model:Casts", "--train.dtype", "bf16"]
    assert main(["check", *words, "--code", "."]) == 0
    with Trainer(load_config(words[0], [*words[1:], "--train.steps", "1", "--run.name", "casts"])) as trainer:
        trainer.fit()


def test_a_stage_hands_on_all_that_it_returns(code):
    model = built("Staged")
    first = take_stage(model, range(1), first=True, last=False)
    assert len(first(torch.arange(4)[None])) == 2
    assert isinstance(take_stage(model, range(1, 2), first=False, last=True)(torch.ones(1, 4, 8)), torch.Tensor)


def test_a_module_that_gives_no_logits_is_refused_in_one_line_and_one_that_does_is_exported(code, capsys):
    for name, words in (
        ("NoLogits", "its forward returned a dict for tokens [1, 16]. It must return logits [B, S, V]"),
        ("Narrow", "its forward returned a tensor of shape [1, 16] for tokens [1, 16]"),
        ("Few", "its forward returned 100 logits a token, and the tokenizer has 259 tokens"),
        ("Broken", "its forward failed on tokens [1, 16]: RuntimeError"),
    ):
        arguments = ["c.toml", "--model.name", f"outputs_model:{name}", "--code", "."]
        assert main(["check", *arguments]) == 2
        said = capsys.readouterr().err
        assert words in said
        assert said.count("\n") == 1
        if (
            name == "NoLogits"
        ):  # in a process of its own: the server of ranks of an earlier test has not named this code
            command = [sys.executable, "-m", "titan_train", "run", *arguments]
            assert subprocess.run(command, capture_output=True, text=True, check=False).stderr == said
    words = ["c.toml", "--model.name", "outputs_model:LogitsLoss"]
    assert main(["check", *words, "--code", "."]) == 0
    with Trainer(load_config(words[0], [*words[1:], "--train.steps", "2", "--run.name", "own"])) as trainer:
        trainer.fit()
    export = ["export", "runs/own", "--trust-code", "--code", "."]
    assert main([*export, "--to", "dcp", "--out", "dcp"]) == 0
    assert main([*export, "--to", "hf", "--out", "hf"]) == 2
    assert "or export --to dcp" in capsys.readouterr().err


def test_what_a_module_returns_is_between_it_and_a_loss_of_the_tasks_own(code, monkeypatch):
    class OfScores(TextTask):
        def loss(self, config, vocab_size):
            return lambda output, labels: output["scores"].logsumexp(-1).sum()

    monkeypatch.setitem(tasks._registered, "of_scores", OfScores)
    words = ["c.toml", "--model.name", "outputs_model:NoLogits", "--model.task", "of_scores"]
    assert main(["check", *words, "--code", "."]) == 0
    with Trainer(load_config(words[0], [*words[1:], "--train.steps", "1", "--run.name", "scores"])) as trainer:
        trainer.fit()


def test_a_module_without_a_cache_is_exported_to_onnx_and_one_that_cannot_be_traced_is_refused(code, capsys):
    for library in ("onnxscript", "onnxruntime", "tokenizers"):
        pytest.importorskip(library)
    for name, out, length in (("Window", "onnx", "20"), ("Branches", "refused", "24")):
        words = ["c.toml", "--model.name", f"outputs_model:{name}", "--model.seq-len", length, "--run.name", name]
        with Trainer(load_config(words[0], [*words[1:], "--train.steps", "2"])) as trainer:
            trainer.fit()
        code_of = main(
            ["export", f"runs/{name}", "--trust-code", "--code", ".", "--to", "onnx", "--dtype", "fp32", "--out", out]
        )
        err = capsys.readouterr().err
        assert code_of == (0 if out == "onnx" else 2), err
    assert "Branches has no key-value cache, and its forward cannot be traced as one graph for 1 to 24 tokens" in err
    assert err.count("\n") == 1
    assert not Path("refused").exists()

    assert json.loads(Path("onnx/export.json").read_text())["seq_len"] == 20  # what `eval` reads at once
    run = load_run("runs/Window", trust_code=True, code=["."])
    (want,) = generate(run.model, [run.tokenizer.encode("some").tolist()], max_new_tokens=12)
    words = ["--prompt", "some", "--temperature", "0", "--max-new-tokens", "12"]
    assert main(["generate", "onnx", *words]) == 0
    assert capsys.readouterr().out.rstrip("\n") == "some" + run.tokenizer.decode(want)
    served = load_served(Path("onnx"))
    assert generate(served.model, [served.tokenizer.encode("some").tolist()], max_new_tokens=12) == [want]
    example = [sys.executable, "onnx/generate.py", "some"]
    assert subprocess.run(example, capture_output=True, text=True, check=True).stdout.startswith("some")
    with pytest.raises(ValueError, match="25 positions are needed, but the model has learned 24"):
        load_exported(Path("onnx")).logits(torch.zeros(1, 25, dtype=torch.int64))
