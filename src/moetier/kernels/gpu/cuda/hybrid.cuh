// The hybrid step of a layer. Each routed expert is in a slot, or is streamed from DRAM into a staging slot in this very call,
// or is computed by the CPU meanwhile. `plan_step` decides and posts the CPU's part to the mailbox; whoever combines awaits
// the answer. Which one computes an expert never changes a bit of its rows.
#pragma once
#include "box.cuh"
#include "common.cuh"

typedef unsigned long long u64;

constexpr int MAX_STAGED = 64;

// Nanoseconds: of a CPU call, of the least an expert takes there (its bytes), of a pair (its arithmetic), of an expert over the
// link, and of the least an expert takes the CPU while the link reads the same DRAM.
struct Costs {
  float cpu_call, cpu_expert, cpu_pair, stream_expert, cpu_expert_beside;
};

enum Count { CALLS, CALLS_MISSED, HITS, MISSES, STREAMED, PAIRS_CPU, WAITED_NS, COUNTS };

struct Step {
  u32 sequence;   // of the last request
  u32 awaited;    // the request whose answer this call needs, if `pending`
  u32 released;   // the last request whose answer was seen, for blocks that do not poll
  int pending;    // this call posted a request
  int planned;    // 1 + the number of records to stream, until all blocks that wait for it have streamed
  int left;       // blocks that have seen it and done their part
  int pad[2];
  u64 from[MAX_STAGED];  // records to stream, and the slot of each
  int to[MAX_STAGED];
  int table[EXPERTS];  // slot of each routed expert in this call, or -1: the CPU's
};

// What a plan is made from: the call, the store and the mailbox.
struct StepCall {
  const u16 *x;
  const int *ids;
  const float *weights;
  int pairs;
  const int *slot_table;
  const u64 *records;  // pinned: where each expert's record lies in DRAM, or 0
  int layer;
  int staging_first, staging;  // staging slots
  const Costs *costs;
  u32 *heat;        // pairs of each expert so far
  u64 *counts;      // of the layer, since the start: see Count
  const int *live;  // tokens that are real; what follows is padding
  int *step_ids;    // ids, -1 where there is nothing to compute
};
struct Mail {
  Box *box;
  int *ids;
  float *weights;
  u16 *x;
  int *streamed;
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

struct PlanRoom {  // in shared memory
  u64 best;
  int misses, streamable, cpu_pairs, pad;
  u32 routed[(EXPERTS + 31) / 32];
  int count[EXPERTS], missed[EXPERTS], key[EXPERTS], sorted[EXPERTS], pairs[EXPERTS];
  u8 needed[BOX_TOKENS];
};

// One block of THREADS. Fills step.table and the list of records to stream; posts the CPU's part. announces: blocks wait for
// `planned`, in any step with a miss.
template <int THREADS>
__device__ __forceinline__ void plan_step(const StepCall &call, Step &step, const Mail &mail, bool announces, PlanRoom &room) {
  static_assert(THREADS > MAX_STAGED && THREADS * 32 >= EXPERTS);
  const int thread = threadIdx.x, live = min(call.pairs, *call.live * TOP_K);
  if (thread < (EXPERTS + 31) / 32) room.routed[thread] = 0;
  __syncthreads();
  bool miss = false;
  for (int p = thread; p < call.pairs; p += THREADS) {
    int id = p < live ? call.ids[p] : -1;
    if (id >= EXPERTS) id = -1;
    call.step_ids[p] = id;
    if (id < 0) continue;
    int slot = call.slot_table[id];
    step.table[id] = slot;
    miss |= slot < 0;
    atomicOr(&room.routed[id / 32], 1u << id % 32);
    atomicAdd(call.heat + id, 1u);
  }
  if (!__syncthreads_or(miss)) {  // the common case, as short as it can be
    if (thread < (EXPERTS + 31) / 32) tally(call.counts, HITS, __popc(room.routed[thread]));
    if (thread == 0) step.pending = 0, tally(call.counts, CALLS, 1);
    return;
  }
  for (int e = thread; e < EXPERTS; e += THREADS) room.count[e] = 0;
  if (thread == 0) room.misses = 0, room.streamable = 0, room.cpu_pairs = 0, room.best = ~0ull;
  __syncthreads();
  for (int p = thread; p < call.pairs; p += THREADS)
    if (call.step_ids[p] >= 0) atomicAdd(&room.count[call.step_ids[p]], 1);
  __syncthreads();
  for (int e = thread; e < EXPERTS; e += THREADS) {
    if (!room.count[e]) continue;
    if (step.table[e] < 0)
      room.missed[atomicAdd(&room.misses, 1)] = e;
    else
      tally(call.counts, HITS, 1);
  }
  __syncthreads();
  const int n = room.misses;
  int taken = 0;  // of the missed experts: those that are streamed
  if (call.staging > 0) {
    const Costs costs = *call.costs;
    for (int i = thread; i < n; i += THREADS) {
      int e = room.missed[i];
      bool here = *(const volatile u64 *)(call.records + e) != 0;
      // Most pairs first, then the lowest id.
      room.key[i] = (here ? 1 << 30 : 0) | min(room.count[e], 0x7FFF) << 14 | (0x3FFF - e);
      if (here) atomicAdd(&room.streamable, 1);
    }
    __syncthreads();
    for (int i = thread; i < n; i += THREADS) {
      int rank = 0;
      for (int j = 0; j < n; j++) rank += room.key[j] > room.key[i];
      room.sorted[rank] = room.missed[i];
      room.pairs[rank] = room.count[room.missed[i]];
    }
    __syncthreads();
    const int most = min(min(call.staging, MAX_STAGED), room.streamable);
    if (thread <= most) {  // the time if the first `thread` of them are streamed
      const float least = thread > 0 ? costs.cpu_expert_beside : costs.cpu_expert;
      float cpu = thread == n ? 0.f : costs.cpu_call;
      for (int i = thread; i < n; i++) cpu += fmaxf(least, float(room.pairs[i]) * costs.cpu_pair);
      const float time = fmaxf(cpu, float(thread) * costs.stream_expert);
      atomicMin(&room.best, u64(__float_as_uint(time)) << 32 | u32(thread));
    }
    __syncthreads();
    taken = int(u32(room.best));
    if (thread < taken) {
      int e = room.sorted[thread];
      step.from[thread] = *(const volatile u64 *)(call.records + e);
      step.to[thread] = step.table[e] = call.staging_first + thread;
      mail.streamed[thread] = e;
    }
    __syncthreads();
  }
  if (thread == 0) {
    step.pending = n > taken;
    if (n > taken) step.awaited = step.sequence += step.sequence == ~0u ? 2 : 1;  // 0 is no request's number
    if (announces) store_release((u32 *)&step.planned, u32(1 + taken));
    tally(call.counts, CALLS, 1), tally(call.counts, CALLS_MISSED, 1);
    tally(call.counts, MISSES, n), tally(call.counts, STREAMED, taken);
  }
  if (n == taken) return;
  const int tokens = call.pairs / TOP_K;
  for (int t = thread; t < tokens; t += THREADS) room.needed[t] = 0;
  __syncthreads();
  for (int p = thread; p < call.pairs; p += THREADS) {
    int id = call.step_ids[p];
    bool cpu = id >= 0 && step.table[id] < 0;
    mail.ids[p] = cpu ? id : -1;
    mail.weights[p] = call.weights[p];
    if (cpu) room.needed[p / TOP_K] = 1, atomicAdd(&room.cpu_pairs, 1);
  }
  __syncthreads();
  for (int i = thread; i < tokens * (HIDDEN / 8); i += THREADS)
    if (room.needed[i / (HIDDEN / 8)]) ((uint4 *)mail.x)[i] = ((const uint4 *)call.x)[i];
  __threadfence_system();
  __syncthreads();
  if (thread == 0) {
    tally(call.counts, PAIRS_CPU, room.cpu_pairs);
    mail.box->layer = call.layer, mail.box->tokens = tokens, mail.box->streamed = taken;
    __threadfence_system();
    *(volatile u32 *)&mail.box->posted = step.awaited;
  }
}

// All threads of a block of THREADS: whether a routed expert has no slot. So blocks that stream need not wait for a plan of
// nothing.
template <int THREADS> __device__ __forceinline__ bool any_miss(const StepCall &call) {
  const int live = min(call.pairs, *call.live * TOP_K);
  bool miss = false;
  for (int p = threadIdx.x; p < live; p += THREADS) {
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
      store_release((u32 *)&step.planned, 0);
    }
  }
  return records;
}

