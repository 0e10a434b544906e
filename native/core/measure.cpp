#include "core/measure.h"

#include <algorithm>
#include <atomic>
#include <chrono>

namespace moetier {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kPiece = 1U << 20; // bytes that a thread reads at a time
constexpr std::size_t kRounds = 20'000;  // of multiply in a piece of work
constexpr std::size_t kPiecesPerThread = 50;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

} // namespace

double read_rate(ThreadPool &pool, const Kernels &kernels, std::size_t way, std::span<const std::uint8_t> memory) {
  const std::size_t bytes = memory.size() / 64 * 64;
  std::atomic<std::size_t> next{0};
  std::atomic<std::uint64_t> sum{0};
  const Clock::time_point start = Clock::now();
  pool.run([&](int) {
    for (std::size_t at; (at = next.fetch_add(kPiece, std::memory_order_relaxed)) < bytes;) {
      sum.fetch_add(kernels.read[way](memory.data() + at, std::min(kPiece, bytes - at)), std::memory_order_relaxed);
    }
  });
  return static_cast<double>(bytes) / seconds_since(start);
}

double start_time(ThreadPool &pool, std::chrono::nanoseconds idle) {
  std::atomic<int> there{0};
  std::atomic<Clock::rep> last{0};
  auto meet = [&](int) {
    const Clock::rep now = Clock::now().time_since_epoch().count();
    for (Clock::rep seen = last.load(); seen < now && !last.compare_exchange_weak(seen, now);) {
    }
    there.fetch_add(1);
    spin_until([&] { return there.load() % pool.threads() == 0; }); // nobody leaves before all are in
  };
  pool.run(meet);
  const Clock::time_point end = Clock::now();
  while (Clock::now() - end < idle) relax();
  const Clock::rep start = Clock::now().time_since_epoch().count();
  pool.run(meet);
  return std::chrono::duration<double>(Clock::duration(last.load() - start)).count();
}

double multiply_rate(ThreadPool &pool, const Kernels &kernels) {
  const std::size_t pieces = kPiecesPerThread * static_cast<std::size_t>(pool.threads());
  std::atomic<std::size_t> next{0};
  std::atomic<std::size_t> operations{0};
  const Clock::time_point start = Clock::now();
  pool.run([&](int) {
    while (next.fetch_add(1, std::memory_order_relaxed) < pieces) {
      operations.fetch_add(kRounds * kernels.multiply(kRounds), std::memory_order_relaxed);
    }
  });
  return static_cast<double>(operations.load()) / seconds_since(start);
}

} // namespace moetier
