"""Show packages, devices and backends of this machine; what is missing, how to install it, and the next command."""

import argparse
import contextlib
import importlib.util
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from titan_train.cli.cluster import Finding, diagnose_cluster
from titan_train.rank_device import usable_cores

PACKAGES = ("titan-train", "titan-mesh", "titan-fsdp", "titan-pipeline", "titan-cp", "titan-fp8", "titan-ckpt")
_EXTRAS = {
    "ray": "runs on a Ray cluster (--launcher ray)",
    "tensorboard": "TensorBoard metrics",
    "wandb": "Weights & Biases metrics",
    "mlflow": "MLflow metrics",
    "trackio": "trackio metrics",
    "prometheus": "Prometheus metrics",
    "opentelemetry": "OpenTelemetry metrics",
    "hf": "models and data of Hugging Face, export --to hf, download",
    "data": "Parquet and Arrow tables as data",
    "diffusion": "weights of diffusers",
    "vision": "models of images and text",
    "onnx": "export --to onnx",
    "gguf": "export --to gguf",
    "serve": "titan-train serve",
    "eval": "tasks of lm-evaluation-harness",
    "kernels": "liger-kernel's elementwise kernels (CUDA)",
    "llamacpp": "comparing a GGUF export in llama.cpp",
}


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Run the command. Exit code 1 if something that training needs is missing."""
    parser.add_argument(
        "--bench", metavar="FILE", help="measure this machine and write its hardware file for the planner"
    )
    arguments = parser.parse_args(words)
    if arguments.bench is not None:
        place = Path(arguments.bench)
        if place.is_dir() or not place.absolute().parent.is_dir():
            raise ValueError(f"--bench {arguments.bench}: there is no such folder to write a file in. Make it first.")
        from titan_train.planner.hardware.links import measure_links
        from titan_train.planner.hardware.measure import gpu_lines, gpu_products, this_device, write_machine

        links = measure_links()
        table = write_machine(place, links=[speed for speed in links if speed.device == this_device()])
        measured, memory = table["measured"], table["memory"]
        float8 = measured["float8_product_tflops"]
        print(
            f"{table['title']}: products {measured['product_tflops']:.3f} TFLOP/s, "
            f"{f'float8 {float8:.0f}, ' if float8 else ''}memory {measured['copy_gb_s']:.1f} GB/s, "
            f"{memory['capacity_gib']:.1f} GiB; written to {arguments.bench}"
        )
        for line in gpu_lines(gpu_products()):
            print(line)
        for operation, found in table["kernels"].items():
            times = ", ".join(f"{name} {micros:,.0f} us" for name, micros in found["microseconds"].items())
            print(f"kernels.{operation}: {found['chosen']} ({times})")
        print(
            f"{'between ranks here':<20}{'latency':>12}{'GB/s':>10}   mesh axes; as a run has it: titan-train report RUN --trace"
        )
        for speed in links:
            print(f"{speed.operation:<20}{speed.latency_us:>9.0f} us{speed.gb_s:>10.3g}   {speed.axes}")
        return 0

    from rich.markup import escape

    from titan_train.terminal import clean_console

    marks = {"ok": "[green]ok     [/]", "note": "[yellow]note   [/]", "missing": "[red]missing[/]"}
    console = clean_console(highlight=False, soft_wrap=True)
    missing = 0
    for finding in diagnose():
        missing += finding.level == "missing"
        console.print(f"{marks[finding.level]} {escape(f'{finding.name:<16} {finding.text}')}")
    console.print("everything that training needs is installed" if not missing else f"{missing} missing")
    console.print(f"next    {_next(missing)}")
    return 1 if missing else 0


def _next(missing: int) -> str:
    if missing:
        return "install what is missing with the command at its line, then: titan-train doctor"
    if sys.platform == "win32":
        return "titan-train check llama3_8b (training needs Linux or macOS: WSL 2)"
    return "titan-train run quickstart"


def diagnose() -> Iterator[Finding]:
    """Look at the interpreter, the packages, the devices, the process-group back ends and the disk."""
    yield Finding(
        "ok", "python", f"{platform.python_version()} ({sys.executable}), {platform.system()} {platform.machine()}"
    )
    yield Finding("ok", "cores", f"{usable_cores()} usable")
    for name in PACKAGES:
        yield _package(name, f"uv pip install {name}")
    yield from _torch()
    yield from diagnose_cluster(*_torch_cuda_and_memlock())
    yield _compiler()
    for extra, purpose in _EXTRAS.items():
        yield _extra(extra, purpose)
    yield from _disk()


def _torch_cuda_and_memlock() -> tuple[str | None, int | None]:
    """The CUDA that torch was built for, and the bytes that may be locked; None without."""
    cuda = None
    with contextlib.suppress(ImportError, OSError):
        import torch

        cuda = torch.version.cuda
    try:
        import resource
    except ImportError:  # no such limit on Windows
        return cuda, None
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return cuda, None if limit == resource.RLIM_INFINITY else limit


def _torch() -> Iterator[Finding]:
    try:
        import torch
        import torch.distributed as dist
    except (ImportError, OSError) as err:
        yield Finding("missing", "torch", f"cannot be imported ({err}): uv pip install 'torch>=2.11'")
        return
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if release < (2, 11):
        yield Finding("missing", "torch", f"{torch.__version__} is too old: uv pip install 'torch>=2.11'")
    else:
        yield Finding("ok", "torch", f"{torch.__version__}, built for CUDA {torch.version.cuda or 'none'}")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            yield Finding("ok", f"cuda:{index}", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB")
        yield _float8_cast()
    else:
        yield Finding("note", "cuda", "torch sees no GPU: runs use CPU ranks (gloo), which is correct but slow")
    if not dist.is_available():
        yield Finding(
            "missing", "torch.distributed", "not in this build of torch: install a build with USE_DISTRIBUTED=1"
        )
        return
    gloo = dist.is_gloo_available()
    yield Finding("ok" if gloo else "missing", "gloo", "CPU process groups" if gloo else "not in this build of torch")
    if not dist.is_nccl_available():
        yield Finding("note", "nccl", "not in this build; GPUs need it")
        return
    from torch.cuda import nccl

    yield Finding("ok", "nccl", f"{'.'.join(map(str, nccl.version()))}, GPU process groups")


def _float8_cast() -> Finding:
    """Which kernel casts activations to float8 in 1x128 blocks, and why not the ones before it."""
    from titan_fp8 import backends

    (report,) = (report for report in backends() if report.op == "cast_block_dual")
    reasons = "".join(f"; {name} {reason}" for name, reason in report.skipped.items())
    return Finding("ok" if not reasons else "note", "float8 cast", f"the {report.chosen} kernel{reasons}")


def _compiler() -> Finding:
    """torch.compile generates C++ on CPUs, and Triton's launchers are C."""
    found = next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), "g++", "clang++", "c++"))), None)
    if found is None:
        return Finding("note", "compiler", "no C++ compiler: compile.enabled=true needs one, such as g++")
    return Finding("ok", "compiler", f"{found}, for compile.enabled=true")


