#include "core/experts.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace moetier {
namespace {

constexpr std::size_t kPiece = 64; // pairs of one expert that a task takes through its tiles at a time
constexpr std::size_t kRecordAlignment = 64;

ExponentRange widest() {
  return {kBadRow, -128};
}

void widen(ExponentRange &range, ExponentRange by) {
  range.lo = std::min(range.lo, by.lo);
  range.hi = std::max(range.hi, by.hi);
}

template <typename Better>
void improve(std::atomic<std::int8_t> &value, std::int8_t candidate, Better better) {
  std::int8_t seen = value.load(std::memory_order_relaxed);
  while (better(candidate, seen) && !value.compare_exchange_weak(seen, candidate, std::memory_order_relaxed)) {
  }
}

bool aligned(std::uint64_t address) {
  return address != 0 && address % kRecordAlignment == 0;
}

std::size_t padded(std::size_t size, std::size_t to) {
  return (size + to - 1) / to * to;
}

} // namespace

Experts::Experts(const Shape &shape, const Activation &activation, ThreadPool &pool, const Kernels &kernels)
    : shape_(shape), activation_(activation), pool_(pool), kernels_(kernels), x_blocks_(shape.hidden / kBlock),
      h_blocks_(shape.inner / kBlock), scratch_(static_cast<std::size_t>(pool.threads())) {
  const std::size_t codes = shape.hidden * shape.inner / 2;
  const std::size_t scales = shape.hidden * shape.inner / kBlock;
  up_codes_ = codes;
  down_codes_ = 2 * codes;
  gate_scales_ = 3 * codes;
  up_scales_ = gate_scales_ + scales;
  down_scales_ = up_scales_ + scales;
  slice_bytes_ = padded(down_scales_ + scales, kRecordAlignment);

  const std::size_t pairs = shape.max_tokens * shape.top_k;
  const auto take = [&] {
    x_ = arena_.take<ActBlock>(shape.max_tokens * x_blocks_);
    x_range_ = arena_.take<ExponentRange>(shape.max_tokens);
    h_ = arena_.take<ActBlock>(pairs * shape.slices * h_blocks_);
    h_lo_ = arena_.take<std::atomic<std::int8_t>>(pairs * shape.slices);
    h_hi_ = arena_.take<std::atomic<std::int8_t>>(pairs * shape.slices);
    acc_ = arena_.take<float>(shape.max_tokens * shape.hidden);
    pair_token_ = arena_.take<std::int32_t>(pairs);
    pair_weight_ = arena_.take<float>(pairs);
    ids_ = arena_.take<std::int32_t>(shape.experts);
    counts_ = arena_.take<std::int32_t>(shape.experts);
    begins_ = arena_.take<std::int32_t>(shape.experts);
    stages_ = arena_.take<Stage>(shape.experts);
    routed_address_ = arena_.take<std::uint64_t>(shape.experts);
    left_ = arena_.take<std::atomic<std::int32_t>>(shape.experts);
    cursor_ = arena_.take<std::int32_t>(shape.experts);
    for (Scratch &scratch : scratch_) {
      scratch.gate = arena_.take<float>(kPiece * kBlock);
      scratch.up = arena_.take<float>(kPiece * kBlock);
      scratch.y = arena_.take<float>(shape.slices * kPiece * kTileRows);
      scratch.rows = arena_.take<const ActBlock *>(kPiece);
    }
  };
  take();
  arena_.allocate();
  take();
  absent_.reserve(shape.experts);
}

