// Decode of one token in one launch, of a block a multiprocessor: all blocks must be resident at once, since each waits for
// the others' h. A hybrid step is planned here too; `hybrid`: see protocol.h.
#include "one_hybrid.cuh"

// What is to be done, found by every warp for itself, so that it may start at once: all write the same. slot: of this lane's
// pair, or -1.
__device__ __forceinline__ void find_work(Work &work, int id, int slot, bool pending, int lane) {
  const bool routed = id >= 0 && id < EXPERTS;
  if (!routed) slot = -1;
  const u32 with_slot = __ballot_sync(~0u, slot >= 0);
  int place = 0;
#pragma unroll
  for (int i = 0; i < TOP_K; i++) {
    const int other = __shfl_sync(~0u, id, i);
    place += other < id || (other == id && i < lane);
  }
  if (lane < TOP_K) {
    const int k = __popc(with_slot & ((1u << lane) - 1));
    work.order[place] = lane, work.turn[place] = slot >= 0 ? k : routed ? NO_SLOT : NOT_ROUTED;
    if (slot >= 0) work.pair[k] = lane, work.slot[k] = slot;
  }
  const int pairs = __popc(with_slot), tiles = (ROW_TILES - int(blockIdx.x) + int(gridDim.x) - 1) / int(gridDim.x);
  if (lane == 0) {
    work.pending = pending, work.pairs = pairs, work.units = pairs * UNITS;
    work.tiles = tiles, work.items = tiles * pairs * GROUPS<Down>;
  }
  __syncwarp();
}

// Eight values of x, a thread's, to q and exponents in shared memory. place: of the eight in x; all lanes of a warp.
__device__ __forceinline__ void quantize_eight(uint4 eight, int place, u8 *q, int *exponents) {
  const u32 words[4] = {eight.x, eight.y, eight.z, eight.w};
  float values[8];
  u32 most = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    values[i] = flush(__uint_as_float(i % 2 ? words[i / 2] & 0xFFFF0000u : words[i / 2] << 16));
    most = max(most, __float_as_uint(values[i]) & 0x7FFFFFFF);
  }
  most = max(most, __shfl_xor_sync(~0u, most, 1));
  most = max(most, __shfl_xor_sync(~0u, most, 2));
  int e;
  const float scale = power(-exponent_of(most, e));
  u32 packed[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < 8; i++)
    packed[i / 4] |= u32(e == 127 ? 0 : __float2int_rn(__fmul_rn(values[i], scale)) & 255) << i % 4 * 8;
  const int block = place / 4, chain = block / Up::CHAIN, b = block % Up::CHAIN;
  if (block >= Up::BLOCKS) return;
  *(uint2 *)(q + chain * PITCH<Up> + b * 32 + place % 4 * 8) = {packed[0], packed[1]};
  if (place % 4 == 0) exponents[b * Up::INPUTS + chain] = meta_of({0, e, 0}).exponent;
}

// h of every pair with a slot, from all blocks, to shared memory.
__device__ __forceinline__ void gather_h(const Work &work, const s8 *hq, const int *h_exponents, u8 *q, int *exponents) {
  constexpr int BLOCKS = INTERMEDIATE / 32;
  for (int i = threadIdx.x; i < work.pairs * BLOCKS * 2; i += WARPS * 32) {
    const int k = i / (BLOCKS * 2), block = i / 2 % BLOCKS;
    *(uint4 *)(q + (k * Down::CHAINS + block / Down::CHAIN) * PITCH<Down> + block % Down::CHAIN * 32 + i % 2 * 16) =
        __ldcg((const uint4 *)(hq + size_t(work.pair[k]) * INTERMEDIATE) + i % (BLOCKS * 2));
  }
  for (int i = threadIdx.x; i < work.pairs * BLOCKS; i += WARPS * 32) {
    const int k = i / BLOCKS, block = i % BLOCKS;
    exponents[k * BLOCKS + block % Down::CHAIN * Down::INPUTS + block / Down::CHAIN] =
        __ldcg(h_exponents + work.pair[k] * BLOCKS + block);
  }
}

