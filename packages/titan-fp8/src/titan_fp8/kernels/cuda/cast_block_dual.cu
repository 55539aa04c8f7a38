// One read of a 128x128 bfloat16 tile; 1x128 blocks of its rows to q, 128x1 blocks of its columns, transposed, to qt.
//
// 256 threads, each with 8 rows x 8 columns in 32 registers, two bfloat16 to a register. What the Triton kernel spends
// its instructions on is done in pairs or not at all:
//   - maxima are taken on packed bfloat16 pairs (exact: a maximum rounds nothing);
//   - the transpose costs no byte shuffles: the conversion instruction packs any two floats, so for qt it packs two rows
//     of one column, and for q two columns of one row;
//   - the bytes of qt pass through shared memory swizzled, free of bank conflicts, and leave as 16-byte stores.
// fma(x, 0, x) makes infinities NaN; a maximum drops NaN; the conversion turns NaN into 0x7F.
//
// Compiled with -DE4M3={0,1} (else e5m2) and -DPOW2={0,1}. M and K are multiples of 128, x is 16-byte aligned, row_stride
// a multiple of 8. Scales are stored column by column: scale[K/128][M], scale_t[M/128][K].

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

#if E4M3
#define FLOAT8_EMAX 8
#define FLOAT8_MAX 448.0f
#define CONVERT "cvt.rn.satfinite.e4m3x2.f32"
#else
#define FLOAT8_EMAX 15
#define FLOAT8_MAX 57344.0f
#define CONVERT "cvt.rn.satfinite.e5m2x2.f32"
#endif

__device__ __forceinline__ u32 drop_infinities(u32 pair) {
  u32 out;
  asm("fma.rn.bf16x2 %0, %1, %2, %1;" : "=r"(out) : "r"(pair), "r"(0u));
  return out;
}

__device__ __forceinline__ u32 max_pair(u32 a, u32 b) {
  u32 out;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}

__device__ __forceinline__ u32 magnitudes(u32 pair) { return pair & 0x7FFF7FFFu; }
__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }

// Four floats to four float8 codes, the first in the lowest byte.
__device__ __forceinline__ u32 convert(float a, float b, float c, float d) {
  u16 first, second;
  asm(CONVERT " %0, %1, %2;" : "=h"(first) : "f"(b), "f"(a));
  asm(CONVERT " %0, %1, %2;" : "=h"(second) : "f"(d), "f"(c));
  return (u32)first | ((u32)second << 16);
}

// The encode scale of a block, and its inverse; amax as bfloat16 bits (NaN if nothing in the block is finite).
__device__ __forceinline__ float encode_scale(u32 amax_bits, float* decode) {
  const u32 bits = amax_bits << 16;
  const bool usable = bits > 0u && bits < 0x7F800000u;
#if POW2
  int k = FLOAT8_EMAX + 127 - (int)(bits >> 23) - ((bits & 0x7FFFFFu) > 0x600000u ? 1 : 0);
  k = usable ? min(k, 126) : 0;
  *decode = __uint_as_float((u32)(127 - k) << 23);
  return __uint_as_float((u32)(127 + k) << 23);
#else
  const float encode = usable ? fminf(__fdiv_rn(FLOAT8_MAX, __uint_as_float(bits)), 8.507059173023462e37f) : 1.0f;
  *decode = __fdiv_rn(1.0f, encode);
  return encode;
#endif
}

// Three blocks of 80 registers share a multiprocessor; the divisions of exact scales need a few more.
extern "C" __global__ void __launch_bounds__(256, POW2 ? 3 : 2)
cast_block_dual(const uint4* __restrict__ x, u8* __restrict__ q, float* __restrict__ scale, u8* __restrict__ qt,
                float* __restrict__ scale_t, i64 M, i64 K, i64 row_stride) {
  __shared__ alignas(16) u8 transposed[128 * 128];
  __shared__ alignas(16) u32 warp_column_amax[8][64];  // pairs of columns
  __shared__ alignas(16) float row_encode[128];
  __shared__ alignas(16) float column_encode[128];

  const int tiles_k = (int)(K >> 7);
  const i64 tile_m = blockIdx.x / tiles_k, tile_k = blockIdx.x % tiles_k;
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  const int column_group = thread & 15, row_group = thread >> 4;  // 8 columns, 8 rows each

  u32 pair[8][4];
  const uint4* source = x + ((tile_m * 128 + row_group * 8) * row_stride + tile_k * 128) / 8 + column_group;
#pragma unroll
  for (int row = 0; row < 8; ++row) {
    const uint4 chunk = __ldg(source + row * (row_stride >> 3));
    pair[row][0] = chunk.x;
    pair[row][1] = chunk.y;
    pair[row][2] = chunk.z;
    pair[row][3] = chunk.w;
  }

  u32 column_amax[4] = {0u, 0u, 0u, 0u};
  u32 row_amax[4];  // rows 2i and 2i + 1
#pragma unroll
  for (int row = 0; row < 8; ++row) {
    u32 amax = 0u;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      pair[row][i] = drop_infinities(pair[row][i]);
      const u32 magnitude = magnitudes(pair[row][i]);
      column_amax[i] = max_pair(column_amax[i], magnitude);
      amax = max_pair(amax, magnitude);
    }
    amax = max_pair(amax, amax >> 16);  // the low half now has both
    if (row & 1)
      row_amax[row >> 1] |= amax << 16;
    else
      row_amax[row >> 1] = amax & 0xFFFFu;
  }
