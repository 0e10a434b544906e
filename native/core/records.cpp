#include "core/records.h"

#include <cerrno>
#include <unistd.h>

#include "core/xxh3.h"

namespace moetier {

bool RecordFiles::read(std::size_t layer, std::size_t expert, std::uint8_t *out) const {
  const std::size_t offset = expert * stride + start;
  for (std::size_t done = 0; done < bytes;) {
    const ssize_t got = pread(files[layer], out + done, bytes - done, static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    done += static_cast<std::size_t>(got);
  }
  const std::uint64_t *expected = sums[layer] + expert * slices;
  for (std::size_t slice = first_slice; slice < slices; ++slice) {
    const std::size_t begin = (slice - first_slice) * slice_bytes;
    if (begin >= used) break;
    const std::size_t end = slice == slices - 1 ? used : begin + slice_bytes; // the record's padding goes with its last
    if (end > used || end - begin <= xxh3::kShort) return false;
    if (xxh3::hash(out + shift + begin, end - begin) != expected[slice]) return false;
  }
  return true;
}

} // namespace moetier
