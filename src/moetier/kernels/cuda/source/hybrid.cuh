// The hybrid step of a layer. Each routed expert is in a slot, or is streamed from DRAM into a staging slot in this very call,
// or is computed by the CPU meanwhile. `plan_step` decides and posts the CPU's part to the mailbox; whoever combines awaits
// the answer. Which one computes an expert never changes a bit of its rows.
#pragma once
#include "common.cuh"
#include "protocol.h"

typedef unsigned long long u64;

// An expert of so many pairs on the CPU.
__device__ __forceinline__ float cpu_time(const Costs &costs, int pairs, bool beside) {
  return fmaxf(beside ? costs.cpu_expert_beside : costs.cpu_expert, float(pairs) * costs.cpu_pair);
}
// A call of which so many experts are streamed: the device computes its pairs when they are there.
__device__ __forceinline__ float call_time(const Costs &costs, float cpu, int streamed, int device_pairs) {
  return streamed ? fmaxf(cpu, float(streamed) * costs.stream_expert + float(device_pairs) * costs.device_pair) : cpu;
}

__device__ __forceinline__ int *table_of(Step *step) { return (int *)(step + 1); }

// The call that a plan is made for.
struct StepCall {
  const u16 *x;
  const int *ids;
  const float *weights;
  int pairs;
  const int *slot_table;
};

