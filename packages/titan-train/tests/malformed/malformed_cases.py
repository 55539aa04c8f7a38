"""Inputs that cannot work, over every command: what is typed, and the files that it names.

A case is ``(words, files)``. ``RUN`` in a word is the folder of a finished run, a copy for each case; files are written
into the working directory first, and a name below ``RUN/`` changes the run. Content None makes a pipe that nobody writes to.
"""

import base64
import gzip
from collections.abc import Iterator

import strangers_cases

Case = tuple[list[str], dict[str, str | bytes | None]]
TEXT = {"text.txt": "some text\n" * 500}
BYTES = '[tokenizer]\nkind = "bytes"\n'
DATA = '[data]\ncache_dir = "cache"\n'
SOURCE = '[[data.sources]]\nname = "a"\nkind = "text"\npaths = ["text.txt"]\n'
RANKS = "".join(f"{base64.b64encode(bytes([i])).decode()} {i}\n" for i in range(256))


def all_cases() -> dict[str, Case]:
    """Every case, by a name that says where it comes from."""
    groups = (
        words, settings, toml_files, model_arguments, sources, tokenizers, run_folders, planning, outputs, shown_data,
        downloads, evaluations, serving, exported_folders, comparisons, other_commands, found_by_trying, special_files, odd_names,
        strangers_cases.names_of_code, strangers_cases.published, strangers_cases.patterns, strangers_cases.sizes,
        strangers_cases.records,
    )  # fmt: skip
    return {f"{group.__name__} {i}": case for group in groups for i, case in enumerate(group())}


def words() -> Iterator[Case]:
    """Command lines."""
    for command in (
        "run",
        "check",
        "data prepare",
        "slurm",
        "check --rehearse",
        "generate",
        "export",
        "report",
        "plan",
    ):
        yield command.split(), {}
        yield [*command.split(), "--nonsense"], {}
        yield [*command.split(), "no_such_thing", "--zzz", "1"], {}
        yield [*command.split(), ""], {}
        yield [*command.split(), "x" * 5000], {}
    yield ["zap"], {}
    yield ["runn"], {}
    for option, values in {
        "--max-new-tokens": ["1e8", "0", "-1", "x", "", "nan", "9" * 50],
        "--temperature": ["-1", "nan", "inf", "hot"],
        "--top-p": ["2", "-0.1", "nan"],
        "--samples": ["0", "1.5"],
        "--seed": ["-1", "x"],
        "--step": ["-3", "99", "last"],
        "--top-k": ["-1"],
    }.items():
        for value in values:
            yield ["generate", "RUN", "--prompt", "a", option, value], {}
    yield ["generate", "RUN"], {}
    yield ["generate", "RUN", "--prompt", ""], {}
    yield ["generate", "RUN", "--prompt", "a", "stray"], {}
    yield ["generate", "RUN", "--prompt", "a", "--code", "nowhere"], {}
    for option, value in [("--to", "zap"), ("--step", "99"), ("--dtype", "int3"), ("--max-shard-gb", "0")]:
        yield ["export", "RUN", "--out", "out", option, value], {}
    yield ["export", "RUN"], {}
    for extra in (
        ["--port", "99999"], ["--port", "0"], ["--warn-s", "x"], ["--time", "soon"], ["--partition", "a\nb"],
        ["--launch.nnodes", "2"], ["--launch.nproc", "0"], ["--account", "$(id)"],
    ):  # fmt: skip
        yield ["slurm", "debug", "--launch.nproc", "1", *extra], {}
    yield ["slurm", "debug"], {}


