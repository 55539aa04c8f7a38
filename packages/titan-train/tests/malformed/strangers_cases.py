"""Files of a stranger, made to harm: names of code, small files that stand for large ones, records of the wrong kind."""

import gzip
import json
from collections.abc import Iterator

import zstandard

Case = tuple[list[str], dict[str, str | bytes | None]]
_TEXT = {"text.txt": "some text\n" * 500}
_DATA = '[tokenizer]\nkind = "bytes"\n[data]\ncache_dir = "cache"\n'
_EVIL = "\x1b]0;title\x07\x1b[2J\u202e"
_STEP = {"kind": "step", "step": 1, "time": 1.0, "loss": 2.0, "grad_norm": 1.0, "lr": 1e-3, "tokens_per_s": 1.0, "mfu": None,
         "peak_mem_gib": 1.0, "step_time_s": 1.0, "tokens": 10}  # fmt: skip


def names_of_code() -> Iterator[Case]:
    """``model.name`` and ``--code``: what may not be imported or called."""
    names = (
        "transformers:EncoderDecoderModel.from_encoder_decoder_pretrained", "transformers:AutoModelForCausalLM",
        "diffusers:DiffusionPipeline.from_pretrained", "peft:PeftModel.from_pretrained", "torch.hub:load", "torch:load",
        "titan_train.models.build:build_model", "numpy:load", "yaml:unsafe_load", "pydantic:BaseModel", "rich:print",
        "huggingface_hub:snapshot_download", "a.b:c.d", "a:b()", "a:__import__", "a b:c", "../a:b", "/tmp/a:b", ":b", "a:", "::",
        "hf:hf:x", "numpy..linalg:x", ".numpy:x", "numpy.:x", "a:b:c", "a\0b:c", "é:é", _EVIL + ":x",
    )  # fmt: skip
    for name in names:
        toml = f"[model]\nname = {json.dumps(name)}\n"
        yield ["check", "c.toml"], {"c.toml": toml}
        yield ["check", "RUN/config.toml"], {"RUN/config.toml": toml}
    for code in ("", "nowhere", "no.such", "os", "../..nowhere", "a b", _EVIL, "--", "x" * 5000):
        yield ["check", "debug", "--model.name", "numpy:load", "--code", code], {}
    for args in ("encoder_trust_remote_code = true", 'config = "x"', '"__class__" = "x"'):
        name = "transformers:EncoderDecoderModel.from_encoder_decoder_pretrained"
        for command in (["check", "c.toml"], ["check", "c.toml", "--rehearse"], ["plan", "c.toml", "--devices", "2"]):
            yield command, {"c.toml": f'[model]\nname = "{name}"\n[model.args]\n{args}\n'}


