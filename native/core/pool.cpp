#include "core/pool.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <system_error>

#include <pthread.h>
#include <sched.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace moetier {
namespace {

// How long a worker looks for the next call before it sleeps. Longer than the gap between two layers of a small model,
// far shorter than anything that would show in an idle server's CPU time.
constexpr std::chrono::microseconds kSpin{100};

// The contract's float state for the life of the object, the caller's own state afterwards.
class FloatState {
public:
#if defined(__x86_64__)
  FloatState() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
  ~FloatState() { _mm_setcsr(saved_); }

private:
  unsigned saved_;
#elif defined(__aarch64__)
  FloatState() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(std::uint64_t{0}));
  }
  ~FloatState() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

private:
  std::uint64_t saved_;
#endif
public:
  FloatState(const FloatState &) = delete;
  FloatState &operator=(const FloatState &) = delete;
};

std::int64_t now() {
  return std::chrono::steady_clock::now().time_since_epoch().count();
}

// Forks between the first process that had a pool and this one: what a process id would tell, without a system call.
std::atomic<std::uint64_t> forks{0};

std::uint64_t count_forks() {
  static const int error = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
  if (error != 0) throw std::system_error(error, std::generic_category(), "pthread_atfork");
  return forks.load(std::memory_order_relaxed);
}

} // namespace

void allow_cpus(const std::vector<int> &cpus) {
  if (cpus.empty()) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  for (int cpu : cpus) {
    if (cpu >= 0 && cpu < CPU_SETSIZE) CPU_SET(cpu, &set);
  }
  // A CPU that went offline since makes this fail; the thread then keeps what it inherited, which is only slower.
  (void)pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

struct ThreadPool::State {
  static constexpr std::uint32_t kOpen = 1U << 31;

  alignas(64) std::atomic<std::uint32_t> ticket{0}; // one more for every call; workers sleep on it
  alignas(64) std::atomic<std::uint32_t> gate{0};   // kOpen while a call takes workers in, plus how many are inside
  std::atomic<bool> stop{false};
  std::atomic<std::int64_t> awake_until{0}; // steady clock; looked at beside kSpin
  Entry entry = nullptr;                    // both are written only while the gate is shut and empty
  void *context = nullptr;
  std::mutex turn;
  std::vector<std::thread> workers;

  bool enter() {
    std::uint32_t seen = gate.load(std::memory_order_relaxed);
    while ((seen & kOpen) != 0) {
      if (gate.compare_exchange_weak(seen, seen + 1, std::memory_order_acquire, std::memory_order_relaxed)) return true;
    }
    return false;
  }

  void leave() { gate.fetch_sub(1, std::memory_order_release); }

  void await_ticket(std::uint32_t seen) {
    const std::int64_t spin_until_time = now() + std::chrono::nanoseconds(kSpin).count();
    do {
      for (int turn_count = 0; turn_count < 64; ++turn_count) {
        if (ticket.load(std::memory_order_acquire) != seen) return;
        relax();
      }
    } while (now() < std::max(spin_until_time, awake_until.load(std::memory_order_relaxed)));
    ticket.wait(seen, std::memory_order_acquire);
  }

  void end() {
    stop.store(true, std::memory_order_release);
    ticket.fetch_add(1, std::memory_order_release);
    ticket.notify_all();
    for (std::thread &worker : workers) worker.join();
  }

  void work(int index) {
    std::uint32_t seen = 0;
    while (true) {
      await_ticket(seen);
      seen = ticket.load(std::memory_order_acquire);
      if (stop.load(std::memory_order_acquire)) return;
      if (!enter()) continue;
      {
        FloatState state;
        entry(context, index);
      }
      leave();
    }
  }
};

ThreadPool::ThreadPool(int threads, std::vector<std::vector<int>> cpus)
    : threads_(threads < 1 ? 1 : threads), generation_(count_forks()), state_(std::make_unique<State>()) {
  State &state = *state_;
  state.workers.reserve(static_cast<std::size_t>(threads_ - 1));
  try {
    for (int index = 1; index < threads_; ++index) {
      std::vector<int> own = cpus.empty() ? std::vector<int>() : cpus[static_cast<std::size_t>(index) % cpus.size()];
      state.workers.emplace_back([&state, index, own = std::move(own)] {
        allow_cpus(own);
        state.work(index);
      });
    }
  } catch (...) { // the system gives no more threads: end those that there are, a joinable one would end the process
    state.end();
    throw;
  }
}

ThreadPool::~ThreadPool() {
  if (!usable()) {
    (void)state_.release(); // the threads are another process's; nothing here can join them
    return;
  }
  state_->end();
}

bool ThreadPool::usable() const {
  return generation_ == forks.load(std::memory_order_relaxed);
}

void ThreadPool::demand_usable() const {
  if (!usable()) throw std::runtime_error("the thread pool was made before a fork; make one in this process");
}

void ThreadPool::stay_awake(std::chrono::microseconds time) {
  State &state = *state_;
  const std::int64_t before = now();
  const bool asleep = state.awake_until.exchange(before + std::chrono::nanoseconds(time).count()) <= before;
  if (!asleep) return;
  state.ticket.fetch_add(1, std::memory_order_release); // a worker that wakes finds the gate shut and looks again
  state.ticket.notify_all();
}

void ThreadPool::run_raw(Entry entry, void *context) {
  demand_usable();
  State &state = *state_;
  const std::lock_guard lock(state.turn);
  const FloatState float_state;
  if (threads_ == 1) {
    entry(context, 0);
    return;
  }
  state.entry = entry;
  state.context = context;
  state.gate.store(State::kOpen, std::memory_order_release);
  state.ticket.fetch_add(1, std::memory_order_release);
  state.ticket.notify_all();
  entry(context, 0);
  state.gate.fetch_and(~State::kOpen, std::memory_order_acq_rel);
  spin_until([&state] { return state.gate.load(std::memory_order_acquire) == 0; });
}

} // namespace moetier
