// AVX-512 with VNNI and VBMI (Zen 4, Ice Lake and later).
//
// A byte permute with a 64-entry table turns nibbles into u = w + 12 without masking; vpdpbusd multiplies them by the
// signed q. Four registers of codes (rows 4i..4i+3 in register i) are transposed as 4-byte words first, so that lane
// 4L+i of every word belongs to row 4i+L and a dot product needs no horizontal sum; the last step puts rows in order.

#include <immintrin.h>

#include "cpu/elementwise.h"

namespace moetier {
namespace {

constexpr std::size_t kMaxGroup = 8;    // rows of activations per pass over a tile
constexpr std::size_t kPrefetch = 4096; // bytes ahead of the codes being read

// w + 12 for each code, four times over: the permute looks at six bits of a byte.
alignas(64) constexpr std::uint8_t kUnsigned[64] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0,
                                                    12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0,
                                                    12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0,
                                                    12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

[[gnu::always_inline]] inline __m512i word(const std::int8_t *q) {
  std::int32_t value;
  std::memcpy(&value, q, sizeof value);
  return _mm512_set1_epi32(value);
}

// One tile's codes as eight registers of u: even k of word j in u[j], odd k in u[4 + j].
[[gnu::always_inline]] inline void unpack(const std::uint8_t *codes, __m512i table, __m512i *u) {
  const __m512i a0 = _mm512_load_si512(codes);
  const __m512i a1 = _mm512_load_si512(codes + 64);
  const __m512i a2 = _mm512_load_si512(codes + 128);
  const __m512i a3 = _mm512_load_si512(codes + 192);
  const __m512i b0 = _mm512_unpacklo_epi32(a0, a1);
  const __m512i b1 = _mm512_unpackhi_epi32(a0, a1);
  const __m512i b2 = _mm512_unpacklo_epi32(a2, a3);
  const __m512i b3 = _mm512_unpackhi_epi32(a2, a3);
  const __m512i words[4] = {_mm512_unpacklo_epi64(b0, b2), _mm512_unpackhi_epi64(b0, b2), _mm512_unpacklo_epi64(b1, b3),
                            _mm512_unpackhi_epi64(b1, b3)};
  for (int j = 0; j < 4; ++j) {
    u[j] = _mm512_permutexvar_epi8(words[j], table);
    u[4 + j] = _mm512_permutexvar_epi8(_mm512_srli_epi16(words[j], 4), table);
  }
}

// 2^c of 16 rows, as the contract has it: +0 where c is too small, NaN where it is too large.
template <bool Checked>
[[gnu::always_inline]] inline __m512 power(__m512i shifted_scales, std::int32_t exponent) {
  if constexpr (!Checked) return _mm512_castsi512_ps(_mm512_add_epi32(shifted_scales, _mm512_set1_epi32(exponent)));
  const __m512i field = _mm512_add_epi32(_mm512_srli_epi32(shifted_scales, 23), _mm512_set1_epi32(exponent >> 23));
  const __mmask16 some = _mm512_cmpge_epi32_mask(field, _mm512_set1_epi32(kMinShift + 127));
  const __mmask16 over = _mm512_cmpgt_epi32_mask(field, _mm512_set1_epi32(kMaxShift + 127));
  const __m512i bits = _mm512_maskz_slli_epi32(some, field, 23);
  return _mm512_castsi512_ps(_mm512_mask_mov_epi32(bits, over, _mm512_set1_epi32(0x7FC00000)));
}

// E8M0 bytes of a tile in the lane order of `unpack`, as exponent fields.
[[gnu::always_inline]] inline __m512i load_scales(const std::uint8_t *scales, __m128i order) {
  const __m128i bytes = _mm_shuffle_epi8(_mm_load_si128(reinterpret_cast<const __m128i *>(scales)), order);
  return _mm512_slli_epi32(_mm512_cvtepu8_epi32(bytes), 23);
}

template <std::size_t Count, bool Checked>
void group(const TileJob &job, std::size_t first) {
  const __m512i table = _mm512_load_si512(kUnsigned);
  const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const std::size_t per_segment = job.blocks / segments(job.blocks);
  const ActBlock *rows[Count];
  __m512 total[Count];
  for (std::size_t m = 0; m < Count; ++m) {
    rows[m] = job.rows[first + m];
    total[m] = _mm512_setzero_ps();
  }
  for (std::size_t begin = 0; begin < job.blocks; begin += per_segment) {
    __m512 sum[Count];
    for (std::size_t m = 0; m < Count; ++m) sum[m] = _mm512_setzero_ps();
    for (std::size_t b = begin; b < begin + per_segment; ++b) {
      const std::uint8_t *codes = job.codes + b * kTileCodes;
      for (std::size_t line = 0; line < kTileCodes; line += 64) {
        _mm_prefetch(reinterpret_cast<const char *>(codes + kPrefetch + line), _MM_HINT_T0);
      }
      __m512i u[8];
      unpack(codes, table, u);
      const __m512i scales = load_scales(job.scales + b * kTileRows, order);
      for (std::size_t m = 0; m < Count; ++m) {
        const ActBlock &act = rows[m][b];
        __m512i d = _mm512_set1_epi32(act.correction);
        for (int j = 0; j < 8; ++j) d = _mm512_dpbusd_epi32(d, u[j], word(act.q + 4 * j));
        // d * 2^c is a float32, so fusing the product with the addition changes no bit.
        sum[m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(d), power<Checked>(scales, act.exponent), sum[m]);
      }
    }
    for (std::size_t m = 0; m < Count; ++m) total[m] = _mm512_add_ps(total[m], sum[m]);
  }
  const __m512i rows_in_order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  for (std::size_t m = 0; m < Count; ++m) {
    _mm512_storeu_ps(job.out + (first + m) * job.stride, _mm512_permutexvar_ps(rows_in_order, total[m]));
  }
}

// Whether no block of the tile can leave the exponents that need no check.
bool needs_check(const TileJob &job) {
  __m128i least = _mm_set1_epi8(-1);
  __m128i most = _mm_setzero_si128();
  for (std::size_t b = 0; b < job.blocks; ++b) {
    const __m128i scales = _mm_load_si128(reinterpret_cast<const __m128i *>(job.scales + b * kTileRows));
    least = _mm_min_epu8(least, scales);
    most = _mm_max_epu8(most, scales);
  }
  alignas(16) std::uint8_t low[16];
  alignas(16) std::uint8_t high[16];
  _mm_store_si128(reinterpret_cast<__m128i *>(low), least);
  _mm_store_si128(reinterpret_cast<__m128i *>(high), most);
  int s_lo = 255;
  int s_hi = 0;
  for (int i = 0; i < 16; ++i) {
    s_lo = low[i] < s_lo ? low[i] : s_lo;
    s_hi = high[i] > s_hi ? high[i] : s_hi;
  }
  return s_lo + job.range.lo - 128 < kMinShift || s_hi + job.range.hi - 128 > kMaxShift;
}

template <bool Checked>
void groups(const TileJob &job) {
  using Group = void (*)(const TileJob &, std::size_t);
  constexpr Group kGroups[kMaxGroup] = {group<1, Checked>, group<2, Checked>, group<3, Checked>, group<4, Checked>,
                                        group<5, Checked>, group<6, Checked>, group<7, Checked>, group<8, Checked>};
  for (std::size_t first = 0; first < job.count;) {
    const std::size_t left = job.count - first;
    const std::size_t count = left < kMaxGroup ? left : kMaxGroup;
    kGroups[count - 1](job, first);
    first += count;
  }
}

void tile(const TileJob &job) {
  if (needs_check(job)) {
    groups<true>(job);
  } else {
    groups<false>(job);
  }
}

bool available() {
  return __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
         __builtin_cpu_supports("avx512vl") != 0 && __builtin_cpu_supports("avx512dq") != 0 &&
         __builtin_cpu_supports("avx512vbmi") != 0 && __builtin_cpu_supports("avx512vnni") != 0;
}

} // namespace

extern const Kernels kAvx512;
const Kernels kAvx512 = {"avx512", available, tile, activate, quantize_f32, quantize_bf16, accumulate, to_bf16};

} // namespace moetier
