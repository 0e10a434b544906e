// How a step's work is shared out among threads: the loops of Experts, apart from the arithmetic and the bookkeeping.
#pragma once

#include "core/experts.h"

namespace moetier {

// Parts of gate/up, in order; neighbours are done together. done(part) is called after each.
template <typename PartOf, typename Done>
void Experts::gate_up_parts(std::atomic<std::size_t> &next, std::size_t total, PartOf part_of, Done done, int thread) {
  Scratch &scratch = scratch_[static_cast<std::size_t>(thread)];
  for (Run run; !(run = take(next, total, total)).empty();) {
    Part part = part_of(run.begin);
    for (std::size_t number = run.begin; number < run.end;) {
      part.strips = strips_together(part, run.end - number);
      number += part.strips;
      const Part after = number < run.end ? part_of(number) : part;
      gate_up(part, after, scratch);
      done(part);
      part = after;
    }
  }
}

// Some strips of down: every expert in turn, so that a strip's sums are in the contract's order. await(index) returns
// when the expert's h is complete.
template <typename AddressOf, typename Await>
void Experts::down_strips(Run strips, Run experts, AddressOf address_of, Await await, int thread) {
  Scratch &scratch = scratch_[static_cast<std::size_t>(thread)];
  for (std::size_t index = experts.begin; index < experts.end; ++index) {
    await(index);
    for (std::size_t strip = strips.begin; strip < strips.end; ++strip) {
      const Part part = {index, address_of(index), 0, strip};
      Part after = part;
      if (strip + 1 < strips.end) {
        after.strip = strip + 1;
      } else if (index + 1 < experts.end) {
        after = {index + 1, address_of(index + 1), 0, strips.begin};
      }
      down(part, after, scratch);
    }
  }
}

} // namespace moetier
