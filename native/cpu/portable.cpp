// Plain C++: the kernel set that every machine has, and the one that the others are compared with natively.

#include "cpu/elementwise.h"

namespace moetier {
namespace {

// Vectors of 16 bytes, which every 64-bit machine has; the compiler finds the instructions.
using Bytes [[gnu::vector_size(16)]] = std::int8_t;
using Words [[gnu::vector_size(16)]] = std::int16_t;
using HalfBytes [[gnu::vector_size(8)]] = std::int8_t;

// A tile's weights as integers: [32 k, even ones first][16 rows].
using Unpacked = Words[kBlock][2];

// 16 rows of 16 bytes become 16 columns: every round interleaves the first half of the vectors with the second.
inline void transpose(Bytes (&v)[16]) {
  for (int round = 0; round < 4; ++round) {
    Bytes next[16];
    for (int i = 0; i < 8; ++i) {
      next[2 * i] = __builtin_shufflevector(v[i], v[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      next[2 * i + 1] =
          __builtin_shufflevector(v[i], v[i + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    }
    std::memcpy(v, next, sizeof next);
  }
}

// w, twice the E2M1 value, of 16 codes. Comparisons give -1 where true.
inline void decode(Bytes codes, Words (&w)[2]) {
  const Bytes size = codes & 7;
  Bytes value = size - (size > 4) - (size > 5) - 3 * (size > 6); // 0 1 2 3 4 6 8 12
  const Bytes negative = (codes & 8) != 0;
  value = (value ^ negative) - negative;
  const HalfBytes low = __builtin_shufflevector(value, value, 0, 1, 2, 3, 4, 5, 6, 7);
  const HalfBytes high = __builtin_shufflevector(value, value, 8, 9, 10, 11, 12, 13, 14, 15);
  w[0] = __builtin_convertvector(low, Words);
  w[1] = __builtin_convertvector(high, Words);
}

void unpack(const std::uint8_t *codes, Unpacked &w) {
  Bytes columns[16];
  std::memcpy(columns, codes, sizeof columns);
  transpose(columns);
  for (std::size_t i = 0; i < kBlock / 2; ++i) {
    decode(columns[i] & 15, w[i]);
    decode((columns[i] >> 4) & 15, w[kBlock / 2 + i]);
  }
}

// Sum over 16 k for 16 rows. |sum| <= 16 * 127 * 12 = 24,384 fits 16 bits.
inline void dot_half(const Words (*w)[2], const std::int8_t *q, Words (&d)[2]) {
  for (std::size_t i = 0; i < kBlock / 2; ++i) {
    const std::int16_t factor = q[i];
    d[0] += w[i][0] * factor;
    d[1] += w[i][1] * factor;
  }
}

void add_block(const Unpacked &w, const std::uint8_t *scales, const ActBlock &act, float *sum) {
  Words halves[2][2] = {};
  dot_half(w, act.q, halves[0]);
  dot_half(w + kBlock / 2, act.q + kBlock / 2, halves[1]);
  std::int16_t d[2][kTileRows];
  std::memcpy(d, halves, sizeof d);
  const std::int32_t e = act.exponent >> 23;
  for (std::size_t r = 0; r < kTileRows; ++r) {
    const std::int32_t field = scales[r] + e; // c + 127, the exponent field of 2^c
    std::int32_t bits = static_cast<std::int32_t>(static_cast<std::uint32_t>(field) << 23);
    bits = field < kMinShift + 127 ? 0 : bits;
    bits = field > kMaxShift + 127 ? 0x7FC00000 : bits;
    sum[r] = sum[r] + static_cast<float>(d[0][r] + d[1][r]) * std::bit_cast<float>(bits);
  }
}

constexpr std::size_t kGroup = 16; // rows of activations per unpacking of a tile

// Rows first .. first + count - 1 of the job times one of its tiles.
void tile_group(const StripJob &job, std::size_t tile, std::size_t first, std::size_t count) {
  const std::uint8_t *codes = job.strip.codes + tile * job.blocks * kTileCodes;
  const std::uint8_t *scales = job.strip.scales + tile * job.blocks * kTileRows;
  const std::size_t per_segment = job.blocks / segments(job.blocks);
  float total[kGroup][kTileRows] = {};
  float sum[kGroup][kTileRows] = {};
  for (std::size_t b = 0; b < job.blocks; ++b) {
    Unpacked w;
    unpack(codes + b * kTileCodes, w);
    for (std::size_t m = 0; m < count; ++m) add_block(w, scales + b * kTileRows, job.rows[first + m][b], sum[m]);
    if ((b + 1) % per_segment != 0) continue;
    for (std::size_t m = 0; m < count; ++m) {
      for (std::size_t r = 0; r < kTileRows; ++r) {
        total[m][r] = total[m][r] + sum[m][r];
        sum[m][r] = 0.0F;
      }
    }
  }
  for (std::size_t m = 0; m < count; ++m) {
    std::memcpy(job.out + (first + m) * kStripRows + tile * kTileRows, total[m], sizeof total[m]);
  }
}

void strip(const StripJob &job) {
  for (std::size_t tile = 0; tile < 2; ++tile) {
    for (std::size_t m = 0; m < job.count; m += kGroup) {
      tile_group(job, tile, m, job.count - m < kGroup ? job.count - m : kGroup);
    }
  }
}

std::size_t multiply(std::size_t rounds) {
  Unpacked w;
  std::memset(w, 1, sizeof w);
  std::int8_t q[kBlock] = {1};
  for (std::size_t round = 0; round < rounds; ++round) {
    Words d[2] = {};
    dot_half(w, q, d);
    dot_half(w + kBlock / 2, q + kBlock / 2, d);
    asm volatile("" : "+m"(q) : "m"(d)); // every round counts
  }
  return 2 * kBlock * kTileRows;
}

bool available() {
  return true;
}

} // namespace

extern const Kernels kPortable;
const Kernels kPortable = {"portable", available, strip, activate, quantize_f32, quantize_bf16,
                           accumulate, to_bf16,   read,  multiply, kNever,       nullptr};

} // namespace moetier
