"""Walk through what a new user does, in a fresh clone, and print pass or fail for each row.

    python testing/walk.py                     # the clone of this repository's HEAD, with the commands of this environment
    python testing/walk.py --only "check"      # rows whose name holds the word

A row is a command as typed and what it must print. Rows build on the runs of earlier ones. CPU seconds are user plus
system time of the fastest of three; they include importing torch, which is printed first. Ends with 1 if a row failed.
"""
# ruff: noqa: E501 - a row is one line

import argparse
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Row(NamedTuple):
    """One thing that is tried."""

    name: str
    command: str
    """A shell command; ``titan-train`` is this environment's."""
    says: str = ""
    """A regular expression that its output holds; what begins with ``!`` must not be there."""
    code: int = 0
    cpu_s: float = 0.0
    """Most CPU seconds; 0 sets no limit."""


MODULE = "class M(torch.nn.Module):\n    def __init__(s):\n        super().__init__(); s.e = torch.nn.Embedding(300, 16); s.h = torch.nn.Linear(16, 300)\n"
FILES = {
    "own/tuples.py": f"import torch\n{MODULE}    def forward(s, idx, targets=None):\n        return s.h(s.e(idx)), None\ndef build() -> torch.nn.Module: return M()\n",
    "rows.jsonl": '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}\n'
    * 200,
    "text.txt": "def f(x):\n    return x + 1\n" * 3000,
    "missing_data.toml": 'extends = "debug"\n[[data.sources]]\nname = "a"\nkind = "text"\npaths = ["nowhere/*.txt"]\n',
    "missing_tokenizer.toml": 'extends = "debug"\n[tokenizer]\nkind = "hf"\npath = "nowhere"\n',
    "missing_init.toml": 'extends = "debug"\n[model]\ninit = "hf:nowhere"\n',
    "foreign.toml": 'learning_rate = 3e-4\nbase_model = "x"\n[train]\ngradient_accumulation_steps = 2\n',
}
SMALL = "--launch.device cpu --train.steps 6 --devices 1 --metrics.progress lines"
ROWS = [
    Row("import torch", f"{sys.executable} -c 'import torch'", cpu_s=1000),
    Row("run debug", f"titan-train run debug {SMALL} --checkpoint.every 3", "finished"),
    # the record
    Row("resume with another rate", f"titan-train run debug {SMALL} --train.steps 9 --optimizer.lr 1e-4", "finished"),
    Row("the record has both rates", "cat runs/debug/attempts.jsonl runs/debug/run.json", "settings"),
    Row("the report says so", "grep -o 'optimizer.lr' runs/debug/report.html", "optimizer.lr"),
    # check
    Row("check: data that is not there", "titan-train check missing_data.toml", "nowhere", 2),
    Row("check: a tokenizer that is not there", "titan-train check missing_tokenizer.toml", "nowhere", 2),
    Row("check: an init that is not there", "titan-train check missing_init.toml", "nowhere", 2),
    Row("check: as many ranks as run", "titan-train check quickstart", "the configuration is valid"),
    Row("check: SI units", "titan-train check llama3_405b --parallel 'pp8 dp8 tp8'", r"!\d,\d{3},\d{3}\.\d TFLOP"),
    # a module of one's own
    Row("check: a module that returns a tuple", "titan-train check debug --code own --model.name tuples:build", "!defect of titan"),
    Row("run: a module that returns a tuple", f"titan-train run debug {SMALL} --run.name own --code own --model.name tuples:build", "finished"),
    Row("export: one's own module to DCP", "titan-train export runs/own --to dcp --out own_dcp --code own"),
    Row("export: one's own module to ONNX", "titan-train export runs/own --to onnx --out own_onnx --code own"),
    # docs against product
    Row("dry-run names its successor", "titan-train dry-run llama3_8b --world 512", "check CONFIG --rehearse", 2),
    Row("watch --once is short", "titan-train watch runs/debug --once | wc -l", r"^\s*1?\d\s*$"),
    Row("data show --help", "titan-train data show --help", "usage"),
    Row("the console blocks of the pages", f"{sys.executable} -m pytest -q tests/test_console_blocks.py", "passed"),
    # starting points
    Row("branch from a run", f"titan-train run debug {SMALL} --run.name branch --train.steps 9 --from runs/debug@6", "finished"),
    Row("the report of a branch draws its parent", "grep -o 'parent, debug' runs/branch/report.html", "parent, debug"),
    Row("check: a branch with another optimizer", "titan-train check debug --run.name misfit --train.steps 9 --from runs/debug@6 --optimizer.name sgd", "state of 'adamw'", 2),
    Row("weights of a run", f"titan-train run debug {SMALL} --run.name again --model.init run:runs/debug", "finished"),
    *(Row(f"init {kind}", f"titan-train init {kind} --out {kind}.toml && titan-train check {kind}.toml --paper") for kind in ("pretrain", "continue", "sft", "lora", "diffusion")),
    Row("list shows sft and lora", "titan-train list", r"(?s)lora.*sft|sft.*lora"),
    Row("an absent hub model names the command", "titan-train check debug --run.name new --model.init hf:ORG/NAME", "titan-train data download", 2),
    # python
    Row("load_config by keywords", f"{sys.executable} -c \"from titan_train import load_config; print(load_config('debug', train={{'steps': 8}}).train.steps)\"", "^8"),
    Row("dir is the API", f"{sys.executable} -c \"import titan_train as t; assert not {{*dir(t)}} - {{*t.__all__}} - {{n for n in dir(t) if n.startswith('__')}}\""),
    # the first page
    Row("names of other trainers", "titan-train check foreign.toml", r"(?s)optimizer\.lr.*model\.init.*train\.global_batch", 2),
    Row("README shows the report", "cat README.md", r"(?s)pictures/report\.png.*What others refuse.*Fine-tune.*Move models.*Scale"),
    Row("no script from another server", "cat docs/conf.py", "!dollarmath\""),
    Row("the notebook has its plots", "cat examples/13_notebook/train_and_plot.ipynb", "image/png"),
    # small commands
    Row("generate 200 tokens", "titan-train generate runs/debug --prompt 'def '", cpu_s=2.5),
    Row("check quickstart", "titan-train check quickstart", cpu_s=1.2),
    Row("the image compiles bytecode", "cat Dockerfile", "--compile-bytecode"),
    Row("the profiler's lines stay out", f"titan-train run debug {SMALL} --run.name traced --profile.steps 2:4", "!Handler.cpp"),
    Row("the last hint fits chats", f"titan-train run examples/11_chats/sft.toml {SMALL} --data.sources.0.paths rows.jsonl --run.name chats", "--chat --prompt"),
    Row("help COMMAND", "titan-train help generate", "usage"),
    Row("-V", "titan-train -V", "titan-train"),
    Row("a misspelt option", "titan-train generate runs/debug --promt x", "'--prompt'", 2),
    Row("one spelling of devices", "titan-train run debug --gpus 2", "'--devices'", 2),
    # agents
    Row("skills", "ls skills/*/SKILL.md AGENTS.md", r"(?s)add-a-family.*write-a-schedule"),
]  # fmt: skip


