// Decode of few tokens in three launches: quantize, gate_up, down (which combines too). In a hybrid step begin_step takes
// the place of quantize; it runs before prefill's kernels too. `hybrid`: see protocol.h.
#include "decode.cuh"

__device__ __forceinline__ void quantize_blocks(const u16 *x, s8 *q, Meta *meta, int blocks, int first) {
  int block = first + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (block >= blocks) return;
  Quantized b = quantize(from_bf16(x[size_t(block) * 32 + lane]));
  q[size_t(block) * 32 + lane] = s8(b.q);
  if (lane == 0) meta[block] = meta_of(b);
}

extern "C" __global__ void __launch_bounds__(256) quantize_decode(const u16 *x, s8 *q, Meta *meta, int blocks) {
  let_next_start();
  quantize_blocks(x, q, meta, blocks, blockIdx.x * 8);
}

#if HYBRID_STEP
// Block 0 plans, the next `hybrid.streams` blocks stream what it chose, the others quantize (none where blocks is 0).
extern "C" __global__ void __launch_bounds__(STEP_THREADS)
    begin_step(const u16 *x, s8 *q, Meta *meta, int blocks, const int *ids, const float *weights, int pairs, const int *slot_table,
               u8 *slots, size_t stride, const HybridStep hybrid) {
  let_next_start();
  const int block = blockIdx.x, streams = hybrid.streams;
  const StepCall call = {x, ids, weights, pairs, slot_table};
  if (block == 0)
    plan_step(call, hybrid);
  else if (block > streams)
    quantize_blocks(x, q, meta, blocks, (block - 1 - streams) * 8);
  else if (any_miss(call, hybrid.live))
    stream_records<STEP_THREADS>(*hybrid.step, {slots, stride, size_t(hybrid.record_bytes)}, block - 1, streams, streams);
}
#endif

// gate_up: block (i, p) computes 32 rows of h for pair p and the other pairs of p's expert.
constexpr int UP_STAGE = largest_divisor(UP_CHAIN, UP_BLOCKS_A_STAGE);
using UpStage = Stage<UP_TILES, UP_STAGE>;
using UpWeights = Weights<UP_TILES, UP_STAGE>;
using UpActivations = Activations<UP_TILES, UP_STAGE>;

#if __CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200  // about 100 KB of shared memory: one block
constexpr int UP_RESIDENT = 1;
#else
constexpr int UP_RESIDENT = 2;
#endif
using UpRing = Ring<UP_TILES, UP_STAGE, UP_DEPTH>;

template <int COLUMNS>
__device__ __forceinline__ void gate_up_sums(u8 *shared, UpRing &ring, const UpWeights &weights, const UpActivations &pairs,
                                             const s8 *q, const Meta *meta, int warp, int lane) {
  constexpr int STEPS = UP_CHAIN / UP_STAGE;
  const Tables tables;
  Sums<UP_TILES, COLUMNS> sums;
  sums.clear();
#pragma unroll 1
  for (int step = 0; step < STEPS; step++) {
    ring.wait();
    int next = step + UP_DEPTH - 1;
    if (next < STEPS) {
      ring.fill(weights, next * UP_STAGE, lane);
      pairs.copy(ring.unused(), next * UP_STAGE, lane);
      ring.filled();
    }
    commit();
    multiply<UP_TILES, UP_STAGE, COLUMNS>(tables, sums, ring.used(), pairs.count, lane);
    ring.advance();
  }
  wait_copies<0>();
  __syncthreads();  // the rings become the partial sums
  store_up<UP_STAGE>((float *)shared, sums, weights, q, meta, pairs.rows, pairs.count, warp, lane);
  __syncthreads();
}