def published() -> Iterator[Case]:
    """``config.json`` of a folder that asks for code."""
    llama = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    for more in (
        {"attn_implementation": "evil/kernels"}, {"_attn_implementation": "evil/kernels:x"},
        {"experts_implementation": {"": "evil/kernels"}}, {"text_config": {"attn_implementation": "evil/kernels@main"}},
        {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config"}}, {"model_type": ["llama"]}, {"model_type": None},
        {"hidden_size": "64"}, {"hidden_size": 1e300}, {"rope_scaling": {"type": "evil"}},
        {"torch_dtype": "evil"}, {"vocab_size": 2**70}, {"hidden_act": "evil"},
    ):  # fmt: skip
        yield ["check", "debug", "--model.name", "hf:m"], {"m/config.json": json.dumps(llama | more)}


def patterns() -> Iterator[Case]:
    """Regular expressions that do not end, or are none."""
    for pattern in (
        "(a+)+$",
        "(.|..)*x",
        ".*.*.*.*x",
        "(?:a?){50}a{50}",
        "a" * 500,
        "(",
        "[",
        "*",
        "(?P<x>",
        "\\",
        "(?<=.*)x",
        "a{9999999999}",
    ):
        for key, value in (
            ("optimizer.lr-scales", f"{{{json.dumps(pattern)} = 1.0}}"),
            ("optimizer.frozen-steps", f"{{{json.dumps(pattern)} = 1}}"),
            ("train.freeze", json.dumps([pattern])),
        ):
            yield ["check", "debug", f"--{key}", value], {}


def sizes() -> Iterator[Case]:
    """Files out of all proportion."""
    for toml in (
        "# " + "x" * 2_000_000, ".".join("a" * 20_000) + " = 1", "[" + ".".join(["a"] * 5_000) + "]",
        "".join(f"k{i} = 1\n" for i in range(20_000)), "".join(f"[s{i}]\n" for i in range(20_000)),
        '[model]\nname = "' + "x" * 500_000 + '"', "[train]\nsteps = " + "9" * 500_000, "[train]\nsteps = 1979-05-27",
        "[data]\nsources = [" + "{}," * 3_000 + "]", "x = " + "[" * 400_000, '"' + "k" * 500_000 + '" = 1',
    ):  # fmt: skip
        yield ["check", "c.toml"], {"c.toml": toml}
        yield ["generate", "RUN", "--prompt", "a"], {"RUN/config.toml": toml}
    compressor = zstandard.ZstdCompressor(level=3)
    window = zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters(window_log=31)
    ).compressobj()
    zeros = b"\0" * 2**24
    bombs = {
        "zeros.jsonl.zst": compressor.compress(zeros) * 4,
        "lines.jsonl.zst": compressor.compress(b"\n" * 2**24),
        "window.jsonl.zst": window.compress(b"{}\n") + window.flush(),
        "zeros.jsonl.gz": gzip.compress(zeros),
        "zeros.txt.zst": compressor.compress(b"\xff" * 2**24),
        "cut.jsonl.zst": compressor.compress(b'{"text": "a"}\n' * 1000)[:-9],
    }
    for name, content in bombs.items():
        kind = "text" if ".txt" in name else "jsonl"
        source = f'[[data.sources]]\nname = "a"\nkind = "{kind}"\npaths = ["{name}"]\n'
        yield ["data", "prepare", "c.toml"], {name: content, "c.toml": _DATA + source}


def records() -> Iterator[Case]:
    """Metrics, attempts and traces of the wrong kind, read by every command that looks at a run."""
    lines: tuple[object, ...] = (
        _STEP | {"step": "x"}, _STEP | {"loss": [1]}, _STEP | {"lr": None}, _STEP | {"step_time_s": "x"}, {"kind": "step"},
        _STEP | {"tokens_per_s": {}}, _STEP | {"time": "x"}, _STEP | {"step": 1e400}, _STEP | {"step": -5}, [1], 1, None, "x",
        _STEP | {"split": 3}, _STEP | {"memory": []}, _STEP | {"validation": 1}, {"kind": "validation", "loss": "x", "step": 1},
        {"kind": "event"}, {"kind": "event", "event": 3, "step": "x"}, {"kind": "event", "event": "step_split", "step": 1},
        {"kind": "event", "event": "step_split", "step": 1, "phases_ms": 3, "axes": {"x": 1}},
        {"kind": "event", "event": "straggler", "step": 1, "rank": {}},
        {"kind": "event", "event": _EVIL, "step": 1, "why": _EVIL},
        {"kind": ["step"], "step": 1},
    )  # fmt: skip
    for line in lines:
        yield ["report", "RUN", "--trace"], {"RUN/metrics.jsonl": json.dumps(line) + "\n"}
        yield ["plan", "calibrate", "RUN"], {"RUN/metrics.jsonl": json.dumps(line) + "\n"}
    traces = ("", "[]", "{}", " " * 2**27, '{"titan": {"row": []}}', "[" * 99_999,
              '{"titan": {"row": [], "rank": "x"}, "traceEvents": 3}')  # fmt: skip
    for trace in (b"", b"x", *(gzip.compress(text.encode()) for text in traces)):
        yield ["report", "RUN", "--trace"], {"RUN/traces/rank-0.json.gz": trace}
    yield ["report", "RUN", "--trace"], {"RUN/traces/rank-x.json.gz": gzip.compress(b"{}")}


def readable() -> Iterator[Case]:
    """The same records before commands that show what can be shown: they end well, in few words."""
    for command in (["watch", "RUN", "--once"], ["report", "RUN", "--out", "out/page.html"]):
        for _, files in records():
            if "RUN/metrics.jsonl" in files:
                yield command, files
        attempts = (
            "3",
            "[3]",
            "[{}]",
            '{"a": 1}',
            '[{"started": 3, "status": [1], "error": {}}]',
            json.dumps([{"status": _EVIL}] * 2),
        )
        for info in ("{", "[]", "3", *(f'{{"attempts": {found}}}' for found in attempts)):
            yield command, {"RUN/run.json": info}