__device__ __forceinline__ u32 load_acquire(const u32 *p) {
  u32 v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void store_release(u32 *p, u32 v) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ u64 load_acquire_system(const u64 *p) {
  u64 v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ u64 nanoseconds() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}
__device__ __forceinline__ uint4 load_host(const uint4 *p) {  // never from a cache: the CPU may have changed it
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
__device__ __forceinline__ float load_host(const float *p) { return *(const volatile float *)p; }

__device__ __forceinline__ void tally(u64 *counts, Count count, u64 n) { atomicAdd(counts + count, n); }

// Where missed experts stand when some are to be streamed: those that DRAM holds first, then those of most pairs, then the
// lowest id.
__device__ __forceinline__ int stream_key(bool here, int pairs, int id) {
  return (here ? 1 << 30 : 0) | min(pairs, 0x7FFF) << 14 | (0x3FFF - id);
}

// 0 is no request's number.
__device__ __forceinline__ u32 next_request(Step &step) { return step.awaited = step.sequence += step.sequence == ~0u ? 2 : 1; }

// One block. Fills the step's table and the list of records to stream; posts the CPU's part.
__device__ __forceinline__ void plan_step(const StepCall &call, const HybridStep &hybrid) {
  __shared__ int count[EXPERTS], missed[EXPERTS], key[EXPERTS], sorted[EXPERTS], pairs[EXPERTS];
  __shared__ u32 routed[(EXPERTS + 31) / 32];
  __shared__ int misses, streamable, cpu_pairs, all_pairs;
  __shared__ u64 best;
  __shared__ u8 needed[BOX_TOKENS];
  Step &step = *hybrid.step;
  int *const table = table_of(hybrid.step), *const step_ids = hybrid.step_ids;
  const bool streams = hybrid.streams > 0;
  const int thread = threadIdx.x, live = min(call.pairs, *hybrid.live * TOP_K);
  if (thread < (EXPERTS + 31) / 32) routed[thread] = 0;
  __syncthreads();
  bool miss = false;
  for (int p = thread; p < call.pairs; p += STEP_THREADS) {
    int id = p < live ? call.ids[p] : -1;
    if (id >= EXPERTS) id = -1;
    step_ids[p] = id;
    if (id < 0) continue;
    int slot = call.slot_table[id];
    table[id] = slot;
    miss |= slot < 0;
    atomicOr(&routed[id / 32], 1u << id % 32);
    atomicAdd(hybrid.heat + id, 1u);
  }
  if (!__syncthreads_or(miss)) {  // the common case, as short as it can be
    if (thread < (EXPERTS + 31) / 32) tally(hybrid.counts, HITS, __popc(routed[thread]));
    if (thread == 0) step.pending = 0, tally(hybrid.counts, CALLS, 1);
    return;
  }
  for (int e = thread; e < EXPERTS; e += STEP_THREADS) count[e] = 0;
  if (thread == 0) misses = 0, streamable = 0, cpu_pairs = 0, all_pairs = 0, best = ~0ull;
  __syncthreads();
  for (int p = thread; p < call.pairs; p += STEP_THREADS)
    if (step_ids[p] >= 0) atomicAdd(&count[step_ids[p]], 1), atomicAdd(&all_pairs, 1);
  __syncthreads();
  for (int e = thread; e < EXPERTS; e += STEP_THREADS) {
    if (!count[e]) continue;
    if (table[e] < 0)
      missed[atomicAdd(&misses, 1)] = e;
    else
      tally(hybrid.counts, HITS, 1);
  }
  __syncthreads();
  const int n = misses;
  int taken = 0;  // of the missed experts: those that are streamed
  if (streams) {
    const Costs costs = *hybrid.costs;
    for (int i = thread; i < n; i += STEP_THREADS) {
      int e = missed[i];
      bool here = *(const volatile u64 *)(hybrid.records + e) != 0;
      key[i] = stream_key(here, count[e], e);
      if (here) atomicAdd(&streamable, 1);
    }
    __syncthreads();
    for (int i = thread; i < n; i += STEP_THREADS) {
      int rank = 0;
      for (int j = 0; j < n; j++) rank += key[j] > key[i];
      sorted[rank] = missed[i];
      pairs[rank] = count[missed[i]];
    }
    __syncthreads();
    const int most = min(min(hybrid.staging, MAX_STAGED), streamable);
    if (thread <= most) {  // the time if the first `thread` of them are streamed
      float cpu = thread == n ? 0.f : costs.cpu_call;
      int device_pairs = all_pairs;
      for (int i = thread; i < n; i++) cpu += cpu_time(costs, pairs[i], thread > 0), device_pairs -= pairs[i];
      const float time = call_time(costs, cpu, thread, device_pairs);
      atomicMin(&best, u64(__float_as_uint(time)) << 32 | u32(thread));
    }
    __syncthreads();
    taken = int(u32(best));
    if (thread < taken) {
      int e = sorted[thread];
      step.from[thread] = *(const volatile u64 *)(hybrid.records + e);
      step.to[thread] = table[e] = hybrid.staging_first + thread;
      hybrid.box_streamed[thread] = e;
    }
    __syncthreads();
  }
  if (thread == 0) {
    if (streams) {
      __threadfence();
      *(volatile int *)&step.planned = 1 + taken;
    }
    step.pending = n > taken;
    tally(hybrid.counts, CALLS, 1), tally(hybrid.counts, CALLS_MISSED, 1);
    tally(hybrid.counts, MISSES, n), tally(hybrid.counts, STREAMED, taken);
  }
  if (n == taken) return;
  const int tokens = call.pairs / TOP_K;
  for (int t = thread; t < tokens; t += STEP_THREADS) needed[t] = 0;
  __syncthreads();
  for (int p = thread; p < call.pairs; p += STEP_THREADS) {
    int id = step_ids[p];
    bool cpu = id >= 0 && table[id] < 0;
    hybrid.box_ids[p] = cpu ? id : -1;
    hybrid.box_weights[p] = call.weights[p];
    if (cpu) needed[p / TOP_K] = 1, atomicAdd(&cpu_pairs, 1);
  }
  __syncthreads();
  for (int i = thread; i < tokens * (HIDDEN / 8); i += STEP_THREADS)
    if (needed[i / (HIDDEN / 8)]) ((uint4 *)hybrid.box_x)[i] = ((const uint4 *)call.x)[i];
  __threadfence_system();
  __syncthreads();
  if (thread == 0) {
    const u32 request = next_request(step);
    tally(hybrid.counts, PAIRS_CPU, cpu_pairs);
    hybrid.box->layer = hybrid.layer, hybrid.box->tokens = tokens, hybrid.box->streamed = taken;
    __threadfence_system();
    *(volatile u32 *)&hybrid.box->posted = request;
  }
}

// All threads of a block: whether a routed expert has no slot. So blocks that stream need not wait for a plan of nothing.
__device__ __forceinline__ bool any_miss(const StepCall &call, const int *live_tokens) {
  const int live = min(call.pairs, *live_tokens * TOP_K);
  bool miss = false;
  for (int p = threadIdx.x; p < live; p += STEP_THREADS) {
    int id = call.ids[p];
    miss |= id >= 0 && id < EXPERTS && call.slot_table[id] < 0;
  }
  return __syncthreads_or(miss);
}

struct Slots {
  u8 *first;
  size_t stride, bytes;  // of a slot, and of the record in it
};

// A block of THREADS, of `all` that wait for a plan: its share of the records that plan_step chose, read over the link by the
// device itself, if it is one of the first `streams`. Returns how many there are.
template <int THREADS>
__device__ __forceinline__ int stream_records(Step &step, const Slots &slots, int block, int streams, int all) {
  __shared__ int records;
  if (threadIdx.x == 0) {
    u32 planned;
    while (!(planned = load_acquire((const u32 *)&step.planned))) __nanosleep(40);
    records = int(planned) - 1;
  }
  __syncthreads();
  constexpr int DEEP = 2048 / THREADS;
  const size_t words = slots.bytes / 16, threads = size_t(streams) * THREADS;
  for (int r = 0; r < records && block < streams; r++) {
    const uint4 *from = (const uint4 *)__ldcg(&step.from[r]);
    uint4 *to = (uint4 *)(slots.first + size_t(__ldcg(&step.to[r])) * slots.stride);
    for (size_t i = size_t(block) * THREADS + threadIdx.x; i < words; i += threads * DEEP) {
      uint4 held[DEEP];
#pragma unroll
      for (int j = 0; j < DEEP; j++)
        if (i + j * threads < words) held[j] = load_host(from + i + j * threads);
#pragma unroll
      for (int j = 0; j < DEEP; j++)
        if (i + j * threads < words) to[i + j * threads] = held[j];
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    if (atomicAdd(&step.left, 1) == all - 1) {
      step.left = 0;
      __threadfence();  // what the other blocks streamed is seen before this is
      store_release((u32 *)&step.planned, 0);
    }
  }
  return records;
}

// All threads of all blocks: returns when the CPU's rows of this call are in memory. The first block polls the mailbox, the
// others what it found. A refusal, or no answer within the patience, stops the device: never a partial sum.
__device__ __forceinline__ void await_answer(const HybridStep &hybrid) {
  Step &step = *hybrid.step;
  Box *const box = hybrid.box;
  if (threadIdx.x == 0) {
    const u32 wanted = step.awaited;
    if (blockIdx.x == 0) {
      const u64 start = nanoseconds();
      while (true) {
        const u64 word = load_acquire_system((const u64 *)&box->answered);
        if (int(u32(word) - wanted) >= 0) break;
        if (u32(word >> 32) == wanted || nanoseconds() - start > hybrid.patience) {
          *(volatile u32 *)&box->late = wanted;
          __threadfence_system();
          __trap();
        }
        __nanosleep(40);
      }
      tally(hybrid.counts, WAITED_NS, nanoseconds() - start);
      store_release(&step.released, wanted);
    } else {
      while (int(load_acquire(&step.released) - wanted) < 0) __nanosleep(40);
    }
  }
  __syncthreads();
}
