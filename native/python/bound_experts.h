// What stands between Python and the experts: the object that Python holds, safe against what Python may do with it.
#pragma once

#include <atomic>
#include <stdexcept>

#include <nanobind/nanobind.h>

#include "core/experts.h"

namespace moetier {

// Experts with what Python may get wrong: two steps at once, a pool from before a fork.
class BoundExperts {
public:
  BoundExperts(const Shape &shape, const Activation &activation, ThreadPool &pool, const Kernels &kernels,
               Prefetch prefetch)
      : pool_(pool), experts_(shape, activation, pool, kernels, prefetch) {}

  // The object for one call, or for as long as a native thread works with it. Throws std::runtime_error where it is not
  // to be had; needs no GIL and never waits.
  class Turn {
  public:
    explicit Turn(BoundExperts &bound) : bound_(bound) {
      bound.pool_.demand_usable();
      if (bound.busy_.exchange(true))
        throw std::runtime_error("another thread is inside this object: one step at a time");
    }
    ~Turn() { bound_.busy_.store(false); }
    Turn(const Turn &) = delete;
    Turn &operator=(const Turn &) = delete;

    Experts &experts() const { return bound_.experts_; }

  private:
    BoundExperts &bound_;
  };

  // call(experts) without the GIL, which the caller holds. The turn ends before the GIL is had again: a thread that
  // waits for it keeps nobody from the object.
  template <typename Call>
  auto exclusively(Call call) {
    const nanobind::gil_scoped_release unlocked;
    const Turn turn(*this);
    return call(turn.experts());
  }

  const Experts &experts() const { return experts_; }

private:
  ThreadPool &pool_;
  std::atomic<bool> busy_{false};
  Experts experts_;
};

} // namespace moetier
