// The hybrid step of a single token, which decode_one plans by itself.
#pragma once
#include "one.cuh"

// Whether a lane's pair is the first of its expert, and how many pairs that has.
struct PairsOf {
  bool first;
  int count;
};
__device__ __forceinline__ PairsOf pairs_of(int id, int lane) {
  PairsOf pairs = {id >= 0, 0};
#pragma unroll
  for (int i = 0; i < TOP_K; i++) {
    const bool same = __shfl_sync(~0u, id, i) == id;
    pairs.count += same, pairs.first &= !same || i >= lane;
  }
  return pairs;
}

// One warp, a pair of the only token a lane: what plan_step does, in registers. All but the request itself is written; true:
// the CPU is to be asked. id: of the lane's pair, or -1; slot: its slot, or -1.
__device__ __forceinline__ bool plan_token(const StepCall &call, const HybridStep &hybrid, int id, int slot, int lane) {
  Step &step = *hybrid.step;
  const Costs costs = *hybrid.costs;
  const float weight = lane < TOP_K ? call.weights[lane] : 0.f;
  const bool routed = id >= 0;
  const auto [first, pairs] = pairs_of(id, lane);
  const bool missed = first && slot < 0;
  const u32 all_missed = __ballot_sync(~0u, missed);
  const int n = __popc(all_missed), all_pairs = __popc(__ballot_sync(~0u, routed));
  int rank = 0, taken = 0;  // of the missed experts; those that are streamed
  u64 record = 0;
  bool here = missed && hybrid.staging > 0;  // if nothing is gained by streaming, nothing need be asked of the host's memory
  for (int look = 0; look < 2; look++) {
    const int key = missed ? stream_key(here, pairs, id) : -1;
    float cpu = lane == n ? 0.f : costs.cpu_call;
    int device_pairs = all_pairs;
    rank = 0;
#pragma unroll
    for (int i = 0; i < TOP_K; i++) rank += __shfl_sync(~0u, key, i) > key;
#pragma unroll
    for (int i = 0; i < TOP_K; i++) {
      const int its_rank = __shfl_sync(~0u, rank, i), its_pairs = __shfl_sync(~0u, pairs, i);
      if ((all_missed >> i & 1) && its_rank >= lane) cpu += cpu_time(costs, its_pairs, lane > 0), device_pairs -= its_pairs;
    }
    const int most = min(min(hybrid.staging, MAX_STAGED), __popc(__ballot_sync(~0u, here)));
    const float time = call_time(costs, cpu, lane, device_pairs);  // if the first `lane` of them are streamed
    const u32 bits = lane <= most ? __float_as_uint(time) : ~0u;
    taken = __ffs(__ballot_sync(~0u, bits == __reduce_min_sync(~0u, bits))) - 1;
    if (taken == 0 || look == 1) break;
    record = missed ? *(const volatile u64 *)(hybrid.records + id) : 0;
    here = record != 0;
  }
  const bool streamed = missed && rank < taken;
  if (streamed) {
    slot = hybrid.staging_first + rank;
    step.from[rank] = record, step.to[rank] = slot, hybrid.box_streamed[rank] = id;
  }
#pragma unroll
  for (int i = 0; i < TOP_K; i++) {  // other pairs of a streamed expert
    const int its_id = __shfl_sync(~0u, id, i), its_slot = __shfl_sync(~0u, slot, i);
    if (its_id == id && its_slot >= 0) slot = its_slot;
  }
  if (routed) table_of(hybrid.step)[id] = slot, atomicAdd(hybrid.heat + id, 1u);
  const u32 cpus = __ballot_sync(~0u, routed && slot < 0);
  if (lane < TOP_K) hybrid.box_ids[lane] = routed && slot < 0 ? id : -1, hybrid.box_weights[lane] = weight;
  const int hits = __popc(__ballot_sync(~0u, first)) - n;
  __syncwarp();
  if (lane == 0) {
    step.pending = n > taken;
    if (n > taken) next_request(step);
    store_release((u32 *)&step.planned, u32(1 + taken));
    hybrid.box->layer = hybrid.layer, hybrid.box->tokens = 1, hybrid.box->streamed = taken;
    tally(hybrid.counts, CALLS, 1), tally(hybrid.counts, CALLS_MISSED, 1), tally(hybrid.counts, HITS, hits);
    tally(hybrid.counts, MISSES, n), tally(hybrid.counts, STREAMED, taken), tally(hybrid.counts, PAIRS_CPU, __popc(cpus));
  }
  return n > taken;
}

// All threads of all blocks, of a token with a miss: the first block plans and asks the CPU, the first `hybrid.streams` stream: more
// loads than fill the link would only keep the CPU from its own. When it returns, the step's table and the staging slots are those
// of this step; whether the CPU was asked.
__device__ __forceinline__ bool begin_token(const StepCall &call, const HybridStep &hybrid, const Slots &slots,
                                            const uint4 (&x)[MOST_EIGHTS], int id, int slot, int warp, int lane) {
  Step &step = *hybrid.step;
  if (blockIdx.x == 0) {
    __shared__ bool asks;
#pragma unroll
    for (int i = 0; i < MOST_EIGHTS; i++) {
      const int place = threadIdx.x + i * WARPS * 32;
      if (place < EIGHTS) ((uint4 *)hybrid.box_x)[place] = x[i];
    }
    if (warp == 0) asks = plan_token(call, hybrid, id, slot, lane);
    __syncthreads();
    if (threadIdx.x == 0 && asks) {
      __threadfence_system();
      *(volatile u32 *)&hybrid.box->posted = step.awaited;
    }
  }
  const int streams = min(hybrid.streams, int(gridDim.x));
  const int records = stream_records<WARPS * 32>(step, slots, blockIdx.x, streams, gridDim.x);
  if (records > 0 && threadIdx.x == 0)
    while (load_acquire((const u32 *)&step.planned)) __nanosleep(40);
  __syncthreads();
  return __ldcg(&step.pending);
}

// One warp: what plan_step counts of a token whose experts all have slots. id: of this lane's pair, or -1.
__device__ __forceinline__ void note_hits(int id, const HybridStep &hybrid, int lane) {
  const int hits = __popc(__ballot_sync(~0u, pairs_of(id, lane).first));
  if (id >= 0) atomicAdd(hybrid.heat + id, 1u);
  if (lane == 0) tally(hybrid.counts, CALLS, 1), tally(hybrid.counts, HITS, hits);
}
