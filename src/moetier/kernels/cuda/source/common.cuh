// The contract's small functions for CUDA; names as in the oracle. Compiled with -fmad=false: a fused multiply-add is
// written only where the product is exact. The layer's sizes are macros: HIDDEN, INNER (a slice's intermediate size),
// SLICES, SLICE_BYTES, EXPERTS, TOP_K, WEIGHTED (route weight before down), LIMIT_BITS (the clamp's float bits, or none);
// HYBRID_STEP is 1 for a hybrid step, of at most BOX_TOKENS tokens.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef signed char s8;

__host__ __device__ constexpr int segments(int blocks) {
  return blocks % 8 == 0 ? 8 : blocks % 4 == 0 ? 4 : blocks % 2 == 0 ? 2 : 1;
}
__host__ __device__ constexpr int largest_divisor(int n, int most) { return n % most == 0 ? most : largest_divisor(n, most - 1); }

// Byte offsets in a slice of a record: codes of gate, up, down, then their scales.
constexpr size_t CODES = size_t(INNER) * HIDDEN / 2, SCALES = size_t(INNER) * HIDDEN / 32;
constexpr int INTERMEDIATE = INNER * SLICES;
constexpr bool HYBRID = HYBRID_STEP;  // compiled for the hybrid step (hybrid.cuh), whose other rows are the CPU's

constexpr int MAGIC = 0x4B400000;  // bits of 1.5 * 2^23: MAGIC + d, read as a float, is 1.5 * 2^23 + d
constexpr int OFFSET = 116;        // unpacked weights are w - OFFSET, so that every byte of both tables has its top bit set

struct Meta {  // of one block of 32 activations
  int exponent;    // (e - 1) << 23, so that adding s << 23 gives the bits of 2^(e + s - 128); lowest bit: e is not tame
  float base;      // 1.5 * 2^23 - OFFSET * (sum of q): what the block's sum d is offset by, once read as a float
  __device__ int e() const { return (exponent >> 23) + 1; }
};

__device__ __forceinline__ float flush(float x) { return fabsf(x) < 0x1p-100f ? 0.f : x; }
__device__ __forceinline__ float rint_exact(float x) { return __fadd_rn(__fadd_rn(x, 0x1.8p23f), -0x1.8p23f); }
__device__ __forceinline__ float power(int n) { return __int_as_float((n + 127) << 23); }
__device__ __forceinline__ float from_bf16(u16 bits) { return __int_as_float(int(bits) << 16); }

__device__ __forceinline__ u16 to_bf16(float x) {
  u32 bits = __float_as_uint(x);
  u32 rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  return (bits & 0x7F800000) == 0x7F800000 ? 0x7FC0 : u16(rounded);
}

__device__ __forceinline__ float exp_negative(float t) {
  float n = rint_exact(__fmul_rn(t, 1.44269504f));
  float r = __fsub_rn(__fsub_rn(t, __fmul_rn(n, 0.693359375f)), __fmul_rn(n, -2.12194440e-4f));
  float p = float(1.0 / 5040);
  const float c[7] = {float(1.0 / 720), float(1.0 / 120), float(1.0 / 24), float(1.0 / 6), 0.5f, 1.f, 1.f};
#pragma unroll
  for (int i = 0; i < 7; i++) p = __fadd_rn(__fmul_rn(p, r), c[i]);
  return __fmul_rn(p, power(int(n)));
}

__device__ __forceinline__ float swiglu(float g, float u, float weight) {
#ifdef LIMIT_BITS
  const float limit = __int_as_float(LIMIT_BITS);
  g = g > limit ? limit : g;  // a comparison with NaN is false: NaN stays
  u = u > limit ? limit : u;
  u = u < -limit ? -limit : u;
#endif
  g = flush(g);
  float size = fabsf(g);
  float e = exp_negative(size < 80.f ? -size : (size >= 80.f ? -80.f : 0.f));
  float sigma = __fdiv_rn(g >= 0.f ? 1.f : e, __fadd_rn(1.f, e));
  float h = flush(__fmul_rn(g < -80.f ? 0.f : flush(__fmul_rn(g, sigma)), u));
  return WEIGHTED ? flush(__fmul_rn(h, weight)) : h;
}

// One block of 32 activations, one a lane: its q, exponent (127: it holds a NaN or an infinity) and sum of q.
// The oracle marks the whole row; one such block makes every sum of the row NaN, so the results are the same.
struct Quantized {
  int q, e, sum;
};
// a: bits of the largest |x| of a block -> e; the power that scales the block is 2^-(what this returns)
__device__ __forceinline__ int exponent_of(u32 a, int &e) {
  const bool bad = a >= 0x7F800000;
  const int scaling = a == 0 || bad ? 0 : int(a >> 23) - 133 + ((a & 0x7FFFFF) > 0x7E0000);
  e = bad ? 127 : scaling;
  return scaling;
}
__device__ __forceinline__ Quantized quantize(float x) {
  x = flush(x);
  Quantized b;
  const int scaling = exponent_of(__reduce_max_sync(~0u, __float_as_uint(x) & 0x7FFFFFFF), b.e);
  b.q = b.e == 127 ? 0 : __float2int_rn(__fmul_rn(x, power(-scaling)));
  b.sum = __reduce_add_sync(~0u, b.q);
  return b;
}
// Tame: an exponent in [-62, 48] and scale bytes in [64, 191]; c = e + s - 128 is then in [-126, 111], where d * 2^c is what
// the contract asks for. Whatever meets something wild is computed again by `exact_chain`.
__device__ __forceinline__ bool is_tame(int e) { return e >= -62 && e <= 48; }
__device__ __forceinline__ Meta meta_of(const Quantized &b) {
  return {int(u32(b.e - 1) << 23) | !is_tame(b.e), 0x1.8p23f - float(OFFSET * b.sum)};
}
// Four scale bytes: nonzero unless every one is tame, that is, its two top bits differ.
__device__ __forceinline__ u32 wild_scales(u32 four) { return ~(four ^ four << 1) & 0x80808080u; }

