// Ways to read memory as fast as it goes, written once and compiled with each instruction set's flags.
//
// Registers are named by their width: of wider vectors, and of a loop over words, the compiler made detours by the
// stack and shuffles for AVX2, at a third of what the memory gave. How many streams a processor wants, and whether it
// wants to be asked for lines ahead, is its own: the machine is tried (read_ways in measure.py).
#pragma once

#include <array>
#include <cstring>

#include "core/kernels.h"

namespace moetier {
namespace {

#if defined(__AVX512F__)
constexpr std::size_t kWidth = 64;
#elif defined(__AVX__)
constexpr std::size_t kWidth = 32;
#else
constexpr std::size_t kWidth = 16;
#endif
using ReadWords [[gnu::vector_size(kWidth)]] = std::uint64_t;
constexpr std::size_t kSums = 4; // enough that no addition waits for the one before it

// One line at a time of each of Streams equal parts; Ahead: bytes by which lines are asked for before they are needed,
// 0: not at all.
template <std::size_t Streams, std::size_t Ahead>
std::uint64_t read_lines(const std::uint8_t *data, std::size_t bytes) {
  const std::size_t part = bytes / (Streams * 64) * 64;
  ReadWords sums[kSums] = {};
  auto add_line = [&](const std::uint8_t *line) {
    for (std::size_t i = 0; i < 64 / kWidth; ++i) {
      ReadWords words;
      std::memcpy(&words, line + i * kWidth, kWidth);
      sums[i % kSums] += words;
    }
  };
  for (std::size_t at = 0; at < part; at += 64) {
#pragma GCC unroll 16
    for (std::size_t stream = 0; stream < Streams; ++stream) {
      const std::uint8_t *line = data + stream * part + at;
      if constexpr (Ahead != 0) __builtin_prefetch(line + Ahead, 0, 3);
      add_line(line);
    }
  }
  for (std::size_t at = Streams * part; at < bytes; at += 64) add_line(data + at);
  std::uint64_t total = 0;
  for (const ReadWords &sum : sums)
    for (std::size_t i = 0; i < kWidth / 8; ++i) total += sum[i];
  return total;
}

constexpr std::array<Read, kReadWays> read = {read_lines<1, 0>, read_lines<1, 4096>, read_lines<8, 0>,
                                              read_lines<8, 1024>};

} // namespace
} // namespace moetier
