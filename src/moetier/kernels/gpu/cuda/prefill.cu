// Prefill: pairs sorted by expert into tiles, each tile times panels of the expert's weight rows. Operands outside the range
// where every product is exact ("tame", see panel.cuh) are found and their values computed again by `exact_row_sum`.
#if WGMMA
#include "panel_wgmma.cuh"
#else
#include "panel_mma.cuh"
#endif
#include "hybrid.cuh"

constexpr int ROWS = ROW_TILES * 16, HALF_TILES = ROW_TILES / 2, HALF_ROWS = ROWS / 2;

struct Tile {
  int slot, first, count;  // pairs order[first .. first + count) of the expert in `slot`
};

// Activations of `blocks` blocks a row: folded bf16 (permuted within each 8), q and e.
extern "C" __global__ void __launch_bounds__(THREADS) quantize_prefill(const u16 *x, u16 *folded_x, s8 *q, s8 *e, int *counts,
                                                                       int blocks) {
  const int lane = threadIdx.x % 32;
  const size_t row = blockIdx.x;
  if (row == 0)
    for (int i = threadIdx.x; i < EXPERTS; i += THREADS) counts[i] = 0;
  for (int block = threadIdx.x / 32; block < blocks; block += THREADS / 32) {
    size_t at = (row * blocks + block) * 32;
    Quantized b = quantize(from_bf16(x[at + lane]));
    q[at + lane] = s8(b.q);
    folded_x[at + place_in_block(lane)] = folded(b);
    if (lane == 0) e[at / 32] = s8(b.e);
  }
}

__device__ __forceinline__ int slot_of(int id, const int *slot_table) {
  return id >= 0 && id < EXPERTS ? slot_table[id] : -1;
}

extern "C" __global__ void __launch_bounds__(THREADS) plan_count(const int *ids, const int *slot_table, int *counts, int pairs) {
  int p = blockIdx.x * THREADS + threadIdx.x;
  if (p < pairs && slot_of(ids[p], slot_table) >= 0) atomicAdd(counts + ids[p], 1);
}

// One block: where each expert's pairs start (`next`), and the tiles.
extern "C" __global__ void __launch_bounds__(1024) plan_tiles(const int *counts, const int *slot_table, int *next, Tile *tiles,
                                                              int *tile_count) {
  __shared__ int pairs_before[1024], tiles_before[1024];
  int base_pairs = 0, base_tiles = 0;
  for (int start = 0; start < EXPERTS; start += 1024) {
    int expert = start + threadIdx.x, n = expert < EXPERTS ? counts[expert] : 0, mine = (n + PAIRS - 1) / PAIRS;
    pairs_before[threadIdx.x] = n, tiles_before[threadIdx.x] = mine;
    __syncthreads();
    for (int step = 1; step < 1024; step *= 2) {
      int a = threadIdx.x >= step ? pairs_before[threadIdx.x - step] : 0;
      int b = threadIdx.x >= step ? tiles_before[threadIdx.x - step] : 0;
      __syncthreads();
      pairs_before[threadIdx.x] += a, tiles_before[threadIdx.x] += b;
      __syncthreads();
    }
    int first = base_pairs + pairs_before[threadIdx.x] - n, tile = base_tiles + tiles_before[threadIdx.x] - mine;
    if (expert < EXPERTS) next[expert] = first;
    for (int i = 0; i < mine; i++) tiles[tile + i] = {slot_table[expert], first + i * PAIRS, min(PAIRS, n - i * PAIRS)};
    base_pairs += pairs_before[1023], base_tiles += tiles_before[1023];
    __syncthreads();
  }
  if (threadIdx.x == 0) *tile_count = base_tiles;
}

// The order within an expert is that of the atomics; every row is computed alone, so it changes no bit.
extern "C" __global__ void __launch_bounds__(THREADS) plan_order(const int *ids, const int *slot_table, int *next, int *order,
                                                                 int pairs) {
  int p = blockIdx.x * THREADS + threadIdx.x;
  if (p < pairs && slot_of(ids[p], slot_table) >= 0) order[atomicAdd(next + ids[p], 1)] = p;
}

// One row sum by the letter of the contract.
__device__ __noinline__ float exact_row_sum(const u8 *codes, const u8 *scales, const s8 *q, const s8 *e, int blocks) {
  float total = 0.f;
  const int chain = blocks / segments(blocks);
  for (int b = 0; b < blocks; b += chain)
    total = __fadd_rn(total, exact_chain(codes + b * 256, scales + b * 16, q + b * 32, [&](int i) { return int(e[b + i]); }, chain));
  return total;
}

struct Flags {
  int rows[PAIRS];  // which row of the activations each pair reads; beyond the last pair, those of the first
  int pairs[PAIRS];
  u8 bad_pair[PAIRS];  // has a block with a NaN: filled by `repair`
  u8 row_tame[ROWS];
};

