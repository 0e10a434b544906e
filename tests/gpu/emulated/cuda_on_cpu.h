// CUDA threads on a CPU: a block is one OS thread, its threads are coroutines that run until they must wait for each other.
// Functions with inline assembly are replaced by those at the end. Copies to shared memory land when they are waited for and
// no earlier, so that a wait that is missing is found; stores of threads are seen at once, so a barrier that is missing is not.
#pragma once
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <thread>
#include <ucontext.h>
#include <utility>
#include <vector>

using std::max;
using std::min;

#define __CUDA_ARCH__ 900
#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static thread_local // a block has its OS thread for itself

struct int2 {
  int x, y;
};
struct uint2 {
  unsigned x, y;
};
struct int4 {
  int x, y, z, w;
};
struct uint4 {
  unsigned x, y, z, w;
};
struct Index {
  unsigned x = 0, y = 0, z = 0;
};

namespace emulated {
struct Copy {
  void *to;
  const void *from;
  size_t bytes;
};
struct Thread {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(1 << 16);
  Index index;
  bool ended = false;
  std::vector<Copy> open;                // copies since the last commit
  std::deque<std::vector<Copy>> pending; // committed, not waited for
  unsigned lane() const { return index.x % 32; }
};
struct Barrier {
  unsigned arrived = 0, generation = 0;
};
struct Warp {
  Barrier barrier;
  uint64_t value[32];
  uint32_t operands[32][6];
};
struct Block {
  ucontext_t scheduler;
  Index index, grid, size;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  Barrier barriers[16];
  int votes = 0;
  unsigned char *shared;
};
inline thread_local Block *block;
inline thread_local Thread *thread;

inline __noinline__ void yield() { swapcontext(&thread->context, &block->scheduler); }
inline void arrive(Barrier &barrier, unsigned threads) {
  const unsigned generation = barrier.generation;
  if (++barrier.arrived == threads) {
    barrier.arrived = 0, barrier.generation++;
    return;
  }
  while (barrier.generation == generation) yield();
}
inline Warp &warp() { return block->warps[thread->index.x / 32]; }

// What a warp's lanes give, to a function of all 32 values.
template <class Function> auto exchange(uint64_t value, Function function) {
  warp().value[thread->lane()] = value;
  arrive(warp().barrier, 32);
  auto result = function(warp().value);
  arrive(warp().barrier, 32);
  return result;
}

inline void run_block(const std::function<void()> &kernel, Index index, Index grid, unsigned threads, size_t shared_bytes) {
  static thread_local std::function<void()> entry;
  entry = kernel;
  Block here;
  here.index = index, here.grid = grid, here.size = {threads, 1, 1};
  here.threads = std::vector<Thread>(threads), here.warps = std::vector<Warp>(threads / 32);
  std::vector<unsigned char> memory(shared_bytes + 1024, 0xA5);
  here.shared = memory.data() + (1024 - uintptr_t(memory.data()) % 1024);
  block = &here;
  for (unsigned t = 0; t < threads; t++) {
    Thread &made = here.threads[t];
    made.index.x = t;
    getcontext(&made.context);
    made.context.uc_stack.ss_sp = made.stack.data(), made.context.uc_stack.ss_size = made.stack.size();
    makecontext(&made.context, +[] {
      entry();
      thread->ended = true;
      yield();
    }, 0);
  }
  for (unsigned left = threads; left;)
    for (Thread &next : here.threads) {
      if (next.ended) continue;
      thread = &next;
      swapcontext(&here.scheduler, &next.context);
      left -= next.ended;
    }
}

// together: the blocks run at once, each on an OS thread; else one after the other.
inline void launch(const std::function<void()> &kernel, Index grid, unsigned threads, size_t shared_bytes, bool together) {
  std::vector<std::thread> running;
  for (unsigned y = 0; y < grid.y; y++)
    for (unsigned x = 0; x < grid.x; x++) {
      running.emplace_back([=] { run_block(kernel, {x, y, 0}, grid, threads, shared_bytes); });
      if (!together) running.back().join();
    }
  for (std::thread &each : running)
    if (each.joinable()) each.join();
}

// Arguments as the launcher passes them: 8 bytes each, of which an int takes the low 4; of a struct its address.
template <class... P, size_t... I>
void call(void (*kernel)(P...), const uint64_t *values, std::index_sequence<I...>) {
  auto one = [](auto type, uint64_t value) {
    decltype(type) argument;
    if constexpr (std::is_class_v<decltype(type)>)
      memcpy(&argument, reinterpret_cast<const void *>(value), sizeof argument);
    else
      memcpy(&argument, &value, sizeof argument);
    return argument;
  };
  kernel(one(P{}, values[I])...);
}
template <class... P>
void launch(void (*kernel)(P...), Index grid, unsigned threads, size_t shared_bytes, bool together, const uint64_t *values) {
  launch([=] { call(kernel, values, std::index_sequence_for<P...>{}); }, grid, threads, shared_bytes, together);
}
} // namespace emulated

#define threadIdx (emulated::thread->index)
#define blockIdx (emulated::block->index)
#define blockDim (emulated::block->size)
#define gridDim (emulated::block->grid)