def settings() -> Iterator[Case]:
    """Settings, as typed."""
    for option, values in {
        "--train.steps": ["1e26", "1.5", "0", "-1", "nan", "x", "", "9" * 400],
        "--train.global-batch": ["0", "7777777777777", "x", "1_0_"],
        "--train.microbatch": ["5", "-1"],
        "--train.dtype": ["fp64", "", "FP32 "],
        "--optimizer.lr": ["nan", "inf", "-1", "-inf", "fast"],
        "--optimizer.name": ["adam", "SGD!", ""],
        "--optimizer.betas": ["0.9", "[0.9, 2]", "x y"],
        "--metrics.report": ["yes", "2", ""],
        "--parallel": ["zz9", "", "pp0", "tp-1", "pp2 pp3"],
        "--parallel.pp": ["0", "1000000000", "x"],
        "--parallel.tp": ["4611686018427387904"],
        "--parallel.reshard": ["0", "true", "often"],
        "--pipeline.cuts": ["[1", "[2, 1]", "x", "[1.5]"],
        "--run.name": ["a/b", "", ".", "..", "n" * 300, "a\0b", "a\nb", "\udcff"],
        "--run.seed": ["-1", "1e3"],
        "--model.name": ["llama3_9b", "os:system", "a:b:c", ":", "x:y", "json:loads", ""],
        "--model.seq-len": ["0", "-5", "1000000000000"],
        "--model.init": ["hf:", "elsewhere", "hf:missing"],
        "--model.args": ["x", "{a = 1", "{dim = []}"],
        "--schedule.min-lr-factor": ["2", "nan"],
        "--checkpoint.every": ["-5", "often"],
        "--launch.nproc": ["-1", "100000", "x"],
        "--launch.faults": ["zap", "kill", "kill rank=x step=1", "kill rank=9 step=1 y=2", "nan step=nan"],
        "--launch.port": ["99999", "-1"],
        "--launch.device": ["tpu"],
        "--data.sources.0.weight": ["-1", "nan", "0"],
        "--data.sources.7.name": ["x"],
        "--data.sources": ["x", "[]", "[{}]", "[1]"],
        "--tokenizer.kind": ["spm"],
        "--data.validation-fraction": ["1.0", "-0.1"],
        "--activations.every": ["0"],
        "--float8.recipe": ["fp7"],
    }.items():
        for value in values:
            yield ["check", "debug", option, value], {}
    yield ["run", "debug", "--launch.elastic", "--launch.min-ranks", "9", "--launch.nproc", "2"], {}
    yield ["run", "debug", "--launch.launcher", "machines", "--launch.nnodes", "2", "--launch.endpoint", "h:99999"], {}
    yield ["run", "debug", "--launch.nnodes", "2"], {}


def toml_files() -> Iterator[Case]:
    """Configuration files."""
    for content in (
        b"\xff\xfe\x00", b"\xef\xbb\xbf[run]\nzzz = 1", "[run\n", "a = 1\na = 2", "= 1", "run = 1", "run = []",
        '[run]\nname = ""', 'extends = "missing"', 'extends = "."', 'extends = "c.toml"', "extends = [1]",
        "data = []", "[data]\nsources = 5", "[data]\nsources = [5]", "[data]\nsources = [[]]", "[model]\nargs = [1]",
        "[model]\nargs = {a = [1]}", "[model]\nargs = {a = {b = 1}}", '[model]\nargs = {"" = 1}',
        "x = " + "[" * 100 + "]" * 100, "x = " + "[" * 5000 + "]" * 5000, "x = " + "{a = " * 300 + "1" + "}" * 300,
        "[" + "a." * 3000 + "a]\nb = 1", '[model]\nname = "' + "x" * 100_000 + '"', '[run]\nname = "\\u0000"',
        '[run]\ndir = "\\u0000"', "[train]\nsteps = 1979-05-27T07:32:00Z", "[train]\nsteps = 0x7fffffffffffffffffff",
        "[train]\nsteps = " + "9" * 5000, "[train]\nsteps = nan", "[optimizer]\nlr = inf", "[optimizer]\nbetas = [0.9]",
        '[optimizer]\nbetas = ["a", "b"]', "[parallel]\ntp_plan = {a = 1}", '[parallel]\nreshard_overrides = {a = "z"}',
        "[launch]\nray = 1", "[launch]\nray = {address = 1}", '[launch]\nfaults = "kill rank=1e400 step=1"',
        "[launch]\nnodes = 2", "[trian]\nsteps = 1", "[pipeline]\ncuts = [1, 1]", "[pipeline]\ncuts = [900]\n[parallel]\npp = 2",
        '[activations]\ncheckpoint = "pattern"', '[metrics]\ntrackers = ["zz"]', '[tokenizer]\nkind = "tiktoken"',
    ):  # fmt: skip
        yield ["check", "c.toml"], {"c.toml": content}
    yield ["check", "a.toml"], {"a.toml": 'extends = "b.toml"', "b.toml": 'extends = "a.toml"'}
    yield ["check", "."], {}
    yield ["check", "debug", "--pipeline.schedule", "nonsense"], {}
    for content in ('{"a": 1}', "[]", "", "{" * 3000, b"\xff"):
        yield (
            ["check", "c.toml"],
            {"c.toml": '[pipeline]\nschedule = "s.json"\n[parallel]\npp = 2', "s.json": content},
        )