// A chain of blocks of one weight row by the letter of the contract, for what the fast kernels cannot hold. exponent(b): e.
template <class Exponent>
__device__ __forceinline__ float exact_chain(const u8 *codes, const u8 *scales, const s8 *q, Exponent exponent, int blocks) {
  float acc = 0.f;
  for (int b = 0; b < blocks; b++) {
    int d = 0, e = exponent(b), c = e + scales[b * 16] - 128;
    if (e == 127 || c > 111) return __int_as_float(0x7FC00000);
    for (int i = 0; i < 32; i++) {
      int code = codes[b * 256 + i / 2] >> (i % 2 * 4) & 15, m = code & 7;
      int w = m < 2 ? m : (2 + (m & 1)) << ((m >> 1) - 1);
      d += (code & 8 ? -w : w) * q[b * 32 + i];
    }
    acc = __fadd_rn(acc, c < -126 ? 0.f : __fmul_rn(float(d), power(c)));
  }
  return acc;
}

__device__ __forceinline__ u32 permute(u32 a, u32 b, u32 selector) {
  u32 d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
  return d;
}

// d = start + a b: 16 rows x 32 k by 32 k x 8 columns.
__device__ __forceinline__ void multiply16(int d[4], const int start[4], const u32 a[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(start[0]), "r"(start[1]), "r"(start[2]), "r"(start[3]));
}

// Constants that must stay in registers pass through shared memory: the compiler would else keep them in uniform registers
// and copy one to an ordinary register before every use.
struct Tables {
  u32 positive, negative;
  int magic[4];  // what an accumulator starts from

  __device__ __forceinline__ Tables() {
    __shared__ volatile u32 constants[3];
    constants[0] = 0x8F8E8D8Cu, constants[1] = 0x898A8B8Cu, constants[2] = MAGIC;  // every thread writes the same
    __syncwarp();
    positive = constants[0], negative = constants[1];
    for (int i = 0; i < 4; i++) magic[i] = int(constants[2]);
  }
};

// 8 codes -> w - OFFSET as 4 + 4 signed bytes. A set top bit of a selector nibble (the code's sign) replicates the table
// byte's top bit, 0xFF here; so of the two look-ups one gives the value and the other leaves it alone under AND.
__device__ __forceinline__ void unpack(const Tables &tables, u32 codes, u32 &low, u32 &high) {
  u32 flipped = codes ^ 0x88888888u;
  low = permute(tables.positive, 0x98949290u, codes) & permute(tables.negative, 0x80848688u, flipped);
  high = permute(tables.positive, 0x98949290u, codes >> 16) & permute(tables.negative, 0x80848688u, flipped >> 16);
}

// Scales of a tile's rows, read as words (a load of single bytes costs four passes of shared memory).
__device__ __forceinline__ u32 scale_word(const u8 *scales, int row) { return *(const u32 *)(scales + (row & ~3)); }
// The row's byte of its word, times 2^16.
__device__ __forceinline__ u32 scale_byte(u32 word, int row) { return permute(word, 0, 0x4044 | (row & 3) << 8); }

__device__ __forceinline__ void copy16(u32 to, const void *from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy8(u32 to, const void *from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
__device__ __forceinline__ u32 shared_address(const void *p) { return u32(__cvta_generic_to_shared(p)); }

// Programmatic dependent launch: the next kernel may start early, and waits here before it touches our results.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// A record's slices, by the pairwise tree.
__device__ __forceinline__ float join(float (&slice)[SLICES]) {
#pragma unroll
  for (int width = SLICES; width > 1; width /= 2)
#pragma unroll
    for (int l = 0; l < width / 2; l++) slice[l] = __fadd_rn(slice[2 * l], slice[2 * l + 1]);
  return slice[0];
}

// One row's answer from its chains' sums, 16 values apart: segments in order, then slices.
template <int SEGMENTS> __device__ __forceinline__ float whole_row(const float *parts) {
  float slice[SLICES];
#pragma unroll
  for (int l = 0; l < SLICES; l++) {
    slice[l] = parts[l * SEGMENTS * 16];
#pragma unroll
    for (int s = 1; s < SEGMENTS; s++) slice[l] = __fadd_rn(slice[l], parts[(l * SEGMENTS + s) * 16]);
  }
  return join(slice);
}