inline void __syncwarp() { emulated::arrive(emulated::warp().barrier, 32); }
inline void __syncthreads() { emulated::arrive(emulated::block->barriers[0], blockDim.x); }
inline int __syncthreads_count(int vote) {
  __syncthreads();
  emulated::block->votes += vote != 0;
  __syncthreads();
  const int count = emulated::block->votes;
  __syncthreads();
  emulated::block->votes = 0;
  __syncthreads();
  return count;
}
inline int __syncthreads_or(int vote) { return __syncthreads_count(vote) > 0; }
inline unsigned __ballot_sync(unsigned, bool vote) {
  return emulated::exchange(vote, [](const uint64_t *all) {
    unsigned mask = 0;
    for (int i = 0; i < 32; i++) mask |= unsigned(all[i]) << i;
    return mask;
  });
}
inline bool __any_sync(unsigned all, unsigned vote) { return __ballot_sync(all, vote != 0) != 0; }
inline int __shfl_sync(unsigned, int value, int from) {
  return emulated::exchange(unsigned(value), [=](const uint64_t *all) { return int(all[from]); });
}
inline unsigned __shfl_xor_sync(unsigned, unsigned value, unsigned mask) {
  const unsigned from = emulated::thread->lane() ^ mask;
  return emulated::exchange(value, [=](const uint64_t *all) { return unsigned(all[from]); });
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  return emulated::exchange(value, [](const uint64_t *all) { return unsigned(*std::max_element(all, all + 32)); });
}
inline unsigned __reduce_min_sync(unsigned, unsigned value) {
  return emulated::exchange(value, [](const uint64_t *all) { return unsigned(*std::min_element(all, all + 32)); });
}
inline int __reduce_add_sync(unsigned, int value) {
  return emulated::exchange(unsigned(value), [](const uint64_t *all) {
    unsigned sum = 0;
    for (int i = 0; i < 32; i++) sum += unsigned(all[i]);
    return int(sum);
  });
}

template <class To, class From> To bits_as(From from) {
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
inline float __int_as_float(int x) { return bits_as<float>(x); }
inline float __uint_as_float(unsigned x) { return bits_as<float>(x); }
inline int __float_as_int(float x) { return bits_as<int>(x); }
inline unsigned __float_as_uint(float x) { return bits_as<unsigned>(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline int __float2int_rn(float a) { return int(std::lrint(a)); }
inline int __ffs(unsigned x) { return __builtin_ffs(int(x)); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
template <class T> T __ldcg(const T *p) { return *p; }
inline size_t __cvta_generic_to_shared(const void *p) { return (const unsigned char *)p - emulated::block->shared; }
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void __threadfence_system() { __threadfence(); }
inline void __nanosleep(unsigned) { emulated::yield(); }
inline void __trap() { abort(); }
template <class T, class U> T atomicAdd(T *p, U value) { return __atomic_fetch_add(p, T(value), __ATOMIC_SEQ_CST); }
template <class T> T atomicOr(T *p, T value) { return __atomic_fetch_or(p, value, __ATOMIC_SEQ_CST); }
template <class T> T atomicMin(T *p, T value) {
  T old = __atomic_load_n(p, __ATOMIC_SEQ_CST);
  while (value < old && !__atomic_compare_exchange_n(p, &old, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {}
  return old;
}

// In place of the functions of the same name, which are inline assembly.
inline unsigned permute(unsigned a, unsigned b, unsigned selector) {
  const uint64_t table = uint64_t(b) << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; i++) {
    const unsigned nibble = selector >> 4 * i & 15, byte = table >> (nibble & 7) * 8 & 255;
    result |= (nibble & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
  }
  return result;
}
inline unsigned upper_half(unsigned x) { return x >> 16; }
inline void multiply16(int d[4], const int start[4], const unsigned a[4], unsigned b0, unsigned b1) {
  using namespace emulated;
  auto &operands = warp().operands;
  std::copy(a, a + 4, operands[thread->lane()]);
  operands[thread->lane()][4] = b0, operands[thread->lane()][5] = b1;
  __syncwarp();
  const int g = thread->lane() / 4, c = thread->lane() % 4;
  for (int i = 0; i < 4; i++) { // row g + 8 * (i / 2), column 2c + i % 2; k is 4 * lane % 4 + byte, from 16 on in other registers
    int sum = start[i];
    for (int k = 0; k < 32; k++) {
      const auto byte = [&](unsigned word) { return int8_t(word >> 8 * (k % 4)); };
      sum += byte(operands[g * 4 + k % 16 / 4][i / 2 + k / 16 * 2]) * byte(operands[(2 * c + i % 2) * 4 + k % 16 / 4][4 + k / 16]);
    }
    d[i] = sum;
  }
  __syncwarp();
}
inline void copy_later(unsigned to, const void *from, size_t bytes) {
  emulated::thread->open.push_back({emulated::block->shared + to, from, bytes});
}
inline void copy16(unsigned to, const void *from) { copy_later(to, from, 16); }
inline void copy8(unsigned to, const void *from) { copy_later(to, from, 8); }
inline void commit() { emulated::thread->pending.push_back(std::exchange(emulated::thread->open, {})); }
template <int N> void wait_copies() {
  auto &pending = emulated::thread->pending;
  for (; pending.size() > N; pending.pop_front())
    for (const emulated::Copy &copy : pending.front()) memcpy(copy.to, copy.from, copy.bytes);
}
inline void named_barrier(int number, int threads) { emulated::arrive(emulated::block->barriers[number], unsigned(threads)); }
inline void wait_for_previous() {}
inline void let_next_start() {}
inline unsigned load_acquire(const unsigned *p) {
  emulated::yield(), std::this_thread::yield();
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
inline void store_release(unsigned *p, unsigned value) { __atomic_store_n(p, value, __ATOMIC_RELEASE); }
inline unsigned long long load_acquire_system(const unsigned long long *p) {
  emulated::yield();
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
inline unsigned long long nanoseconds() { return 0; }
inline uint4 load_host(const uint4 *p) { return *p; }
