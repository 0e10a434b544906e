// The arithmetic of a step, 32 rows of one expert at a time.

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>

#include "core/experts.h"

namespace moetier {
namespace {

// Bad rows hold zeros, for which any range does.
ExponentRange without_bad_rows(ExponentRange range) {
  return range.lo == kBadRow ? ExponentRange{0, 0} : range;
}

template <typename Better>
void improve(std::atomic<std::int8_t> &value, std::int8_t candidate, Better better) {
  std::int8_t seen = value.load(std::memory_order_relaxed);
  while (better(candidate, seen) && !value.compare_exchange_weak(seen, candidate, std::memory_order_relaxed)) {
  }
}

} // namespace

// Large runs first, then ever smaller ones: neighbours are read in a row, and all threads end together.
Experts::Run Experts::take(std::atomic<std::size_t> &next, std::size_t total, std::size_t most) const {
  const std::size_t shares = 4 * static_cast<std::size_t>(pool_.threads());
  std::size_t begin = next.load(std::memory_order_relaxed);
  while (begin < total) {
    const std::size_t size = std::clamp<std::size_t>((total - begin) / shares, 1, most);
    if (next.compare_exchange_weak(begin, begin + size, std::memory_order_relaxed)) return {begin, begin + size};
  }
  return {total, total};
}

Experts::Run Experts::pairs_of(std::size_t index) const {
  const auto begin = static_cast<std::size_t>(begins_[index]);
  return {begin, begin + static_cast<std::size_t>(counts_[index])};
}

const std::uint8_t *Experts::slice_base(std::uint64_t address, std::size_t slice) const {
  return reinterpret_cast<const std::uint8_t *>(address) + (shape_.first_slice + slice) * slice_bytes_;
}

Strip Experts::strip_at(const std::uint8_t *base, std::size_t codes, std::size_t scales, std::size_t strip,
                        std::size_t blocks) const {
  const std::size_t tiles = 2 * strip * blocks;
  return {base + codes + tiles * kTileCodes, base + scales + tiles * kTileRows};
}

Experts::Part Experts::gate_up_part(std::size_t index, std::uint64_t address, std::size_t number) const {
  return {index, address, number / h_blocks_, number % h_blocks_};
}

// Gives the kernels the rows of x that job.rows names at equal distances, as copies or widened, where they gain by it.
// What is copied serves all strips of the same pairs.
void Experts::fill_panel(std::size_t first, StripJob &job, Scratch &scratch) const {
  if (job.count < kernels_.panel_from) return;
  const bool there = scratch.panel_step == step_ && scratch.panel_pair == first;
  scratch.panel_step = step_;
  scratch.panel_pair = first;
  if (kernels_.widen != nullptr) {
    job.wide = scratch.wide_panel;
    job.wide_stride = wide_stride(x_blocks_);
    for (std::size_t i = 0; !there && i < job.count; ++i) {
      kernels_.widen(scratch.rows[i], x_blocks_, scratch.wide_panel + i * job.wide_stride);
    }
    return;
  }
  job.stride = x_blocks_;
  for (std::size_t i = 0; i < job.count; ++i) {
    ActBlock *row = scratch.panel + i * x_blocks_;
    if (!there) std::memcpy(row, scratch.rows[i], x_blocks_ * sizeof(ActBlock));
    scratch.rows[i] = row;
  }
}

// How many neighbouring strips of gate, then of up, to read in a row: as many as have room for their results.
std::size_t Experts::strips_together(const Part &part, std::size_t most) const {
  const auto count = static_cast<std::size_t>(counts_[part.index]);
  return std::max<std::size_t>(1, std::min({most, kMostStrips, kMostRows / count, h_blocks_ - part.strip}));
}

// Some strips of gate and of up, hence as many blocks of h, for every pair of an expert.
void Experts::gate_up(const Part &part, const Part &next, Scratch &scratch) {
  const std::uint8_t *base = slice_base(part.address, part.slice);
  const auto gate = [&](std::size_t i) { return strip_at(base, 0, gate_scales_, part.strip + i, x_blocks_); };
  const auto up = [&](std::size_t i) { return strip_at(base, up_codes_, up_scales_, part.strip + i, x_blocks_); };
  const Strip after = strip_at(slice_base(next.address, next.slice), 0, gate_scales_, next.strip, x_blocks_);
  const Run pairs = pairs_of(part.index);
  for (std::size_t first = pairs.begin; first < pairs.end; first += kMostRows) {
    const std::size_t count = std::min(kMostRows, pairs.end - first);
    ExponentRange range = kNoBlocks;
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t token = token_of(first + i);
      scratch.rows[i] = x_ + token * x_blocks_;
      if (x_range_[token].hi != kBadRow) widen(range, x_range_[token]);
    }
    StripJob job = {gate(0),   gate(0), x_blocks_, scratch.rows, 0, nullptr, 0, count, without_bad_rows(range),
                    prefetch_, nullptr};
    fill_panel(first, job, scratch);
    for (std::size_t i = 0; i < part.strips; ++i) {
      job.strip = gate(i);
      job.next = i + 1 < part.strips ? gate(i + 1) : up(0);
      job.out = scratch.gate + i * count * kStripRows;
      kernels_.strip(job);
    }
    for (std::size_t i = 0; i < part.strips; ++i) {
      job.strip = up(i);
      job.next = i + 1 < part.strips ? up(i + 1) : after;
      job.out = scratch.up + i * count * kStripRows;
      kernels_.strip(job);
    }
    for (std::size_t i = 0; i < part.strips; ++i) activate_strip(part, i, {first, first + count}, scratch);
  }
}

