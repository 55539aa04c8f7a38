"""The CUDA cast is chosen where it compiles and works, and replaced where it does not; compiler and driver are stubs."""

import contextlib
import logging
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from titan_fp8 import dispatch, reference
from titan_fp8.dispatch import backends, implementation

pytest.importorskip("cuda.bindings.driver")
launch = pytest.importorskip("titan_fp8.kernels.cuda.launch")

CUDA = torch.device("cuda", 0)
E4M3 = torch.float8_e4m3fn
SUCCESS = launch.driver.CUresult.CUDA_SUCCESS


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """A Hopper device as far as choices ask; nothing found before is remembered."""
    caches = [implementation, dispatch._problem, launch.build_problem]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(launch, "_kernels", {})
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


def chosen(device=CUDA):
    return {report.op: report for report in backends(device)}["cast_block_dual"]


def compiles(name, arch, defines, **_):
    return SimpleNamespace(cubin=f"{name} {arch} {' '.join(defines)}".encode(), log="")


def refuses(name, arch, defines, **_):
    raise RuntimeError(f"NVRTC 13.0 could not compile {name}.cu for {arch}:\nline 1\nline 2")


def test_the_cuda_cast_is_the_default_where_it_compiles(monkeypatch, caplog):
    pytest.importorskip("triton")
    monkeypatch.setattr(launch, "compile_source", compiles)
    assert chosen().chosen == "cuda"
    assert chosen().skipped == {}
    assert implementation("cast_block_dual", CUDA, "triton").__module__ == "titan_fp8.kernels.triton.block"
    x, taken = matrix(128, 128), (object(),) * 4
    monkeypatch.setattr("titan_fp8.kernels.triton.block.cast_block_dual", lambda *_: "Triton's")
    for results, expected in ((taken, taken), (None, "Triton's")):
        monkeypatch.setattr(launch, "cast_block_dual", lambda *_, results=results: results)
        implementation.cache_clear()
        assert implementation("cast_block_dual", CUDA)(x, E4M3, True) is expected
    assert not caplog.records


def test_a_compiler_that_fails_leaves_triton_and_one_line(monkeypatch, caplog):
    pytest.importorskip("triton")
    monkeypatch.setattr(launch, "compile_source", refuses)
    with caplog.at_level(logging.WARNING, "titan_fp8"):
        for _ in range(3):
            assert chosen().chosen == "triton"
            assert implementation("cast_block_dual", CUDA).__module__ == "titan_fp8.kernels.triton.block"
    (record,) = caplog.records
    assert record.getMessage() == (
        "the CUDA cast cannot be compiled for sm_90a: NVRTC 13.0 could not compile cast_block_dual.cu for sm_90a; the Triton "
        "kernel runs instead"
    )
    assert "cannot be compiled for sm_90a" in chosen().skipped["cuda"]
    with pytest.raises(ValueError, match="backend='cuda' on cuda:0: cannot be compiled"):
        implementation("cast_block_dual", CUDA, "cuda")


def test_a_machine_without_cuda_bindings_is_silent(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "titan_fp8.kernels.cuda.launch", None)
    assert chosen().chosen != "cuda"
    assert "cuda-bindings cannot be imported" in chosen().skipped["cuda"]
    assert not caplog.records


