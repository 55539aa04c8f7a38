"""Does every layout and recipe on this device, over NCCL, give the losses and gradients of one process on a CPU?

Question: recipes, model families and kernels on one GPU; the composition matrix of titan-train's tests on 2 and 4 ranks.

Method: the ranks of a layout share one GPU. NCCL refuses two ranks of one machine on one device, so each rank is given a host
name of its own (``NCCL_HOSTID``), and messages go through sockets: the real collectives, streams and events of CUDA, at a speed
that says nothing. One process on the CPU trains each case without its layout. Compared are, in float32, the losses of four
steps, the held-out loss, the first gradient norm, and every gradient of the first step.

A case that fails or hangs ends its ranks; the next one starts new ones. Output: a row per case; JSON objects with all so far;
exit code 1 if any failed.

    python benchmarks/gpu/layouts.py --device cuda
    python benchmarks/gpu/layouts.py --device cpu --sizes 1 2 --only Muon tp     # the same code over gloo
"""

import argparse
import datetime
import hashlib
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "packages" / "titan-train" / "tests" / "parallel"
sys.path.insert(0, str(TESTS))

STEPS = 4
SMOOTH = {"lr": 1e-3, "eps": 1e-3}  # an error of a gradient becomes one of the weight of at most that size
FLOAT32 = {"first_loss": 1e-5, "last_loss": 1e-4, "validation": 1e-4, "norm": 2e-5, "gradient": 5e-5}
"""Sums of some thousand float32 terms in another order, by other kernels; ten times what gloo on one processor may differ."""
ROUNDED = {"first_loss": 1e-2, "last_loss": 6e-2, "validation": 6e-2, "norm": 4e-2, "gradient": 0.3}
"""Products in float8, Newton-Schulz in bfloat16, weights or states in few bits."""
FROM_LAYOUT = ("parallel", "context", "pipeline", "activations", "compile", "kernels")
"""Sections that one process on the CPU trains without."""


@dataclass(frozen=True)
class Case:
    """One run, and how far from the CPU it may be."""

    name: str
    ranks: int
    sections: dict[str, dict[str, Any]]
    rounded: bool = False

    @property
    def model(self) -> str:
        """Its name; empty for the matrix's own."""
        return str(self.sections.get("model", {}).get("name", ""))

    def reference(self) -> dict[str, dict[str, Any]]:
        """What the CPU trains."""
        kept = {name: values for name, values in self.sections.items() if name not in FROM_LAYOUT}
        kept["train"] = {name: value for name, value in kept.get("train", {}).items() if name != "microbatch"}
        return kept


