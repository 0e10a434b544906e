#include "core/arena.h"

#include <cstring>
#include <new>

#include <sys/mman.h>

namespace moetier {

void Arena::allocate() {
  size_ = used_;
  used_ = 0;
  void *memory = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  (void)madvise(memory, size_, MADV_HUGEPAGE); // fewer TLB misses where the kernel grants it
  std::memset(memory, 0, size_);
  base_ = static_cast<std::uint8_t *>(memory);
}

Arena::~Arena() {
  if (base_ != nullptr) munmap(base_, size_);
}

} // namespace moetier
