// Layer calls made at random, for compare.cpp.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>
#include <random>
#include <vector>

#include "core/experts.h"

namespace {

struct Free {
  void operator()(std::uint8_t *memory) const { std::free(memory); }
};
using Record = std::unique_ptr<std::uint8_t[], Free>;

std::size_t slice_bytes(const moetier::Shape &shape) {
  const std::size_t bytes = 3 * shape.hidden * shape.inner * 17 / 32;
  return (bytes + 63) / 64 * 64;
}

// A layer call made at random: shapes from one block up, scales and activations of any magnitude, odd ids.
struct Call {
  moetier::Shape shape{};
  moetier::Activation activation{};
  std::size_t tokens = 0;
  bool bf16 = false;
  std::vector<float> x;
  std::vector<std::uint16_t> x_bits;
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
  std::vector<Record> records;
  std::vector<std::uint64_t> addresses;

  moetier::StepInput input() const {
    return {bf16 ? nullptr : x.data(), bf16 ? x_bits.data() : nullptr, ids.data(), nullptr, weights.data(), tokens};
  }
};

// Makes the call of a number.
class Maker {
public:
  Maker(std::uint64_t number, bool few) : number_(number), few_(few), random_(number) {}

  std::size_t below(std::size_t bound) { return std::uniform_int_distribution<std::size_t>(0, bound - 1)(random_); }

  Call call() {
    Call call;
    const std::size_t slices = std::size_t{1} << below(3);
    const std::size_t count = std::size_t{1} << below(3);
    const std::size_t most = few_ ? kFewBlocks : kBlocks;
    const std::size_t hidden = 32 * (1 + number_ % most);
    const std::size_t inner = 32 * (1 + number_ / most % most);
    call.shape = {hidden, inner, 1 + below(6), 1 + below(4), 0, count, 1 + below(few_ ? 12 : 90)};
    if (!few_ && number_ % 10 == 9) call.shape = long_shape(count);
    if (!few_ && number_ % 100 == 99) call.shape = model_shape(count);
    call.shape.first_slice = below(slices);
    call.activation = {below(2) == 1, 0.5F, below(2) == 1};
    call.tokens = 1 + below(call.shape.max_tokens);
    call.bf16 = below(2) == 1;
    spread_ = kSpreads[below(std::size(kSpreads))];
    fill_records(call);
    fill_inputs(call);
    return call;
  }

private:
  static constexpr std::size_t kBlocks = 16;
  static constexpr std::size_t kFewBlocks = 4;
  struct Sizes {
    std::size_t hidden, intermediate;
  };
  static constexpr Sizes kModels[] = {{4096, 2048}, {5120, 2304}, {6144, 2048}, {7168, 2048}, {4096, 1536}};

  // Long rows of few tokens, which have kernels of their own.
  moetier::Shape long_shape(std::size_t slices) {
    return {32 * (120 + below(24)), 32 * (1 + below(3)), 1 + below(3), 1 + below(2), 0, slices, 1 + below(4)};
  }

  moetier::Shape model_shape(std::size_t slices) {
    const Sizes sizes = kModels[below(std::size(kModels))];
    return {sizes.hidden, sizes.intermediate / slices, 2, 1 + below(2), 0, slices, 1 + below(3)};
  }

  void fill_records(Call &call) {
    const std::size_t size = (call.shape.first_slice + call.shape.slices) * slice_bytes(call.shape);
    const Spread spread = spread_;
    for (std::size_t i = 0; i < call.shape.experts; ++i) {
      Record record(static_cast<std::uint8_t *>(std::aligned_alloc(64, size)));
      for (std::size_t at = 0; at < size; at += sizeof(std::uint64_t)) { // sizes are multiples of 64
        const std::uint64_t bits = random_();
        std::memcpy(record.get() + at, &bits, sizeof bits);
      }
      for (std::size_t slice = 0; slice < call.shape.first_slice + call.shape.slices; ++slice) {
        const std::size_t codes = 3 * call.shape.hidden * call.shape.inner / 2;
        std::uint8_t *scales = record.get() + slice * slice_bytes(call.shape) + codes;
        const std::size_t down = codes / 16 / 3 * 2; // the first of down's scales, which stay usual at the edges
        for (std::size_t at = 0; at < codes / 16; ++at) {
          const std::size_t few = at >= down && spread.edge ? 6 : spread.few;
          const std::size_t least = at >= down && spread.edge ? 118 : spread.least;
          scales[at] = static_cast<std::uint8_t>(least + below(few));
        }
      }
      call.addresses.push_back(reinterpret_cast<std::uint64_t>(record.get()));
      call.records.push_back(std::move(record));
    }
  }

  void fill_inputs(Call &call) {
    std::normal_distribution<float> normal;
    const int odd = below(4) == 0 ? static_cast<int>(below(200)) - 100 : 0;
    const int magnitude = spread_.edge ? spread_.magnitude - static_cast<int>(below(12)) : odd;
    for (std::size_t i = 0; i < call.tokens * call.shape.hidden; ++i) {
      call.x.push_back(std::ldexp(normal(random_), magnitude));
      std::uint32_t bits;
      std::memcpy(&bits, &call.x.back(), sizeof bits);
      call.x_bits.push_back(static_cast<std::uint16_t>(bits >> 16));
    }
    if (below(4) == 0) {
      const std::size_t at = below(call.x.size());
      call.x[at] = __builtin_nanf("");
      call.x_bits[at] = 0x7F80;
    }
    for (std::size_t i = 0; i < call.tokens * call.shape.top_k; ++i) {
      call.ids.push_back(static_cast<std::int32_t>(below(call.shape.experts + 2)) - 1);
      call.weights.push_back(normal(random_));
    }
  }

  // E8M0 bytes from `least` on; at an edge those of gate and up alone, with x about 2^magnitude at most.
  struct Spread {
    std::size_t least;
    std::size_t few;
    bool edge;
    int magnitude;
  };
  static constexpr Spread kSpreads[] = {{0, 255, false, 0}, {118, 40, false, 0}, {118, 6, false, 0},
                                        {0, 4, true, 125},  {250, 5, true, -95}, {60, 6, true, 126}};

  std::uint64_t number_;
  bool few_;
  std::mt19937_64 random_;
  Spread spread_{};
};

} // namespace
