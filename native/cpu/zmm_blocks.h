// What the 512-bit kernels share: how codes are unpacked, scales applied and weights prefetched.
//
// Weights enter as u = w + 12, unsigned, for vpdpbusd multiplies unsigned by signed bytes. Four registers of codes
// (rows 4i..4i+3 in register i) are transposed as 4-byte words first, so that lane 4L+i of every word belongs to row
// 4i+L and a dot product needs no horizontal sum; the last step puts rows in order. After inclusion everything here has
// internal linkage.
#pragma once

#include <immintrin.h>

#include "cpu/elementwise.h"
#include "cpu/prefetch.h"

namespace moetier {
namespace {

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

} // namespace
} // namespace moetier