def model_arguments() -> Iterator[Case]:
    """Shapes that no model has."""
    for model, changes in {
        "llama3_debug": [
            ("dim", "1000000000000"), ("dim", "0"), ("dim", "65"), ("num_heads", "3"), ("num_heads", "2000000000"),
            ("num_layers", "1000000000000"), ("num_layers", "0"), ("num_kv_heads", "5"), ("norm_eps", "-1"),
            ("vocab_size", "3"), ("rope_theta", "0"), ("head_dim", "4611686018427387904"), ("zzz", "1"), ("dim", "64.0"),
        ],
        "gpt_debug": [("dim", "-1"), ("max_seq_len", "8"), ("num_layers", "99999999"), ("ffn_dim", "-3"), ("dim", "x")],
        "qwen3_moe_debug": [
            ("num_experts", "1000000000000"), ("num_experts", "0"), ("experts_per_token", "999"), ("scores", "zap"),
            ("ffn_dim", "-1"), ("head_dim", "4611686018427387904"),
        ],
        "deepseek_debug": [("q_lora_rank", "-1"), ("num_heads", "4611686018427387904"), ("num_layers", "true")],
    }.items():  # fmt: skip
        for key, value in changes:
            yield ["check", "debug", "--model.name", model, f"--model.args.{key}", value], {}
    yield ["check", "llama3_8b", "--hardware", "h100", "--devices", "8", "--model.args.zzz", "1"], {}
    yield ["check", "debug", "--rehearse", "--devices", "2", "--model.args.dim", "x"], {}


def sources() -> Iterator[Case]:
    """Data."""
    files: dict[str, str | bytes] = {
        "empty.txt": "", "mixed.txt": b"abc \xff\xfe def", "b.jsonl": '{"text": "a"}\nnot json\n', "c.jsonl": '{"txt": "a"}\n',
        "d.jsonl": "[1]\n", "n.jsonl": '{"text": null}\n', "num.jsonl": '{"text": 3}\n', "x.gz": b"\x1f\x8b\x08\x00garbage",
        "cut.jsonl.gz": gzip.compress(b'{"text": "a"}\n' * 100)[:-9], "x.jsonl.zst": b"\x28\xb5\x2f\xfdgarbage",
        "y.jsonl.zst": b"nothing", "nul.jsonl": b'{"text": "a"}\n\x00\x00', "utf.jsonl": b'{"text": "\xff\xfe"}\n',
        "lone.jsonl": '{"text": "\\ud800"}\n', "cut.jsonl": '{"text": "abc', "m.idx": "no index", "m.bin": "", "e.jsonl": "",
        "deep.jsonl": '{"text": ' + "[" * 5000 + "]" * 5000 + "}\n",
    }  # fmt: skip
    given = [
        ("text", ["empty.txt", "missing*", "missing.txt", "mixed.txt", "x.gz", "/dev/null", "x" * 5000, "[", ""]),
        ("jsonl", [name for name in files if ".jsonl" in name] + ["."]),
        ("tokens", [".", "text.txt", "missing"]),
        ("megatron", ["text.txt", "m", "missing", "."]),
        ("zap", ["text.txt"]),
    ]
    for kind, paths in given:
        for path in paths:
            source = f'[[data.sources]]\nname = "a"\nkind = "{kind}"\npaths = ["{path}"]\n'
            yield ["data", "prepare", "c.toml"], {**files, **TEXT, "c.toml": BYTES + DATA + source}
    for extra in (
        "num_threads = -1",
        "shard_tokens = 0",
        "validation_fraction = 1.0",
        'verify = "zap"',
        "prefetch = -1",
    ):
        yield ["data", "prepare", "c.toml"], {**TEXT, "c.toml": f"{BYTES}{DATA}{extra}\n{SOURCE}"}
    for cache in ("text.txt", "text.txt/below", "/proc/nothing", "x" * 300):
        yield ["data", "prepare", "c.toml"], {**TEXT, "c.toml": f'{BYTES}[data]\ncache_dir = "{cache}"\n{SOURCE}'}
    for source in (
        SOURCE + SOURCE,
        SOURCE + "weight = 0\n",
        SOURCE.replace('"a"', '"a b"'),
        SOURCE + "max_epochs = -1\n",
    ):
        yield ["data", "prepare", "c.toml"], {**TEXT, "c.toml": BYTES + DATA + source}


