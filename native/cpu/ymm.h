// The 256-bit strip kernel, shared by AVX2 and AVX-VNNI: they differ in how 8 rows of 32 products become sums.
//
// As in avx512.cpp, weights enter as u = w + 12, unsigned, and are transposed as 4-byte words first: with rows 2i and
// 2i+1 in register i, lane 4L+i of every word belongs to row 2i+L. A tile is two halves of 8 rows.
// Included once by each of its users, after which everything here has internal linkage.
#pragma once

#include <array>
#include <utility>

#include <immintrin.h>

#include "cpu/elementwise.h"
#include "cpu/prefetch.h"

namespace moetier {
namespace {

constexpr std::size_t kGroup = 4;    // rows of activations that share a pass over the weights
constexpr std::size_t kHalfRows = 8; // rows that a register holds

[[gnu::always_inline]] inline __m256i word(const std::int8_t *q) {
  std::int32_t value;
  std::memcpy(&value, q, sizeof value);
  return _mm256_set1_epi32(value);
}

// Codes of 8 rows as eight registers of u: even k of word j in u[j], odd k in u[4 + j].
[[gnu::always_inline]] inline void unpack(const std::uint8_t *codes, __m256i *u) {
  const __m256i table = _mm256_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0, 12, 13, 14, 15, 16,
                                         18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
  const __m256i nibble = _mm256_set1_epi8(15);
  __m256i a[4];
  for (int i = 0; i < 4; ++i) a[i] = _mm256_load_si256(reinterpret_cast<const __m256i *>(codes + 32 * i));
  const __m256i b0 = _mm256_unpacklo_epi32(a[0], a[1]);
  const __m256i b1 = _mm256_unpackhi_epi32(a[0], a[1]);
  const __m256i b2 = _mm256_unpacklo_epi32(a[2], a[3]);
  const __m256i b3 = _mm256_unpackhi_epi32(a[2], a[3]);
  const __m256i words[4] = {_mm256_unpacklo_epi64(b0, b2), _mm256_unpackhi_epi64(b0, b2), _mm256_unpacklo_epi64(b1, b3),
                            _mm256_unpackhi_epi64(b1, b3)};
  for (int j = 0; j < 4; ++j) {
    u[j] = _mm256_shuffle_epi8(table, _mm256_and_si256(words[j], nibble));
    u[4 + j] = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(words[j], 4), nibble));
  }
}

// E8M0 bytes of 8 rows, in the low half of `bytes` and the lane order of `unpack`, as exponent fields.
[[gnu::always_inline]] inline __m256i fields(__m128i bytes) {
  return _mm256_slli_epi32(_mm256_cvtepu8_epi32(bytes), 23);
}

// sum + d * 2^c: +0 where c is too small, NaN where it is too large; the product is exact, so fusing changes no bit.
template <bool Checked>
[[gnu::always_inline]] inline __m256 add_block(__m256 sum, __m256i d, __m256i scales, __m256i exponent) {
  __m256i power = _mm256_add_epi32(scales, exponent);
  if constexpr (Checked) {
    const __m256i field = _mm256_add_epi32(_mm256_srli_epi32(scales, 23), _mm256_srai_epi32(exponent, 23));
    const __m256i some = _mm256_cmpgt_epi32(field, _mm256_set1_epi32(kMinShift + 126));
    const __m256i over = _mm256_cmpgt_epi32(field, _mm256_set1_epi32(kMaxShift + 127));
    power = _mm256_blendv_epi8(_mm256_and_si256(power, some), _mm256_set1_epi32(0x7FC00000), over);
  }
  return _mm256_fmadd_ps(_mm256_cvtepi32_ps(d), _mm256_castsi256_ps(power), sum);
}

