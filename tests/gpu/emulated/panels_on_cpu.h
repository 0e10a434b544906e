// What the prefill kernels need beside cuda_on_cpu.h: matrix instructions in bf16, barriers in shared memory, bulk copies.
#pragma once
#include "cuda_on_cpu.h"
#include <map>

struct float4 {
  float x, y, z, w;
};
struct ushort4 {
  unsigned short x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emulated {
inline float from_bf16_half(unsigned word, int half) { return bits_as<float>((half ? word >> 16 : word & 0xFFFF) << 16); }

// Rows g and g + 8 times 16 k that four registers of 32 lanes hold, as mma and wgmma lay them out, times b(k, column).
template <class B> float product(const uint32_t (&operands)[32][6], int row, B b) {
  float sum = 0;
  for (int k = 0; k < 16; k++)
    sum += from_bf16_half(operands[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k % 2) * b(k);
  return sum;
}
} // namespace emulated

#if WGMMA
namespace emulated {
struct SharedBarrier {
  int arrivals = 0, pending = 0, bytes = 0;
  unsigned phase = 0;
  std::vector<Copy> copies; // land when the phase ends
  void step() {
    if (pending || bytes) return;
    for (const Copy &copy : copies) memcpy(copy.to, copy.from, copy.bytes);
    copies.clear(), pending = arrivals, phase++;
  }
};
inline thread_local std::map<unsigned, SharedBarrier> shared_barriers;
} // namespace emulated

inline void barrier_init(unsigned barrier, int arrivals) {
  emulated::shared_barriers[barrier] = {};
  emulated::shared_barriers[barrier].arrivals = emulated::shared_barriers[barrier].pending = arrivals;
}
inline void barriers_are_ready() {}
inline void barrier_arrive(unsigned barrier) {
  auto &b = emulated::shared_barriers.at(barrier);
  if (--b.pending < 0) abort();
  b.step();
}
inline void barrier_expect(unsigned barrier, unsigned bytes) {
  emulated::shared_barriers.at(barrier).bytes += bytes;
  barrier_arrive(barrier);
}
inline void barrier_wait(unsigned barrier, unsigned parity) {
  while (emulated::shared_barriers.at(barrier).phase % 2 == parity) emulated::yield();
}
inline void bulk_copy(unsigned to, const void *from, unsigned bytes, unsigned barrier) {
  if (to % 16 || bytes % 16 || uintptr_t(from) % 16) abort();
  auto &b = emulated::shared_barriers.at(barrier);
  b.copies.push_back({emulated::block->shared + to, from, bytes});
  b.bytes -= int(bytes);
  b.step();
}
inline void arrive_when_copied(unsigned barrier) {
  auto &open = emulated::thread->open;
  auto &b = emulated::shared_barriers.at(barrier);
  b.copies.insert(b.copies.end(), open.begin(), open.end());
  open.clear();
  barrier_arrive(barrier);
}
template <int N> void fewer_registers() {}
template <int N> void more_registers() {}
inline void settled(float &) {}
inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int N> void wgmma_wait() {}
inline void sync_panel() { emulated::arrive(emulated::block->barriers[1], 256); }
inline bool sync_panel_or(bool value) {
  sync_panel();
  emulated::block->votes += value;
  sync_panel();
  const bool any = emulated::block->votes > 0;
  sync_panel();
  emulated::block->votes = 0;
  sync_panel();
  return any;
}

// A warp's 16 rows of a warpgroup's 64, times N columns that lie in shared memory with the swizzle of 64 bytes.
template <int N> void wgmma(float (&d)[N / 2], const unsigned (&a)[4], unsigned long long descriptor, int add) {
  using namespace emulated;
  auto &operands = warp().operands;
  std::copy(a, a + 4, operands[thread->lane()]);
  __syncwarp();
  const int g = thread->lane() / 4, c = thread->lane() % 4;
  const unsigned start = (descriptor & 0x3FFF) << 4, group = (descriptor >> 32 & 0x3FFF) << 4;
  if (descriptor >> 62 != 2) abort();
  for (int i = 0; i < N / 2; i++) {
    const int column = i / 4 * 8 + 2 * c + i % 2;
    const float sum = product(operands, g + i / 2 % 2 * 8, [&](int k) {
      const unsigned at = start + column / 8 * group + column % 8 * 64 + k * 2;
      return from_bf16_half(*(const unsigned short *)(block->shared + (at ^ (at >> 7 & 3) << 4)), 0);
    });
    d[i] = add ? d[i] + sum : sum;
  }
  __syncwarp();
}
#else
inline void multiply(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  using namespace emulated;
  auto &operands = warp().operands;
  const unsigned mine[6] = {a0, a1, a2, a3, b0, b1};
  std::copy(mine, mine + 6, operands[thread->lane()]);
  __syncwarp();
  const int g = thread->lane() / 4, c = thread->lane() % 4;
  for (int i = 0; i < 4; i++)
    d[i] += product(operands, g + i / 2 * 8, [&](int k) {
      return from_bf16_half(operands[(2 * c + i % 2) * 4 + k % 8 / 2][4 + k / 8], k % 2);
    });
  __syncwarp();
}
#endif