extern "C" __global__ void __launch_bounds__(UP_WARPS * 32, UP_RESIDENT)
    gate_up_decode(const s8 *q, const Meta *meta, const int *ids, const float *route_weights, const int *slot_table,
                   const u8 *slots, size_t stride, int pairs, s8 *hq, Meta *hmeta, const HybridStep hybrid) {
  extern __shared__ __align__(16) u8 shared[];
  __shared__ u16 members[MAX_PAIRS], tokens[MAX_PAIRS];
  __shared__ u32 masks[4];
  let_next_start();
  const int pair = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (HYBRID) pairs = min(pairs, *hybrid.live * TOP_K);
  const int expert = HYBRID && pair >= pairs ? -1 : ids[pair];
  int slot = expert >= 0 && expert < EXPERTS ? slot_table[expert] : -1;
  if (HYBRID && expert >= 0 && expert < EXPERTS && slot < 0) {  // streamed, perhaps
    wait_for_previous();
    slot = table_of(hybrid.step)[expert];
  }
  int count = 1;
  bool mine = slot >= 0;
  if (mine) {  // all pairs of this expert, by the block of its first pair
    if (warp < 4) {
      int other = warp * 32 + lane;
      u32 mask = __ballot_sync(~0u, other < pairs && ids[other < pairs ? other : 0] == expert);
      if (lane == 0) masks[warp] = mask;
    }
    __syncthreads();
    count = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (warp == 0 && masks[i] >> lane & 1) {
        int at = count + __popc(masks[i] & ((1u << lane) - 1));
        members[at] = u16(i * 32 + lane), tokens[at] = u16((i * 32 + lane) / TOP_K);
      }
      u32 earlier = i < pair / 32 ? ~0u : i == pair / 32 ? (1u << pair % 32) - 1 : 0u;
      if (masks[i] & earlier) mine = false;
      count += __popc(masks[i]);
    }
  }
  if (!mine) {
    wait_for_previous();
    return;
  }
  const int row = blockIdx.x * 32, first = warp % UP_SEGMENTS * UP_CHAIN;
  const UpWeights weights = up_weights<UP_STAGE>(slots + size_t(slot) * stride, row, warp);
  UpRing ring(shared + warp * UP_DEPTH * UpStage::stride);
  for (int base = 0; base < count; base += GROUP) {
    const int now = min(count - base, GROUP), fill_at = ring.fill_at;
#pragma unroll
    for (int i = 0; i < UP_DEPTH - 1; i++)
      if (i * UP_STAGE < UP_CHAIN) ring.fill(weights, i * UP_STAGE, lane), ring.filled();
    if (base == 0) {
      __syncthreads();
      wait_for_previous();
    }
    const UpActivations activations(q, meta, tokens + base, now, UP_BLOCKS, first, lane);
    ring.fill_at = fill_at;
#pragma unroll
    for (int i = 0; i < UP_DEPTH - 1; i++) {
      if (i * UP_STAGE < UP_CHAIN) activations.copy(ring.unused(), i * UP_STAGE, lane), ring.filled();
      commit();
    }
    if (now == 1)
      gate_up_sums<1>(shared, ring, weights, activations, q, meta, warp, lane);
    else
      gate_up_sums<2>(shared, ring, weights, activations, q, meta, warp, lane);
    for (int m = warp; m < now; m += UP_WARPS) {
      int which = members[base + m];
      Quantized b = finish_up((const float *)shared, m, route_weights[which], lane);
      hq[size_t(which) * INTERMEDIATE + row + lane] = s8(b.q);
      if (lane == 0) hmeta[(size_t(which) * INTERMEDIATE + row) / 32] = meta_of(b);
    }
    __syncthreads();
  }
}

// out: bf16 bits [tokens, HIDDEN], or null: then rows float32 [pairs, HIDDEN] of the pairs that have a slot.
extern "C" __global__ void __launch_bounds__(DOWN_WARPS * 32, 2)
    down_decode(const s8 *hq, const Meta *hmeta, const int *ids, const float *route_weights, const int *slot_table,
                const u8 *slots, size_t stride, int pairs, float *rows, u16 *out, const HybridStep hybrid) {
  extern __shared__ __align__(16) u8 shared[];
  __shared__ Work work;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, all = pairs;
  if (HYBRID) pairs = min(pairs, *hybrid.live * TOP_K);
  float *parts = (float *)(shared + DOWN_WARPS * DOWN_DEPTH * DownStage::stride);
  const DownRing ring(shared + warp * DOWN_DEPTH * DownStage::stride);
  int tasks = plan(work, ids, slot_table, slots, stride, pairs) * CHAINS;
  bool missing = false;  // some pair has no slot, or gets one only in this call
  if (HYBRID) {
    const int p = threadIdx.x;
    missing = __syncthreads_or(p < pairs && work.id[p] >= 0 && work.id[p] < EXPERTS && work.slot[p] < 0);
  }
  if (!missing) down_prefetch(ring, work, tasks, blockIdx.x, warp, lane);
  wait_for_previous();
  if (missing) {
    tasks = plan(work, ids, table_of(hybrid.step), slots, stride, pairs) * CHAINS;
    down_prefetch(ring, work, tasks, blockIdx.x, warp, lane);
  }
  down_sums(Tables(), ring, work, tasks, blockIdx.x, parts, hq, hmeta, warp, lane);
  if (missing && hybrid.step->pending) await_answer(hybrid);
  combine(work, parts, route_weights, pairs, all, blockIdx.x, rows, out);
}