// Count rows from the first on, one tile at a time. Dot::block(u, q) sums the products of 8 rows.
template <typename Dot, std::size_t Count, bool Checked>
void group(const StripJob &job, std::size_t first) {
  const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
  const __m256i rows_in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const std::size_t per_segment = job.blocks / segments(job.blocks);
  for (std::size_t tile = 0; tile < 2; ++tile) {
    const std::size_t start = tile * job.blocks;
    __m256 total[Count][2];
    for (auto &row : total) row[0] = row[1] = _mm256_setzero_ps();
    for (std::size_t begin = 0; begin < job.blocks; begin += per_segment) {
      __m256 sum[Count][2];
      for (auto &row : sum) row[0] = row[1] = _mm256_setzero_ps();
      for (std::size_t b = begin; b < begin + per_segment; ++b) {
        prefetch_codes(job, start + b);
        prefetch(job.next.scales + (start + b) * kTileRows);
        const auto *at = reinterpret_cast<const __m128i *>(job.strip.scales + (start + b) * kTileRows);
        const __m128i scales = _mm_shuffle_epi8(_mm_load_si128(at), order);
#pragma GCC unroll 2
        for (std::size_t half = 0; half < 2; ++half) {
          __m256i u[8];
          unpack(job.strip.codes + (start + b) * kTileCodes + half * kTileCodes / 2, u);
          const __m256i shifted = fields(half == 0 ? scales : _mm_srli_si128(scales, 8));
#pragma GCC unroll 4
          for (std::size_t m = 0; m < Count; ++m) {
            const ActBlock &act = job.rows[first + m][b];
            const __m256i d = _mm256_add_epi32(Dot::block(u, act.q), _mm256_set1_epi32(act.correction));
            sum[m][half] = add_block<Checked>(sum[m][half], d, shifted, _mm256_set1_epi32(act.exponent));
          }
        }
      }
      for (std::size_t m = 0; m < Count; ++m) {
        total[m][0] = _mm256_add_ps(total[m][0], sum[m][0]);
        total[m][1] = _mm256_add_ps(total[m][1], sum[m][1]);
      }
    }
    for (std::size_t m = 0; m < Count; ++m) {
      float *out = job.out + (first + m) * kStripRows + tile * kTileRows;
      _mm256_store_ps(out, _mm256_permutevar8x32_ps(total[m][0], rows_in_order));
      _mm256_store_ps(out + kHalfRows, _mm256_permutevar8x32_ps(total[m][1], rows_in_order));
    }
  }
}

// Whether some c = e + s - 128 of the strip may leave its bounds.
bool needs_check(const StripJob &job) {
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
  int s_lo = 255;
  int s_hi = 0;
  for (int i = 0; i < 32; ++i) {
    s_lo = low[i] < s_lo ? low[i] : s_lo;
    s_hi = high[i] > s_hi ? high[i] : s_hi;
  }
  return s_lo + job.range.lo - 128 < kMinShift || s_hi + job.range.hi - 128 > kMaxShift;
}

template <typename Dot, bool Checked>
void groups(const StripJob &job) {
  using Group = void (*)(const StripJob &, std::size_t);
  static constexpr Group kGroups[kGroup] = {group<Dot, 1, Checked>, group<Dot, 2, Checked>, group<Dot, 3, Checked>,
                                            group<Dot, 4, Checked>};
  const std::size_t number = (job.count + kGroup - 1) / kGroup;
  for (std::size_t i = 0; i < number; ++i) { // of nearly equal sizes
    const std::size_t first = i * job.count / number;
    kGroups[(i + 1) * job.count / number - first - 1](job, first);
  }
}

template <typename Dot>
void strip(const StripJob &job) {
  if (job.count == 1 || needs_check(job)) {
    groups<Dot, true>(job);
  } else {
    groups<Dot, false>(job);
  }
}

template <typename Dot>
std::size_t multiply(std::size_t rounds) {
  __m256i u[8];
  for (__m256i &part : u) part = _mm256_set1_epi8(3);
  std::int8_t q[kBlock] = {1};
  for (std::size_t round = 0; round < rounds; ++round) {
    __m256i d = Dot::block(u, q);
    asm volatile("" : "+m"(q) : "x"(d)); // every round counts
  }
  return 2 * kBlock * kHalfRows;
}

} // namespace
} // namespace moetier
