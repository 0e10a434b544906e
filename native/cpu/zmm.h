// The 512-bit strip kernel, shared by AVX-512 with and without VBMI: they differ in how nibbles are looked up.
//
// Weights enter as u = w + 12, unsigned, for vpdpbusd multiplies unsigned by signed bytes. Four registers of codes
// (rows 4i..4i+3 in register i) are transposed as 4-byte words first, so that lane 4L+i of every word belongs to row
// 4i+L and a dot product needs no horizontal sum; the last step puts rows in order. Included once by each of its users,
// after which everything here has internal linkage.
#pragma once

#include <array>
#include <utility>

#include <immintrin.h>

#include "cpu/elementwise.h"

namespace moetier {
namespace {

constexpr std::size_t kGroup = 16; // rows of activations that share a pass over the weights
constexpr std::size_t kAhead = 32; // blocks (of 256 bytes) by which prefetching leads reading

[[gnu::always_inline]] inline __m512i word(const std::int8_t *q) {
  std::int32_t value;
  std::memcpy(&value, q, sizeof value);
  return _mm512_set1_epi32(value);
}

// One tile's codes as four registers of words: word j of each of the 16 rows.
[[gnu::always_inline]] inline void transpose(const std::uint8_t *codes, __m512i *words) {
  const __m512i a0 = _mm512_load_si512(codes);
  const __m512i a1 = _mm512_load_si512(codes + 64);
  const __m512i a2 = _mm512_load_si512(codes + 128);
  const __m512i a3 = _mm512_load_si512(codes + 192);
  const __m512i b0 = _mm512_unpacklo_epi32(a0, a1);
  const __m512i b1 = _mm512_unpackhi_epi32(a0, a1);
  const __m512i b2 = _mm512_unpacklo_epi32(a2, a3);
  const __m512i b3 = _mm512_unpackhi_epi32(a2, a3);
  words[0] = _mm512_unpacklo_epi64(b0, b2);
  words[1] = _mm512_unpackhi_epi64(b0, b2);
  words[2] = _mm512_unpacklo_epi64(b1, b3);
  words[3] = _mm512_unpackhi_epi64(b1, b3);
}

// One tile's codes as eight registers of u: even k of word j in u[j], odd k in u[4 + j].
template <typename Lookup>
[[gnu::always_inline]] inline void unpack(const std::uint8_t *codes, __m512i *u) {
  __m512i words[4];
  transpose(codes, words);
  for (int j = 0; j < 4; ++j) {
    u[j] = Lookup::low_nibbles(words[j]);
    u[4 + j] = Lookup::low_nibbles(_mm512_srli_epi16(words[j], 4));
  }
}

// E8M0 bytes of a tile in the lane order of `unpack`, as exponent fields.
[[gnu::always_inline]] inline __m512i load_scales(const std::uint8_t *scales) {
  const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m128i bytes = _mm_shuffle_epi8(_mm_load_si128(reinterpret_cast<const __m128i *>(scales)), order);
  return _mm512_slli_epi32(_mm512_cvtepu8_epi32(bytes), 23);
}

// sum + d * 2^c: +0 where c is too small, NaN where it is too large. d * 2^c is a float32, so fusing it with the
// addition changes no bit. Checked is not needed where no c of the strip leaves its bounds.
template <bool Checked>
[[gnu::always_inline]] inline __m512 add_block(__m512 sum, __m512i d, __m512i scales, __m512i exponent) {
  __m512i power = _mm512_add_epi32(scales, exponent);
  if constexpr (Checked) {
    const __m512i field = _mm512_add_epi32(_mm512_srli_epi32(scales, 23), _mm512_srai_epi32(exponent, 23));
    const __mmask16 some = _mm512_cmpge_epi32_mask(field, _mm512_set1_epi32(kMinShift + 127));
    const __mmask16 over = _mm512_cmpgt_epi32_mask(field, _mm512_set1_epi32(kMaxShift + 127));
    power = _mm512_mask_mov_epi32(_mm512_maskz_mov_epi32(some, power), over, _mm512_set1_epi32(0x7FC00000));
  }
  return _mm512_fmadd_ps(_mm512_cvtepi32_ps(d), _mm512_castsi512_ps(power), sum);
}

[[gnu::always_inline]] inline __m512 in_row_order(__m512 lanes) {
  return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), lanes);
}

// Into the second-level cache: the first level tracks too few misses to keep a core's share of the memory busy, and its
// own prefetcher brings the lines on from there.
[[gnu::always_inline]] inline void prefetch(const std::uint8_t *at) {
  _mm_prefetch(reinterpret_cast<const char *>(at), _MM_HINT_T1);
}

// Fetches codes kAhead blocks before block b of the strip is read, past its end those of the next.
[[gnu::always_inline]] inline void prefetch_codes(const StripJob &job, std::size_t b) {
  const std::size_t at = b + kAhead;
  const std::size_t blocks = 2 * job.blocks;
  const std::uint8_t *codes =
      at < blocks ? job.strip.codes + at * kTileCodes : job.next.codes + (at - blocks) * kTileCodes;
  for (std::size_t line = 0; line < kTileCodes; line += 64) prefetch(codes + line);
}

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
  if (job.count == 1 || needs_check(job)) {
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
