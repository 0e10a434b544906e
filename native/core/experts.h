// Runs the routed experts of one geometry on the CPU, one step at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/arena.h"
#include "core/kernels.h"
#include "core/pool.h"

namespace moetier {

struct Shape {
  std::size_t hidden;
  std::size_t inner; // intermediate size of one slice
  std::size_t experts;
  std::size_t top_k;
  std::size_t first_slice; // of the record, the first that this rank holds
  std::size_t slices;      // how many it holds, a power of two
  std::size_t max_tokens;
};

// The pointers of a step's input. Exactly one of x_f32 and x_bf16, and of ids32 and ids64, is set.
struct StepInput {
  const float *x_f32;
  const std::uint16_t *x_bf16;
  const std::int32_t *ids32;
  const std::int64_t *ids64;
  const float *weights;
  std::size_t tokens;
};

enum class StepError {
  none,
  no_step,        // begin was not called
  bad_index,      // an expert index outside begin's list
  gate_up_twice,  // gate_up of an expert that had it
  gate_up_absent, // down before gate_up
  down_order,     // down not in ascending order without gaps
  unfinished,     // finish before every expert's down
  bad_address,    // a record address that is null or not 64-byte aligned
};

class Experts {
public:
  Experts(const Shape &shape, const Activation &activation, ThreadPool &pool, const Kernels &kernels,
          Prefetch prefetch);

  std::size_t workspace_bytes() const { return arena_.size(); }
  std::size_t bad_rows() const { return bad_rows_; }
  std::size_t tokens() const { return tokens_; }
  // Routed experts of the current step, ascending, and how many pairs each has.
  std::span<const std::int32_t> ids() const { return {ids_, listed_}; }
  std::span<const std::int32_t> counts() const { return {counts_, listed_}; }

  // Starts a step, dropping one that was not finished.
  void begin(const StepInput &input);
  StepError gate_up(std::span<const std::int32_t> indices, std::span<const std::uint64_t> addresses);
  StepError down(std::size_t first, std::span<const std::uint64_t> addresses);
  StepError finish(std::uint16_t *out);

  // A whole step. addresses has one entry per expert of the layer, 0 where the record is not in memory. Where a routed
  // expert is absent nothing is computed and its index in ids() is in absent().
  StepError forward(const StepInput &input, std::span<const std::uint64_t> addresses, std::uint16_t *out);
  const std::vector<std::int32_t> &absent() const { return absent_; }

  // A whole step that stops before the combination: y of the pair at `position` of `token`, the slices of this rank
  // already added up and the route weight not yet applied to it, goes to rows[(token * top_k + position) * hidden].
  // Pairs whose expert has no address here, or an id outside the layer, are skipped: their rows are left alone.
  // `rows` may be any memory; it is written once, in pieces of 128 bytes, and complete when the call returns.
  StepError rows(const StepInput &input, std::span<const std::uint64_t> addresses, float *rows);

private:
  static constexpr std::size_t kMostStrips = 16; // that a thread reads in a row: longer runs of memory are faster
  static constexpr ExponentRange kNoBlocks = {kBadRow, -128};

  enum class Stage : std::uint8_t { listed, gated, done };
  // What one thread works with.
  struct Scratch {
    float *gate;                // [kMostRows][32]
    float *up;                  // [kMostRows][32]
    float *y;                   // [slices][kMostRows][32]
    const ActBlock **rows;      // [kMostRows]
    ActBlock *panel;            // [kMostRows][hidden / 32]: rows of x at equal distances, where the kernels want that
    std::uint16_t *wide_panel;  // [kMostRows][wide_stride]: or as the kernels widen them
    std::size_t panel_pair = 0; // first pair whose rows either holds, and of which step
    std::uint64_t panel_step = 0;
  };
  // A range of work items that a thread took.
  struct Run {
    std::size_t begin;
    std::size_t end;
    bool empty() const { return begin == end; }
  };
  // One expert's share of gate_up or down: 32 rows of one slice, or of all slices.
  struct Part {
    std::size_t index; // of the expert in the step's list
    std::uint64_t address;
    std::size_t slice; // gate_up only
    std::size_t strip;
    std::size_t strips = 1; // gate_up only: how many neighbours are done together
  };

  // Routing and quantization.
  template <typename Id, typename Held>
  void route(const Id *ids, const float *weights, std::size_t tokens, Held held);
  template <typename Held>
  void route(const StepInput &input, Held held);
  ExponentRange quantize(const StepInput &input, std::size_t token, Run blocks);
  void quantize_piece(const StepInput &input, std::size_t number);
  void count_bad_rows();

  StepError mark_gated(std::span<const std::int32_t> indices, std::span<const std::uint64_t> addresses);
  StepError look_up(std::span<const std::uint64_t> addresses);

