// The elementwise half of the contract, written once and compiled with each instruction set's flags.
//
// Everything here has internal linkage: a copy compiled for AVX-512 must never be the one that the portable code calls.
// The loops are branch-free so that the compiler vectorizes them; -ffp-contract=off keeps every operation apart.

#pragma once

#include <bit>
#include <cstring>

#include "core/kernels.h"
#include "cpu/reading.h"

namespace moetier {
namespace {

constexpr std::int32_t kAbsMask = 0x7FFFFFFF;
constexpr std::int32_t kInfinity = 0x7F800000;
constexpr float kRound = 0x1.8p23F; // x + kRound rounds |x| < 2^22 to an integer, to nearest even
constexpr std::int32_t kRoundBits = 0x4B400000;

inline float flush(float x) {
  return __builtin_fabsf(x) < kTiny ? 0.0F : x;
}

inline float power_of_two(std::int32_t exponent) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(exponent + 127) << 23);
}

inline void clear_row(std::size_t blocks, ActBlock *out) {
  for (std::size_t b = 0; b < blocks; ++b) {
    std::memset(&out[b], 0, sizeof(ActBlock));
    out[b].exponent = static_cast<std::int32_t>(0xFF800000U); // e = 0
  }
}

// Contract 2 for one block; its e, or kBadRow.
inline int quantize_block(const float *x, ActBlock *out) {
  float v[kBlock]; // even k, then odd k
  for (std::size_t i = 0; i < kBlock / 2; ++i) {
    v[i] = flush(x[2 * i]);
    v[kBlock / 2 + i] = flush(x[2 * i + 1]);
  }
  std::int32_t largest = 0; // bits of positive floats are in the floats' order
  for (std::size_t i = 0; i < kBlock; ++i) {
    const std::int32_t magnitude = std::bit_cast<std::int32_t>(v[i]) & kAbsMask;
    largest = magnitude > largest ? magnitude : largest;
  }
  if (largest >= kInfinity || largest == 0) {
    clear_row(1, out);
    return largest == 0 ? 0 : kBadRow;
  }
  // largest = 1.f * 2^(X - 127): 127 * 2^e covers it with e = X - 133, one more where 1.f exceeds 127/64
  const int e = (largest >> 23) - 133 + static_cast<int>((largest & 0x7FFFFF) > 0x7E0000);
  const float scale = power_of_two(-e);
  std::int32_t sum = 0;
  for (std::size_t i = 0; i < kBlock; ++i) {
    const std::int32_t q = std::bit_cast<std::int32_t>(v[i] * scale + kRound) - kRoundBits;
    out->q[i] = static_cast<std::int8_t>(q);
    sum += q;
  }
  out->correction = -12 * sum;
  out->exponent = static_cast<std::int32_t>(static_cast<std::uint32_t>(e - 1) << 23);
  return e;
}

template <typename Load>
inline ExponentRange quantize_row(Load load, std::size_t blocks, ActBlock *out) {
  int lo = kBadRow;
  int hi = -128;
  for (std::size_t b = 0; b < blocks; ++b) {
    float x[kBlock];
    load(b, x);
    const int e = quantize_block(x, &out[b]);
    lo = e < lo ? e : lo;
    hi = e > hi ? e : hi;
  }
  if (hi == kBadRow) clear_row(blocks, out);
  return {static_cast<std::int8_t>(lo), static_cast<std::int8_t>(hi)};
}

ExponentRange quantize_f32(const float *x, std::size_t blocks, ActBlock *out) {
  return quantize_row([x](std::size_t b, float *v) { std::memcpy(v, x + b * kBlock, kBlock * sizeof(float)); }, blocks,
                      out);
}

ExponentRange quantize_bf16(const std::uint16_t *x, std::size_t blocks, ActBlock *out) {
  return quantize_row(
      [x](std::size_t b, float *v) {
        std::uint16_t bits[kBlock];
        std::memcpy(bits, x + b * kBlock, sizeof bits);
        for (std::size_t i = 0; i < kBlock; ++i) v[i] = std::bit_cast<float>(static_cast<std::uint32_t>(bits[i]) << 16);
      },
      blocks, out);
}

// exp(t) for t in [-80, 0], contract 5.
inline float exp_negative(float t) {
  const float shifted = t * 1.44269504F + kRound;
  const float n = shifted - kRound;
  const float r = (t - n * 0.693359375F) - n * -2.12194440e-4F;
  float p = static_cast<float>(1.0 / 5040);
  p = p * r + static_cast<float>(1.0 / 720);
  p = p * r + static_cast<float>(1.0 / 120);
  p = p * r + static_cast<float>(1.0 / 24);
  p = p * r + static_cast<float>(1.0 / 6);
  p = p * r + 0.5F;
  p = p * r + 1.0F;
  p = p * r + 1.0F;
  return p * power_of_two(std::bit_cast<std::int32_t>(shifted) - kRoundBits);
}

int activate(const float *gate, const float *up, const Activation &how, float weight, ActBlock *out) {
  const float limit = how.clamp ? how.limit : __builtin_inff();
  const float factor = how.weighted ? weight : 1.0F; // times 1 changes nothing
  float h[kBlock];
  for (std::size_t i = 0; i < kBlock; ++i) {
    // Comparisons are false for NaN, so a NaN stays itself.
    float g = gate[i] > limit ? limit : gate[i];
    float u = up[i] > limit ? limit : up[i];
    u = u < -limit ? -limit : u;
    g = flush(g);
    const float size = __builtin_fabsf(g);
    const float e = exp_negative(-(size < 80.0F ? size : 80.0F));
    const float sigma = (g >= 0.0F ? 1.0F : e) / (1.0F + e);
    const float a = g < -80.0F ? 0.0F : flush(g * sigma);
    h[i] = flush(flush(a * u) * factor);
  }
  return quantize_block(h, out);
}

void accumulate(const float *y, float weight, float *acc) {
  for (std::size_t i = 0; i < kStripRows; ++i) acc[i] = acc[i] + flush(y[i] * weight);
}

void to_bf16(const float *acc, std::uint16_t *out) {
  for (std::size_t i = 0; i < kStripRows; ++i) {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(acc[i]);
    const std::uint32_t rounded = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
    out[i] = static_cast<std::uint16_t>((static_cast<std::int32_t>(bits) & kAbsMask) >= kInfinity ? 0x7FC0U : rounded);
  }
}

} // namespace
} // namespace moetier
