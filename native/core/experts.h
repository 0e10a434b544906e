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
  Experts(const Shape &shape, const Activation &activation, ThreadPool &pool, const Kernels &kernels);

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

private:
  enum class Stage : std::uint8_t { listed, gated, done };
  // What one thread works with.
  struct Scratch {
    float *gate;           // [kPiece][32]
    float *up;             // [kPiece][32]
    float *y;              // [slices][kPiece][16]
    const ActBlock **rows; // [kPiece]
  };

  std::size_t token_of(std::size_t pair) const { return static_cast<std::size_t>(pair_token_[pair]); }
  template <typename Id>
  void route(const Id *ids, const float *weights, std::size_t tokens);
  void route(const StepInput &input);
  void count_bad_rows();
  void quantize_row(const StepInput &input, std::size_t token);
  void gate_up_task(std::size_t index, std::uint64_t address, std::size_t slice, std::size_t block, Scratch &scratch);
  void down_task(std::size_t index, std::uint64_t address, std::size_t tile, Scratch &scratch);
  void clear_tile(std::size_t tile);
  void write_tile(std::size_t tile, std::uint16_t *out) const;
  float *acc(std::size_t tile, std::size_t token) const { return acc_ + (tile * tokens_ + token) * kTileRows; }
  ActBlock *h_row(std::size_t pair, std::size_t slice) const { return h_ + (pair * shape_.slices + slice) * h_blocks_; }
  std::size_t inner_blocks() const { return shape_.inner / kBlock; }
  std::size_t hidden_tiles() const { return shape_.hidden / kTileRows; }

  Shape shape_;
  Activation activation_;
  ThreadPool &pool_;
  const Kernels &kernels_;

  // Byte offsets within a slice, as moetier/formats/record.py lays it out.
  std::size_t slice_bytes_;
  std::size_t up_codes_;
  std::size_t down_codes_;
  std::size_t gate_scales_;
  std::size_t up_scales_;
  std::size_t down_scales_;

  Arena arena_;
  std::size_t x_blocks_;
  std::size_t h_blocks_;
  ActBlock *x_;                    // [token][hidden / 32]
  ExponentRange *x_range_;         // [token]
  ActBlock *h_;                    // [pair][slice][inner / 32]
  std::atomic<std::int8_t> *h_lo_; // [pair][slice]
  std::atomic<std::int8_t> *h_hi_;
  float *acc_;               // [hidden / 16][token][16]
  std::int32_t *pair_token_; // [pair], grouped by expert
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

  bool open_ = false;
  std::size_t tokens_ = 0;
  std::size_t listed_ = 0;
  std::size_t next_down_ = 0;
  std::size_t bad_rows_ = 0;
};

} // namespace moetier