  // The work of a step, in parts. `next` is the part that the thread does afterwards, or the part itself.
  Run take(std::atomic<std::size_t> &next, std::size_t total, std::size_t most) const;
  Part gate_up_part(std::size_t index, std::uint64_t address, std::size_t number) const;
  std::size_t strips_together(const Part &part, std::size_t most) const;
  void gate_up(const Part &part, const Part &next, Scratch &scratch);
  void activate_strip(const Part &part, std::size_t i, Run pairs, Scratch &scratch);
  void fill_panel(std::size_t first, StripJob &job, Scratch &scratch) const;
  void down(const Part &part, const Part &next, Scratch &scratch);
  void put(std::size_t pair, std::size_t strip, const float *y);
  void down_slice(const Part &part, const Part &next, std::size_t slice, Run pairs, Scratch &scratch);
  void combine_slices(std::size_t count, Scratch &scratch) const;
  template <typename PartOf, typename Done>
  void gate_up_parts(std::atomic<std::size_t> &next, std::size_t total, PartOf part_of, Done done, int thread);
  template <typename AddressOf, typename Await>
  void down_strips(Run strips, Run experts, AddressOf address_of, Await await, int thread);
  void whole_step(const StepInput &input, std::uint16_t *out);
  void clear_strip(std::size_t strip);
  void write_strip(std::size_t strip, std::uint16_t *out) const;

  const std::uint8_t *slice_base(std::uint64_t address, std::size_t slice) const;
  Strip strip_at(const std::uint8_t *base, std::size_t codes, std::size_t scales, std::size_t strip,
                 std::size_t blocks) const;
  Run pairs_of(std::size_t index) const;
  std::size_t token_of(std::size_t pair) const { return static_cast<std::size_t>(pair_token_[pair]); }
  float *acc(std::size_t strip, std::size_t token) const { return acc_ + (strip * tokens_ + token) * kStripRows; }
  ActBlock *h_row(std::size_t pair, std::size_t slice) const { return h_ + (pair * shape_.slices + slice) * h_blocks_; }
  std::uint16_t *wide_h_row(std::size_t pair, std::size_t slice) const {
    return wide_h_ + pair * wide_stride(shape_.slices * h_blocks_) + slice * h_blocks_ * kBlock;
  }
  bool widened(std::size_t rows) const { return kernels_.widen != nullptr && rows >= kernels_.panel_from; }
  std::size_t parts_per_expert() const { return shape_.slices * h_blocks_; }
  std::size_t hidden_strips() const { return shape_.hidden / kStripRows; }

  Shape shape_;
  Activation activation_;
  ThreadPool &pool_;
  const Kernels &kernels_;
  Prefetch prefetch_;

  // Byte offsets within a slice, as moetier/contract/record.py lays it out.
  std::size_t slice_bytes_;
  std::size_t up_codes_;
  std::size_t down_codes_;
  std::size_t gate_scales_;
  std::size_t up_scales_;
  std::size_t down_scales_;

  Arena arena_;
  std::size_t x_blocks_;
  std::size_t h_blocks_;
  ActBlock *x_;                // [token][hidden / 32]
  ExponentRange *x_range_;     // [token]
  ExponentRange *piece_range_; // [token][pieces_], of fewer tokens than threads, whose rows are quantized in pieces
  std::atomic<std::int32_t> *pieces_left_; // [token]: those not done yet
  std::size_t pieces_ = 1;                 // of a row, in this step
  ActBlock *h_;                            // [pair][slice][inner / 32]
  std::uint16_t *wide_h_;                  // [pair][wide_stride]: all slices, for kernels that widen
  std::atomic<std::int8_t> *h_lo_;         // [pair][slice]
  std::atomic<std::int8_t> *h_hi_;
  float *acc_;               // [hidden / 32][token][32]
  std::int32_t *pair_token_; // [pair], grouped by expert
  std::int32_t *pair_place_; // token * top_k + position: its place in ids and weights
  float *pair_weight_;
  std::int32_t *ids_; // [listed]
  std::int32_t *counts_;
  std::int32_t *begins_; // first pair of each
  Stage *stages_;
  std::uint64_t *routed_address_;   // [listed]
  std::atomic<std::int32_t> *left_; // gate_up tasks of each that are not done yet
  std::int32_t *cursor_;            // [experts]
  std::vector<Scratch> scratch_;
  std::vector<std::int32_t> absent_;

  std::uint64_t step_ = 0; // counts steps from 1
  bool open_ = false;
  std::size_t tokens_ = 0;
  std::size_t listed_ = 0;
  std::size_t next_down_ = 0;
  std::size_t bad_rows_ = 0;
  float *rows_ = nullptr; // [place][hidden]; null where the step's answers are combined
};

} // namespace moetier