def cpu_seconds(command: str, folder: Path, times: int) -> float:
    """User plus system seconds of a command's fastest run."""
    found: list[float] = []
    for _ in range(times):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, shell=True, cwd=folder, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(found)


def failure(row: Row, command: str, folder: Path) -> str:
    """Why a row fails; empty if it passes."""
    done = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True, timeout=1800)
    said = done.stdout + done.stderr
    last = (said.strip().splitlines() or ["nothing was printed"])[-1][:160]
    if "Traceback" in said or done.returncode != row.code:
        return f"exit {done.returncode}: {last}"
    wanted = row.says.removeprefix("!")
    if wanted and (re.search(wanted, said, re.MULTILINE) is None) != row.says.startswith("!"):
        return f"{'holds' if row.says.startswith('!') else 'lacks'} {wanted!r}: {last}"
    return ""


def main() -> int:
    """Walk, and print one line for each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORD", help="rows whose name holds it")
    only = parser.parse_args().only
    program = Path(sys.executable).parent / "titan-train"
    failed = 0
    with tempfile.TemporaryDirectory() as there:
        clone = Path(there) / "clone"
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        for name, text in FILES.items():
            (clone / name).parent.mkdir(exist_ok=True)
            (clone / name).write_text(text, encoding="utf-8")
        for row in (row for row in ROWS if only in row.name):
            command = re.sub(r"(?<![\w/.-])titan-train (?=[\w-])", f"{program} ", row.command)
            why = failure(row, command, clone)
            note = ""
            if row.cpu_s and not why:
                seconds = cpu_seconds(command, clone, 3)
                note = f"  {seconds:.1f} CPU-s"
                why = f"more than {row.cpu_s}" if seconds > row.cpu_s else ""
            failed += bool(why)
            print(f"{'FAIL' if why else 'pass'}  {row.name}{note}{'  ' + why if why else ''}", flush=True)
        shutil.rmtree(clone)
    print(f"{failed} rows fail")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