def recipes() -> list[Case]:
    """What one rank trains: optimizers, options, kernels, families."""
    optimizers: dict[str, tuple[dict[str, Any], bool]] = {
        "AdamW": ({}, False),
        "AdamW, int8 states": ({"states": "int8"}, True),
        "AdamW, bf16 states": ({"states": "bf16"}, True),
        "Muon": ({"name": "muon", "muon": {"dtype": "fp32"}}, True),
        "Muon in bf16": ({"name": "muon"}, True),
        "NorMuon": ({"name": "muon", "muon": {"dtype": "fp32", "normuon": True}}, True),
        "Polar Express": ({"name": "muon", "muon": {"dtype": "fp32", "coefficients": "polar_express"}}, True),
        "SGD": ({"name": "sgd", "lr": 0.1}, False),
    }
    options: dict[str, dict[str, dict[str, Any]]] = {
        "QK-clip": {"qk_clip": {"threshold": 0.05}},
        "EMA": {"average": {"ema_decay": 0.5, "use": "ema"}},
        "batch ramp": {"train": {"ramp_from": 4, "ramp_tokens": 512}},
        "muP": {"model": {"name": "llama3_debug", "seq_len": 32, "parametrization": "mup", "base_dim": 16}},
        "z-loss": {"train": {"z_loss": 1e-3}},
        "whole logits": {"train": {"fused_loss": False}},
        "tiles": {"activations": {"mlp_tiles": 4}},
        "full recomputation": {"activations": {"checkpoint": "full"}},
        "selective recomputation": {"activations": {"checkpoint": "selective"}},
        "offloaded activations": {"activations": {"offload": True}},
        "offloaded parameters": {"parallel": {"offload": "cpu"}},
        "compiled": {"compile": {"enabled": True}},
        "compiled, selective": {"compile": {"enabled": True}, "activations": {"checkpoint": "selective"}},
        "one row at a time": {"train": {"microbatch": 1}},
        "no document mask": {"data": {"document_mask": False}},
        "titan's kernels": {"kernels": {"rms_norm": "titan", "swiglu": "titan", "rope": "titan"}},
        "torch's kernels": {"kernels": {"rms_norm": "torch", "swiglu": "torch", "rope": "torch"}},
        "MTP": {"model": {"name": "qwen3_debug", "seq_len": 32, "args": {"mtp_depth": 2}}},
    }
    cases = [Case(name, 1, {"optimizer": SMOOTH | more}, rounded) for name, (more, rounded) in optimizers.items()]
    constant = {"optimizer": SMOOTH | {"name": "schedule_free"}, "schedule": {"name": "constant", "warmup_steps": 2}}
    cases.append(Case("schedule-free", 1, constant))
    cases.append(Case("bf16 weights", 1, {"optimizer": SMOOTH | {"weights": "bf16"}, "train": {"dtype": "bf16"}}, True))
    cases += [Case(name, 1, {"optimizer": SMOOTH} | sections) for name, sections in options.items()]
    wide = {"model": {"name": "llama3_debug", "seq_len": 64, "args": {"dim": 256, "ffn_dim": 512, "num_heads": 4}}}
    for recipe in ("tensorwise", "rowwise", "rowwise_gw_hp", "blockwise"):
        cases.append(Case(f"float8 {recipe}", 1, wide | {"float8": {"recipe": recipe, "min_speedup": 0.0}}, True))
    for model in ("qwen3_moe_debug", "deepseek_debug"):
        experts = {"model": {"name": model, "seq_len": 32, "args": {}}, "optimizer": SMOOTH}
        float8 = {"recipe": "blockwise", "min_speedup": 0.0}
        cases.append(Case(f"float8 experts of {model}", 1, experts | {"float8": float8}, True))
    for model in (
        "gpt_debug",
        "qwen3_debug",
        "qwen3_moe_debug",
        "qwen3_next_debug",
        "qwen3_next_moe_debug",
        "deepseek_debug",
    ):
        cases.append(Case(model, 1, {"optimizer": SMOOTH, "model": {"name": model, "seq_len": 32, "args": {}}}))
    cases += [Case("images", 1, vision()), Case("flow matching", 1, diffusion())]
    return cases + [Case(f"hf {kind}", 1, hf(kind)) for kind in FAMILIES]


FAMILIES = ("llama", "gpt_oss", "gemma3_text", "qwen3_next", "nemotron_h", "kimi_linear", "deepseek_v32", "mamba2")


def hf(kind: str) -> dict[str, dict[str, Any]]:
    """A folder of transformers that `resolve` makes."""
    model = {"name": f"hf:@{kind}", "init": f"hf:@{kind}", "seq_len": 32, "args": {}}
    return {"optimizer": SMOOTH, "model": model, "data": {"document_mask": kind != "mamba2"}}


def vision() -> dict[str, dict[str, Any]]:
    """A small vision-language model on drawn shapes."""
    from test_vision import TINY

    return {**TINY, "optimizer": SMOOTH}


def diffusion() -> dict[str, dict[str, Any]]:
    """A small flow-matching model on drawn shapes."""
    from test_diffusion import TINY

    return {**TINY, "optimizer": SMOOTH}


