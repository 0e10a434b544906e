// Compares every kernel set of this machine with the portable one on random calls, without Python, so that the address,
// undefined-behaviour and thread sanitizers see the whole core. Exit 1 on any difference.
//
// `compare [calls] [first] [few]`: the calls from number `first` on; a call depends on its number alone, so ranges may
// be run apart. Hidden and intermediate sizes go through all pairs of multiples of 32 up to 512; every tenth call has
// long rows, every 100th the sizes of a model. With `few`, calls are so small that hundreds of them are looked at under
// the thread sanitizer: what the threads do with each other does not depend on how much each has to do.

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string_view>
#include <thread>
#include <vector>

#include "core/experts.h"
#include "core/mailbox.h"
#include "tests/calls.h"

namespace {

using moetier::Experts;
using moetier::Kernels;
using moetier::Prefetch;
using moetier::StepError;
using moetier::ThreadPool;

std::vector<std::uint16_t> forward(const Call &call, ThreadPool &pool, const Kernels &kernels, Prefetch prefetch) {
  Experts experts(call.shape, call.activation, pool, kernels, prefetch);
  std::vector<std::uint16_t> out(call.tokens * call.shape.hidden);
  if (experts.forward(call.input(), call.addresses, out.data()) != StepError::none) std::abort();
  return out;
}

// The contract's last step: rows of pairs combined.
std::vector<std::uint16_t> combine(const Call &call, const std::vector<float> &rows, const Kernels &kernels) {
  const std::size_t hidden = call.shape.hidden;
  std::vector<std::uint16_t> out(call.tokens * hidden);
  std::vector<float> acc(hidden);
  for (std::size_t token = 0; token < call.tokens; ++token) {
    std::fill(acc.begin(), acc.end(), 0.0F);
    for (std::size_t expert = 0; expert < call.shape.experts; ++expert) {
      for (std::size_t pair = token * call.shape.top_k; pair < (token + 1) * call.shape.top_k; ++pair) {
        if (call.ids[pair] != static_cast<std::int32_t>(expert)) continue;
        const float weight = call.activation.weighted ? 1.0F : call.weights[pair];
        for (std::size_t i = 0; i < hidden; i += moetier::kStripRows) {
          kernels.accumulate(rows.data() + pair * hidden + i, weight, acc.data() + i);
        }
      }
    }
    for (std::size_t i = 0; i < hidden; i += moetier::kStripRows) {
      kernels.to_bf16(acc.data() + i, out.data() + token * hidden + i);
    }
  }
  return out;
}

std::vector<float> room_for_rows(const Call &call) {
  return std::vector<float>(call.tokens * call.shape.top_k * call.shape.hidden);
}

// The rows of two objects that hold every other expert.
std::vector<std::uint16_t> by_rows(const Call &call, ThreadPool &pool, const Kernels &kernels, Prefetch prefetch) {
  std::vector<float> rows = room_for_rows(call);
  for (std::size_t part = 0; part < 2; ++part) {
    Experts experts(call.shape, call.activation, pool, kernels, prefetch);
    std::vector<std::uint64_t> held = call.addresses;
    for (std::size_t expert = 1 - part; expert < held.size(); expert += 2) held[expert] = 0;
    if (experts.rows(call.input(), held, rows.data()) != StepError::none) std::abort();
  }
  return combine(call, rows, kernels);
}

// This thread plays the device: two requests, the second right after the first one's answer.
std::vector<std::uint16_t> by_mailbox(const Call &call, ThreadPool &pool, const Kernels &kernels, Prefetch prefetch) {
  std::vector<float> rows = room_for_rows(call);
  Experts experts(call.shape, call.activation, pool, kernels, prefetch);
  Box box{};
  box.tokens = static_cast<int>(call.tokens);
  const moetier::Mail mail = {&box, call.ids.data(), call.weights.data(), call.x_bits.data(), rows.data()};
  const auto compute = [&](const moetier::StepInput &input, std::span<const std::uint64_t> addresses, float *to) {
    return experts.rows(input, addresses, to) == StepError::none;
  };
  moetier::Mailbox mailbox(mail, call.shape.top_k, call.shape.experts, {call.addresses.data()}, pool, compute, {});
  for (unsigned request = 1; request <= 2; ++request) {
    std::fill(rows.begin(), rows.end(), -1.0F);
    mailbox.wake();
    __atomic_store_n(&box.posted, request, __ATOMIC_RELEASE);
    moetier::spin_until([&] { return __atomic_load_n(&box.answered, __ATOMIC_ACQUIRE) == request; });
  }
  return combine(call, rows, kernels);
}

// gate_up from the last expert to the first, one at a time; down in two calls.
std::vector<std::uint16_t> in_pieces(const Call &call, ThreadPool &pool, const Kernels &kernels, Prefetch prefetch) {
  Experts experts(call.shape, call.activation, pool, kernels, prefetch);
  std::vector<std::uint16_t> out(call.tokens * call.shape.hidden);
  experts.begin(call.input());
  std::vector<std::uint64_t> addresses;
  for (const std::int32_t id : experts.ids()) addresses.push_back(call.addresses[static_cast<std::size_t>(id)]);
  const std::span<const std::uint64_t> all(addresses);
  for (std::size_t i = addresses.size(); i-- > 0;) {
    const auto index = static_cast<std::int32_t>(i);
    if (experts.gate_up({&index, 1}, all.subspan(i, 1)) != StepError::none) std::abort();
    if (experts.gate_up({&index, 1}, all.subspan(i, 1)) != StepError::gate_up_twice) std::abort();
  }
  const std::size_t half = addresses.size() / 2;
  if (!addresses.empty() && experts.finish(out.data()) != StepError::unfinished) std::abort();
  if (experts.down(0, all.first(half)) != StepError::none) std::abort();
  if (experts.down(half, all.subspan(half)) != StepError::none) std::abort();
  if (experts.finish(out.data()) != StepError::none) std::abort();
  return out;
}

bool same(const std::vector<std::uint16_t> &found, const std::vector<std::uint16_t> &wanted, const char *isa,
          const char *how, int threads, std::uint64_t number) {
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    if (found[i] == wanted[i]) continue;
    std::printf("call %" PRIu64 ": %s %s with %d threads differs at %zu: %04x instead of %04x\n", number, isa, how,
                threads, i, found[i], wanted[i]);
    return false;
  }
  return true;
}