def tokenizers() -> Iterator[Case]:
    """Tokenizers, and training one."""
    pair = base64.b64encode(b"ab").decode()
    for content in (
        b"\x00\x01garbage", b"", RANKS + f"{pair} 3\n", RANKS + f"{pair} -5\n", RANKS + f"{pair} 999999999\n",
        RANKS + f"{pair} 99999999999999999999\n", RANKS + "!!! 256\n", RANKS + f"{pair} x\n", "YQ== 0\n", RANKS + "YQ== 256\n",
        b"\xff\xfe" + RANKS.encode("utf-16-le"),
    ):  # fmt: skip
        for command in ("data prepare", "check"):
            toml = f'[tokenizer]\nkind = "tiktoken"\npath = "t"\n{DATA}{SOURCE}'
            yield [*command.split(), "c.toml"], {**TEXT, "t": content, "c.toml": toml}
    for extra in ('pattern = "("', 'pattern = "[[["', 'special_tokens = ["<a>", "<a>"]', 'eos_token = "<zz>"'):
        toml = f'[tokenizer]\nkind = "tiktoken"\npath = "t"\n{extra}\n{DATA}{SOURCE}'
        yield ["data", "prepare", "c.toml"], {**TEXT, "t": RANKS, "c.toml": toml}
    for content in (b"\x0a\x05hello", b"", "hello", bytes(1000)):
        toml = f'[tokenizer]\nkind = "sentencepiece"\npath = "t.model"\n{DATA}{SOURCE}'
        yield ["data", "prepare", "c.toml"], {**TEXT, "t.model": content, "c.toml": toml}
    for kind in ("sentencepiece", "hf", "tiktoken"):
        for path in ("missing.model", "text.txt", ".", "x" * 5000):
            toml = f'[tokenizer]\nkind = "{kind}"\npath = "{path}"\n{DATA}{SOURCE}'
            yield ["data", "prepare", "c.toml"], {**TEXT, "c.toml": toml}
    for content in ("{}", "[]", '{"model": 1}', "garbage", "[" * 99_999, b"\xff"):
        toml = f'[tokenizer]\nkind = "hf"\npath = "t"\n{DATA}{SOURCE}'
        yield ["data", "prepare", "c.toml"], {**TEXT, "t/tokenizer.json": content, "c.toml": toml}
    for extra in (
        ["--out", "o", "missing.txt"], ["--out", "o", "--vocab-size", "10", "text.txt"],
        ["--out", "o", "--max-mb", "nan", "text.txt"],
        ["--out", "o", "--vocab-size", "9999999", "text.txt"], ["--out", "o", "empty.txt"], ["text.txt"],
        ["--out", "o", "--model-type", "zap", "text.txt"], ["--out", "o", "--max-mb", "0", "text.txt"],
    ):  # fmt: skip
        yield ["data", "tokenizer", *extra], {**TEXT, "empty.txt": ""}
    yield ["data", "zap", "--out", "o"], {}


def run_folders() -> Iterator[Case]:
    """Folders of runs that are damaged, or none."""
    for command in (["report"], ["generate", "--prompt", "a"], ["export", "--out", "out"]):
        for folder in ("missing", ".", "text.txt", "text.txt/below", "a\0b"):
            yield [command[0], folder, *command[1:]], TEXT
        for config in (b"\xff\xfe", "[run\n", "[zzz]\na = 1", "[train]\nsteps = nan", "[" * 9999):
            yield [command[0], "RUN", *command[1:]], {"RUN/config.toml": config}
        if command[0] != "report":
            yield [command[0], "RUN", *command[1:]], {"RUN/config.toml": '[model]\nname = "os:system"'}
    for file, content in {
        "MANIFEST.json": [b"", b"{", b"[]", b"{}", b"[" * 9999, b"\xff", b'{"format": 99}', b"null"],
    }.items():
        for bad in content:
            yield ["generate", "RUN", "--prompt", "a"], {f"RUN/checkpoints/*/{file}": bad}
    yield ["report", "RUN", "missing", "--out", "c.html"], {}
    yield ["plan", "calibrate", "RUN", "--hardware", "zap"], {}
    yield ["plan", "calibrate", "missing"], {}


def planning() -> Iterator[Case]:
    """The planner."""
    plan = ["plan", "llama3_8b", "--devices", "8", "--global-batch", "64"]
    for extra in (
        ["--hardware", "zap"], ["--precision", "fp3"], ["--fix", "tp"], ["--fix", "zap=2"], ["--fix", "tp=0"], ["--top", "0"],
        ["--explain", "0", "1"], ["--explain", "1", "9999"], ["--stack", "zap"], ["--max-mem", "nan"], ["--seq-len", "0"],
        ["--devices", "0"], ["--devices", "x"], ["--devices", "9" * 30], ["--global-batch", "-1"], ["--max-mem", "0.001"],
        ["--out", "missing/below/x"], ["--hardware", "h.toml"],
    ):  # fmt: skip
        yield [*plan, *extra], {"h.toml": "x = 1"}
    yield ["plan", "zap", "--devices", "8", "--global-batch", "64"], {}
    yield ["check", "llama3_70b", "--hardware", "h100", "--devices", "1"], {}
    yield ["check", "llama3_8b", "--hardware", "h100", "--devices", "7", "--parallel.tp", "2"], {}
    yield ["check", "llama3_8b", "--hardware", "h100", "--devices", "8", "--constants", "missing.toml"], {}
    yield ["check", "llama3_8b", "--hardware", "h100", "--devices", "8", "--constants", "c.toml"], {"c.toml": "x = 1"}
    for content in (
        "",
        "x = 1",
        "[compute]\n",
        "[compute]\nbf16_tflops = -1",
        b"\xff",
        "[" * 3000,
        'title = 3\ncompute = "x"',
    ):
        yield ["check", "llama3_8b", "--devices", "8", "--hardware", "h.toml"], {"h.toml": content}
    yield ["check", "debug", "--rehearse", "--devices", "0"], {}
    yield ["check", "debug", "--rehearse", "--devices", "7", "--parallel.tp", "2"], {}


