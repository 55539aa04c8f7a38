"""Host time of launching a float8 kernel: Triton's own path beside `titan_fp8.kernels.triton.launch`.

Question: what does the host pay to launch a compiled kernel, and does the short way hand over the same arguments?
Method: the kernels are compiled for sm_90a; in place of a driver stands one that knows its target only, and its launcher
notes or drops what it is given. The arguments of both paths are compared first. Then CPU seconds of this process, the
fastest of 15 rounds, both paths in turn in every round.
Output: a table, then one JSON object. Limits: the driver's own launch and the device are not included.

    OMP_NUM_THREADS=1 python packages/titan-fp8/benchmarks/launch_time.py [--check]
"""

import argparse
import json
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import triton
from titan_fp8.kernels.triton import block, fused, row, tensor, weights
from titan_fp8.kernels.triton import launch as launching
from torch import Tensor
from triton.backends.compiler import GPUTarget

given: list[tuple[Any, ...]] | None = None


class Launcher:
    """Stands for the compiled launcher: notes its arguments while `given` is a list."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self.name = metadata.name

    def __call__(self, *arguments: Any) -> None:
        if given is not None:
            # scratch, hooks and metadata of hooks are the launcher's own business
            given.append((self.name, *arguments[:6], *map(_seen, arguments[9:])))


class DriverOfNoDevice:
    """What binding, compiling and launching ask of a driver."""

    launcher_cls = Launcher
    utils = SimpleNamespace(
        load_binary=lambda name, *_: (name, f"function of {name}", 32, 0, 1024),
        unload_module=lambda module: None,
        get_device_properties=lambda device: {"max_shared_mem": 232448},
    )

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 7

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def _seen(argument: Any) -> Any:
    return (str(argument.dtype), tuple(argument.shape)) if isinstance(argument, Tensor) else str(argument)


def calls() -> dict[str, Callable[[], Any]]:
    """One call of each wrapper that launches, some with several kinds of arguments."""
    x, odd, w = torch.randn(256, 512).bfloat16(), torch.randn(300, 147).bfloat16(), torch.ones(512).bfloat16()
    shifted = torch.randn(256 * 512 + 1).bfloat16()[1:].view(256, 512)  # starts 2 bytes beyond a multiple of 16
    e4m3 = torch.float8_e4m3fn
    return {
        "cast_block_dual": lambda: block.cast_block_dual(x, e4m3, True),
        "cast_block_dual, unaligned": lambda: block.cast_block_dual(shifted, e4m3, True),
        "cast_block_dual, ragged": lambda: block.cast_block_dual(odd, e4m3, True),
        "cast_row": lambda: row.cast_row(x, e4m3, True),
        "cast_tensor_dual": lambda: tensor.cast_tensor_dual(x, e4m3, True),
        "cast_weight_block": lambda: weights.cast_weight_block(x, e4m3, True),
        "rmsnorm_cast_block": lambda: fused.rmsnorm_cast_block(x, w, 1e-5, e4m3, True),
    }


def launches(call: Callable[[], Any]) -> list[tuple[Any, ...]]:
    """What the launcher is given in one call."""
    global given
    given = []
    call()
    noted, given = given, None
    return noted


def compare(wrappers: dict[str, Callable[[], Any]]) -> dict[str, bool]:
    """Whether a launch that was seen before hands over what Triton's own path does."""
    equal: dict[str, bool] = {}
    for name, call in wrappers.items():
        launching._known.clear()
        first = launches(call)  # Triton's own
        known = len(launching._known)
        equal[name] = bool(first) and first == launches(call) and len(launching._known) == known == len(first)
    return equal


def hooked(call: Callable[[], Any]) -> bool:
    """Whether a hook of Triton's still sees a launch that was seen before."""
    seen: list[str] = []
    call()
    block.cast_block_kernel.add_pre_run_hook(lambda *_, **__: seen.append("launch"))
    call()
    block.cast_block_kernel.pre_run_hooks.clear()
    return seen == ["launch"]


def microseconds(call: Callable[[], Any], calls_each: int = 200) -> tuple[float, float]:
    """CPU time of one call, with Triton's own launch and with ours: the fastest rounds."""
    found: tuple[list[float], list[float]] = ([], [])
    checked = launching._CHECKED
    for _ in range(15):
        for own, rounds in enumerate(found):
            launching._known.clear()
            launching._CHECKED = checked if own else ("none",)
            call()
            start = time.process_time()
            for _ in range(calls_each):
                call()
            rounds.append((time.process_time() - start) / calls_each * 1e6)
    launching._CHECKED = checked
    return min(found[0]), min(found[1])


def main() -> None:
    """Compare, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare the arguments only")
    only_check = parser.parse_args().check
    triton.runtime.driver.set_active(DriverOfNoDevice())
    launching.device_index = lambda x: 0  # tensors of the CPU stand for the device's
    wrappers = calls()
    record: dict[str, Any] = {"torch": torch.__version__, "triton": triton.__version__, "equal": compare(wrappers)}
    record["hooks_see_launches"] = hooked(wrappers["cast_block_dual"])
    if not only_check:
        record["host_us"] = {name: microseconds(call) for name, call in wrappers.items()}
        for name, (before, after) in record["host_us"].items():
            print(f"{name:30} {before:6.1f} us {after:6.1f} us")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
