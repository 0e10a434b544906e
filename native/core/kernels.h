// What a CPU instruction set must provide, and the one table of those that this build and this machine offer.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "core/contract.h"

namespace moetier {

// 16 rows of a weight matrix times some quantized rows of activations.
struct TileJob {
  const std::uint8_t *codes;   // blocks * 256 bytes, 64-byte aligned
  const std::uint8_t *scales;  // blocks * 16 bytes, 16-byte aligned
  std::size_t blocks;          // K / 32
  const ActBlock *const *rows; // count rows of `blocks` blocks
  std::size_t count;           // rows, at least 1
  ExponentRange range;         // of all rows; never that of a bad row
  float *out;                  // out[row * stride + r], r in 0..15
  std::size_t stride;
};

// How gate and up become h.
struct Activation {
  bool clamp;
  float limit;
  bool weighted; // the route weight multiplies h
};

// The kernels of one instruction set. All give the bits of the contract; none allocates, throws or keeps state.
struct Kernels {
  const char *name;
  bool (*available)();
  void (*tile)(const TileJob &job);
  // 32 gate and up values -> one quantized block of h; its e, or kBadRow where a value is not finite.
  int (*activate)(const float *gate, const float *up, const Activation &how, float weight, ActBlock *out);
  // A row of `blocks` * 32 activations. A bad row becomes zeros.
  ExponentRange (*quantize_f32)(const float *x, std::size_t blocks, ActBlock *out);
  ExponentRange (*quantize_bf16)(const std::uint16_t *x, std::size_t blocks, ActBlock *out);
  // acc[i] += F(y[i] * weight), i in 0..15.
  void (*accumulate)(const float *y, float weight, float *acc);
  // 16 float32 -> bf16 bits.
  void (*to_bf16)(const float *acc, std::uint16_t *out);
};

// Every kernel set of this build, best first.
std::span<const Kernels *const> built_kernels();

// The kernel set of that name if this build has it and this machine can run it, else nullptr.
const Kernels *find_kernels(std::string_view name);

} // namespace moetier
