// Panels by mma.m16n8k16: 256 rows x 48 pairs; a warp has one row tile of each half.
#pragma once
#include "panel.cuh"

constexpr int PAIRS = 48, ROW_TILES = 16;
constexpr int PITCH = PAIRS + 9;  // floats from one row of results to the next: no bank conflicts either way
using Members = MembersOf<PAIRS>;
using Flags = FlagsOf<PAIRS, ROW_TILES * 16>;
constexpr int PANEL_THREADS = THREADS;
constexpr bool BY_TILE = false;

__device__ __forceinline__ int place_in_block(int k) {  // a lane reads its 8 values of a block as 16 bytes
  int j = k & 7;
  return (k & 24) + (j < 4 ? 2 * j : 2 * j - 7);
}
__device__ __forceinline__ int swizzled(int piece, int) { return piece; }

// Where a row's block is in an array of activations, `blocks` blocks a row: [row][block][32].
__device__ __forceinline__ size_t block_of(const Place &, int row, int blocks, int block) {
  return (size_t(row) * blocks + block) * 32;
}

__device__ __forceinline__ size_t first_block(const Tile &, int, int block) { return block * 32; }  // of row 0
__device__ __forceinline__ void sync_panel() { __syncthreads(); }
__device__ __forceinline__ bool sync_panel_or(bool value) { return __syncthreads_or(value); }

template <int STAGE> struct Layout {  // of one stage in shared memory
  static constexpr int scales = ROW_TILES * STAGE * 256, activations = scales + ROW_TILES * STAGE * 16;
  static constexpr int block = PAIRS * 64 + 64, stride = activations + STAGE * block;
};

// A stage for N pairs. Sixteen threads take a pair's 16-byte pieces, so a warp reads two rows at a time.
template <int N, int BLOCKS, int STAGE>
__device__ __forceinline__ void copy_stage(u32 stage, const Panel &panel, const u16 *x, u32 x_pitch, const int *rows, int block) {
  static_assert(STAGE <= 4, "a pair's pieces of a stage are one for each of 16 threads");
  copy_weights<ROW_TILES, BLOCKS, STAGE>(stage, panel, block);
  const int first = threadIdx.x / 16, piece = threadIdx.x % 16;
  if (STAGE == 4 || piece < STAGE * 4) {
    const u16 *from = x + block * 32 + piece * 8;
    const u32 to = stage + Layout<STAGE>::activations + piece / 4 * Layout<STAGE>::block + piece % 4 * 16 + first * 64;
#pragma unroll
    for (int m = 0; m < N; m += 16)
      if (N - m >= 16 || first < N - m) copy16(to + m * 64, from + size_t(u32(rows[first + m])) * x_pitch);
  }
}

