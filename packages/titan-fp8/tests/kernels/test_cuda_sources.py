"""The CUDA C++ sources: compiled by NVRTC for Hopper and Blackwell, and run thread by thread on the CPU.

No GPU is needed. `test_on_device.py` compares the compiled kernels with the reference where there is one.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings.nvrtc")
compile_module = pytest.importorskip("titan_fp8.kernels.cuda.compile")

pytestmark = pytest.mark.timeout(600)

SOURCES = sorted(path.stem for path in Path(compile_module.__file__).parent.glob("*.cu"))
VARIANTS = [(f"E4M3={e4m3}", f"POW2={pow2}") for e4m3 in (1, 0) for pow2 in (1, 0)]


def test_sources_are_package_data():
    assert SOURCES == ["cast_block_dual"]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("defines", VARIANTS, ids=" ".join)
@pytest.mark.parametrize("name", SOURCES)
def test_source_compiles_without_spills(name, defines, arch):
    log = compile_module.compile_source(name, arch, defines, cache=False).log
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert spills == [("0", "0", "0")]


@pytest.mark.parametrize("name", SOURCES)
def test_source_moves_the_matrix_128_bits_at_a_time(name, tmp_path):
    triton = pytest.importorskip("triton")
    disassembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compile_module.compile_source(name, "sm_90a", VARIANTS[0], cache=False).cubin)
    sass = subprocess.run([disassembler, "-sass", cubin], capture_output=True, text=True, check=True).stdout
    loads, stores = re.findall(r"\bLDG\.E\S*", sass), re.findall(r"\bSTG\.E\S*", sass)
    assert {load.rstrip(";") for load in loads} == {"LDG.E.128.CONSTANT"}
    assert sorted({store.rstrip(";") for store in stores}) == ["STG.E", "STG.E.128"]  # STG.E: the scales
    assert sum(store == "STG.E" for store in stores) == 2
    assert "F2FP.SATFINITE.E4M3" in sass


def test_a_compiled_source_is_cached(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = compile_module.compile_source(SOURCES[0], "sm_90a", VARIANTS[0])
    second = compile_module.compile_source(SOURCES[0], "sm_90a", VARIANTS[0])
    assert first.cubin == second.cubin
    assert first.log
    assert not second.log
    assert len(list(tmp_path.rglob("*.cubin"))) == 1


def test_a_compiled_source_is_on_the_disk_before_the_cache_has_its_name(tmp_path, monkeypatch):
    done, sync, rename = [], os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda file: done.append(os.fstat(file).st_size) or sync(file))
    monkeypatch.setattr(Path, "replace", lambda self, to: done.append(to) or rename(self, to))
    compile_module._write(tmp_path / "kernel.cubin", b"cubin")
    assert done == [5, tmp_path / "kernel.cubin"]


def test_an_unwritable_cache_is_done_without(tmp_path, monkeypatch):
    (tmp_path / "titan_fp8").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compile_module.compile_source(SOURCES[0], "sm_90a", VARIANTS[0]).cubin


def test_a_source_that_does_not_compile_is_reported_with_its_log():
    with pytest.raises(RuntimeError, match=r"could not compile cast_block_dual.cu for sm_90a:(.|\n)*NOT_A_NUMBER"):
        compile_module.compile_source(SOURCES[0], "sm_90a", ("E4M3=1", "POW2=NOT_A_NUMBER()"), cache=False)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_cast_block_dual_equals_the_reference_with_cpu_threads_for_cuda_threads():
    script = Path(__file__).with_name("cuda_on_cpu.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0"] * 8  # mismatches: q, scale, qt, scale_t, for e4m3 pow2 and e5m2 exact