def layouts(most: int) -> list[Case]:
    """Each setting of the tests' matrix, its combinations on at most so many ranks, and recipes with messages of their own."""
    from composition_matrix import FAST, MODELS, SETTINGS, WITH_EXPERTS, combinations, refusal_of, sections_of

    alone = [(model, (name,)) for name in SETTINGS for model in MODELS if name != "ep" or model in WITH_EXPERTS]
    cases = []
    for model, names in dict.fromkeys([*alone, *FAST, *combinations()]):
        ranks = max(2, math.prod(SETTINGS[name].ranks for name in names))
        if "ep" in names and not any(SETTINGS[name].axis in ("data", "context", "tensor") for name in names):
            ranks = 4 if ranks > 2 or any(SETTINGS[name].axis == "pipeline" for name in names) else 2
        if refusal_of(names) is None and ranks <= most:
            cases.append(
                Case(f"{model}: {', '.join(names)}", ranks, sections_of(model, names), rounded="float8" in names)
            )
    zbv = {"parallel": {"pp": 2}, "pipeline": {"schedule": "zbv"}}
    muon = {"optimizer": SMOOTH | {"name": "muon", "muon": {"dtype": "fp32"}}}
    own: dict[str, dict[str, dict[str, Any]]] = {
        "Muon, fsdp": muon,
        "Muon, pp zbv": muon | zbv,
        "Muon, tp": muon | {"parallel": {"tp": 2}},
        "int8 states, fsdp": {"optimizer": SMOOTH | {"states": "int8"}},
        "QK-clip, tp": {"qk_clip": {"threshold": 0.05}, "parallel": {"tp": 2}},
        "EMA, fsdp": {"average": {"ema_decay": 0.5, "use": "ema"}},
        "zero1": {"parallel": {"accumulate": "zero1"}, "train": {"microbatch": 1}},
        "unsharded accumulation": {"parallel": {"accumulate": "unsharded"}, "train": {"microbatch": 1}},
        "offloaded parameters, fsdp": {"parallel": {"offload": "cpu"}},
        "compressed gradients, ddp": {"parallel": {"mode": "ddp", "compress": "bf16"}},
        "PowerSGD, ddp": {"parallel": {"mode": "ddp", "compress": "powersgd"}},
        "dynamic cp": {"context": {"dynamic": True}, "parallel": {"cp": 2}, "train": {"microbatch": 1}},
        "cp allgather": {"parallel": {"cp": 2}, "context": {"method": "allgather"}},
        "interleaved": {"parallel": {"pp": 2}, "pipeline": {"schedule": "interleaved_1f1b"}},
        "dualpipe_v": {"parallel": {"pp": 2}, "pipeline": {"schedule": "dualpipe_v"}},
        "gpipe": {"parallel": {"pp": 2}, "pipeline": {"schedule": "gpipe"}},
        "zb_h1": {"parallel": {"pp": 2}, "pipeline": {"schedule": "zb_h1"}},
        "MTP, fsdp": {"model": {"name": "qwen3_debug", "seq_len": 32, "args": {"mtp_depth": 2}}},
        "MTP, cp": {"parallel": {"cp": 2}, "model": {"name": "qwen3_debug", "seq_len": 32, "args": {"mtp_depth": 1}}},
        "gpt-oss, cp": hf("gpt_oss") | {"parallel": {"cp": 2}},
        "gpt-oss, pp zbv": hf("gpt_oss") | zbv,
        "Qwen3-Next of transformers, cp": hf("qwen3_next") | {"parallel": {"cp": 2}},
        "Nemotron-H, fsdp": hf("nemotron_h"),
        "Kimi Linear, cp": hf("kimi_linear") | {"parallel": {"cp": 2}},
    }
    loose = ("Muon", "int8", "compressed", "PowerSGD")
    return [Case(name, 2, more, rounded=name.startswith(loose)) for name, more in own.items()] + cases


def cases_of(arguments: argparse.Namespace) -> list[Case]:
    """Those that were asked for, in order."""
    found = recipes() + layouts(max(arguments.sizes))
    done = _ok_in(arguments.done) if arguments.done else set()
    return [
        case
        for case in found
        if case.ranks in arguments.sizes
        and case.name not in done
        and not any(word in case.name for word in arguments.without or ())
        and (not arguments.only or any(word in case.name for word in arguments.only))
    ]


def _ok_in(output: Path) -> set[str]:
    """Names of the cases that an earlier output calls ok."""
    lines = [line for line in output.read_text().splitlines() if line.startswith('{"benchmark": "gpu_layouts"')]
    rows = json.loads(lines[-1])["rows"] if lines else {}
    return {name for name, row in rows.items() if row["outcome"] == "ok"}