def outputs() -> Iterator[Case]:
    """Places where nothing can be written."""
    slurm = ["slurm", "debug", "--launch.nproc", "1", "--out"]
    for out in ("folder", "missing/below", "text.txt/below", "x" * 300, "a\0b"):
        yield [*slurm, out], {**TEXT, "folder/x": ""}
    for out in ("folder", "text.txt/below", "x" * 300, "a\0b"):
        yield ["report", "RUN", "--out", out], {**TEXT, "folder/x": ""}
    for out in ("folder", "text.txt", "text.txt/below", "x" * 300):
        yield ["export", "RUN", "--out", out], {**TEXT, "folder/x": ""}
    for folder in ("text.txt", "text.txt/below", "/proc/nothing", "x" * 300):
        yield ["run", "debug", "--run.dir", folder, "--launch.nproc", "1"], TEXT


def shown_data() -> Iterator[Case]:
    """`data show`."""
    for extra in (
        ["zap"], ["show"], ["show", "c.toml", "--samples", "0"], ["show", "c.toml", "--samples", "1001"],
        ["show", "c.toml", "--first", "-1"], ["show", "c.toml", "--first", "9" * 30], ["show", "c.toml", "--zzz", "1"],
        ["show", "missing.toml"], ["show", "no_such_config"], ["show", "c.toml", "stray"],
        ["show", "c.toml", "--model.seq-len", "100000000"], ["show", "c.toml", "--data.sources.0.paths", "missing.txt"],
        ["show", "c.toml", "--data.validation-fraction", "1"], ["show", "c.toml", "--tokenizer.kind", "hf"],
    ):  # fmt: skip
        yield ["data", *extra], {**TEXT, "c.toml": BYTES + DATA + SOURCE}
    for lines in (
        '{"messages": 1}\n',
        '{"messages": [{"role": "user"}]}\n',
        '{"messages": []}\n',
        '{"text": "a"}\n',
        "[]\n",
    ):
        source = SOURCE.replace('"text"', '"chat"').replace("text.txt", "chat.jsonl")
        yield ["data", "show", "c.toml"], {"chat.jsonl": lines, "c.toml": BYTES + DATA + source}


def downloads() -> Iterator[Case]:
    """`data download`; the test lets no server answer."""
    for extra in (
        [], ["org/name"], ["org/name", "--out", "o"], ["hf:", "--out", "o"], ["hf:datasets/", "--out", "o"],
        ["hf:a/b/c/d", "--out", "o"], ["hf:../..", "--out", "o"], ["hf:" + "x" * 5000, "--out", "o"],
        ["hf:org/name", "--out", "text.txt"], ["hf:org/name", "--out", "text.txt/below"], ["hf:org/name", "--out", "a\0b"],
        ["hf:org/name", "--out", "o", "--only", "zap"], ["hf:org/name", "--out", "o", "--revision", "a\nb"],
        ["hf:org/name", "--out", "o", "--include"], ["hf:org\0/name", "--out", "o"], ["hf:org/name", "--out", "o"],
        ["hf:org/name", "hf:org/other", "--out", "o"], ["hf:org/name", "--out", "x" * 300],
    ):  # fmt: skip
        yield ["data", "download", *extra], TEXT
    for record in ("", "{", "[]", "null", '{"repository": 3}', "[" * 9999, b"\xff", '{"repository": "other/name"}'):
        yield ["data", "download", "hf:org/name", "--out", "o"], {"o/download.json": record}


