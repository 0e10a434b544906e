// Panels by wgmma (sm_90a): 128 rows x 128 pairs; a warpgroup has one half, a warp one row tile of it.
#pragma once
#include "panel.cuh"

constexpr int PAIRS = 128, ROW_TILES = 8;
constexpr int PITCH = PAIRS + 9;  // floats from one row of results to the next: no bank conflicts either way

// Activations in shared memory, as wgmma's right operand with its swizzle of 64 bytes: of each block 64 bytes a pair, whose
// four pieces of 16 bytes change places with bits 1 and 2 of the pair's number.
constexpr int BLOCK_BYTES = PAIRS * 64;

__device__ __forceinline__ int place_in_block(int k) {  // registers (j, j + 4) of `unpack_bf16` are neighbours along k
  int c = k >> 3, j = k & 7;
  return ((j & 3) >> 1) * 16 + (j & 1) * 8 + 2 * c + (j >> 2);
}

template <int STAGE> struct Layout {  // of one stage in shared memory
  static constexpr int codes = STAGE * BLOCK_BYTES, scales = codes + ROW_TILES * STAGE * 256;
  static constexpr int stride = (scales + ROW_TILES * STAGE * 16 + 1023) / 1024 * 1024;
};

// Where a thread copies activations from: 16 bytes a block of pairs threadIdx / 4, + 64.
template <int N> struct Source {
  static constexpr int COUNT = (N + 63) / 64;
  const u16 *from[COUNT];
  u32 to;

  __device__ __forceinline__ Source(const u16 *x, size_t pitch, const int *rows) {
    const int m = threadIdx.x / 4, piece = threadIdx.x % 4;
    to = m * 64 + (piece ^ (m >> 1 & 3)) * 16;
#pragma unroll
    for (int i = 0; i < COUNT; i++) from[i] = x + rows[min(m + 64 * i, PAIRS - 1)] * pitch + piece * 8;
  }
  template <int BLOCKS, int STAGE> __device__ __forceinline__ void copy(u32 stage, const Panel &panel, int block) const {
    copy_weights<ROW_TILES, BLOCKS, STAGE>(stage + Layout<STAGE>::codes, panel, block);
#pragma unroll
    for (int b = 0; b < STAGE; b++)
#pragma unroll
      for (int i = 0; i < COUNT; i++)
        if (N - 64 * i >= 64 || int(threadIdx.x) < (N - 64 * i) * 4)
          copy16(stage + b * BLOCK_BYTES + i * 4096 + to, from[i] + size_t(block + b) * 32);
  }
};

// 64 bits that tell wgmma where its right operand lies: address, 512 bytes from 8 pairs to the next, swizzle of 64 bytes.
__device__ __forceinline__ unsigned long long descriptor(u32 address) {
  return (address & 0x3FFFF) >> 4 | 1ull << 16 | (unsigned long long)(512 >> 4) << 32 | 2ull << 62;
}
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// d (+)= the warpgroup's 64 rows x 16 k times N pairs; without `add`, d starts from zero.
template <int N> __device__ __forceinline__ void wgmma(float (&d)[N / 2], const u32 (&a)[4], unsigned long long b, int add);
template <> __device__ __forceinline__ void wgmma<16>(float (&d)[8], const u32 (&a)[4], unsigned long long b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %13, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7}, "
      "{%8, %9, %10, %11}, %12, p, 1, 1, 0;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
template <> __device__ __forceinline__ void wgmma<32>(float (&d)[16], const u32 (&a)[4], unsigned long long b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "{%16, %17, %18, %19}, %20, p, 1, 1, 0;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
template <> __device__ __forceinline__ void wgmma<48>(float (&d)[24], const u32 (&a)[4], unsigned long long b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %29, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23}, "
      "{%24, %25, %26, %27}, %28, p, 1, 1, 0;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
template <> __device__ __forceinline__ void wgmma<64>(float (&d)[32], const u32 (&a)[4], unsigned long long b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
      "%23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

// N pairs of a warpgroup's rows: what the matrix unit gives for a block, the segment's sum, the sum of segments.
template <int N> struct Part {
  float d[N / 2], acc[N / 2], total[N / 2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < N / 2; i++) d[i] = 0.f, acc[i] = 0.f, total[i] = 0.f;
  }
  __device__ __forceinline__ void start(const Fragment &f, u32 activations) {
    const u32 first[4] = {f.top[0], f.bottom[0], f.top[1], f.bottom[1]};
    const u32 second[4] = {f.top[2], f.bottom[2], f.top[3], f.bottom[3]};
    wgmma<N>(d, first, descriptor(activations), 0);
    wgmma<N>(d, second, descriptor(activations + 32), 1);
    wgmma_commit();
  }
  __device__ __forceinline__ void add(const float (&scale)[2]) {
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
      asm volatile("" : "+f"(d[i])::"memory");  // not read before the wait
      acc[i] = __fmaf_rn(d[i], scale[i / 2 % 2], acc[i]);  // the product is exact
    }
  }
  __device__ __forceinline__ void end_segment() {
#pragma unroll
    for (int i = 0; i < N / 2; i++) total[i] = __fadd_rn(total[i], acc[i]), acc[i] = 0.f;
  }
  __device__ __forceinline__ void store(float *results, int row, int first_pair) const {
    const int c = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < N / 2; i++)
      results[(row + i / 2 % 2 * 8) * PITCH + first_pair + i / 4 * 8 + 2 * c + i % 2] = total[i];
  }
};
template <> struct Part<0> {
  __device__ void clear() {}
  __device__ void start(const Fragment &, u32) {}
  __device__ void add(const float (&)[2]) {}
  __device__ void end_segment() {}
  __device__ void store(float *, int, int) const {}
};