// Computes again, by the letter, what a panel could not: rows with wild scales, and sums that came out as NaN.
__device__ __noinline__ void repair(float *results, Flags &flags, Half a, Half b, const s8 *q, const s8 *e, size_t pitch,
                                    int blocks, int count) {
  const int lane = threadIdx.x % 32;
  for (int m = threadIdx.x / 32; m < count; m += THREADS / 32) {
    bool bad = false;
    for (int i = lane; i < blocks; i += 32) bad |= e[flags.rows[m] * (pitch / 32) + i] == 127;
    bad = __any_sync(~0u, bad);
    if (lane == 0) flags.bad_pair[m] = bad;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < ROWS * count; i += THREADS) {
    int row = i % ROWS, m = i / ROWS, tile = row / 16;
    const Half half = tile < HALF_TILES ? a : b;
    float &result = results[row * PITCH + m];
    if (tile % HALF_TILES >= half.valid || (result == result && flags.row_tame[row])) continue;
    size_t first = size_t(tile % HALF_TILES) * blocks, at = flags.rows[m] * pitch;
    result = flags.bad_pair[m] ? __int_as_float(0x7FC00000)
                               : exact_row_sum(half.codes + first * 256 + row % 16 * 16, half.scales + first * 16 + row % 16,
                                               q + at, e + at / 32, blocks);
  }
}

template <int BLOCKS>
__device__ __forceinline__ void all_row_sums(u8 *shared, Flags &flags, const Panel &panel, const u16 *x, const s8 *q,
                                             const s8 *e, size_t pitch, int count) {
  row_sums_of<BLOCKS>(count, shared, panel, x, u32(pitch), flags.rows, flags.row_tame);
  const int row = threadIdx.x % ROWS;
  bool wild = row % HALF_ROWS / 16 < (row < HALF_ROWS ? panel.a : panel.b).valid && !flags.row_tame[row];
  // A pair with a block that is not tame is NaN in every row; the first rows always exist.
  if (threadIdx.x < count) wild |= ((const float *)shared)[threadIdx.x] != ((const float *)shared)[threadIdx.x];
  if (__syncthreads_or(wild)) {
    repair((float *)shared, flags, panel.a, panel.b, q, e, pitch, BLOCKS, count);
    __syncthreads();
  }
}

// Block (i, t): h of HALF_ROWS intermediate rows for tile t: gate is the panel's first half, up the second.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    gate_up_prefill(const u16 *x, const s8 *q, const s8 *e, const float *weights, const u8 *slots, size_t stride,
                    const Tile *tiles, const int *tile_count, const int *order, u16 *folded_h, s8 *hq, s8 *he) {
  extern __shared__ __align__(1024) u8 shared[];
  __shared__ Flags flags;
  if (blockIdx.y >= *tile_count) return;
  const Tile tile = tiles[blockIdx.y];
  const int lane = threadIdx.x % 32;
  constexpr int GROUPS = (INNER + HALF_ROWS - 1) / HALF_ROWS;
  const int part = blockIdx.x / GROUPS, first = blockIdx.x % GROUPS * HALF_ROWS;
  if (threadIdx.x < PAIRS) {
    int pair = order[tile.first + (threadIdx.x < tile.count ? threadIdx.x : 0)];
    flags.pairs[threadIdx.x] = pair;
    flags.rows[threadIdx.x] = pair / TOP_K;
  }
  __syncthreads();
  const u8 *record = slots + size_t(tile.slot) * stride + size_t(part) * SLICE_BYTES;
  const size_t start = size_t(first) / 16 * (HIDDEN / 32);
  const int valid = min(HALF_TILES, (INNER - first) / 16);
  const u8 *scales = record + 3 * CODES + start * 16;
  const Panel panel = {{record + start * 256, scales, valid}, {record + CODES + start * 256, scales + SCALES, valid}};
  all_row_sums<HIDDEN / 32>(shared, flags, panel, x, q, e, HIDDEN, tile.count);
  const float *results = (const float *)shared;
  for (int i = threadIdx.x / 32; i < tile.count * (valid / 2); i += THREADS / 32) {
    int m = i / (valid / 2), row = i % (valid / 2) * 32 + lane, pair = flags.pairs[m];
    float weight = WEIGHTED ? weights[pair] : 0.f;
    Quantized b = quantize(swiglu(results[row * PITCH + m], results[(HALF_ROWS + row) * PITCH + m], weight));
    size_t at = size_t(pair) * INTERMEDIATE + part * INNER + first + row - lane;
    hq[at + lane] = s8(b.q);
    folded_h[at + place_in_block(lane)] = folded(b);
    if (lane == 0) he[at / 32] = s8(b.e);
  }
}