#pragma unroll
  for (int distance = 8; distance > 0; distance >>= 1)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      row_amax[i] = max_pair(row_amax[i], __shfl_xor_sync(0xFFFFFFFFu, row_amax[i], distance));
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    column_amax[i] = max_pair(column_amax[i], __shfl_xor_sync(0xFFFFFFFFu, column_amax[i], 16));
    if (lane < 16) warp_column_amax[warp][column_group * 4 + i] = column_amax[i];
  }
  if (column_group < 8) {  // one thread of each half warp per row
    const u32 two = column_group & 4 ? (column_group & 2 ? row_amax[3] : row_amax[2])
                                     : (column_group & 2 ? row_amax[1] : row_amax[0]);
    float decode;
    const int row = row_group * 8 + column_group;
    row_encode[row] = encode_scale(column_group & 1 ? two >> 16 : two & 0xFFFFu, &decode);
    scale[tile_k * M + tile_m * 128 + row] = decode;
  }
  __syncthreads();

  if (thread < 128) {
    u32 amax = warp_column_amax[0][thread >> 1];
#pragma unroll
    for (int i = 1; i < 8; ++i) amax = max_pair(amax, warp_column_amax[i][thread >> 1]);
    float decode;
    column_encode[thread] = encode_scale(thread & 1 ? amax >> 16 : amax & 0xFFFFu, &decode);
    scale_t[tile_m * K + tile_k * 128 + thread] = decode;
  }

  // Rows to q while the column scales are on their way. Neighbouring threads swap halves of two rows, so that each
  // stores 16 bytes of one row instead of 8 of both.
  u8* target = q + (tile_m * 128 + row_group * 8 + (column_group & 1)) * K + tile_k * 128 + (column_group >> 1) * 16;
#pragma unroll
  for (int row = 0; row < 8; row += 2) {
    u32 codes[2][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float encode = row_encode[row_group * 8 + row + i];
      const u32* p = pair[row + i];
      codes[i][0] = convert(low(p[0]) * encode, high(p[0]) * encode, low(p[1]) * encode, high(p[1]) * encode);
      codes[i][1] = convert(low(p[2]) * encode, high(p[2]) * encode, low(p[3]) * encode, high(p[3]) * encode);
    }
    const bool odd = column_group & 1;
    const u32 received0 = __shfl_xor_sync(0xFFFFFFFFu, odd ? codes[0][0] : codes[1][0], 1);
    const u32 received1 = __shfl_xor_sync(0xFFFFFFFFu, odd ? codes[0][1] : codes[1][1], 1);
    const uint4 sixteen = odd ? make_uint4(received0, received1, codes[1][0], codes[1][1])
                              : make_uint4(codes[0][0], codes[0][1], received0, received1);
    *reinterpret_cast<uint4*>(target + row * K) = sixteen;
  }
  __syncthreads();

  // Columns to shared memory: column c has 8 chunks of 16 rows at positions (chunk ^ c/8 mod 8), the halves of a chunk
  // swapped in the upper 64 columns. The 16 threads of a half warp so touch all 32 banks once.
  const int position = ((row_group >> 1) ^ (column_group & 7)) * 16 + (((row_group & 1) ^ (column_group >> 3)) * 8);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float even = column_encode[column_group * 8 + 2 * i], odd = column_encode[column_group * 8 + 2 * i + 1];
    uint2 eight;
    eight.x = convert(low(pair[0][i]) * even, low(pair[1][i]) * even, low(pair[2][i]) * even, low(pair[3][i]) * even);
    eight.y = convert(low(pair[4][i]) * even, low(pair[5][i]) * even, low(pair[6][i]) * even, low(pair[7][i]) * even);
    *reinterpret_cast<uint2*>(transposed + (column_group * 8 + 2 * i) * 128 + position) = eight;
    eight.x = convert(high(pair[0][i]) * odd, high(pair[1][i]) * odd, high(pair[2][i]) * odd, high(pair[3][i]) * odd);
    eight.y = convert(high(pair[4][i]) * odd, high(pair[5][i]) * odd, high(pair[6][i]) * odd, high(pair[7][i]) * odd);
    *reinterpret_cast<uint2*>(transposed + (column_group * 8 + 2 * i + 1) * 128 + position) = eight;
  }
  __syncthreads();

#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int column = (thread >> 3) + i * 32, chunk = thread & 7;
    uint4 sixteen = *reinterpret_cast<const uint4*>(transposed + column * 128 + ((chunk ^ ((column >> 3) & 7)) * 16));
    if (column & 64) sixteen = make_uint4(sixteen.z, sixteen.w, sixteen.x, sixteen.y);
    *reinterpret_cast<uint4*>(qt + (tile_k * 128 + column) * M + tile_m * 128 + chunk * 16) = sixteen;
  }
}