// Groups the step's pairs by expert; within an expert they stay in the order of tokens, then of the router.
template <typename Id>
void Experts::route(const Id *ids, const float *weights, std::size_t tokens) {
  std::fill_n(cursor_, shape_.experts, 0);
  const std::size_t pairs = tokens * shape_.top_k;
  const auto routed = [this](Id id) { return id >= 0 && static_cast<std::uint64_t>(id) < shape_.experts; };
  for (std::size_t p = 0; p < pairs; ++p) {
    if (routed(ids[p])) ++cursor_[ids[p]];
  }
  listed_ = 0;
  std::int32_t begin = 0;
  for (std::size_t expert = 0; expert < shape_.experts; ++expert) {
    const std::int32_t count = cursor_[expert];
    if (count == 0) continue;
    ids_[listed_] = static_cast<std::int32_t>(expert);
    counts_[listed_] = count;
    begins_[listed_] = begin;
    stages_[listed_] = Stage::listed;
    left_[listed_].store(static_cast<std::int32_t>(shape_.slices * inner_blocks()), std::memory_order_relaxed);
    cursor_[expert] = begin;
    begin += count;
    ++listed_;
  }
  for (std::size_t p = 0; p < pairs; ++p) {
    if (!routed(ids[p])) continue;
    const std::int32_t at = cursor_[ids[p]]++;
    pair_token_[at] = static_cast<std::int32_t>(p / shape_.top_k);
    pair_weight_[at] = weights[p];
  }
  for (std::size_t i = 0; i < static_cast<std::size_t>(begin) * shape_.slices; ++i) {
    h_lo_[i].store(widest().lo, std::memory_order_relaxed);
    h_hi_[i].store(widest().hi, std::memory_order_relaxed);
  }
}

void Experts::route(const StepInput &input) {
  open_ = false;
  tokens_ = input.tokens;
  next_down_ = 0;
  bad_rows_ = 0;
  if (input.ids32 != nullptr) {
    route(input.ids32, input.weights, input.tokens);
  } else {
    route(input.ids64, input.weights, input.tokens);
  }
}

void Experts::quantize_row(const StepInput &input, std::size_t token) {
  ActBlock *out = x_ + token * x_blocks_;
  const std::size_t start = token * shape_.hidden;
  x_range_[token] = input.x_bf16 != nullptr ? kernels_.quantize_bf16(input.x_bf16 + start, x_blocks_, out)
                                            : kernels_.quantize_f32(input.x_f32 + start, x_blocks_, out);
}

// 32 rows of gate and of up, hence one block of h, for every pair of an expert.
void Experts::gate_up_task(std::size_t index, std::uint64_t address, std::size_t slice, std::size_t block,
                           Scratch &scratch) {
  const auto *base = reinterpret_cast<const std::uint8_t *>(address) + (shape_.first_slice + slice) * slice_bytes_;
  const std::size_t begin = static_cast<std::size_t>(begins_[index]);
  const std::size_t end = begin + static_cast<std::size_t>(counts_[index]);
  for (std::size_t first = begin; first < end; first += kPiece) {
    const std::size_t count = std::min(kPiece, end - first);
    ExponentRange range = widest();
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t token = token_of(first + i);
      scratch.rows[i] = x_ + token * x_blocks_;
      if (x_range_[token].hi != kBadRow) widen(range, x_range_[token]);
    }
    if (range.lo == kBadRow) range = {0, 0}; // bad rows only: zeros
    for (std::size_t half = 0; half < 2; ++half) {
      const std::size_t tile = 2 * block + half;
      const std::size_t codes = tile * x_blocks_ * kTileCodes;
      const std::size_t scales = tile * x_blocks_ * kTileRows;
      kernels_.tile({base + codes, base + gate_scales_ + scales, x_blocks_, scratch.rows, count, range,
                     scratch.gate + half * kTileRows, kBlock});
      kernels_.tile({base + up_codes_ + codes, base + up_scales_ + scales, x_blocks_, scratch.rows, count, range,
                     scratch.up + half * kTileRows, kBlock});
    }
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t pair = first + i;
      const std::size_t at = pair * shape_.slices + slice;
      ActBlock *out = h_row(pair, slice) + block;
      const int raw =
          kernels_.activate(scratch.gate + i * kBlock, scratch.up + i * kBlock, activation_, pair_weight_[pair], out);
      const bool bad = x_range_[token_of(pair)].hi == kBadRow;
      const auto e = static_cast<std::int8_t>(bad ? kBadRow : raw);
      improve(h_lo_[at], e, std::less<>());
      improve(h_hi_[at], e, std::greater<>());
    }
  }
}

