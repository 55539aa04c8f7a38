"""cast_block_dual.cu compiled as C++ and run with one CPU thread per CUDA thread; prints mismatches with the reference.

The kernel's text is compiled as it is, but for its three functions of inline assembly, which are replaced by plain C++,
and the CUDA keywords, which become macros. Barriers and shuffles are real barriers between 256 threads, so indexing,
data exchange and shared memory are those of the device; only the instructions themselves are not.
"""

import ctypes
import re
import subprocess
import tempfile
from importlib import resources
from pathlib import Path

import torch
from titan_fp8 import reference

CUDA = r"""
#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>
using std::min;
#define __global__
#define __device__
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(...)
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
static uint4 make_uint4(unsigned a, unsigned b, unsigned c, unsigned d) { return {a, b, c, d}; }
static float __uint_as_float(unsigned u) { float f; memcpy(&f, &u, 4); return f; }
static unsigned bits_of(float f) { unsigned u; memcpy(&u, &f, 4); return u; }
static float __fdiv_rn(float a, float b) { return a / b; }
static uint4 __ldg(const uint4* p) { return *p; }
struct Index { int x; };
thread_local Index threadIdx, blockIdx;
static std::barrier<> block_barrier(256);
static std::vector<std::unique_ptr<std::barrier<>>> warp_barrier;
static unsigned exchanged[256];
static void __syncthreads() { block_barrier.arrive_and_wait(); }
static unsigned __shfl_xor_sync(unsigned, unsigned value, int distance) {
  exchanged[threadIdx.x] = value;
  warp_barrier[threadIdx.x / 32]->arrive_and_wait();
  const unsigned received = exchanged[threadIdx.x ^ distance];
  warp_barrier[threadIdx.x / 32]->arrive_and_wait();
  return received;
}
"""
ASSEMBLY = {
    "drop_infinities": r"""
static u32 drop_infinities(u32 pair) {
  for (int shift = 0; shift < 32; shift += 16)
    if (((pair >> shift) & 0x7FFF) >= 0x7F80) pair |= 0x7FFFu << shift;
  return pair;
}
""",
    "max_pair": r"""
static u32 max_one(u32 a, u32 b) {
  if ((a & 0x7FFF) > 0x7F80) return b;
  if ((b & 0x7FFF) > 0x7F80) return a;
  return __uint_as_float(a << 16) > __uint_as_float(b << 16) ? a : b;
}
static u32 max_pair(u32 a, u32 b) { return max_one(a & 0xFFFF, b & 0xFFFF) | max_one(a >> 16, b >> 16) << 16; }
""",
    "convert": r"""
static u32 convert_one(float y) {
  const int mantissa = E4M3 ? 3 : 2, bias = E4M3 ? 7 : 15, largest = E4M3 ? 0x7E : 0x7B;
  const u32 magnitude = bits_of(y) & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) return 0x7F;
  const u32 half = (1u << (22 - mantissa)) - 1 + ((magnitude >> (23 - mantissa)) & 1);
  int code = (int)((magnitude + half) >> (23 - mantissa)) - ((127 - bias) << mantissa);
  if (magnitude < (u32)((128 - bias) << 23)) code = (int)std::nearbyint(std::ldexp((double)fabsf(y), bias + mantissa - 1));
  return min(code, largest) | ((bits_of(y) >> 24) & 0x80);
}
static u32 convert(float a, float b, float c, float d) {
  return convert_one(a) | convert_one(b) << 8 | convert_one(c) << 16 | convert_one(d) << 24;
}
""",
}
LAUNCH = r"""
extern "C" void launch(const void* x, u8* q, float* scale, u8* qt, float* scale_t, i64 M, i64 K, i64 row_stride) {
  for (int warp = 0; warp < 8; ++warp) warp_barrier.push_back(std::make_unique<std::barrier<>>(32));
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 256; ++thread)
    threads.emplace_back([=] {
      threadIdx.x = thread;
      for (int block = 0; block < M / 128 * (K / 128); ++block) {
        blockIdx.x = block;
        cast_block_dual((const uint4*)x, q, scale, qt, scale_t, M, K, row_stride);
        block_barrier.arrive_and_wait();
      }
    });
  for (auto& thread : threads) thread.join();
}
"""


def build(folder, e4m3, pow2):
    source = resources.files("titan_fp8.kernels.cuda").joinpath("cast_block_dual.cu").read_text()
    source = source.replace("__shared__ alignas(16)", "alignas(16) static")
    for name, replacement in ASSEMBLY.items():
        pattern = rf"__device__ __forceinline__ u32 {name}\(.*?\n}}\n"
        source, count = re.subn(pattern, lambda _, text=replacement: text, source, flags=re.DOTALL)
        assert count == 1, name
    assert "asm(" not in source
    path = Path(folder) / f"emulated{e4m3}{pow2}"
    path.with_suffix(".cpp").write_text(f"#define E4M3 {e4m3}\n#define POW2 {pow2}\n{CUDA}\n{source}\n{LAUNCH}")
    command = ["g++", "-O1", "-std=c++20", "-pthread", "-shared", "-fPIC", "-Wno-unknown-pragmas", "-o"]
    subprocess.run([*command, path.with_suffix(".so"), path.with_suffix(".cpp")], check=True)
    return ctypes.CDLL(str(path.with_suffix(".so")))


def main():
    generator = torch.Generator().manual_seed(0)
    buffer = torch.randn(256, 512, generator=generator).bfloat16()
    every = torch.arange(32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    buffer[128:256, 128:384] = every[torch.randperm(32768, generator=generator)].view(128, 256)
    x = buffer[:, 128:384]  # rows further apart than they are long
    x[3, 4], x[5], x[7], x[:, 20] = torch.inf, torch.nan, 0, 0
    x[9] *= 1e-38
    rows, columns = x.shape
    for dtype, pow2 in ((torch.float8_e4m3fn, True), (torch.float8_e5m2, False)):
        q, qt = torch.empty(rows, columns, dtype=torch.uint8), torch.empty(columns, rows, dtype=torch.uint8)
        scale, scale_t = torch.empty(columns // 128, rows), torch.empty(rows // 128, columns)
        with tempfile.TemporaryDirectory() as folder:
            library = build(folder, int(dtype == torch.float8_e4m3fn), int(pow2))
            pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (x, q, scale, qt, scale_t)]
            library.launch(*pointers, *(ctypes.c_longlong(size) for size in (rows, columns, x.stride(0))))
        results = (q.view(dtype), scale.t(), qt.view(dtype), scale_t.t())
        for got, expected in zip(results, reference.cast_block_dual(x, dtype, pow2), strict=True):
            different = got.view(torch.uint8) != expected.view(torch.uint8) if got.itemsize == 1 else got != expected
            print(int(different.sum()))


if __name__ == "__main__":
    main()