// Block (i, t, l): ROWS rows of the answers of tile t, slice l -> parts float32 [SLICES, pairs, HIDDEN].
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    down_prefill(const u16 *h, const s8 *hq, const s8 *he, const u8 *slots, size_t stride, const Tile *tiles,
                 const int *tile_count, const int *order, int pairs, float *parts) {
  extern __shared__ __align__(1024) u8 shared[];
  __shared__ Flags flags;
  if (blockIdx.y >= *tile_count) return;
  const Tile tile = tiles[blockIdx.y];
  const int part = blockIdx.z, first = blockIdx.x * ROWS;
  if (threadIdx.x < PAIRS)
    flags.pairs[threadIdx.x] = flags.rows[threadIdx.x] = order[tile.first + (threadIdx.x < tile.count ? threadIdx.x : 0)];
  __syncthreads();
  const u8 *record = slots + size_t(tile.slot) * stride + size_t(part) * SLICE_BYTES;
  const size_t start = size_t(first) / 16 * (INNER / 32), half = size_t(HALF_TILES) * (INNER / 32);
  const u8 *codes = record + 2 * CODES + start * 256, *scales = record + 3 * CODES + 2 * SCALES + start * 16;
  const int left = (HIDDEN - first) / 16;
  const Panel panel = {{codes, scales, min(HALF_TILES, left)},
                       {codes + half * 256, scales + half * 16, max(0, min(HALF_TILES, left - HALF_TILES))}};
  const size_t shift = size_t(part) * INNER;
  all_row_sums<INNER / 32>(shared, flags, panel, h + shift, hq + shift, he + shift / 32, INTERMEDIATE, tile.count);
  const float *results = (const float *)shared;
  float *out = parts + size_t(part) * pairs * HIDDEN + first;
  for (int i = threadIdx.x; i < tile.count * ROWS; i += THREADS) {
    int m = i / ROWS, row = i % ROWS;
    if (row < HIDDEN - first) out[size_t(flags.pairs[m]) * HIDDEN + row] = results[row * PITCH + m];
  }
}

// parts float32 [SLICES, pairs, HIDDEN] -> rows [pairs, HIDDEN] of the pairs that have a slot, by the pairwise tree.
extern "C" __global__ void __launch_bounds__(THREADS) join_slices(const float *parts, const int *ids, const int *slot_table,
                                                                  int pairs, float *rows) {
  const size_t pair = blockIdx.x;
  if (slot_of(ids[pair], slot_table) < 0) return;
  for (int n = threadIdx.x; n < HIDDEN; n += THREADS) {
    float slice[SLICES];
#pragma unroll
    for (int l = 0; l < SLICES; l++) slice[l] = parts[(size_t(l) * pairs + pair) * HIDDEN + n];
#pragma unroll
    for (int width = SLICES; width > 1; width /= 2)
#pragma unroll
      for (int l = 0; l < width / 2; l++) slice[l] = __fadd_rn(slice[2 * l], slice[2 * l + 1]);
    rows[pair * HIDDEN + n] = slice[0];
  }
}

// A token's rows in ascending expert id, equal ids in the router's order. slot_table, unless null, makes a token NaN that
// is routed to an expert without a slot; in a hybrid step such rows are the CPU's, in `box_rows`.
extern "C" __global__ void __launch_bounds__(THREADS)
    combine(const float *rows, const int *ids, const float *weights, const int *slot_table, u16 *out, const float *box_rows,
            Step *step, Box *box, u64 *counts, u64 patience) {
  __shared__ int expert[TOP_K], order[TOP_K];
  const size_t token = blockIdx.x;
  if (HYBRID && step->pending) await_answer(*step, box, counts, patience);
  const int k = threadIdx.x;
  if (k < TOP_K) expert[k] = ids[token * TOP_K + k];
  __syncthreads();
  if (k < TOP_K) {
    int place = 0;
    for (int i = 0; i < TOP_K; i++) place += expert[i] < expert[k] || (expert[i] == expert[k] && i < k);
    order[place] = k;
  }
  __syncthreads();
  for (int n = threadIdx.x * 4; n < HIDDEN; n += THREADS * 4) {
    float acc[4] = {};
    for (int i = 0; i < TOP_K; i++) {
      int at = order[i], id = expert[at];
      if (id < 0 || id >= EXPERTS) continue;
      const size_t from = (token * TOP_K + at) * HIDDEN + n;
      const bool elsewhere = slot_table && slot_table[id] < 0, missing = elsewhere && !HYBRID;
      float4 y;
      if (HYBRID && elsewhere) {
        uint4 bits = load_host((const uint4 *)(box_rows + from));
        y = make_float4(__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z), __uint_as_float(bits.w));
      } else {
        y = *(const float4 *)(rows + from);
      }
      float weight = WEIGHTED ? 1.f : weights[token * TOP_K + at];
      float values[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
      for (int j = 0; j < 4; j++) {
        float value = flush(WEIGHTED ? values[j] : __fmul_rn(values[j], weight));
        acc[j] = __fadd_rn(acc[j], missing ? __int_as_float(0x7FC00000) : value);
      }
    }
    ushort4 bits = {to_bf16(acc[0]), to_bf16(acc[1]), to_bf16(acc[2]), to_bf16(acc[3])};
    *(ushort4 *)(out + token * HIDDEN + n) = bits;
  }
}
