// Prefetching of records, written once for every instruction set's file.
#pragma once

#include "core/kernels.h"

namespace moetier {
namespace {

constexpr std::size_t kAhead = 32; // blocks (of 256 bytes) by which prefetching leads reading

// Into the second-level cache: the first level tracks too few misses to keep a core's share of the memory busy, and its
// own prefetcher brings the lines on from there.
[[gnu::always_inline]] inline void prefetch(const std::uint8_t *at) {
  __builtin_prefetch(at, 0, 2);
}

// Fetches codes kAhead blocks before block b of the strip is read, past its end those of the next.
[[gnu::always_inline]] inline void prefetch_codes(const StripJob &job, std::size_t b) {
  const std::size_t at = b + kAhead;
  const std::size_t blocks = 2 * job.blocks;
  const std::uint8_t *codes =
      at < blocks ? job.strip.codes + at * kTileCodes : job.next.codes + (at - blocks) * kTileCodes;
  for (std::size_t line = 0; line < kTileCodes; line += 64) prefetch(codes + line);
}

} // namespace
} // namespace moetier