def _extra(extra: str, purpose: str) -> Finding:
    """What an extra of titan-train brings, or how to install it."""
    remedy = f"for {purpose}: uv pip install 'titan-train[{extra}]'"
    try:
        asked = [line for line in requires("titan-train") or () if re.search(rf"extra == ['\"]{extra}['\"]", line)]
    except PackageNotFoundError:
        asked = []
    found: list[str] = []
    for line in asked:
        name = re.split(r"[ ;<>=!~\[(]", line, maxsplit=1)[0]
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            return Finding("note", f"[{extra}]", f"{name} is not installed; {remedy}")
    return Finding("ok" if found else "note", f"[{extra}]", f"{', '.join(found)}; {purpose}" if found else remedy)


def _disk() -> Iterator[Finding]:
    import sysconfig

    source = Path(sysconfig.get_paths()["stdlib"])
    count = sum(1 for _ in source.glob("*.py"))
    level = "ok" if count > 50 else "missing"
    yield Finding(
        level,
        "stdlib corpus",
        f"{count} modules in {source}" + ("" if count > 50 else ": install Python's library sources"),
    )
    for name, folder in (("working folder", Path.cwd()), ("temporary folder", Path(tempfile.gettempdir()))):
        free = shutil.disk_usage(folder).free / 2**30
        yield Finding("ok" if free > 2 else "note", name, f"{folder}, {free:.1f} GiB free")


def _package(name: str, remedy: str) -> Finding:
    try:
        return Finding("ok", name, version(name))
    except PackageNotFoundError:
        found = importlib.util.find_spec(name.replace("-", "_"))
        if found is not None and found.origin is not None:
            return Finding("ok", name, f"not installed, read from {Path(found.origin).parent}")
        return Finding("missing", name, f"not installed: {remedy}")