def evaluations() -> Iterator[Case]:
    """`eval`."""
    for extra in (
        [], ["--text"], ["--text", "missing.txt"], ["--text", "empty.txt"], ["--text", "."], ["--text", "b.bin"],
        ["--text", "a\0b"], ["--text", "n.jsonl"], ["--text", "bad.jsonl"], ["--text", "list.jsonl"],
        ["--text", "text.txt", "--batch-size", "0"], ["--text", "text.txt", "--max-length", "1"],
        ["--text", "text.txt", "--step", "77"], ["--text", "text.txt", "--json", "missing/below/x.json"],
        ["--text", "text.txt", "--json", "folder"], ["--text", "text.txt", "--limit", "x"], ["--tasks", ","],
        ["--tasks", "no_such_task"], ["--tasks", "x", "--include-path", "missing"],
        ["--tasks", "mine", "--include-path", "tasks"], ["--text", "text.txt", "--code", "nowhere"],
        ["--text", "text.txt", "--json", "x" * 300], ["--text", "text.txt", "--json", "a\0b"],
    ):  # fmt: skip
        files = {
            "empty.txt": "", "b.bin": b"\xff\xfe", "n.jsonl": '{"zzz": 1}\n', "bad.jsonl": "{\n", "list.jsonl": "[1]\n",
            "folder/x": "", "tasks/mine.yaml": "task: [mine",
        }  # fmt: skip
        yield ["eval", "RUN", *extra], {**TEXT, **files}
    for folder in ("missing", ".", "text.txt", "text.txt/below", "a\0b"):
        yield ["eval", folder, "--text", "text.txt"], TEXT
    yield ["eval", "RUN", "--text", "text.txt"], {**TEXT, "RUN/config.toml": "[run\n"}
    yield ["eval", "RUN", "--text", "text.txt"], {**TEXT, "RUN/config.toml": '[model]\nname = "os:system"'}


def serving() -> Iterator[Case]:
    """`serve`, which otherwise does not end."""
    for extra in (
        ["--port", "99999"], ["--port", "-1"], ["--port", "x"], ["--max-new-tokens", "0"], ["--step", "77", "--port", "0"],
        ["--step", "-1"], ["--code", "nowhere", "--port", "0"], ["--zzz"], ["stray"],
    ):  # fmt: skip
        yield ["serve", "RUN", *extra], {}
    for folder in ("missing", ".", "text.txt", "text.txt/below", "a\0b"):
        yield ["serve", folder, "--port", "0"], TEXT
    for config in (b"\xff\xfe", "[run\n", '[model]\nname = "os:system"', '[model]\nname = "gpt_debug"'):
        yield ["serve", "RUN", "--port", "0"], {"RUN/config.toml": config}


def exported_folders() -> Iterator[Case]:
    """Folders that look exported, for `generate` and `eval`; and targets, for `export`."""
    config = '{"model_type": "llama", "hidden_size": 64}'
    token = {
        "E/tokenizer.json": '{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}, "added_tokens": []}'
    }
    shape = '{"cache": {"layers": 1, "heads": 1, "width": 8}, "max_positions": null, "step": 1}'
    for files in (
        {"E/config.json": config, "E/model.safetensors": b""},
        {"E/config.json": config, "E/model.safetensors": b"\xff" * 100, **token},
        {"E/config.json": "{", "E/model.safetensors": b"", **token},
        {"E/config.json": "[]", "E/model.safetensors": b"", **token},
        {"E/config.json": '{"model_type": "zap"}', "E/model.safetensors": b"", **token},
        {"E/config.json": '{"auto_map": {"AutoModelForCausalLM": "evil.Evil"}, "model_type": "evil"}',
         "E/evil.py": "raise SystemExit(77)", "E/model.safetensors": b"", **token},
        {"E/model.onnx": b""}, {"E/model.onnx": b"garbage", "E/export.json": shape}, {"E/model.onnx": b"", "E/export.json": "[]"},
        {"E/model.onnx": b"", "E/export.json": "{"}, {"E/model.onnx": b"", "E/export.json": '{"cache": {"zzz": 1}}', **token},
        {"E/model.pt2": b"garbage", "E/export.json": shape}, {"E/model.pt2": b""},
        {"E/model.gguf": b""}, {"E/model.gguf": b"GGUF\x03\x00\x00\x00" + b"\xff" * 16}, {"E/model.gguf": b"garbage"},
    ):  # fmt: skip
        yield ["generate", "E", "--prompt", "a", "--temperature", "0"], files
        yield ["eval", "E", "--text", "text.txt"], {**TEXT, **files, "E/tokenizer_config.json": "{}"}
    for extra in (
        ["--chat"], ["--stop", "a"], ["--compile"], ["--temperature", "1"], ["--samples", "2"], ["--repetition-penalty", "2"],
        ["--step", "3"], ["--code", "mine"],
    ):  # fmt: skip
        yield ["generate", "E", "--prompt", "a", "--temperature", "0", *extra], {"E/model.onnx": b""}
    for extra in (
        ["--to", ""], ["--to", "hf,hf"], ["--to", ","], ["--to", "gguf,zap"], ["--dtype", "float8", "--to", "gguf"],
        ["--dtype", "q8_0"], ["--max-shard-gb", "nan"], ["--max-shard-gb", "-1"], ["--step", "-1"], ["--code", "nowhere"],
        ["--dtype", "q8_0", "--to", "gguf,hf"],
    ):  # fmt: skip
        yield ["export", "RUN", "--out", "out", *extra], {}
    yield ["export", "E", "--out", "out"], {"E/model.onnx": b""}


