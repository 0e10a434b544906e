// The 512-bit kernel of one row of activations and a long strip, for processors whose own prefetcher is the faster one
// (`best_prefetch`): as fast as plain reading.
//
// Only where a run of memory is long, only if instructions leave that prefetcher alone, and only if the arithmetic
// keeps up: weights are not transposed, and scales are checked per segment.
#pragma once

#include <type_traits>

#include "cpu/zmm_blocks.h"

namespace moetier {
namespace {

constexpr std::size_t kLongStrip = 128; // blocks of a tile from which on a strip is such a run

// One tile's codes as eight registers of u without a transposition: rows 4i..4i+3 in u[i] (even k) and u[4 + i] (odd
// k).
template <typename Lookup>
[[gnu::always_inline]] inline void unpack_rows(const std::uint8_t *codes, __m512i *u) {
  for (int i = 0; i < 4; ++i) {
    const __m512i bytes = _mm512_load_si512(codes + 64 * i);
    u[i] = Lookup::low_nibbles(bytes);
    u[4 + i] = Lookup::low_nibbles(_mm512_srli_epi16(bytes, 4));
  }
}

// d of the 16 rows of `unpack_rows`, in the lane order of `unpack`. Four lanes share a row; each sums 8 products, at
// most 24 * 127 * 8 < 2^15, so pairs of registers fit into one of 16-bit lanes on the way.
[[gnu::always_inline]] inline __m512i dot_rows(const __m512i *u, const ActBlock &act) {
  const auto four_times = [](const std::int8_t *q) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i *>(q)));
  };
  const __m512i even = four_times(act.q);
  const __m512i odd = four_times(act.q + kBlock / 2);
  __m512i d[4];
  for (int i = 0; i < 4; ++i) {
    d[i] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(_mm512_setzero_si512(), u[i], even), u[4 + i], odd);
  }
  const __m512i ones = _mm512_set1_epi16(1);
  const __m512 halves01 = _mm512_castsi512_ps(_mm512_madd_epi16(_mm512_packs_epi32(d[0], d[1]), ones));
  const __m512 halves23 = _mm512_castsi512_ps(_mm512_madd_epi16(_mm512_packs_epi32(d[2], d[3]), ones));
  const __m512i sums = _mm512_add_epi32(_mm512_castps_si512(_mm512_shuffle_ps(halves01, halves23, 0x88)),
                                        _mm512_castps_si512(_mm512_shuffle_ps(halves01, halves23, 0xDD)));
  return _mm512_add_epi32(sums, _mm512_set1_epi32(act.correction));
}

// The E8M0 bytes s of a strip with which every c = e + s - 128 keeps its bounds. Never empty, for e is in -106..122.
class ScaleBounds {
public:
  explicit ScaleBounds(ExponentRange range) {
    const int least = kMinShift + 128 - range.lo > 0 ? kMinShift + 128 - range.lo : 0;
    const int most = kMaxShift + 128 - range.hi < 255 ? kMaxShift + 128 - range.hi : 255;
    least_ = _mm512_set1_epi8(static_cast<char>(least));
    width_ = _mm512_set1_epi8(static_cast<char>(most - least));
  }

  [[gnu::always_inline]] bool hold(const std::uint8_t *scales, std::size_t count) const {
    __mmask64 outside = 0;
    for (std::size_t at = 0; at < count; at += 64) {
      const __mmask64 in = count - at >= 64 ? ~__mmask64{0} : (__mmask64{1} << (count - at)) - 1;
      const __m512i above = _mm512_sub_epi8(_mm512_maskz_loadu_epi8(in, scales + at), least_);
      outside |= _mm512_mask_cmpgt_epu8_mask(in, above, width_);
    }
    return outside == 0;
  }

private:
  __m512i least_;
  __m512i width_;
};

template <typename Lookup>
void one_row(const StripJob &job) {
  const std::size_t per_segment = job.blocks / segments(job.blocks);
  const ActBlock *row = job.rows[0];
  const ScaleBounds bounds(job.range);
  for (std::size_t tile = 0; tile < 2; ++tile) {
    const std::uint8_t *codes = job.strip.codes + tile * job.blocks * kTileCodes;
    const std::uint8_t *scales = job.strip.scales + tile * job.blocks * kTileRows;
    __m512 total = _mm512_setzero_ps();
    for (std::size_t begin = 0; begin < job.blocks; begin += per_segment) {
      __m512 sum = _mm512_setzero_ps();
      const auto segment = [&](auto checked) {
        for (std::size_t b = begin; b < begin + per_segment; ++b) {
          __m512i u[8];
          unpack_rows<Lookup>(codes + b * kTileCodes, u);
          sum = add_block<decltype(checked)::value>(sum, dot_rows(u, row[b]), load_scales(scales + b * kTileRows),
                                                    _mm512_set1_epi32(row[b].exponent));
        }
      };
      if (bounds.hold(scales + begin * kTileRows, per_segment * kTileRows)) {
        segment(std::false_type());
      } else {
        segment(std::true_type());
      }
      total = _mm512_add_ps(total, sum);
    }
    _mm512_store_ps(job.out + tile * kTileRows, in_row_order(total));
  }
}

} // namespace
} // namespace moetier
