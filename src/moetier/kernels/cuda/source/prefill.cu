// Prefill: pairs sorted by expert into tiles, each tile times panels of the expert's weight rows (jobs.cuh).
#include "hybrid.cuh"
#include "jobs.cuh"

// Activations of `blocks` blocks a row: folded bf16 to where the panels read it, q and e.
extern "C" __global__ void __launch_bounds__(THREADS) quantize_prefill(const u16 *x, const Place *places, u16 *folded_x, s8 *q,
                                                                       s8 *e) {
  constexpr int BLOCKS = HIDDEN / 32;
  __shared__ __align__(16) u16 folded_row[HIDDEN];
  const int lane = threadIdx.x % 32;
  const size_t row = blockIdx.x;
  for (int block = threadIdx.x / 32; block < BLOCKS; block += THREADS / 32) {
    size_t at = (row * BLOCKS + block) * 32;
    Quantized b = quantize(from_bf16(x[at + lane]));
    q[at + lane] = s8(b.q);
    folded_row[block * 32 + place_in_block(lane)] = folded(b);
    if (lane == 0) e[at / 32] = s8(b.e);
  }
  __syncthreads();
  for (int k = 0; k < (BY_TILE ? TOP_K : 1); k++) {
    const Place place = BY_TILE ? places[row * TOP_K + k] : Place{0, 1, 0};
    if (place.count == 0) continue;  // no slot
    for (int i = threadIdx.x; i < BLOCKS * 4; i += THREADS) {
      u16 *to = folded_x + block_of(place, row, BLOCKS, i / 4) + swizzled(i % 4, place.m) * 8;
      *(uint4 *)to = *(const uint4 *)(folded_row + i * 8);
    }
  }
}

__device__ __forceinline__ int slot_of(int id, const int *slot_table) {
  return id >= 0 && id < EXPERTS ? slot_table[id] : -1;
}

extern "C" __global__ void __launch_bounds__(THREADS) plan_count(const int *ids, const int *slot_table, int *counts, int pairs) {
  int p = blockIdx.x * THREADS + threadIdx.x;
  if (p < pairs && slot_of(ids[p], slot_table) >= 0) atomicAdd(counts + ids[p], 1);
}

// One block: where each expert's pairs start (`firsts`, and in `next` for plan_order), and the tiles.
extern "C" __global__ void __launch_bounds__(1024) plan_tiles(const int *counts, const int *slot_table, int *firsts, int *next,
                                                              Tile *tiles, int *tile_count) {
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
    if (expert < EXPERTS) firsts[expert] = next[expert] = first;
    for (int i = 0; i < mine; i++) tiles[tile + i] = {slot_table[expert], first + i * PAIRS, min(PAIRS, n - i * PAIRS)};
    base_pairs += pairs_before[1023], base_tiles += tiles_before[1023];
    __syncthreads();
  }
  if (threadIdx.x == 0) *tile_count = base_tiles;
}

// The order within an expert is that of the atomics; every row is computed alone, so it changes no bit.
extern "C" __global__ void __launch_bounds__(THREADS) plan_order(const int *ids, const int *slot_table, const int *counts,
                                                                 const int *firsts, int *next, int *order, Place *places, int pairs) {
  int p = blockIdx.x * THREADS + threadIdx.x;
  if (p >= pairs) return;
  const int id = ids[p];
  Place place = {};
  if (slot_of(id, slot_table) >= 0) {
    const int at = atomicAdd(next + id, 1), number = at - firsts[id], m = number % PAIRS;
    order[at] = p;
    place = {at - m, u16(min(PAIRS, counts[id] - (number - m))), u16(m)};
  }
  places[p] = place;
}

extern "C" __global__ void __launch_bounds__(PANEL_THREADS, 1)
    gate_up_prefill(const u16 *x, const s8 *q, const s8 *e, const float *weights, const u8 *slots, size_t stride,
                    const Tile *tiles, const int *tile_count, const int *order, u16 *folded_h, s8 *hq, s8 *he) {
  extern __shared__ __align__(1024) u8 shared[];
  run(shared, Up{{slots, stride, tiles, tile_count, order}, x, q, e, weights, folded_h, hq, he});
}

extern "C" __global__ void __launch_bounds__(PANEL_THREADS, 1)
    down_prefill(const u16 *h, const s8 *hq, const s8 *he, const u8 *slots, size_t stride, const Tile *tiles,
                 const int *tile_count, const int *order, int pairs, float *parts) {
  extern __shared__ __align__(1024) u8 shared[];
  run(shared, Down{{slots, stride, tiles, tile_count, order}, h, hq, he, pairs, parts});
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
    rows[pair * HIDDEN + n] = join(slice);
  }
}

// A token's rows in ascending expert id, equal ids in the router's order. slot_table, unless null, makes a token NaN that
// is routed to an expert without a slot; in a hybrid step such rows are the CPU's, in `box_rows`.
extern "C" __global__ void __launch_bounds__(THREADS)
    combine(const float *rows, const int *ids, const float *weights, const int *slot_table, u16 *out,
            const HybridStep hybrid) {
  __shared__ int expert[TOP_K], order[TOP_K];
  const size_t token = blockIdx.x;
  if (HYBRID && hybrid.step->pending) await_answer(hybrid);
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
        uint4 bits = load_host((const uint4 *)(hybrid.box_rows + from));
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