def comparisons() -> Iterator[Case]:
    """`report` of several runs."""
    for extra in (
        [], ["RUN", "RUN"], ["RUN", "."], ["RUN", "text.txt"], ["RUN", "text.txt/below"], ["RUN", "a\0b"],
        ["RUN"] * 9, ["RUN", "RUN2", "--out", "folder"], ["RUN", "RUN2", "--out", "text.txt/below"], ["RUN", "./RUN"],
        ["RUN", "RUN2", "--out", "x" * 300], ["RUN", "RUN2", "--zzz"], ["RUN", "x" * 5000],
    ):  # fmt: skip
        files = {"RUN2/config.toml": "[train]\nsteps = 2", "RUN2/metrics.jsonl": "", "folder/x": ""}
        yield ["report", *extra], {**TEXT, **files}
    for config in (b"\xff", "[run\n", "", "[" * 9999):
        yield ["report", "RUN", "RUN2"], {"RUN2/config.toml": config, "RUN2/metrics.jsonl": ""}


def other_commands() -> Iterator[Case]:
    """What is left, and settings of the newer sections."""
    for command in ("list", "doctor", "plan calibrate", "data", "data download", "eval", "serve", "data tokenizer"):
        yield [*command.split(), "--nonsense"], {}
        yield [*command.split(), "x" * 5000, "--zzz", "1"], {}
    yield ["doctor", "--bench", "missing/below/x.toml"], {}
    yield ["doctor", "--bench", "folder"], {"folder/x": ""}
    for backend in ("zap", "", "a b", "os:system", "inductorr"):
        yield ["check", "debug", "--compile.backend", backend], {}
        yield ["check", "debug", "--compile.backend", backend, "--compile.enabled"], {}
    yield ["check", "debug", "--compile.backend", "eager", "--compile.mode", "max-autotune-no-cudagraphs"], {}
    for tracker in ('["zap"]', '[""]', '"x"', "[1]"):
        yield ["check", "debug", "--metrics.trackers", tracker], {}


def found_by_trying() -> Iterator[Case]:
    """What a person tried who had not read the groups above."""
    step = '{"kind":"step","step":"x","loss":[]}\n'
    yield ["plan", "calibrate", "RUN"], {"RUN/metrics.jsonl": step * 9}
    yield ["plan", "calibrate", "RUN"], {"RUN/run.json": '{"attempts": [{"world_size": "x"}]}'}
    yield ["plan", "calibrate", "RUN"], {"RUN/metrics.jsonl": b"\xff\x00" * 99}
    yield (
        ["check", "llama3_8b", "--hardware", "h100", "--devices", "8", "--constants", "c.toml"],
        {"c.toml": 'matmul = "x"'},
    )
    yield (
        ["check", "llama3_8b", "--hardware", "h100", "--devices", "8", "--constants", "c.toml"],
        {"c.toml": "matmul = nan"},
    )
    yield ["generate", "RUN", "--prompt", "a", "--samples", "100000000"], {}
    for words in (["--run.dir", "~nosuchuser/x"], ["--model.init", "hf:~nosuch/x"], ["--model.name", "hf:~nosuch/x"]):
        yield ["check", "debug", *words], {}
    yield ["data", "prepare", "c.toml"], {"c.toml": BYTES + DATA + SOURCE.replace("text.txt", "~nosuch/x.txt")}
    yield ["data", "prepare", "c.toml"], {**TEXT, "c.toml": f'{BYTES}[data]\ncache_dir = "~nosuch/x"\n{SOURCE}'}
    yield ["data", "prepare", "c.toml"], {"c.toml": BYTES + DATA + SOURCE.replace("text.txt", "/dev/zero")}
    for kind in ("parquet", "arrow"):
        source = SOURCE.replace('"text"', f'"{kind}"').replace("text.txt", f"x.{kind}")
        yield ["data", "prepare", "c.toml"], {f"x.{kind}": b"PAR1ARROW1garbage", "c.toml": BYTES + DATA + source}
    for runs in (["RUN"], ["RUN", "RUN2"]):
        yield ["report", *runs, "--out", ""], {"RUN2/config.toml": "[run]\nname = 'b'"}
    yield ["doctor", "--bench", ""], {}
    yield ["slurm", "debug", "--launch.nproc", "1", "--partition", "-x; rm -rf /"], {}
    yield ["generate", "RUN", "--prompt", "\ud800"], {}
    yield ["generate", "RUN", "--prompt", "a", "--stop", ""], {}
    yield ["check", "debug", "--train.freeze", '["["]'], {}
    yield ["report", "RUN"], {"RUN/config.toml": 'train = 3\nmodel = [1]\nparallel = "x"'}