__device__ __forceinline__ void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Row sums of the panel times up to 8 * COLUMNS pairs into results[row * PITCH + pair]; row_tame[row]: its scales were tame.
template <int COLUMNS, int BLOCKS>
__device__ __forceinline__ void row_sums(u8 *shared, const Panel &panel, const u16 *x, u32 x_pitch, const int *rows, u8 *row_tame) {
  constexpr int SEGMENTS = segments(BLOCKS), CHAIN = BLOCKS / SEGMENTS, STAGE = largest_divisor(CHAIN, STAGE_BLOCKS);
  constexpr int STEPS = BLOCKS / STAGE;
  using Stages = Layout<STAGE>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, c = lane & 3;
  const u32 ring = shared_address(shared);
#pragma unroll
  for (int i = 0; i < DEPTH - 1; i++) {
    if (i < STEPS) copy_stage<8 * COLUMNS, BLOCKS, STAGE>(ring + i * Stages::stride, panel, x, x_pitch, rows, i * STAGE);
    commit();
  }
  float total[2][COLUMNS][4], acc[2][COLUMNS][4];
#pragma unroll
  for (int i = 0; i < 2 * COLUMNS * 4; i++) (&total[0][0][0])[i] = 0.f, (&acc[0][0][0])[i] = 0.f;
  u32 wild[2][2] = {};
#pragma unroll 1
  for (int step = 0; step < STEPS; step++) {
    wait_copies<DEPTH - 2>();
    __syncthreads();
    int next = step + DEPTH - 1;
    if (next < STEPS)
      copy_stage<8 * COLUMNS, BLOCKS, STAGE>(ring + next % DEPTH * Stages::stride, panel, x, x_pitch, rows, next * STAGE);
    commit();
    const u8 *stage = shared + step % DEPTH * Stages::stride;
#pragma unroll
    for (int b = 0; b < STAGE; b++) {
      Fragment a[2];
#pragma unroll
      for (int t = 0; t < 2; t++) {
        int tile = (warp + 8 * t) * STAGE + b;
        a[t].load(stage + tile * 256, stage + Stages::scales + tile * 16, wild[t]);
      }
#pragma unroll
      for (int n = 0; n < COLUMNS; n++) {
        uint4 q = *(const uint4 *)(stage + Stages::activations + b * Stages::block + (n * 8 + g) * 64 + c * 16);
#pragma unroll
        for (int t = 0; t < 2; t++) {
          float d[4] = {};
          multiply(d, a[t].top[0], a[t].bottom[0], a[t].top[1], a[t].bottom[1], q.x, q.y);
          multiply(d, a[t].top[2], a[t].bottom[2], a[t].top[3], a[t].bottom[3], q.z, q.w);
#pragma unroll
          for (int i = 0; i < 4; i++) acc[t][n][i] = __fmaf_rn(d[i], a[t].scale[i / 2], acc[t][n][i]);  // exact product
        }
      }
    }
    if ((step + 1) % (CHAIN / STAGE) == 0) {
#pragma unroll
      for (int i = 0; i < 2 * COLUMNS * 4; i++) {
        float &sum = (&total[0][0][0])[i], &part = (&acc[0][0][0])[i];
        sum = __fadd_rn(sum, part);
        part = 0.f;
      }
    }
  }
  wait_copies<0>();
  __syncthreads();  // the ring becomes the results
  float *results = (float *)shared;
#pragma unroll
  for (int t = 0; t < 2; t++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int row = (warp + 8 * t) * 16 + g + 8 * half;
      if (c == 0) row_tame[row] = wild[t][half] == 0;
#pragma unroll
      for (int n = 0; n < COLUMNS; n++)
#pragma unroll
        for (int j = 0; j < 2; j++) results[row * PITCH + n * 8 + 2 * c + j] = total[t][n][half * 2 + j];
    }
  }
  __syncthreads();
}

template <int BLOCKS, class... Arguments> __device__ __forceinline__ void row_sums_of(int count, Arguments... arguments) {
  switch ((count + 7) / 8) {
    case 1: return row_sums<1, BLOCKS>(arguments...);
    case 2: return row_sums<2, BLOCKS>(arguments...);
    case 3: return row_sums<3, BLOCKS>(arguments...);
    case 4: return row_sums<4, BLOCKS>(arguments...);
    case 5: return row_sums<5, BLOCKS>(arguments...);
    default: return row_sums<6, BLOCKS>(arguments...);
  }
}

// All items of a block of threads, all of its warps at each.
template <class Job> __device__ __forceinline__ void run(u8 *shared, const Job &job) {
  __shared__ Members members;
  __shared__ Flags flags;
  __shared__ int rows[PAIRS];  // which row of the activations each pair reads; beyond the last pair, those of the first
  const int items = job.items();
  float *results = (float *)shared;
#pragma unroll 1
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const Tile tile = job.tile(item);
    job.tell(tile, members, threadIdx.x, THREADS);
    __syncthreads();
    if (threadIdx.x < PAIRS) rows[threadIdx.x] = members.pairs[threadIdx.x < tile.count ? threadIdx.x : 0] / Job::PAIRS_A_ROW;
    __syncthreads();
    row_sums_of<Job::BLOCKS>(tile.count, shared, job.panel(item, tile), job.activations(item, tile), u32(Job::COLUMNS), rows,
                             flags.row_tame);
    job.check(item, tile, members, results, flags);
    job.finish(item, tile, members, results);
    __syncthreads();
  }
}