// 16 rows of the down projection for every pair of an expert, added to the tokens' sums.
void Experts::down_task(std::size_t index, std::uint64_t address, std::size_t tile, Scratch &scratch) {
  const std::size_t begin = static_cast<std::size_t>(begins_[index]);
  const std::size_t end = begin + static_cast<std::size_t>(counts_[index]);
  for (std::size_t first = begin; first < end; first += kPiece) {
    const std::size_t count = std::min(kPiece, end - first);
    for (std::size_t slice = 0; slice < shape_.slices; ++slice) {
      float *y = scratch.y + slice * kPiece * kTileRows;
      ExponentRange range = widest();
      bool any_bad = false;
      for (std::size_t i = 0; i < count; ++i) {
        const std::size_t at = (first + i) * shape_.slices + slice;
        const ExponentRange row = {h_lo_[at].load(std::memory_order_relaxed),
                                   h_hi_[at].load(std::memory_order_relaxed)};
        scratch.rows[i] = h_row(first + i, slice);
        if (row.hi == kBadRow) {
          any_bad = true;
        } else {
          widen(range, row);
        }
      }
      if (range.lo == kBadRow) range = {0, 0};
      const auto *base = reinterpret_cast<const std::uint8_t *>(address) + (shape_.first_slice + slice) * slice_bytes_;
      kernels_.tile({base + down_codes_ + tile * h_blocks_ * kTileCodes,
                     base + down_scales_ + tile * h_blocks_ * kTileRows, h_blocks_, scratch.rows, count, range, y,
                     kTileRows});
      for (std::size_t i = 0; any_bad && i < count; ++i) {
        const std::size_t at = (first + i) * shape_.slices + slice;
        if (h_hi_[at].load(std::memory_order_relaxed) != kBadRow) continue;
        std::fill_n(y + i * kTileRows, kTileRows, std::numeric_limits<float>::quiet_NaN());
      }
    }
    for (std::size_t parts = shape_.slices; parts > 1; parts /= 2) {
      for (std::size_t part = 0; part < parts / 2; ++part) {
        float *to = scratch.y + part * kPiece * kTileRows;
        const float *left = scratch.y + 2 * part * kPiece * kTileRows;
        const float *right = left + kPiece * kTileRows;
        for (std::size_t i = 0; i < count * kTileRows; ++i) to[i] = left[i] + right[i];
      }
    }
    for (std::size_t i = 0; i < count; ++i) {
      const float weight = activation_.weighted ? 1.0F : pair_weight_[first + i];
      kernels_.accumulate(scratch.y + i * kTileRows, weight, acc(tile, token_of(first + i)));
    }
  }
}

void Experts::clear_tile(std::size_t tile) {
  std::memset(acc(tile, 0), 0, tokens_ * kTileRows * sizeof(float));
}

void Experts::write_tile(std::size_t tile, std::uint16_t *out) const {
  for (std::size_t token = 0; token < tokens_; ++token) {
    kernels_.to_bf16(acc(tile, token), out + token * shape_.hidden + tile * kTileRows);
  }
}

void Experts::begin(const StepInput &input) {
  route(input);
  std::atomic<std::size_t> next_row{0};
  std::atomic<std::size_t> next_tile{0};
  pool_.run([&](int) {
    for (std::size_t row; (row = next_row.fetch_add(1, std::memory_order_relaxed)) < tokens_;) quantize_row(input, row);
    for (std::size_t tile; (tile = next_tile.fetch_add(1, std::memory_order_relaxed)) < hidden_tiles();)
      clear_tile(tile);
  });
  count_bad_rows();
  open_ = true;
}

void Experts::count_bad_rows() {
  bad_rows_ = static_cast<std::size_t>(
      std::count_if(x_range_, x_range_ + tokens_, [](ExponentRange range) { return range.hi == kBadRow; }));
}

StepError Experts::gate_up(std::span<const std::int32_t> indices, std::span<const std::uint64_t> addresses) {
  if (!open_) return StepError::no_step;
  for (std::size_t i = 0; i < indices.size(); ++i) {
    StepError error = StepError::none;
    const auto index = static_cast<std::size_t>(indices[i]);
    if (indices[i] < 0 || index >= listed_) {
      error = StepError::bad_index;
    } else if (!aligned(addresses[i])) {
      error = StepError::bad_address;
    } else if (stages_[index] != Stage::listed) {
      error = StepError::gate_up_twice;
    }
    if (error != StepError::none) {
      for (std::size_t k = 0; k < i; ++k) stages_[indices[k]] = Stage::listed; // nothing was run
      return error;
    }
    stages_[index] = Stage::gated;
  }
  const std::size_t per_expert = shape_.slices * inner_blocks();
  const std::size_t tasks = indices.size() * per_expert;
  std::atomic<std::size_t> next{0};
  pool_.run([&](int thread) {
    for (std::size_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
      const std::size_t i = task / per_expert;
      const std::size_t part = task % per_expert;
      gate_up_task(static_cast<std::size_t>(indices[i]), addresses[i], part / inner_blocks(), part % inner_blocks(),
                   scratch_[static_cast<std::size_t>(thread)]);
    }
  });
  return StepError::none;
}