# ---- a rank


def worker(arguments: argparse.Namespace) -> None:
    """Train the cases of this number of ranks, from one on; leave what each found."""
    import torch
    import torch.distributed as dist
    from titan_train.launch.rank.device import set_cuda_defaults

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cuda = arguments.device == "cuda"
    set_cuda_defaults(os.environ, pipeline=ranks > 1)
    torch.set_num_threads(1)
    if cuda:
        torch.cuda.set_device(0)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=datetime.timedelta(seconds=arguments.limit)
    )
    import composition

    draw_on_cpu()
    listed = cases_of(arguments)
    for number in arguments.numbers:
        case = listed[number]
        sections = case.reference() if arguments.reference else case.sections
        steps = {"train": {"steps": STEPS}, "launch": {"device": arguments.device, "timeout_s": arguments.limit}}
        joined = composition.joined({"validation": {"every": STEPS}}, sections, steps)
        target = (
            references_at(arguments) / digest(case)
            if arguments.reference
            else (Path(arguments.folder) / arguments.kind / f"{number}")
        )
        try:
            began = time.perf_counter()
            losses, norms, validation, boxes = composition.run(
                f"{arguments.folder}/corpus", f"{arguments.kind}-{number}", resolve(joined, arguments.folder), STEPS
            )
            whole = {name: (shape, offset, part.float().cpu()) for name, (shape, offset, part) in boxes.items()}
            found = {"result": (losses, norms, validation, whole), "s": time.perf_counter() - began}
        except Exception as err:
            found = {"error": f"{type(err).__name__}: {err}"[:600], "trace": traceback.format_exc()[-3000:]}
        if "error" in found:
            Path(f"{target}.raised").touch()
        torch.save(found, f"{target}.{rank}.part")
        Path(f"{target}.{rank}.part").rename(f"{target}.{rank}")
        torch._dynamo.reset()  # what one trainer compiled counts towards the limit of the next
        if "error" in found and ranks > 1:
            os._exit(3)  # the others may wait for this one for ever
    dist.barrier()
    os._exit(0)


def draw_on_cpu() -> None:
    """Start from the CPU's weights on every device: its generator and CUDA's draw other numbers."""
    import titan_fsdp
    import torch
    from titan_fsdp.weights.materialize import generator_for

    plain = titan_fsdp.materialize

    def materialize(model, device, init, seed=0, **more):
        def drawn(name, tensor, _generator):
            here = torch.empty(tensor.shape, dtype=tensor.dtype)
            init(name, here, generator_for(name, here.device, seed))
            tensor.copy_(here)

        return plain(model, device, drawn if init is not None else None, seed, **more)

    titan_fsdp.materialize = materialize


def digest(case: Case) -> str:
    """The same for cases that are the same for one process."""
    return hashlib.sha256(json.dumps(case.reference(), sort_keys=True).encode()).hexdigest()[:16]


def references_at(arguments: argparse.Namespace) -> Path:
    """Where the CPU's results are."""
    return arguments.references or Path(arguments.folder) / "reference"


def resolve(sections: dict[str, dict[str, Any]], folder: str) -> dict[str, dict[str, Any]]:
    """The configuration with the names of folders of transformers, which the parent has made."""
    model = sections.get("model", {})
    if not str(model.get("name", "")).startswith("hf:@"):
        return sections
    path = f"hf:{folder}/hf/{model['name'].removeprefix('hf:@')}"
    return sections | {"model": model | {"name": path, "init": path}}


# ---- the parent


