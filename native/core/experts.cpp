#include "core/experts.h"
#include "core/experts_work.h"

#include <algorithm>
#include <cstring>

namespace moetier {
namespace {

constexpr std::size_t kRecordAlignment = 64;

bool aligned(std::uint64_t address) {
  return address != 0 && address % kRecordAlignment == 0;
}

std::size_t padded(std::size_t size, std::size_t to) {
  return (size + to - 1) / to * to;
}

constexpr bool every_expert(std::size_t) {
  return true;
}

} // namespace

Experts::Experts(const Shape &shape, const Activation &activation, ThreadPool &pool, const Kernels &kernels,
                 Prefetch prefetch)
    : shape_(shape), activation_(activation), pool_(pool), kernels_(kernels), prefetch_(prefetch),
      x_blocks_(shape.hidden / kBlock), h_blocks_(shape.inner / kBlock),
      scratch_(static_cast<std::size_t>(pool.threads())) {
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
    piece_range_ = arena_.take<ExponentRange>(scratch_.size());
    pieces_left_ = arena_.take<std::atomic<std::int32_t>>(scratch_.size());
    h_ = arena_.take<ActBlock>(pairs * shape.slices * h_blocks_);
    wide_h_ = arena_.take<std::uint16_t>(kernels_.widen == nullptr ? 0 : pairs * wide_stride(shape.slices * h_blocks_));
    h_lo_ = arena_.take<std::atomic<std::int8_t>>(pairs * shape.slices);
    h_hi_ = arena_.take<std::atomic<std::int8_t>>(pairs * shape.slices);
    acc_ = arena_.take<float>(shape.max_tokens * shape.hidden);
    pair_token_ = arena_.take<std::int32_t>(pairs);
    pair_place_ = arena_.take<std::int32_t>(pairs);
    pair_weight_ = arena_.take<float>(pairs);
    ids_ = arena_.take<std::int32_t>(shape.experts);
    counts_ = arena_.take<std::int32_t>(shape.experts);
    begins_ = arena_.take<std::int32_t>(shape.experts);
    stages_ = arena_.take<Stage>(shape.experts);
    routed_address_ = arena_.take<std::uint64_t>(shape.experts);
    left_ = arena_.take<std::atomic<std::int32_t>>(shape.experts);
    cursor_ = arena_.take<std::int32_t>(shape.experts);
    for (Scratch &scratch : scratch_) {
      scratch.gate = arena_.take<float>(kMostRows * kStripRows);
      scratch.up = arena_.take<float>(kMostRows * kStripRows);
      scratch.y = arena_.take<float>(shape.slices * kMostRows * kStripRows);
      scratch.rows = arena_.take<const ActBlock *>(kMostRows);
      const bool panel = kernels_.panel_from != kNever && kernels_.widen == nullptr;
      scratch.panel = arena_.take<ActBlock>(panel ? kMostRows * x_blocks_ : 0);
      const bool wide = kernels_.widen != nullptr;
      scratch.wide_panel = arena_.take<std::uint16_t>(wide ? kMostRows * wide_stride(x_blocks_) : 0);
    }
  };
  take();
  arena_.allocate();
  take();
  absent_.reserve(shape.experts);
}

// Groups the step's pairs by expert; within an expert they stay in the order of tokens, then of the router. Experts
// that are not `held` are none of this step.
template <typename Id, typename Held>
void Experts::route(const Id *ids, const float *weights, std::size_t tokens, Held held) {
  std::fill_n(cursor_, shape_.experts, 0);
  const std::size_t pairs = tokens * shape_.top_k;
  const auto routed = [&](Id id) {
    return id >= 0 && static_cast<std::uint64_t>(id) < shape_.experts && held(static_cast<std::size_t>(id));
  };
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
    left_[listed_].store(static_cast<std::int32_t>(parts_per_expert()), std::memory_order_relaxed);
    cursor_[expert] = begin;
    begin += count;
    ++listed_;
  }
  for (std::size_t p = 0; p < pairs; ++p) {
    if (!routed(ids[p])) continue;
    const std::int32_t at = cursor_[ids[p]]++;
    pair_token_[at] = static_cast<std::int32_t>(p / shape_.top_k);
    pair_place_[at] = static_cast<std::int32_t>(p);
    pair_weight_[at] = weights[p];
  }
  for (std::size_t i = 0; i < static_cast<std::size_t>(begin) * shape_.slices; ++i) {
    h_lo_[i].store(kNoBlocks.lo, std::memory_order_relaxed);
    h_hi_[i].store(kNoBlocks.hi, std::memory_order_relaxed);
  }
}