// Two threads call into one pool, which must make them take turns.
bool callers_take_turns(const Call &call, ThreadPool &pool, const Kernels &kernels) {
  const std::vector<std::uint16_t> wanted = forward(call, pool, kernels, moetier::best_prefetch());
  bool good[2] = {};
  std::vector<std::thread> callers;
  for (bool &result : good)
    callers.emplace_back([&] { result = forward(call, pool, kernels, moetier::best_prefetch()) == wanted; });
  for (std::thread &caller : callers) caller.join();
  return good[0] && good[1];
}

// Pools of every number of threads.
class Pools {
public:
  static int most() { return std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 4, 32); }

  ThreadPool &of(int threads) {
    std::optional<ThreadPool> &pool = pools_[static_cast<std::size_t>(threads)];
    if (!pool) pool.emplace(threads, std::vector<std::vector<int>>());
    return *pool;
  }

private:
  std::vector<std::optional<ThreadPool>> pools_ = std::vector<std::optional<ThreadPool>>(33);
};

// Ways to prefetch between which the kernels of a call may differ: both, whatever this machine's is, where rows are
// long.
std::vector<Prefetch> prefetches(const Call &call) {
  constexpr std::size_t kLong = 4096;
  if (call.shape.hidden < kLong) return {moetier::best_prefetch()};
  return {Prefetch::by_instructions, Prefetch::by_processor};
}

// Every kernel set of this machine, every way to call it and to prefetch, one thread and several. How many comparisons,
// 0 where one failed.
std::uint64_t compare(const Call &call, const std::vector<std::uint16_t> &wanted, Pools &pools, int several,
                      std::uint64_t number) {
  using Way = std::vector<std::uint16_t> (*)(const Call &, ThreadPool &, const Kernels &, Prefetch);
  static constexpr std::pair<const char *, Way> kWays[] = {
      {"forward", forward}, {"in pieces", in_pieces}, {"by rows", by_rows}, {"by mailbox", by_mailbox}};
  std::uint64_t compared = 0;
  for (const Kernels *kernels : moetier::built_kernels()) {
    if (!kernels->available()) continue;
    for (const Prefetch prefetch : prefetches(call)) {
      for (const int threads : {1, several}) {
        for (const auto &[name, way] : kWays) {
          if (way == by_mailbox && !call.bf16) continue; // which is what it takes
          const std::vector<std::uint16_t> found = way(call, pools.of(threads), *kernels, prefetch);
          if (!same(found, wanted, kernels->name, name, threads, number)) return 0;
          ++compared;
        }
      }
    }
  }
  return compared;
}

} // namespace

int main(int argc, char **argv) {
  const std::uint64_t calls = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 300;
  const std::uint64_t first = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 0;
  const bool few = argc > 3 && std::string_view(argv[3]) == "few";
  const Kernels &portable = *moetier::find_kernels("portable");
  Pools pools;
  std::uint64_t compared = 0;
  std::uint64_t hash = 0xCBF29CE484222325U; // FNV-1a over all results: equal on every machine
  bool good = true;
  for (std::uint64_t number = first; number < first + calls && good; ++number) {
    Maker maker(number, few);
    const Call call = maker.call();
    const std::vector<std::uint16_t> wanted = forward(call, pools.of(1), portable, moetier::best_prefetch());
    for (const std::uint16_t bits : wanted) hash = (hash ^ bits) * 0x100000001B3U;
    const int several = 2 + static_cast<int>(number) % (Pools::most() - 1);
    const std::uint64_t more = compare(call, wanted, pools, several, number);
    compared += more;
    good = more > 0;
    if (number % 10 == 0 && !callers_take_turns(call, pools.of(several), portable)) {
      std::printf("call %" PRIu64 ": two callers of one pool got wrong bits\n", number);
      good = false;
    }
  }
  for (const Kernels *kernels : moetier::built_kernels()) {
    std::printf("%s%s ", kernels->name, kernels->available() ? "" : " (not on this machine)");
  }
  std::printf("\ncalls %" PRIu64 " to %" PRIu64 ", 1 to %d threads: %" PRIu64
              " comparisons, %s, results' hash %016" PRIx64 "\n",
              first, first + calls - 1, Pools::most(), compared, good ? "0 differ" : "DIFFERENT", hash);
  return good ? 0 : 1;
}
