// AMX tile instructions in software, so that the AMX kernels can be tested where the processor has none. As the Intel
// SDM describes them for palette 1; a tile row is 64 bytes.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace moetier::emulation {

struct Tile {
  std::uint8_t bytes[16][64];
};

struct Registers {
  Tile tile[8];
  std::uint16_t row_bytes[8];
  std::uint8_t rows[8];
};

inline Registers &registers() {
  thread_local Registers state;
  return state;
}

inline void load_config(const void *config) {
  const auto *bytes = static_cast<const std::uint8_t *>(config);
  std::memset(&registers(), 0, sizeof(Registers));
  std::memcpy(registers().row_bytes, bytes + 16, sizeof registers().row_bytes);
  std::memcpy(registers().rows, bytes + 48, sizeof registers().rows);
}

inline void load(int t, const void *base, long stride) {
  Registers &r = registers();
  std::memset(&r.tile[t], 0, sizeof(Tile));
  for (int row = 0; row < r.rows[t]; ++row) {
    std::memcpy(r.tile[t].bytes[row], static_cast<const std::uint8_t *>(base) + row * stride, r.row_bytes[t]);
  }
}

inline void store(int t, void *base, long stride) {
  const Registers &r = registers();
  for (int row = 0; row < r.rows[t]; ++row) {
    std::memcpy(static_cast<std::uint8_t *>(base) + row * stride, r.tile[t].bytes[row], r.row_bytes[t]);
  }
}

// Signed bytes: 4 products for each 32-bit sum; row k of b holds the four k of each column.
inline void dot_signed(int sums, int a, int b) {
  Registers &r = registers();
  for (int row = 0; row < r.rows[sums]; ++row) {
    for (int column = 0; column < r.row_bytes[sums] / 4; ++column) {
      std::int32_t sum;
      std::memcpy(&sum, r.tile[sums].bytes[row] + 4 * column, sizeof sum);
      for (int k = 0; k < r.row_bytes[a] / 4; ++k) {
        for (int i = 0; i < 4; ++i) {
          sum += static_cast<std::int8_t>(r.tile[a].bytes[row][4 * k + i]) *
                 static_cast<std::int8_t>(r.tile[b].bytes[k][4 * column + i]);
        }
      }
      std::memcpy(r.tile[sums].bytes[row] + 4 * column, &sum, sizeof sum);
    }
  }
}

// Float32 sums of bf16 products, subnormals taken as zero and flushed: 2 products for each sum at a time, the even and
// the odd added up apart over all k, then together, then to the sum that is there (Intel SDM, TDPBF16PS).
inline float widen_bf16(const std::uint8_t *bytes) {
  const std::uint32_t bits = static_cast<std::uint32_t>(bytes[0] | bytes[1] << 8) << 16;
  return (bits & 0x7F800000U) == 0 ? 0.0F : std::bit_cast<float>(bits);
}

inline float flush_subnormal(float x) {
  return (std::bit_cast<std::uint32_t>(x) & 0x7F800000U) == 0 ? 0.0F : x;
}

inline void dot_bf16(int sums, int a, int b) {
  Registers &r = registers();
  for (int row = 0; row < r.rows[sums]; ++row) {
    for (int column = 0; column < r.row_bytes[sums] / 4; ++column) {
      float part[2] = {};
      for (int k = 0; k < r.row_bytes[a] / 4; ++k) {
        for (int i = 0; i < 2; ++i) {
          const float x = widen_bf16(r.tile[a].bytes[row] + 4 * k + 2 * i);
          part[i] = flush_subnormal(std::fma(x, widen_bf16(r.tile[b].bytes[k] + 4 * column + 2 * i), part[i]));
        }
      }
      float sum;
      std::memcpy(&sum, r.tile[sums].bytes[row] + 4 * column, sizeof sum);
      sum = flush_subnormal(sum + flush_subnormal(part[0] + part[1]));
      std::memcpy(r.tile[sums].bytes[row] + 4 * column, &sum, sizeof sum);
    }
  }
}

} // namespace moetier::emulation

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbssd
#undef _tile_dpbf16ps
#define _tile_release() std::memset(&moetier::emulation::registers(), 0, sizeof(moetier::emulation::Registers))
#define _tile_loadd(t, base, stride) moetier::emulation::load(t, base, stride)
#define _tile_stored(t, base, stride) moetier::emulation::store(t, base, stride)
#define _tile_zero(t) std::memset(&moetier::emulation::registers().tile[t], 0, sizeof(moetier::emulation::Tile))
#define _tile_dpbssd(sums, a, b) moetier::emulation::dot_signed(sums, a, b)
#define _tile_dpbf16ps(sums, a, b) moetier::emulation::dot_bf16(sums, a, b)