def pool(arguments: argparse.Namespace) -> None:
    """Ranks that train their cases one after the other; new ones where they end or hang."""
    listed, numbers = cases_of(arguments), arguments.numbers
    folder, ranks, at = Path(arguments.folder) / arguments.kind, arguments.ranks, 0
    while at < len(numbers):
        processes = _start(arguments, numbers[at:])
        began, allowed = time.monotonic(), arguments.limit + 60.0  # the first case imports and compiles
        while at < len(numbers):
            codes = [process.poll() for process in processes]
            left = [folder / f"{numbers[at]}.{rank}" for rank in range(ranks)]
            if arguments.reference:
                left = [references_at(arguments) / f"{digest(listed[numbers[at]])}.0"]
            if all(path.exists() for path in left):
                raised = (folder / f"{numbers[at]}.raised").exists()
                at, began, allowed = at + 1, time.monotonic(), arguments.limit
                if raised and ranks > 1:
                    break  # these ranks end
            elif any(code is not None for code in codes) or time.monotonic() - began > allowed:
                hung = all(code is None for code in codes)
                (folder / f"{numbers[at]}.why").write_text("hung" if hung else f"the ranks ended with {codes}")
                at += 1
                break
            else:
                time.sleep(0.05)
        for process in processes:
            if at < len(numbers):
                process.kill()
            process.wait()


