// The 512-bit strip kernel, shared by AVX-512 with and without VBMI: they differ in how nibbles are looked up. Included
// once by each of its users, after which everything here has internal linkage.
#pragma once

#include <array>
#include <utility>

#include "cpu/zmm_blocks.h"
#include "cpu/zmm_one_row.h"

namespace moetier {
namespace {

constexpr std::size_t kGroup = 16; // rows of activations that share a pass over the weights

// Count rows from the first on: one tile at a time, weights unpacked into registers, a sum in a register for each row.
template <typename Lookup, std::size_t Count, bool Checked>
void group(const StripJob &job, std::size_t first) {
  const std::size_t per_segment = job.blocks / segments(job.blocks);
  const ActBlock *const *rows = job.rows + first;
  for (std::size_t tile = 0; tile < 2; ++tile) {
    const std::size_t start = tile * job.blocks;
    __m512 total[Count];
#pragma GCC unroll 16
    for (std::size_t m = 0; m < Count; ++m) total[m] = _mm512_setzero_ps();
    for (std::size_t begin = 0; begin < job.blocks; begin += per_segment) {
      __m512 sum[Count];
#pragma GCC unroll 16
      for (std::size_t m = 0; m < Count; ++m) sum[m] = _mm512_setzero_ps();
      for (std::size_t b = begin; b < begin + per_segment; ++b) {
        // The two tiles are one run of blocks. Scales come a whole strip early: `needs_check` wants them first.
        prefetch_codes(job, start + b);
        prefetch(job.next.scales + (start + b) * kTileRows);
        __m512i u[8];
        unpack<Lookup>(job.strip.codes + (start + b) * kTileCodes, u);
        const __m512i scales = load_scales(job.strip.scales + (start + b) * kTileRows);
#pragma GCC unroll 16
        for (std::size_t m = 0; m < Count; ++m) {
          const ActBlock *row = rows[m];
          asm volatile("" : "+r"(row)); // or the compiler keeps Count pointers, most of them spilled, and moves each
          const ActBlock &act = row[b];
          __m512i d = _mm512_set1_epi32(act.correction);
          for (int j = 0; j < 8; ++j) d = _mm512_dpbusd_epi32(d, u[j], word(act.q + 4 * j));
          sum[m] = add_block<Checked>(sum[m], d, scales, _mm512_set1_epi32(act.exponent));
        }
      }
#pragma GCC unroll 16
      for (std::size_t m = 0; m < Count; ++m) total[m] = _mm512_add_ps(total[m], sum[m]);
    }
#pragma GCC unroll 16
    for (std::size_t m = 0; m < Count; ++m) {
      _mm512_store_ps(job.out + (first + m) * kStripRows + tile * kTileRows, in_row_order(total[m]));
    }
  }
}

// Least and largest E8M0 byte of a strip.
struct ScaleRange {
  int lo;
  int hi;
};

ScaleRange scales_of(const StripJob &job) {
  __m256i least = _mm256_set1_epi8(-1);
  __m256i most = _mm256_setzero_si256();
  for (std::size_t at = 0; at < 2 * job.blocks * kTileRows; at += 32) {
    const __m256i scales = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(job.strip.scales + at));
    least = _mm256_min_epu8(least, scales);
    most = _mm256_max_epu8(most, scales);
  }
  alignas(32) std::uint8_t low[32];
  alignas(32) std::uint8_t high[32];
  _mm256_store_si256(reinterpret_cast<__m256i *>(low), least);
  _mm256_store_si256(reinterpret_cast<__m256i *>(high), most);
  ScaleRange range = {255, 0};
  for (int i = 0; i < 32; ++i) {
    range.lo = low[i] < range.lo ? low[i] : range.lo;
    range.hi = high[i] > range.hi ? high[i] : range.hi;
  }
  return range;
}

// Whether some c = e + s - 128 of the strip may leave its bounds.
[[maybe_unused]] bool needs_check(ScaleRange scales, ExponentRange exponents) {
  return scales.lo + exponents.lo - 128 < kMinShift || scales.hi + exponents.hi - 128 > kMaxShift;
}

bool needs_check(const StripJob &job) {
  return needs_check(scales_of(job), job.range);
}

using Group = void (*)(const StripJob &, std::size_t);

template <typename Lookup, bool Checked, std::size_t... Less>
constexpr std::array<Group, kGroup> groups_of(std::index_sequence<Less...>) {
  return {group<Lookup, Less + 1, Checked>...};
}

template <typename Lookup, bool Checked>
void groups(const StripJob &job) {
  static constexpr auto kGroups = groups_of<Lookup, Checked>(std::make_index_sequence<kGroup>());
  const std::size_t number = (job.count + kGroup - 1) / kGroup;
  for (std::size_t i = 0; i < number; ++i) { // of nearly equal sizes
    const std::size_t first = i * job.count / number;
    kGroups[(i + 1) * job.count / number - first - 1](job, first);
  }
}

template <typename Lookup>
void strip(const StripJob &job) {
  // One row is memory's speed in any case: reading the scales ahead of the codes would only cost.
  if (job.prefetch == Prefetch::by_processor && job.count == 1 && job.blocks >= kLongStrip) {
    one_row<Lookup>(job);
  } else if (job.count == 1 || needs_check(job)) {
    groups<Lookup, true>(job);
  } else {
    groups<Lookup, false>(job);
  }
}

[[maybe_unused]] std::size_t multiply(std::size_t rounds) {
  constexpr std::size_t kChains = 16; // more than latency times throughput
  const __m512i u = _mm512_set1_epi8(3);
  const __m512i q = _mm512_set1_epi8(5);
  __m512i d[kChains];
  for (__m512i &chain : d) chain = _mm512_setzero_si512();
  for (std::size_t round = 0; round < rounds; ++round) {
    for (__m512i &chain : d) asm volatile("vpdpbusd %2, %1, %0" : "+v"(chain) : "v"(u), "v"(q));
  }
  return kChains * 2 * 64;
}

bool has_avx512_vnni() {
  return __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
         __builtin_cpu_supports("avx512vl") != 0 && __builtin_cpu_supports("avx512dq") != 0 &&
         __builtin_cpu_supports("avx512vnni") != 0;
}

} // namespace
} // namespace moetier
