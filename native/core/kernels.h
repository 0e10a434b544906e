// What a CPU instruction set must provide, and the one table of those that this build and this machine offer.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>

#include "core/contract.h"

namespace moetier {

// Where 32 rows of a weight matrix lie: two row tiles, the second right behind the first.
struct Strip {
  const std::uint8_t *codes;  // 2 * blocks * 256 bytes, 64-byte aligned
  const std::uint8_t *scales; // 2 * blocks * 16 bytes, 16-byte aligned
};

// Who fetches weights before they are read. No bit depends on it.
enum class Prefetch : std::uint8_t {
  by_instructions,
  by_processor, // by its own prefetcher, left alone wherever a run of memory is long enough for that to be faster
};

// 32 rows of a weight matrix times some quantized rows of activations.
struct StripJob {
  Strip strip;
  Strip next;                  // what this thread reads after it: worth prefetching, may be the strip itself
  std::size_t blocks;          // K / 32
  const ActBlock *const *rows; // count rows of `blocks` blocks
  std::size_t stride;          // blocks from each row to the next where all are equal, else 0
  const std::uint16_t *wide;   // the first of the same rows as `widen` made them, or null
  std::size_t wide_stride;     // values from each of those to the next
  std::size_t count;           // rows, 1 to kMostRows
  ExponentRange range;         // of all rows; never that of a bad row
  Prefetch prefetch;
  float *out; // [count][32], 64-byte aligned
};

// How gate and up become h.
struct Activation {
  bool clamp;
  float limit;
  bool weighted; // the route weight multiplies h
};

inline constexpr std::size_t kNever = ~std::size_t{0};

// Reads `bytes` (a multiple of 64) and gives their sum as words.
using Read = std::uint64_t (*)(const std::uint8_t *data, std::size_t bytes);
inline constexpr std::size_t kReadWays = 4;

// The kernels of one instruction set. All give the bits of the contract; none allocates, throws or keeps state.
struct Kernels {
  const char *name;
  bool (*available)();
  void (*strip)(const StripJob &job);
  // 32 gate and up values -> one quantized block of h; its e, or kBadRow where a value is not finite.
  int (*activate)(const float *gate, const float *up, const Activation &how, float weight, ActBlock *out);
  // A row of `blocks` * 32 activations. A bad row becomes zeros.
  ExponentRange (*quantize_f32)(const float *x, std::size_t blocks, ActBlock *out);
  ExponentRange (*quantize_bf16)(const std::uint16_t *x, std::size_t blocks, ActBlock *out);
  // acc[i] += F(y[i] * weight), i in 0..31.
  void (*accumulate)(const float *y, float weight, float *acc);
  // 32 float32 -> bf16 bits.
  void (*to_bf16)(const float *acc, std::uint16_t *out);
  // For measuring the machine: ways to read, of which the machine has a fastest.
  std::array<Read, kReadWays> read;
  // For measuring the machine: the tile's own multiply-adds without memory, `rounds` times; how many operations a round
  // is.
  std::size_t (*multiply)(std::size_t rounds);
  // From how many rows on `strip` gains by rows that lie at equal distances, made by `widen` where that is not null.
  std::size_t panel_from;
  // `blocks` blocks of a row as bf16 values q * 2^e, 32 a block, in the order in which `strip` wants them.
  void (*widen)(const ActBlock *row, std::size_t blocks, std::uint16_t *out);
};

// Values from one widened row to the next: a cache line more than they fill, or the rows of a tile would share few sets
// of the caches.
constexpr std::size_t wide_stride(std::size_t blocks) {
  return blocks * kBlock + 32;
}

// Every kernel set of this build, best first.
std::span<const Kernels *const> built_kernels();

// The kernel set of that name if this build has it and this machine can run it, else nullptr.
const Kernels *find_kernels(std::string_view name);

// What this processor is faster with.
Prefetch best_prefetch();

} // namespace moetier
