// A fixed team of threads that runs one function at a time and sleeps between calls.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace moetier {

// Blocks the CPU's pipeline for a moment inside a spin loop.
inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits for `ready` by spinning, giving the CPU away now and then in case the awaited thread has none.
template <typename Ready>
void spin_until(Ready ready) {
  for (unsigned turn = 1; !ready(); ++turn) {
    relax();
    if (turn % 1024 == 0) std::this_thread::yield();
  }
}

// Lets the calling thread use `cpus` only; an empty list leaves its affinity alone.
void allow_cpus(const std::vector<int> &cpus);

class ThreadPool {
public:
  // `threads` counts the caller of run(), which stays where it is. Worker i, from 1 on, may use cpus[i % cpus.size()];
  // an empty list leaves its affinity alone.
  ThreadPool(int threads, std::vector<std::vector<int>> cpus);
  ~ThreadPool();
  ThreadPool(const ThreadPool &) = delete;
  ThreadPool &operator=(const ThreadPool &) = delete;

  int threads() const { return threads_; }
  // False in a child that was forked after the pool was made: its workers do not exist there, and what one of them or
  // another caller had locked or begun at the fork stays so for ever.
  bool usable() const;
  // Throws std::runtime_error where it is not.
  void demand_usable() const;

  // Calls are about to come: until then the workers look for them without sleeping. Wakes those that sleep.
  void stay_awake(std::chrono::microseconds time);

  // Calls work(index) on the calling thread (index 0) and on every worker that is awake in time; returns when none is
  // inside. Work must be shared out by atomic counters, since a late worker never enters. Float state is the default
  // (round to nearest even, subnormals kept) inside. `work` must not throw. Calls from several threads take turns.
  // Throws std::runtime_error where the pool is not usable.
  template <typename Work>
  void run(Work &&work) {
    using Plain = std::remove_reference_t<Work>;
    run_raw([](void *context, int index) { (*static_cast<Plain *>(context))(index); }, &work);
  }

private:
  using Entry = void (*)(void *, int);
  struct State;

  void run_raw(Entry entry, void *context);

  int threads_;
  std::uint64_t generation_; // of the process that made it
  std::unique_ptr<State> state_;
};

} // namespace moetier
