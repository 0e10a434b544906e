// The numerics contract "int8x" (docs/design.md) as native code needs it: constants and the layout of quantized
// activations.
#pragma once

// A compiler that may change values gives other bits on one machine than on the next, and every kernel alike, so that
// no comparison of kernels shows it.
#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__) ||                               \
    defined(__ASSOCIATIVE_MATH__) || defined(__RECIPROCAL_MATH__) || defined(__NO_SIGNED_ZEROS__)
#error "expected exact arithmetic, found -ffast-math or a part of it; take it out of CXXFLAGS"
#endif
#if defined(__FLT_EVAL_METHOD__) && __FLT_EVAL_METHOD__ != 0
#error "expected float operations in float, found excess precision; build with -mfpmath=sse"
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace moetier {

inline constexpr std::size_t kBlock = 32;      // elements along K that share a scale
inline constexpr std::size_t kTileRows = 16;   // rows of a weight tile
inline constexpr std::size_t kTileCodes = 256; // bytes of codes of a tile: 16 rows of 16 bytes
inline constexpr std::size_t kStripRows = 32;  // rows of a strip, two row tiles: what a kernel call computes
inline constexpr std::size_t kMostRows = 64;   // rows of activations in one kernel call
inline constexpr int kBadRow = 127;            // exponent of a row with a NaN or an infinity
inline constexpr float kTiny = 0x1p-100F;      // F(x) = +0 below it
inline constexpr int kMinShift = -126;         // c below it: the block's value is +0
inline constexpr int kMaxShift = 111;          // c above it: the block's value is NaN

// One quantized block of 32 activations: value = q * 2^e.
// q holds the 16 even k first, then the 16 odd k: the order in which a byte's low and high nibbles meet them.
struct ActBlock {
  std::int8_t q[kBlock];
  std::int32_t correction; // -12 * sum(q): weights enter the dot product as w + 12, which is never negative
  std::int32_t exponent;   // (e - 1) * 2^23: added to an E8M0 byte << 23 it gives the bits of 2^(e + s - 128)
};
static_assert(sizeof(ActBlock) == 40);

// Least and largest e over the blocks of a row; hi = kBadRow marks a bad row.
struct ExponentRange {
  std::int8_t lo;
  std::int8_t hi;
};
inline void widen(ExponentRange &range, ExponentRange by) {
  range.lo = std::min(range.lo, by.lo);
  range.hi = std::max(range.hi, by.hi);
}

// S, the largest power of two <= 8 that divides the number of blocks.
constexpr std::size_t segments(std::size_t blocks) {
  std::size_t s = 8;
  while (blocks % s != 0) s /= 2;
  return s;
}

} // namespace moetier