StepError Experts::down(std::size_t first, std::span<const std::uint64_t> addresses) {
  if (!open_) return StepError::no_step;
  if (first > listed_ || addresses.size() > listed_ - first) return StepError::bad_index;
  if (first != next_down_) return StepError::down_order;
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    if (stages_[first + i] != Stage::gated) return StepError::gate_up_absent;
    if (!aligned(addresses[i])) return StepError::bad_address;
  }
  std::atomic<std::size_t> next{0};
  pool_.run([&](int thread) {
    for (std::size_t tile; (tile = next.fetch_add(1, std::memory_order_relaxed)) < hidden_tiles();) {
      for (std::size_t i = 0; i < addresses.size(); ++i) {
        down_task(first + i, addresses[i], tile, scratch_[static_cast<std::size_t>(thread)]);
      }
    }
  });
  std::fill_n(stages_ + first, addresses.size(), Stage::done);
  next_down_ = first + addresses.size();
  return StepError::none;
}

StepError Experts::finish(std::uint16_t *out) {
  if (!open_) return StepError::no_step;
  if (next_down_ != listed_) return StepError::unfinished;
  open_ = false;
  std::atomic<std::size_t> next{0};
  pool_.run([&](int) {
    for (std::size_t tile; (tile = next.fetch_add(1, std::memory_order_relaxed)) < hidden_tiles();)
      write_tile(tile, out);
  });
  return StepError::none;
}

StepError Experts::forward(const StepInput &input, std::span<const std::uint64_t> addresses, std::uint16_t *out) {
  route(input);
  absent_.clear();
  for (std::size_t i = 0; i < listed_; ++i) {
    const std::uint64_t address = addresses[static_cast<std::size_t>(ids_[i])];
    if (address == 0) absent_.push_back(static_cast<std::int32_t>(i));
    if (address != 0 && !aligned(address)) return StepError::bad_address;
    routed_address_[i] = address;
  }
  if (!absent_.empty()) return StepError::none;

  const std::size_t per_expert = shape_.slices * inner_blocks();
  const std::size_t tasks = listed_ * per_expert;
  alignas(64) std::atomic<std::size_t> next_row{0};
  alignas(64) std::atomic<std::size_t> rows_done{0};
  alignas(64) std::atomic<std::size_t> next_task{0};
  alignas(64) std::atomic<std::size_t> next_tile{0};
  // No barrier between gate/up and down: a thread that finds no gate/up task left starts a tile of down, and waits only
  // for the experts whose last gate/up tasks are still being worked on.
  pool_.run([&](int thread) {
    Scratch &scratch = scratch_[static_cast<std::size_t>(thread)];
    for (std::size_t row; (row = next_row.fetch_add(1, std::memory_order_relaxed)) < tokens_;) {
      quantize_row(input, row);
      rows_done.fetch_add(1, std::memory_order_release);
    }
    spin_until([&] { return rows_done.load(std::memory_order_acquire) == tokens_; });
    for (std::size_t task; (task = next_task.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
      const std::size_t index = task / per_expert;
      const std::size_t part = task % per_expert;
      gate_up_task(index, routed_address_[index], part / inner_blocks(), part % inner_blocks(), scratch);
      left_[index].fetch_sub(1, std::memory_order_release);
    }
    for (std::size_t tile; (tile = next_tile.fetch_add(1, std::memory_order_relaxed)) < hidden_tiles();) {
      clear_tile(tile);
      for (std::size_t index = 0; index < listed_; ++index) {
        spin_until([&] { return left_[index].load(std::memory_order_acquire) == 0; });
        down_task(index, routed_address_[index], tile, scratch);
      }
      write_tile(tile, out);
    }
  });
  count_bad_rows();
  return StepError::none;
}

} // namespace moetier
