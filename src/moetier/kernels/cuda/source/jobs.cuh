// The two jobs of prefill: gate and up, and down. An item of a job is a panel of an expert's weight rows times a tile of its
// pairs; `run` (panel_wgmma.cuh, panel_mma.cuh) gives a block of threads its items. Operands outside the range where every
// product is exact ("tame", see panel.cuh) are found and their values computed again by `exact_row_sum`.
#pragma once
#if WGMMA
#include "panel_wgmma.cuh"
#else
#include "panel_mma.cuh"
#endif

constexpr int ROWS = ROW_TILES * 16, HALF_TILES = ROW_TILES / 2, HALF_ROWS = ROWS / 2;

// One row sum by the letter of the contract.
__device__ __noinline__ float exact_row_sum(const u8 *codes, const u8 *scales, const s8 *q, const s8 *e, int blocks) {
  float total = 0.f;
  const int chain = blocks / segments(blocks);
  for (int b = 0; b < blocks; b += chain)
    total = __fadd_rn(total, exact_chain(codes + b * 256, scales + b * 16, q + b * 32, [&](int i) { return int(e[b + i]); }, chain));
  return total;
}

// Computes again, by the letter, what a panel could not: rows with wild scales, and sums that came out as NaN.
// q, e: of row 0, from the panel's first block on; a row has `pitch` columns and is read by `pairs_a_row` pairs.
__device__ __noinline__ void repair(float *results, Flags &flags, const Members &members, int pairs_a_row, Half a, Half b,
                                    const s8 *q, const s8 *e, size_t pitch, int blocks, int count) {
  const int lane = threadIdx.x % 32;
  for (int m = threadIdx.x / 32; m < count; m += THREADS / 32) {
    bool bad = false;
    for (int i = lane; i < blocks; i += 32) bad |= e[members.pairs[m] / pairs_a_row * (pitch / 32) + i] == 127;
    bad = __any_sync(~0u, bad);
    if (lane == 0) flags.bad_pair[m] = bad;
  }
  sync_panel();
  for (int i = threadIdx.x; i < ROWS * count; i += THREADS) {
    int row = i % ROWS, m = i / ROWS, tile = row / 16;
    const Half half = tile < HALF_TILES ? a : b;
    float &result = results[row * PITCH + m];
    if (tile % HALF_TILES >= half.valid || (result == result && flags.row_tame[row])) continue;
    size_t first = size_t(tile % HALF_TILES) * blocks, at = members.pairs[m] / pairs_a_row * pitch;
    result = flags.bad_pair[m] ? __int_as_float(0x7FC00000)
                               : exact_row_sum(half.codes + first * 256 + row % 16 * 16, half.scales + first * 16 + row % 16,
                                               q + at, e + at / 32, blocks);
  }
}

// What both jobs are: item i is panel i % PANELS of tile i / PANELS. The activations have COLUMNS columns, of which a panel
// multiplies K; a row of them is read by PAIRS_A_ROW pairs.
template <int K, int COLUMNS_, int PAIRS_A_ROW_, int PANELS_A_SLICE> struct Work {
  static constexpr int BLOCKS = K / 32, COLUMNS = COLUMNS_, PAIRS_A_ROW = PAIRS_A_ROW_, PANELS = PANELS_A_SLICE * SLICES;
  const u8 *slots;
  size_t stride;
  const Tile *tiles;
  const int *tile_count, *order;

  __device__ int items() const { return *tile_count * PANELS; }
  __device__ Tile tile(int item) const { return tiles[item / PANELS]; }
  __device__ static int part(int item) { return item % PANELS / PANELS_A_SLICE; }
  __device__ static int panel_of_slice(int item) { return item % PANELS_A_SLICE; }
  __device__ const u8 *record(int item, const Tile &tile) const {
    return slots + size_t(tile.slot) * stride + size_t(part(item)) * SLICE_BYTES;
  }
  // Finds what the panel could not compute, and has it repaired. q, e: as in `repair`
  __device__ static void check_panel(const Panel &panel, int count, const Members &members, float *results, Flags &flags,
                                     const s8 *q, const s8 *e) {
    const int row = threadIdx.x % ROWS;
    bool wild = row % HALF_ROWS / 16 < (row < HALF_ROWS ? panel.a : panel.b).valid && !flags.row_tame[row];
    // A pair with a block that is not tame is NaN in every row; the first rows always exist.
    if (threadIdx.x < count) wild |= results[threadIdx.x] != results[threadIdx.x];
    if (!sync_panel_or(wild)) return;
    repair(results, flags, members, PAIRS_A_ROW, panel.a, panel.b, q, e, COLUMNS, BLOCKS, count);
    sync_panel();
  }
};