def test_older_devices_do_not_ask_for_the_compiler(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.setattr(launch, "compile_source", refuses)
    assert chosen().chosen != "cuda"
    assert "needs compute capability 9.0, the device has 8.9" in chosen().skipped["cuda"]


def test_kernels_in_nvidias_assembly_are_not_tried_on_an_amd_device(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(launch, "compile_source", compiles)
    assert {report.chosen for report in backends(CUDA)} == {"reference", "bf16"}
    assert "built for AMD's" in chosen().skipped["triton"]


@pytest.fixture
def device(monkeypatch):
    """The CPU as a device: a driver that runs the reference on the addresses of a launch, and what it was asked."""
    asked = SimpleNamespace(loaded=[], launches=[], wrong=False, context=1, bound=0)

    def load(cubin):
        asked.loaded.append(cubin.decode())
        return SUCCESS, cubin

    def run(kernel, *arguments):
        assert asked.context, "the driver refuses a launch without a context"
        (values, types) = arguments[-2]
        assert len(values) == len(types)
        asked.launches.append((arguments[:-2], values))
        x, *outputs = asked.operands[-1]
        assert values[:5] == tuple(t.data_ptr() for t in (x, *outputs))
        for target, result in zip(outputs, reference.cast_block_dual(x, outputs[0].dtype, True), strict=True):
            target.copy_(result)
        if asked.wrong:
            outputs[2].view(torch.uint8)[5, 7] ^= 1
        return (SUCCESS,)

    def bind(context):
        asked.context, asked.bound = context, asked.bound + 1
        return (SUCCESS,)

    asked.operands = []
    allocate = launch.empty_block_dual

    def empty(x, dtype):
        results = allocate(x, dtype)
        asked.operands.append((x, *results))
        return results

    monkeypatch.setattr(launch, "compile_source", compiles)
    monkeypatch.setattr(launch, "empty_block_dual", empty)
    monkeypatch.setattr(launch.driver, "cuModuleLoadData", load)
    monkeypatch.setattr(launch.driver, "cuModuleGetFunction", lambda module, name: (SUCCESS, (module, name)))
    monkeypatch.setattr(launch.driver, "cuLaunchKernel", run)
    monkeypatch.setattr(launch.driver, "cuDeviceGet", lambda ordinal: (SUCCESS, ordinal))
    monkeypatch.setattr(launch.driver, "cuCtxGetCurrent", lambda: (SUCCESS, asked.context))
    monkeypatch.setattr(launch.driver, "cuDevicePrimaryCtxRetain", lambda device: (SUCCESS, 1))
    monkeypatch.setattr(launch.driver, "cuCtxSetCurrent", bind)
    monkeypatch.setattr(launch, "_thread", threading.local(), raising=False)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # what a CPU tensor answers
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=77))
    return asked


def matrix(rows, columns, dtype=torch.bfloat16):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(dtype)


def takes(x, dtype=E4M3):
    """Whether the kernel takes ``x``; then with the reference's results."""
    results = launch.cast_block_dual(x, dtype, True)
    for got, want in zip(results or (), reference.cast_block_dual(x, dtype, True), strict=results is not None):
        assert torch.equal(got.float(), want.float())
    return results is not None


def test_a_variant_is_loaded_and_checked_once(device):
    for _ in range(2):
        assert takes(matrix(256, 384))
    assert device.loaded == ["cast_block_dual sm_90a E4M3=1 POW2=1"]
    (check, _), *casts = device.launches
    assert check[0] == 4  # tiles of the comparison: every bfloat16
    assert [grid for (grid, *_), _ in casts] == [6, 6]
    ((_, _, _, threads, _, _, _, stream), values) = casts[0]
    assert (threads, stream) == (256, 77)
    assert values[5:] == (256, 384, 384)
    assert takes(matrix(128, 128), torch.float8_e5m2)
    assert device.loaded[1:] == ["cast_block_dual sm_90a E4M3=0 POW2=1"]


@pytest.mark.parametrize(
    "x",
    [matrix(200, 384), matrix(128, 130), matrix(128, 128, torch.float32), matrix(128, 300)[:, 3:131], matrix(0, 128)],
    ids=["rows", "columns", "float32", "unaligned", "empty"],
)
def test_what_the_kernel_does_not_take_goes_to_the_next(device, x):
    assert not takes(x)
    assert not device.launches


def test_a_thread_without_a_context_binds_the_primary_one_once(device):
    device.context = 0  # autograd's thread of device 0, where torch has called nothing of the runtime yet
    results = []
    thread = threading.Thread(target=lambda: results.extend(takes(matrix(128, 128)) for _ in range(3)))
    thread.start()
    thread.join()
    assert results == [True] * 3
    assert device.context == 1
    assert device.bound == 1


def test_wrong_bits_are_found_before_they_are_used(device, caplog):
    device.wrong = True
    for _ in range(2):
        assert not takes(matrix(128, 128))
    (record,) = caplog.records
    assert record.getMessage() == (
        "the CUDA cast fails on cpu: its results differ from the reference's; the Triton kernel runs instead"
    )
    assert len(device.launches) == 1


def test_a_driver_that_refuses_the_binary_is_reported_once(device, monkeypatch, caplog):
    invalid = launch.driver.CUresult.CUDA_ERROR_INVALID_IMAGE
    monkeypatch.setattr(launch.driver, "cuModuleLoadData", lambda cubin: (invalid, None))
    monkeypatch.setattr(launch.driver, "cuGetErrorString", lambda status: (SUCCESS, b"device kernel image is invalid"))
    for _ in range(2):
        assert not takes(matrix(128, 128))
    (record,) = caplog.records
    assert "the CUDA driver refused: device kernel image is invalid" in record.getMessage()


def test_a_capture_never_compiles_or_checks(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not takes(matrix(128, 128))
    assert not device.loaded
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert takes(matrix(128, 128))
    assert len(device.loaded) == 1