// Row sums of the panel times A + B pairs into results[row * PITCH + pair]; row_tame[row]: its scales were tame. While the
// matrix unit works on one part of a block, the other part's sums are added up.
template <int A, int B, int BLOCKS>
__device__ __forceinline__ void row_sums(u8 *shared, const Panel &panel, const u16 *x, u32 x_pitch, const int *rows, u8 *row_tame) {
  constexpr int SEGMENTS = segments(BLOCKS), CHAIN = BLOCKS / SEGMENTS, STAGE = largest_divisor(CHAIN, STAGE_BLOCKS);
  constexpr int STEPS = BLOCKS / STAGE, AHEAD = DEPTH - 1;
  using Stages = Layout<STAGE>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 ring = shared_address(shared);
  const Source<A + B> source(x, x_pitch, rows);
#pragma unroll
  for (int i = 0; i < AHEAD; i++) {
    if (i < STEPS) source.template copy<BLOCKS, STAGE>(ring + i * Stages::stride, panel, i * STAGE);
    commit();
  }
  Part<A> a;
  Part<B> b;
  a.clear(), b.clear();
  u32 wild[2] = {};
  int at = 0, free_at = AHEAD * Stages::stride;
#pragma unroll 1
  for (int step = 0; step < STEPS; step++) {
    wait_copies<AHEAD - 1>();
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // wgmma reads what the copies wrote
    __syncthreads();
    if (step + AHEAD < STEPS)
      source.template copy<BLOCKS, STAGE>(ring + free_at, panel, (step + AHEAD) * STAGE);
    commit();
    auto load = [&](Fragment &f, int block) {
      int tile = warp * STAGE + block;
      f.load(shared + at + Stages::codes + tile * 256, shared + at + Stages::scales + tile * 16, wild);
    };
    Fragment f[2];
    load(f[0], 0);
#pragma unroll
    for (int block = 0; block < STAGE; block++) {
      Fragment &now = f[block % 2], &other = f[(block + 1) % 2];
      const u32 activations = ring + at + block * BLOCK_BYTES;
      wgmma_fence();
      a.start(now, activations);
      if (block > 0) {
        wgmma_wait<1>();
        b.add(other.scale);
        wgmma_fence();
      }
      b.start(now, activations + A * 64);
      if (block + 1 < STAGE) load(other, block + 1);
      wgmma_wait<(B > 0)>();
      a.add(now.scale);
    }
    wgmma_wait<0>();
    b.add(f[(STAGE - 1) % 2].scale);
    if ((step + 1) % (CHAIN / STAGE) == 0) a.end_segment(), b.end_segment();
    at = at == (DEPTH - 1) * Stages::stride ? 0 : at + Stages::stride;
    free_at = free_at == (DEPTH - 1) * Stages::stride ? 0 : free_at + Stages::stride;
  }
  wait_copies<0>();
  __syncthreads();  // the ring becomes the results
  const int row = warp * 16 + lane / 4;
  if (lane % 4 == 0) row_tame[row] = wild[0] == 0, row_tame[row + 8] = wild[1] == 0;
  a.store((float *)shared, row, 0);
  b.store((float *)shared, row, A);
  __syncthreads();
}

// rows: of PAIRS pairs; those from `count` on may repeat others.
template <int BLOCKS, class... Arguments> __device__ __forceinline__ void row_sums_of(int count, Arguments... arguments) {
  switch ((count + 15) / 16) {
    case 1: return row_sums<16, 0, BLOCKS>(arguments...);
    case 2: return row_sums<32, 0, BLOCKS>(arguments...);
    case 3: return row_sums<48, 0, BLOCKS>(arguments...);
    case 4: return row_sums<64, 0, BLOCKS>(arguments...);
    case 5: return row_sums<64, 16, BLOCKS>(arguments...);
    case 6: return row_sums<64, 32, BLOCKS>(arguments...);
    case 7: return row_sums<64, 48, BLOCKS>(arguments...);
    default: return row_sums<64, 64, BLOCKS>(arguments...);
  }
}