// The i-th block of h that gate_up computes, for some pairs.
void Experts::activate_strip(const Part &part, std::size_t i, Run pairs, Scratch &scratch) {
  const std::size_t results = i * (pairs.end - pairs.begin) * kStripRows;
  const bool wide = widened(pairs.end - pairs.begin);
  for (std::size_t pair = pairs.begin; pair < pairs.end; ++pair) {
    const std::size_t row = results + (pair - pairs.begin) * kStripRows;
    ActBlock *h = h_row(pair, part.slice) + part.strip + i;
    const int raw = kernels_.activate(scratch.gate + row, scratch.up + row, activation_, pair_weight_[pair], h);
    if (wide) kernels_.widen(h, 1, wide_h_row(pair, part.slice) + (part.strip + i) * kBlock);
    const bool bad = x_range_[token_of(pair)].hi == kBadRow;
    const auto e = static_cast<std::int8_t>(bad ? kBadRow : raw);
    const std::size_t at = pair * shape_.slices + part.slice;
    improve(h_lo_[at], e, std::less<>());
    improve(h_hi_[at], e, std::greater<>());
  }
}

// y of one slice, 32 rows, some pairs.
void Experts::down_slice(const Part &part, const Part &next, std::size_t slice, Run pairs, Scratch &scratch) {
  const std::size_t count = pairs.end - pairs.begin;
  ExponentRange range = kNoBlocks;
  bool all_good = true;
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t at = (pairs.begin + i) * shape_.slices + slice;
    const ExponentRange row = {h_lo_[at].load(std::memory_order_relaxed), h_hi_[at].load(std::memory_order_relaxed)};
    scratch.rows[i] = h_row(pairs.begin + i, slice);
    if (row.hi == kBadRow) {
      all_good = false;
    } else {
      widen(range, row);
    }
  }
  const Part &then = slice + 1 < shape_.slices ? part : next;
  const std::size_t then_slice = slice + 1 < shape_.slices ? slice + 1 : 0;
  const Strip strip = strip_at(slice_base(part.address, slice), down_codes_, down_scales_, part.strip, h_blocks_);
  const Strip after = strip_at(slice_base(then.address, then_slice), down_codes_, down_scales_, then.strip, h_blocks_);
  float *y = scratch.y + slice * kMostRows * kStripRows;
  const std::uint16_t *wide = widened(count) ? wide_h_row(pairs.begin, slice) : nullptr;
  const std::size_t all_blocks = shape_.slices * h_blocks_;
  kernels_.strip({strip, after, h_blocks_, scratch.rows, all_blocks, wide, wide_stride(all_blocks), count,
                  without_bad_rows(range), prefetch_, y});
  for (std::size_t i = 0; !all_good && i < count; ++i) {
    if (h_hi_[(pairs.begin + i) * shape_.slices + slice].load(std::memory_order_relaxed) != kBadRow) continue;
    std::fill_n(y + i * kStripRows, kStripRows, std::numeric_limits<float>::quiet_NaN());
  }
}

// Pairwise tree over the slices, into the first.
void Experts::combine_slices(std::size_t count, Scratch &scratch) const {
  constexpr std::size_t kSize = kMostRows * kStripRows;
  for (std::size_t parts = shape_.slices; parts > 1; parts /= 2) {
    for (std::size_t part = 0; part < parts / 2; ++part) {
      float *to = scratch.y + part * kSize;
      const float *left = scratch.y + 2 * part * kSize;
      const float *right = left + kSize;
      for (std::size_t i = 0; i < count * kStripRows; ++i) to[i] = left[i] + right[i];
    }
  }
}

// 32 values of a pair's answer: added to the token's sums, or into the pair's own row.
void Experts::put(std::size_t pair, std::size_t strip, const float *y) {
  if (rows_ != nullptr) {
    float *row = rows_ + static_cast<std::size_t>(pair_place_[pair]) * shape_.hidden;
    std::memcpy(row + strip * kStripRows, y, kStripRows * sizeof(float));
    return;
  }
  const float weight = activation_.weighted ? 1.0F : pair_weight_[pair]; // times 1 changes nothing
  kernels_.accumulate(y, weight, acc(strip, token_of(pair)));
}

// 32 rows of the down projection for every pair of an expert.
void Experts::down(const Part &part, const Part &next, Scratch &scratch) {
  const Run pairs = pairs_of(part.index);
  for (std::size_t first = pairs.begin; first < pairs.end; first += kMostRows) {
    const Run some = {first, std::min(first + kMostRows, pairs.end)};
    for (std::size_t slice = 0; slice < shape_.slices; ++slice) down_slice(part, next, slice, some, scratch);
    combine_slices(some.end - some.begin, scratch);
    for (std::size_t pair = some.begin; pair < some.end; ++pair) {
      put(pair, part.strip, scratch.y + (pair - first) * kStripRows);
    }
  }
}

void Experts::clear_strip(std::size_t strip) {
  std::memset(acc(strip, 0), 0, tokens_ * kStripRows * sizeof(float));
}

void Experts::write_strip(std::size_t strip, std::uint16_t *out) const {
  for (std::size_t token = 0; token < tokens_; ++token) {
    kernels_.to_bf16(acc(strip, token), out + token * shape_.hidden + strip * kStripRows);
  }
}

} // namespace moetier