def _start(arguments: argparse.Namespace, numbers: list[int]) -> list["subprocess.Popen[bytes]"]:
    """The ranks of a pool for some of its cases, each a machine of its own to NCCL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = ("ranks", "limit", "folder", "kind", "device")
    command = [sys.executable, __file__, "--worker", "--sizes", *map(str, arguments.sizes)]
    command += ["--numbers", *map(str, numbers)]
    command += [word for name in given for word in (f"--{name}", str(getattr(arguments, name)))]
    command += ["--only", *arguments.only] if arguments.only else []
    command += ["--without", *arguments.without] if arguments.without else []
    command += ["--done", str(arguments.done)] if arguments.done else []
    command += ["--references", str(arguments.references)] if arguments.references else []
    command += ["--reference"] if arguments.reference else []
    processes = []
    for rank in range(arguments.ranks):
        environment = os.environ | {
            "RANK": str(rank), "WORLD_SIZE": str(arguments.ranks), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NCCL_HOSTID": f"host-{rank}", "NCCL_SOCKET_IFNAME": "lo",
            "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1",
        }  # fmt: skip
        with (Path(arguments.folder) / f"{arguments.kind}.log.{rank}").open("ab") as log:
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    return processes


def row_of(arguments: argparse.Namespace, number: int, case: Case) -> dict[str, Any] | None:
    """The comparison of a case whose two sides are there; None before."""
    import torch
    from composition_check import compare

    folder = Path(arguments.folder)
    of_reference = references_at(arguments) / f"{digest(case)}.0"
    if not of_reference.exists():
        return None
    want = torch.load(of_reference)
    if "error" in want:
        return {"outcome": f"the CPU failed: {want['error']}"}
    side = folder / f"on-{case.ranks}"
    ended = (side / f"{number}.why").exists()  # looked up first: what a rank left is there before
    parts = [side / f"{number}.{rank}" for rank in range(case.ranks)]
    found = [torch.load(part) for part in parts if part.exists()]
    errors = [part for part in found if "error" in part]
    if errors:
        return {"outcome": f"failed: {errors[0]['error']}", "trace": errors[0]["trace"]}
    if len(found) < case.ranks:
        if not ended:
            return None
        logs = [(folder / f"on-{case.ranks}.log.{rank}").read_text(errors="replace") for rank in range(case.ranks)]
        return {
            "outcome": f"failed: {(side / f'{number}.why').read_text()}",
            "trace": "\n---\n".join(log[-4000:] for log in logs),
        }
    try:
        errors_of = asdict(compare(want["result"], [part["result"] for part in found]))
    except (AssertionError, ValueError) as err:
        seen = [(part["result"][0], part["result"][1]) for part in found]  # losses and norms: NaN leaves no gradients
        return {
            "outcome": f"failed: {err}"[:300],
            "trace": f"losses and norms: {seen}; the CPU's: {want['result'][:2]}",
        }
    limits = ROUNDED if case.rounded else FLOAT32
    over = [name for name, limit in limits.items() if not errors_of[name] <= limit]
    over += [] if errors_of["ranks_agree"] else ["ranks_agree"]
    return {"outcome": f"failed: {', '.join(over)}" if over else "ok", "s": round(found[0]["s"], 1)} | errors_of


def main() -> int:
    """Train all cases and compare; 0 if none failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks")
    parser.add_argument("--only", nargs="+", help="words of the cases' names")
    parser.add_argument("--without", nargs="+", help="words of the names of cases to leave out")
    parser.add_argument(
        "--references", type=Path, help="folder in which the CPU's results are kept, or are there already"
    )
    parser.add_argument("--limit", type=float, default=40.0, help="seconds of one case")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds of all")
    parser.add_argument("--done", type=Path, help="output of an earlier run: what was ok there is left out")
    parser.add_argument("--numbers", type=int, nargs="+", help=argparse.SUPPRESS)
    for name, default in (("folder", ""), ("kind", ""), ("ranks", 1)):
        parser.add_argument(f"--{name}", type=type(default), default=default, help=argparse.SUPPRESS)
    for name in ("worker", "reference"):
        parser.add_argument(f"--{name}", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
    with tempfile.TemporaryDirectory(prefix="titan-layouts-", ignore_cleanup_errors=True) as arguments.folder:
        rows = compared(arguments)
    failed = sum(row["outcome"] != "ok" for row in rows.values())
    print(f"{len(rows) - failed} of {len(rows)} cases ok", flush=True)
    os._exit(int(failed > 0))


def compared(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """A row per case, by name."""
    import composition
    import hf_folders

    folder, listed = Path(arguments.folder), cases_of(arguments)
    (folder / "corpus").mkdir()
    composition.prepare(folder / "corpus")
    for kind in sorted({case.model[4:] for case in listed if case.model.startswith("hf:@")}):
        hf_folders.make(folder / "hf" / kind, kind, vocab_size=264)
    helpers = min(4, max(1, (os.cpu_count() or 1) // 2))
    references_at(arguments).mkdir(exist_ok=True)
    first = {digest(case): number for number, case in reversed([*enumerate(listed)])}
    missing = sorted(number for name, number in first.items() if not (references_at(arguments) / f"{name}.0").exists())
    cpu = {"kind": "reference", "ranks": 1, "reference": True, "device": "cpu"}
    pools: list[dict[str, Any]] = [cpu | {"numbers": missing[n::helpers]} for n in range(helpers)]
    for size in arguments.sizes:
        numbers = [number for number, case in enumerate(listed) if case.ranks == size]
        several = 2 if size == 2 and arguments.device == "cuda" else 1  # most cases have two ranks
        pools += [{"kind": f"on-{size}", "ranks": size, "numbers": numbers[n::several]} for n in range(several)]
    jobs = []
    for changes in pools:
        (folder / str(changes["kind"])).mkdir(exist_ok=True)
        given = argparse.Namespace(**vars(arguments) | changes)
        jobs.append(threading.Thread(target=pool, args=(given,), daemon=True))
        jobs[-1].start()
    began, waiting = time.monotonic(), dict(enumerate(listed))
    rows: dict[str, dict[str, Any]] = {}
    while waiting and time.monotonic() - began < arguments.budget:
        running = any(job.is_alive() for job in jobs)
        known = len(rows)
        for number, case in list(waiting.items()):
            row = row_of(arguments, number, case)
            if row is not None:
                del waiting[number]
                rows[case.name] = {"ranks": case.ranks} | row
                _show(case, row)
        if len(rows) > known:
            print(json.dumps({"benchmark": "gpu_layouts", "device": arguments.device, "rows": rows}), flush=True)
        if not running:
            break
        time.sleep(1.0)
    for case in waiting.values():
        rows[case.name] = {"ranks": case.ranks, "outcome": "not run"}
        print(f"{case.name:44} {case.ranks} not run", flush=True)
    print(json.dumps({"benchmark": "gpu_layouts", "device": arguments.device, "rows": rows}), flush=True)
    return rows


def _show(case: Case, row: dict[str, Any]) -> None:
    figures = "  ".join(
        f"{key} {row[key]:.1e}" for key in ("first_loss", "last_loss", "validation", "norm", "gradient") if key in row
    )
    print(f"{case.name:44} {case.ranks} {row['outcome']}  {figures}", flush=True)
    if "trace" in row:
        print(row["trace"], flush=True)


if __name__ == "__main__":
    sys.exit(main())