def special_files() -> Iterator[Case]:
    """Pipes, devices and files of the kernel, which a reader could wait for for ever."""
    endless = ("p", "/dev/zero", "/proc/kmsg", "/dev/stdin", "/dev/tty")
    for name in endless:
        for kind in ("text", "jsonl", "parquet", "megatron", "tokens", "chat"):
            source = f'[[data.sources]]\nname = "a"\nkind = "{kind}"\npaths = ["{name}"]\n'
            yield ["data", "prepare", "c.toml"], {"p": None, "c.toml": BYTES + DATA + source}
        for kind in ("tiktoken", "sentencepiece", "hf"):
            toml = f'[tokenizer]\nkind = "{kind}"\npath = "{name}"\n{DATA}{SOURCE}'
            yield ["data", "prepare", "c.toml"], {**TEXT, "p": None, "c.toml": toml}
        yield ["check", name], {"p": None}
        yield ["check", "c.toml"], {"p": None, "c.toml": f'extends = "{name}"'}
        yield ["check", "debug", "--pipeline.schedule", name, "--parallel.pp", "2", "--launch.nproc", "2"], {"p": None}
        yield ["check", "debug", "--model.init", f"hf:{name}"], {"p": None}
        yield ["check", "debug", "--model.name", f"hf:{name}"], {"p": None}
        yield ["check", "llama3_8b", "--devices", "8", "--hardware", f"./{name}" if name == "p" else name], {"p": None}
        yield ["check", "llama3_8b", "--hardware", "h100", "--devices", "8", "--constants", name], {"p": None}
        yield ["eval", "RUN", "--text", name], {"p": None}
        yield ["data", "tokenizer", "--out", "o", name], {"p": None}
        yield ["report", name], {"p": None}
        yield ["generate", name, "--prompt", "a"], {"p": None}
    for command in (["generate", "--prompt", "a"], ["export", "--out", "out"], ["eval", "--text", "text.txt"]):
        yield [command[0], "RUN", *command[1:]], {**TEXT, "RUN/config.toml": None}
    yield ["generate", "RUN", "--prompt", "a"], {"RUN/checkpoints/*/MANIFEST.json": None}
    yield ["data", "download", "hf:org/name", "--out", "o"], {"o/download.json": None}
    for file in ("tokenizer.json", "config.json"):
        toml = f'[tokenizer]\nkind = "hf"\npath = "t"\n{DATA}{SOURCE}'
        yield ["data", "prepare", "c.toml"], {**TEXT, f"t/{file}": None, "c.toml": toml}
        yield ["check", "debug", "--model.init", "hf:t"], {f"t/{file}": None}
    for file in ("model.onnx", "model.gguf", "config.json", "export.json"):
        yield ["generate", "E", "--prompt", "a", "--temperature", "0"], {f"E/{file}": None}
    shards = {"m.idx": None, "m.bin": b""}
    source = '[[data.sources]]\nname = "a"\nkind = "megatron"\npaths = ["m"]\n'
    yield ["data", "prepare", "c.toml"], {**shards, "c.toml": BYTES + DATA + source}
    source = '[[data.sources]]\nname = "a"\nkind = "tokens"\npaths = ["d"]\n'
    yield ["data", "prepare", "c.toml"], {"d/manifest.json": None, "c.toml": BYTES + DATA + source}


def odd_names() -> Iterator[Case]:
    """Words that are no names: options as values, other alphabets' digits, control characters, paths in a circle."""
    for value in (
        "--",
        "-",
        "--help=1",
        "=",
        "==",
        "\u0661\u0662",
        "1\u00a02",
        "\x1b[31m",
        "\u202e",
        "a\tb",
        "0x10",
        "1e3j",
        "1_000_",
    ):
        yield ["check", "debug", "--train.steps", value], {}
        yield ["plan", "llama3_8b", "--devices", value, "--global-batch", "64"], {}
        yield ["generate", "RUN", "--prompt", "a", "--max-new-tokens", value], {}
    for words in (
        ["--train.steps="],
        ["--=1"],
        ["--.=1"],
        ["--train.=1"],
        ["--.steps", "1"],
        ["--train..steps", "1"],
        ["---train.steps", "1"],
    ):
        yield ["check", "debug", *words], {}
    for text in (
        '[data]\nsources = [{kind = "text", paths = [1]}]',
        "[model]\nname = true",
        "[run]\nname = 1.5",
        '"" = 1',
        '"a.b" = {}',
    ):
        yield ["check", "c.toml"], {"c.toml": text}
