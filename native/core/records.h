// Records of a store read from disk and checked without Python, by whoever cannot wait for its lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace moetier {

// What is read of each record (a rank's part, in whole pages) and how it is checked. The files stay open and the
// checksums stay where they are as long as this is used.
struct RecordFiles {
  std::vector<int> files;                  // one a layer
  std::vector<const std::uint64_t *> sums; // of each layer: xxh3_64 [experts][slices of a record]
  std::size_t stride;                      // from one record to the next
  std::size_t start, bytes;                // what is read: from this byte of the record on, so many
  std::size_t shift, used;                 // of what was read: where the part begins, and its bytes
  std::size_t slices, first_slice;         // of a record; the part's first one
  std::size_t slice_bytes;

  // Reads a record into `out`, of `bytes` bytes, page-aligned. False where it cannot be read or a checksum is wrong.
  bool read(std::size_t layer, std::size_t expert, std::uint8_t *out) const;
};

} // namespace moetier