// Rows of y from their sums, then the token's sum. out: bf16 bits [HIDDEN], or null: then rows float32 [TOP_K, HIDDEN] of the
// pairs that have a slot. In a hybrid step the CPU's rows are in `rows`.
__device__ __forceinline__ void combine(const Work &work, float *parts, const float *route_weights, float *rows, u16 *out) {
  const int live = work.pairs, tiles = work.tiles;
  for (int i = threadIdx.x; i < tiles * live * ROW_TILE; i += WARPS * 32) {
    const int r = i % ROW_TILE, k = i / ROW_TILE % live, nth = i / ROW_TILE / live;
    float *mine = parts + (nth * live + k) * SUMS<Down> + r;
    const float y = whole_row<Down::SEGMENTS>(mine);
    if (out)
      *mine = y;
    else
      rows[size_t(work.pair[k]) * HIDDEN + (blockIdx.x + gridDim.x * nth) * ROW_TILE + r] = y;
  }
  if (!out) return;
  __syncthreads();
  for (int i = threadIdx.x; i < tiles * ROW_TILE; i += WARPS * 32) {
    const int r = i % ROW_TILE, nth = i / ROW_TILE, row = (blockIdx.x + gridDim.x * nth) * ROW_TILE + r;
    float acc = 0.f;
#pragma unroll
    for (int n = 0; n < TOP_K; n++) {
      const int p = work.order[n], k = work.turn[n];
      if (k == NOT_ROUTED) continue;
      const float y = k >= 0   ? parts[(nth * live + k) * SUMS<Down> + r]
                      : HYBRID ? load_host(rows + size_t(p) * HIDDEN + row)
                               : __int_as_float(0x7FC00000);  // no row: the token is NaN
      acc = __fadd_rn(acc, flush(WEIGHTED ? y : __fmul_rn(y, route_weights[p])));
    }
    out[row] = to_bf16(acc);
  }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
    decode_one(const u16 *x, const int *ids, const float *route_weights, const int *slot_table, u8 *slots, size_t stride,
               s8 *hq, int *h_exponents, Progress *progress, float *rows, u16 *out, const HybridStep hybrid) {
  extern __shared__ __align__(128) u8 shared[];
  __shared__ Work work;
  __shared__ __align__(32) u8 zero_block[48];
  const u8 *zeros = zero_block + 16;  // other banks than any activations'
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  wait_for_previous();
  let_next_start();
  __shared__ int table[EXPERTS];
  uint4 eights[MOST_EIGHTS];
  int id = lane < TOP_K ? ids[lane] : -1;
  for (int i = threadIdx.x; i < EXPERTS; i += WARPS * 32) table[i] = slot_table[i];
#pragma unroll
  for (int i = 0; i < MOST_EIGHTS; i++) {
    const int place = threadIdx.x + i * WARPS * 32;
    eights[i] = place < EIGHTS ? ((const uint4 *)x)[place] : uint4{0, 0, 0, 0};
  }
  if (HYBRID && *hybrid.live <= 0) id = -1;
  __syncthreads();
  int slot = id >= 0 && id < EXPERTS ? table[id] : -1;
  bool pending = false;
  const bool routed = id >= 0 && id < EXPERTS;
  if (HYBRID && __any_sync(~0u, routed && slot < 0)) {
    const Slots room = {slots, stride, size_t(hybrid.record_bytes)};
    pending = begin_token({x, ids, route_weights, TOP_K, slot_table}, hybrid, room, eights, routed ? id : -1, slot, warp, lane);
    if (routed) slot = __ldcg(table_of(hybrid.step) + id);
  } else if (HYBRID && blockIdx.x == 0 && warp == 0) {
    note_hits(routed ? id : -1, hybrid, lane);
  }
  find_work(work, id, slot, pending, lane);
  const SlotWeights all_slots = {slots, stride};
  u8 *ring = shared + warp * DEPTH * STAGE_BYTES, *q = shared + WARPS * DEPTH * STAGE_BYTES;
  int *exponents = (int *)(q + Q_BYTES);
  float *parts = (float *)(q + Q_BYTES + EXPONENT_BYTES);
  Stream stream(shared_address(ring), warp, lane);
  stream.begin(work, all_slots, warp, lane);
  stream.fill(work, all_slots, warp, lane);  // no more before x is quantized: the memory has enough to do
  if (threadIdx.x < 12) ((u32 *)zero_block)[threadIdx.x] = 0;
#pragma unroll
  for (int i = 0; i < MOST_EIGHTS; i++) quantize_eight(eights[i], threadIdx.x + i * WARPS * 32, q, exponents);
  __syncthreads();

#pragma unroll 1
  for (int i = 1; i < DEPTH - 1; i++) stream.fill(work, all_slots, warp, lane);
  const Constants constants;
  int use_at = 0;
  float *team_parts = parts + warp / GROUPS<Up> * SUMS<Up>;
#pragma unroll 1
  for (int unit = first_unit(warp); unit < work.units; unit += unit_step()) {
    const int group = warp % GROUPS<Up>;
    team_barrier(warp);  // the sums before are used
    group_sums<Up>(constants, stream, work, all_slots, ring, use_at, {q, exponents}, zeros, unit, group, team_parts, warp, lane);
    team_barrier(warp);
    if (group) continue;
    const int pair = work.pair[unit / UNITS];
    const Quantized h = finish_up(team_parts, route_weights[pair], lane);
    hq[size_t(pair) * INTERMEDIATE + unit % UNITS * 32 + lane] = s8(h.q);
    if (lane == 0) h_exponents[pair * UNITS + unit % UNITS] = meta_of(h).exponent;
    __threadfence();
    __syncwarp();
    if (lane == 0) atomicAdd(&progress->units, 1u);
  }
  if (threadIdx.x == 0 && work.units > 0) {
    while (load_acquire(&progress->units) < u32(work.units)) {}
    if (atomicAdd(&progress->left, 1u) == gridDim.x - 1) progress->units = 0, progress->left = 0;
  }
  __syncthreads();
  gather_h(work, hq, h_exponents, q, exponents);
  __syncthreads();
#pragma unroll 1
  for (int number = warp; number < work.items; number += WARPS) {
    const Item item(work, number);
    const Inputs inputs = {q + item.pair * Down::CHAINS * PITCH<Down>, exponents + item.pair * (INTERMEDIATE / 32)};
    group_sums<Down>(constants, stream, work, all_slots, ring, use_at, inputs, zeros, number, item.group,
                     parts + (item.nth * work.pairs + item.pair) * SUMS<Down>, warp, lane);
  }
  wait_copies<0>();
  __syncthreads();
  if (HYBRID && work.pending) await_answer(hybrid);
  combine(work, parts, route_weights, rows, out);
}
