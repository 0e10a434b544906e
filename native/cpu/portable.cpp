// Plain C++: the kernel set that every machine has, and the one that the others are compared with natively.

#include "cpu/elementwise.h"

namespace moetier {
namespace {

// w of a code: twice its E2M1 value.
constexpr std::int16_t kIntegers[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// A tile's codes as integers, [32 k, even ones first][16 rows].
void unpack(const std::uint8_t *codes, std::int16_t (*w)[kTileRows]) {
  for (std::size_t r = 0; r < kTileRows; ++r) {
    for (std::size_t i = 0; i < kBlock / 2; ++i) {
      const std::uint8_t byte = codes[r * (kBlock / 2) + i];
      w[i][r] = kIntegers[byte & 15];
      w[kBlock / 2 + i][r] = kIntegers[byte >> 4];
    }
  }
}

// Sum over 16 k for 16 rows. |sum| <= 16 * 127 * 12 = 24,384 fits 16 bits.
void dot_half(const std::int16_t (*w)[kTileRows], const std::int8_t *q, std::int16_t *d) {
  for (std::size_t i = 0; i < kBlock / 2; ++i) {
    for (std::size_t r = 0; r < kTileRows; ++r) d[r] = static_cast<std::int16_t>(d[r] + w[i][r] * q[i]);
  }
}

void add_block(const std::int16_t (*w)[kTileRows], const std::uint8_t *scales, const ActBlock &act, float *sum) {
  std::int16_t even[kTileRows] = {};
  std::int16_t odd[kTileRows] = {};
  dot_half(w, act.q, even);
  dot_half(w + kBlock / 2, act.q + kBlock / 2, odd);
  const std::int32_t e = act.exponent >> 23;
  for (std::size_t r = 0; r < kTileRows; ++r) {
    const std::int32_t field = scales[r] + e; // c + 127, the exponent field of 2^c
    std::uint32_t bits = static_cast<std::uint32_t>(field) << 23;
    bits = field < kMinShift + 127 ? 0 : bits;
    bits = field > kMaxShift + 127 ? 0x7FC00000U : bits;
    sum[r] = sum[r] + static_cast<float>(even[r] + odd[r]) * std::bit_cast<float>(bits);
  }
}

constexpr std::size_t kGroup = 16; // rows of activations per unpacking of a tile

void tile_group(const TileJob &job, std::size_t first, std::size_t count) {
  float total[kGroup][kTileRows] = {};
  float sum[kGroup][kTileRows] = {};
  const std::size_t per_segment = job.blocks / segments(job.blocks);
  for (std::size_t b = 0; b < job.blocks; ++b) {
    alignas(64) std::int16_t w[kBlock][kTileRows];
    unpack(job.codes + b * kTileCodes, w);
    for (std::size_t m = 0; m < count; ++m) {
      add_block(w, job.scales + b * kTileRows, job.rows[first + m][b], sum[m]);
    }
    if ((b + 1) % per_segment != 0) continue;
    for (std::size_t m = 0; m < count; ++m) {
      for (std::size_t r = 0; r < kTileRows; ++r) {
        total[m][r] = total[m][r] + sum[m][r];
        sum[m][r] = 0.0F;
      }
    }
  }
  for (std::size_t m = 0; m < count; ++m) std::memcpy(job.out + (first + m) * job.stride, total[m], sizeof total[m]);
}

void tile(const TileJob &job) {
  for (std::size_t m = 0; m < job.count; m += kGroup) {
    tile_group(job, m, job.count - m < kGroup ? job.count - m : kGroup);
  }
}

bool available() {
  return true;
}

} // namespace

extern const Kernels kPortable;
const Kernels kPortable = {"portable", available, tile, activate, quantize_f32, quantize_bf16, accumulate, to_bf16};

} // namespace moetier
