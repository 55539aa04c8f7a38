"""NVRTC: a .cu file of this package to machine code for one architecture. Works on a machine without a GPU.

NVRTC is a library in torch's own CUDA dependencies, called through cuda-bindings, another. Compiling a kernel takes
about a fifth of a second; the result is kept under the user's cache directory, named by a hash of everything it
depends on, so that an entry is never wrong, only unused. A cache that cannot be written is done without.
"""

import contextlib
import hashlib
import os
import tempfile
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from cuda.bindings import nvrtc  # pyright: ignore[reportAttributeAccessIssue]


@dataclass(frozen=True, slots=True)
class Binary:
    """A compiled source file."""

    cubin: bytes
    """Machine code of one architecture."""
    log: str
    """The assembler's report: registers and spills of each kernel; empty if it came from the cache."""


def compile_source(name: str, arch: str, defines: tuple[str, ...] = (), *, cache: bool = True) -> Binary:
    """Compile ``name``.cu of this package.

    Args:
        name: Base name of the source.
        arch: ``sm_90a``, ``sm_100a``, …
        defines: Macro definitions, ``"E4M3=1"``.
        cache: Look in the cache directory, and write to it.

    Raises:
        RuntimeError: If NVRTC rejects the source; with its log.
    """
    source = resources.files("titan_fp8.kernels.cuda").joinpath(f"{name}.cu").read_text(encoding="utf-8")
    options = [
        f"--gpu-architecture={arch}",
        "--std=c++17",
        "--ptxas-options=-v",
        *(f"-D{define}" for define in defines),
    ]
    major, minor = _checked(nvrtc.nvrtcVersion())
    key = hashlib.sha256("\0".join([source, *options, f"{major}.{minor}"]).encode()).hexdigest()
    path = _cache_directory() / f"{name}-{arch}-{key[:32]}.cubin"
    if cache and path.is_file():
        return Binary(path.read_bytes(), "")

    program = _checked(nvrtc.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), 0, [], []))
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
    _checked(nvrtc.nvrtcGetProgramLog(program, log))
    text = log.decode(errors="replace").rstrip("\0 \n")
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(f"NVRTC {major}.{minor} could not compile {name}.cu for {arch}:\n{text}")
    cubin = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
    _checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    _checked(nvrtc.nvrtcDestroyProgram(program))
    if cache:
        _write(path, cubin)
    return Binary(cubin, text)


def _checked(result: tuple[Any, ...]) -> Any:
    """What an NVRTC call returned beside its status."""
    status, *values = result
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(f"NVRTC failed: {status}")
    return values[0] if len(values) == 1 else tuple(values)


def _cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")  # the desktop convention for where caches go
    return (Path(base) if base else Path.home() / ".cache") / "titan_fp8"


def _write(path: Path, content: bytes) -> None:
    """Appear whole or not at all: several processes may compile at once."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(file.name).replace(path)
