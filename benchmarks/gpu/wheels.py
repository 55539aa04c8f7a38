"""List, and download, the wheels that a GPU machine with torch, triton, numpy and pytest lacks.

    python benchmarks/gpu/wheels.py                            # names only
    python benchmarks/gpu/wheels.py --out wheels --python 3.12 # download for that Python on x86-64 Linux

Run it where packages can be installed, carry the folder to the GPU machine, and give it to `run.py --wheels`. `--peer`
adds torchao, which the whole-model benchmark measures beside titan-fp8 where it is installed.
"""

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

# what titan-train, titan-ckpt and their dependencies import, below what the machine is to have; and fla-core's kernels
NEEDED = (
    "annotated-types",
    "docstring-parser",
    "einops",
    "fla-core",
    "jinja2",
    "markdown-it-py",
    "markupsafe",
    "mdurl",
    "pydantic",
    "pydantic-core",
    "pygments",
    "regex",
    "rich",
    "safetensors",
    "sentencepiece",
    "shtab",
    "tiktoken",
    "tomli-w",
    "typeguard",
    "typing-extensions",
    "typing-inspection",
    "xxhash",
    "zstandard",
)


def main() -> None:
    """Print the names, or fetch the wheels."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the wheels; without it the names are listed")
    parser.add_argument("--python", default="3.12", help="the GPU machine's Python (default 3.12)")
    parser.add_argument("--peer", action="store_true", help="torchao too")
    arguments = parser.parse_args()
    names = [*NEEDED, *(["torchao"] if arguments.peer else [])]
    if arguments.out is None:
        print("\n".join(names))
        return
    pip = _find_pip()
    if pip is None:
        parser.error(
            f"{sys.executable} has no pip, which downloads the wheels, and there is no uv that would bring it. Run this with a "
            "Python that has pip."
        )
    # pydantic accepts exactly one version of its core: pip resolves that pair, and no other dependency
    core = _resolve_core(pip, arguments.python)
    requirements = [core if name == "pydantic-core" else name for name in names]
    subprocess.run([*pip, *_download(arguments), "--no-deps", *requirements], check=True)
    print(f"{len(list(arguments.out.glob('*.whl')))} wheels in {arguments.out}")


def _find_pip() -> list[str] | None:
    """Command of the pip of this Python, or of one that uv runs apart: environments made by uv have none."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    uv = shutil.which("uv")
    return None if uv is None else [uv, "tool", "run", "--quiet", "pip"]


def _download(arguments: argparse.Namespace) -> list[str]:
    tags = ("manylinux2014_x86_64", "manylinux_2_28_x86_64", "manylinux_2_34_x86_64")
    platform = [word for tag in tags for word in ("--platform", tag)]
    target = ["--only-binary=:all:", "--python-version", arguments.python, *platform, "--dest", str(arguments.out)]
    return ["download", "--quiet", *target]


def _resolve_core(pip: list[str], python: str) -> str:
    """The version of pydantic-core that the newest pydantic wants."""
    command = [*pip, "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-"]
    command += ["--only-binary=:all:", "--python-version", python, "--target", "unused", "pydantic"]
    report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    found = {item["metadata"]["name"].replace("_", "-"): item["metadata"]["version"] for item in report["install"]}
    return f"pydantic-core=={found['pydantic-core']}"


if __name__ == "__main__":
    main()