// All threads of all blocks of a kernel of THREADS a block, in a step with a miss: the first block plans and posts, the first
// `streams` stream: more loads than fill the link only keep the CPU from its own.
// When it returns, step.table and the staging slots are those of this step; whether the CPU was asked.
template <int THREADS>
__device__ __forceinline__ bool plan_together(const StepCall &call, Step &step, const Mail &mail, const Slots &slots,
                                              int streams, PlanRoom &room) {
  if (blockIdx.x == 0) plan_step<THREADS>(call, step, mail, true, room);
  const int records = stream_records<THREADS>(step, slots, blockIdx.x, min(streams, int(gridDim.x)), gridDim.x);
  if (records > 0 && threadIdx.x == 0)
    while (load_acquire((const u32 *)&step.planned)) __nanosleep(40);
  __syncthreads();
  return __ldcg(&step.pending);
}

// All threads of all blocks: returns when the CPU's rows of this call are in memory. The first block polls the mailbox, the
// others what it found. A refusal, or no answer within `patience` nanoseconds, stops the device: never a partial sum.
__device__ __forceinline__ void await_answer(Step &step, Box *box, u64 *counts, u64 patience) {
  if (threadIdx.x == 0) {
    const u32 wanted = step.awaited;
    if (blockIdx.x == 0) {
      const u64 start = nanoseconds();
      while (true) {
        const u64 word = load_acquire_system((const u64 *)&box->answered);
        if (int(u32(word) - wanted) >= 0) break;
        if (u32(word >> 32) == wanted || nanoseconds() - start > patience) {
          *(volatile u32 *)&box->late = wanted;
          __threadfence_system();
          __trap();
        }
        __nanosleep(40);
      }
      tally(counts, WAITED_NS, nanoseconds() - start);
      store_release(&step.released, wanted);
    } else {
      while (int(load_acquire(&step.released) - wanted) < 0) __nanosleep(40);
    }
  }
  __syncthreads();
}