// h of HALF_ROWS intermediate rows for a tile: gate is the panel's first half, up the second.
struct Up : Work<HIDDEN, HIDDEN, TOP_K, (INNER + HALF_ROWS - 1) / HALF_ROWS> {
  const u16 *x;
  const s8 *q, *e;
  const float *weights;
  u16 *folded_h;
  s8 *hq, *he;

  __device__ static int first(int item) { return panel_of_slice(item) * HALF_ROWS; }
  __device__ static int valid(int item) { return min(HALF_TILES, (INNER - first(item)) / 16); }
  __device__ Panel panel(int item, const Tile &tile) const {
    const size_t start = size_t(first(item)) / 16 * BLOCKS;
    const u8 *codes = record(item, tile) + start * 256, *scales = record(item, tile) + 3 * CODES + start * 16;
    return {{codes, scales, valid(item)}, {codes + CODES, scales + SCALES, valid(item)}};
  }
  __device__ const u16 *activations(int, const Tile &tile) const { return x + first_block(tile, BLOCKS, 0); }
  __device__ void tell(const Tile &tile, Members &members, int from, int step) const {
#pragma unroll 1
    for (int m = from; m < tile.count; m += step) {
      const int pair = order[tile.first + m];
      members.pairs[m] = pair;
      if (WEIGHTED) members.weights[m] = weights[pair];
    }
  }
  __device__ void check(int item, const Tile &tile, const Members &members, float *results, Flags &flags) const {
    check_panel(panel(item, tile), tile.count, members, results, flags, q, e);
  }
  __device__ void finish(int item, const Tile &tile, const Members &members, const float *results) const {
    const int lane = threadIdx.x % 32, to = place_in_block(lane), block = (part(item) * INNER + first(item)) / 32;
    const size_t next = block_of({0, u16(tile.count), 0}, 0, INTERMEDIATE / 32, 1);
    for (int m = threadIdx.x / 32; m < tile.count; m += THREADS / 32) {
      const int pair = members.pairs[m];
      const float weight = WEIGHTED ? members.weights[m] : 0.f;
      const size_t at = size_t(pair) * (INTERMEDIATE / 32) + block;
      u16 *folded_at = folded_h + block_of({tile.first, u16(tile.count), u16(m)}, pair, INTERMEDIATE / 32, block) +
                       swizzled(to / 8, m) * 8 + to % 8;
#pragma unroll
      for (int i = 0; i < HALF_ROWS / 32; i++) {
        if (i >= valid(item) / 2) break;
        const float *result = results + (i * 32 + lane) * PITCH + m;
        const Quantized b = quantize(swiglu(result[0], result[HALF_ROWS * PITCH], weight));
        hq[(at + i) * 32 + lane] = s8(b.q);
        folded_at[i * next] = folded(b);
        if (lane == 0) he[at + i] = s8(b.e);
      }
    }
  }
};

// ROWS rows of the answers of a tile, from one slice -> parts float32 [SLICES, pairs, HIDDEN].
struct Down : Work<INNER, INTERMEDIATE, 1, (HIDDEN + ROWS - 1) / ROWS> {
  const u16 *h;
  const s8 *hq, *he;
  int pairs;
  float *parts;

  __device__ static int first(int item) { return panel_of_slice(item) * ROWS; }
  __device__ Panel panel(int item, const Tile &tile) const {
    const size_t start = size_t(first(item)) / 16 * BLOCKS, half = size_t(HALF_TILES) * BLOCKS;
    const u8 *codes = record(item, tile) + 2 * CODES + start * 256;
    const u8 *scales = record(item, tile) + 3 * CODES + 2 * SCALES + start * 16;
    const int left = (HIDDEN - first(item)) / 16;
    return {{codes, scales, min(HALF_TILES, left)},
            {codes + half * 256, scales + half * 16, max(0, min(HALF_TILES, left - HALF_TILES))}};
  }
  __device__ const u16 *activations(int item, const Tile &tile) const {
    return h + first_block(tile, INTERMEDIATE / 32, part(item) * BLOCKS);
  }
  __device__ void tell(const Tile &tile, Members &members, int from, int step) const {
#pragma unroll 1
    for (int m = from; m < tile.count; m += step) members.pairs[m] = order[tile.first + m];
  }
  __device__ void check(int item, const Tile &tile, const Members &members, float *results, Flags &flags) const {
    const size_t shift = size_t(part(item)) * INNER;
    check_panel(panel(item, tile), tile.count, members, results, flags, hq + shift, he + shift / 32);
  }
  __device__ void finish(int item, const Tile &tile, const Members &members, const float *results) const {
    float *out = parts + size_t(part(item)) * pairs * HIDDEN + first(item);
    for (int m = threadIdx.x / 32; m < tile.count; m += THREADS / 32) {
      float *row = out + size_t(members.pairs[m]) * HIDDEN;
#pragma unroll
      for (int i = threadIdx.x % 32; i < ROWS; i += 32)
        if (i < HIDDEN - first(item)) row[i] = results[i * PITCH + m];
    }
  }
};