template <typename Held>
void Experts::route(const StepInput &input, Held held) {
  ++step_;
  open_ = false;
  rows_ = nullptr;
  tokens_ = input.tokens;
  const auto threads = static_cast<std::size_t>(pool_.threads());
  pieces_ = std::clamp<std::size_t>(threads / std::max<std::size_t>(tokens_, 1), 1, x_blocks_);
  if (pieces_ > 1) std::fill_n(pieces_left_, tokens_, static_cast<std::int32_t>(pieces_));
  next_down_ = 0;
  bad_rows_ = 0;
  if (input.ids32 != nullptr) {
    route(input.ids32, input.weights, input.tokens, held);
  } else {
    route(input.ids64, input.weights, input.tokens, held);
  }
}

ExponentRange Experts::quantize(const StepInput &input, std::size_t token, Run blocks) {
  ActBlock *out = x_ + token * x_blocks_ + blocks.begin;
  const std::size_t start = token * shape_.hidden + blocks.begin * kBlock;
  const std::size_t count = blocks.end - blocks.begin;
  return input.x_bf16 != nullptr ? kernels_.quantize_bf16(input.x_bf16 + start, count, out)
                                 : kernels_.quantize_f32(input.x_f32 + start, count, out);
}

// A part of a token's row. Whoever does a row's last one sums up what was found.
void Experts::quantize_piece(const StepInput &input, std::size_t number) {
  const std::size_t token = number / pieces_;
  const std::size_t piece = number % pieces_;
  if (pieces_ == 1) {
    x_range_[token] = quantize(input, token, {0, x_blocks_});
    return;
  }
  piece_range_[number] = quantize(input, token, {piece * x_blocks_ / pieces_, (piece + 1) * x_blocks_ / pieces_});
  if (pieces_left_[token].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  ExponentRange range = kNoBlocks;
  for (std::size_t i = number - piece; i < number - piece + pieces_; ++i) widen(range, piece_range_[i]);
  // All of a bad row is cleared, not only a piece of it.
  x_range_[token] = range.hi == kBadRow ? quantize(input, token, {0, x_blocks_}) : range;
}

void Experts::count_bad_rows() {
  bad_rows_ = static_cast<std::size_t>(
      std::count_if(x_range_, x_range_ + tokens_, [](ExponentRange range) { return range.hi == kBadRow; }));
}

void Experts::begin(const StepInput &input) {
  route(input, every_expert);
  const std::size_t pieces = tokens_ * pieces_;
  std::atomic<std::size_t> next_piece{0};
  std::atomic<std::size_t> next_strip{0};
  pool_.run([&](int) {
    for (std::size_t piece; (piece = next_piece.fetch_add(1, std::memory_order_relaxed)) < pieces;) {
      quantize_piece(input, piece);
    }
    for (std::size_t strip; (strip = next_strip.fetch_add(1, std::memory_order_relaxed)) < hidden_strips();) {
      clear_strip(strip);
    }
  });
  count_bad_rows();
  open_ = true;
}

StepError Experts::mark_gated(std::span<const std::int32_t> indices, std::span<const std::uint64_t> addresses) {
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
  return StepError::none;
}

StepError Experts::gate_up(std::span<const std::int32_t> indices, std::span<const std::uint64_t> addresses) {
  if (!open_) return StepError::no_step;
  const StepError error = mark_gated(indices, addresses);
  if (error != StepError::none) return error;
  const auto part_of = [&](std::size_t number) {
    const std::size_t i = number / parts_per_expert();
    return gate_up_part(static_cast<std::size_t>(indices[i]), addresses[i], number % parts_per_expert());
  };
  const std::size_t parts = indices.size() * parts_per_expert();
  std::atomic<std::size_t> next{0};
  pool_.run([&](int thread) { gate_up_parts(next, parts, part_of, [](const Part &) {}, thread); });
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
  const Run experts = {first, first + addresses.size()};
  std::atomic<std::size_t> next{0};
  pool_.run([&](int thread) {
    for (Run strips; !(strips = take(next, hidden_strips(), kMostStrips)).empty();) {
      down_strips(
          strips, experts, [&](std::size_t index) { return addresses[index - first]; }, [](std::size_t) {}, thread);
    }
  });
  std::fill_n(stages_ + first, addresses.size(), Stage::done);
  next_down_ = experts.end;
  return StepError::none;
}

StepError Experts::finish(std::uint16_t *out) {
  if (!open_) return StepError::no_step;
  if (next_down_ != listed_) return StepError::unfinished;
  open_ = false;
  std::atomic<std::size_t> next{0};
  pool_.run([&](int) {
    for (std::size_t strip; (strip = next.fetch_add(1, std::memory_order_relaxed)) < hidden_strips();) {
      write_strip(strip, out);
    }
  });
  return StepError::none;
}

StepError Experts::look_up(std::span<const std::uint64_t> addresses) {
  absent_.clear();
  for (std::size_t i = 0; i < listed_; ++i) {
    const std::uint64_t address = addresses[static_cast<std::size_t>(ids_[i])];
    if (address == 0) absent_.push_back(static_cast<std::int32_t>(i));
    if (address != 0 && !aligned(address)) return StepError::bad_address;
    routed_address_[i] = address;
  }
  return StepError::none;
}

StepError Experts::forward(const StepInput &input, std::span<const std::uint64_t> addresses, std::uint16_t *out) {
  route(input, every_expert);
  const StepError error = look_up(addresses);
  if (error == StepError::none && absent_.empty()) whole_step(input, out);
  return error;
}

StepError Experts::rows(const StepInput &input, std::span<const std::uint64_t> addresses, float *rows) {
  route(input, [&](std::size_t expert) { return addresses[expert] != 0; });
  const StepError error = look_up(addresses);
  if (error != StepError::none) return error;
  rows_ = rows;
  whole_step(input, nullptr);
  return StepError::none;
}

// All of a step whose addresses were looked up; `out` is null where rows_ is not.
void Experts::whole_step(const StepInput &input, std::uint16_t *out) {
  const auto part_of = [&](std::size_t number) {
    const std::size_t index = number / parts_per_expert();
    return gate_up_part(index, routed_address_[index], number % parts_per_expert());
  };
  const auto part_done = [&](const Part &part) {
    left_[part.index].fetch_sub(static_cast<std::int32_t>(part.strips), std::memory_order_release);
  };
  const auto address_of = [&](std::size_t index) { return routed_address_[index]; };
  const auto await_h = [&](std::size_t index) {
    spin_until([&] { return left_[index].load(std::memory_order_acquire) == 0; });
  };
  const std::size_t pieces = tokens_ * pieces_;
  alignas(64) std::atomic<std::size_t> next_piece{0};
  alignas(64) std::atomic<std::size_t> pieces_done{0};
  alignas(64) std::atomic<std::size_t> next_part{0};
  alignas(64) std::atomic<std::size_t> next_strip{0};
  // No barrier between gate/up and down: a thread that finds no part of gate/up left starts with strips of down, and
  // waits only for the experts whose last parts are still being worked on.
  pool_.run([&](int thread) {
    for (std::size_t piece; (piece = next_piece.fetch_add(1, std::memory_order_relaxed)) < pieces;) {
      quantize_piece(input, piece);
      pieces_done.fetch_add(1, std::memory_order_release);
    }
    spin_until([&] { return pieces_done.load(std::memory_order_acquire) == pieces; });
    gate_up_parts(next_part, listed_ * parts_per_expert(), part_of, part_done, thread);
    for (Run strips; !(strips = take(next_strip, hidden_strips(), kMostStrips)).empty();) {
      for (std::size_t strip = strips.begin; out != nullptr && strip < strips.end; ++strip) clear_strip(strip);
      down_strips(strips, {0, listed_}, address_of, await_h, thread);
      for (std::size_t strip = strips.begin; out != nullptr && strip < strips.end; ++strip) write_strip(strip, out);
    }
  });
  count_bad_rows();
}

} // namespace moetier
