// One allocation, cut into aligned arrays, touched when it is made.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moetier {

class Arena {
public:
  Arena() = default;
  ~Arena();
  Arena(const Arena &) = delete;
  Arena &operator=(const Arena &) = delete;

  // First pass: sizes are added up. Second pass, after allocate(): arrays are handed out in the same order.
  template <typename T>
  T *take(std::size_t count) {
    std::uint8_t *at = base_ == nullptr ? nullptr : base_ + used_;
    used_ += (count * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return reinterpret_cast<T *>(at);
  }
  // Maps and zeroes what was added up; throws std::bad_alloc where the machine has no memory for it.
  void allocate();
  std::size_t size() const { return size_; }

private:
  static constexpr std::size_t kAlignment = 64;
  std::uint8_t *base_ = nullptr;
  std::size_t used_ = 0;
  std::size_t size_ = 0;
};

} // namespace moetier
