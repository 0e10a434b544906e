// Compares every kernel set of this machine with the portable one on random calls, without Python, so that the address,
// undefined-behaviour and thread sanitizers see the whole core. Exit 1 on any difference.
//
// `compare [calls] [first] [few]`: the calls from number `first` on; a call depends on its number alone, so ranges may
// be run apart. Hidden and intermediate sizes go through all pairs of multiples of 32 up to 512; every tenth
// call has long rows, every 100th the sizes of a model. With `few`, calls are so small that hundreds of them are looked
// at under the thread sanitizer: what the threads do with each other does not depend on how much each has to do.

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>
#include <optional>
#include <random>
#include <string_view>
#include <thread>
#include <vector>

#include "core/experts.h"

namespace {

using moetier::Experts;
using moetier::Kernels;
using moetier::StepError;
using moetier::ThreadPool;

struct Free {
  void operator()(std::uint8_t *memory) const { std::free(memory); }
};
using Record = std::unique_ptr<std::uint8_t[], Free>;

std::size_t slice_bytes(const moetier::Shape &shape) {
  const std::size_t bytes = 3 * shape.hidden * shape.inner * 17 / 32;
  return (bytes + 63) / 64 * 64;
}

// A layer call made at random: shapes from one block up, scales and activations of any magnitude, odd ids.
struct Call {
  moetier::Shape shape{};
  moetier::Activation activation{};
  std::size_t tokens = 0;
  bool bf16 = false;
  std::vector<float> x;
  std::vector<std::uint16_t> x_bits;
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
  std::vector<Record> records;
  std::vector<std::uint64_t> addresses;

  moetier::StepInput input() const {
    return {bf16 ? nullptr : x.data(), bf16 ? x_bits.data() : nullptr, ids.data(), nullptr, weights.data(), tokens};
  }
};

// Makes the call of a number.
class Maker {
public:
  Maker(std::uint64_t number, bool few) : number_(number), few_(few), random_(number) {}

  std::size_t below(std::size_t bound) { return std::uniform_int_distribution<std::size_t>(0, bound - 1)(random_); }

  Call call() {
    Call call;
    const std::size_t slices = std::size_t{1} << below(3);
    const std::size_t count = std::size_t{1} << below(3);
    const std::size_t most = few_ ? kFewBlocks : kBlocks;
    const std::size_t hidden = 32 * (1 + number_ % most);
    const std::size_t inner = 32 * (1 + number_ / most % most);
    call.shape = {hidden, inner, 1 + below(6), 1 + below(4), 0, count, 1 + below(few_ ? 12 : 90)};
    if (!few_ && number_ % 10 == 9) call.shape = long_shape(count);
    if (!few_ && number_ % 100 == 99) call.shape = model_shape(count);
    call.shape.first_slice = below(slices);
    call.activation = {below(2) == 1, 0.5F, below(2) == 1};
    call.tokens = 1 + below(call.shape.max_tokens);
    call.bf16 = below(2) == 1;
    spread_ = kSpreads[below(std::size(kSpreads))];
    fill_records(call);
    fill_inputs(call);
    return call;
  }

private:
  static constexpr std::size_t kBlocks = 16;
  static constexpr std::size_t kFewBlocks = 4;
  struct Sizes {
    std::size_t hidden, intermediate;
  };
  static constexpr Sizes kModels[] = {{4096, 2048}, {5120, 2304}, {6144, 2048}, {7168, 2048}, {4096, 1536}};

  // Long rows of few tokens, which have kernels of their own.
  moetier::Shape long_shape(std::size_t slices) {
    return {32 * (120 + below(24)), 32 * (1 + below(3)), 1 + below(3), 1 + below(2), 0, slices, 1 + below(4)};
  }

  moetier::Shape model_shape(std::size_t slices) {
    const Sizes sizes = kModels[below(std::size(kModels))];
    return {sizes.hidden, sizes.intermediate / slices, 2, 1 + below(2), 0, slices, 1 + below(3)};
  }

  void fill_records(Call &call) {
    const std::size_t size = (call.shape.first_slice + call.shape.slices) * slice_bytes(call.shape);
    const Spread spread = spread_;
    for (std::size_t i = 0; i < call.shape.experts; ++i) {
      Record record(static_cast<std::uint8_t *>(std::aligned_alloc(64, size)));
      for (std::size_t at = 0; at < size; at += sizeof(std::uint64_t)) { // sizes are multiples of 64
        const std::uint64_t bits = random_();
        std::memcpy(record.get() + at, &bits, sizeof bits);
      }
      for (std::size_t slice = 0; slice < call.shape.first_slice + call.shape.slices; ++slice) {
        const std::size_t codes = 3 * call.shape.hidden * call.shape.inner / 2;
        std::uint8_t *scales = record.get() + slice * slice_bytes(call.shape) + codes;
        const std::size_t down = codes / 16 / 3 * 2; // the first of down's scales, which stay usual at the edges
        for (std::size_t at = 0; at < codes / 16; ++at) {
          const std::size_t few = at >= down && spread.edge ? 6 : spread.few;
          const std::size_t least = at >= down && spread.edge ? 118 : spread.least;
          scales[at] = static_cast<std::uint8_t>(least + below(few));
        }
      }
      call.addresses.push_back(reinterpret_cast<std::uint64_t>(record.get()));
      call.records.push_back(std::move(record));
    }
  }

  void fill_inputs(Call &call) {
    std::normal_distribution<float> normal;
    const int odd = below(4) == 0 ? static_cast<int>(below(200)) - 100 : 0;
    const int magnitude = spread_.edge ? spread_.magnitude - static_cast<int>(below(12)) : odd;
    for (std::size_t i = 0; i < call.tokens * call.shape.hidden; ++i) {
      call.x.push_back(std::ldexp(normal(random_), magnitude));
      std::uint32_t bits;
      std::memcpy(&bits, &call.x.back(), sizeof bits);
      call.x_bits.push_back(static_cast<std::uint16_t>(bits >> 16));
    }
    if (below(4) == 0) {
      const std::size_t at = below(call.x.size());
      call.x[at] = __builtin_nanf("");
      call.x_bits[at] = 0x7F80;
    }
    for (std::size_t i = 0; i < call.tokens * call.shape.top_k; ++i) {
      call.ids.push_back(static_cast<std::int32_t>(below(call.shape.experts + 2)) - 1);
      call.weights.push_back(normal(random_));
    }
  }

  // E8M0 bytes from `least` on; at an edge those of gate and up alone, with x about 2^magnitude at most.
  struct Spread {
    std::size_t least;
    std::size_t few;
    bool edge;
    int magnitude;
  };
  static constexpr Spread kSpreads[] = {{0, 255, false, 0}, {118, 40, false, 0}, {118, 6, false, 0},
                                        {0, 4, true, 125},  {250, 5, true, -95}, {60, 6, true, 126}};

  std::uint64_t number_;
  bool few_;
  std::mt19937_64 random_;
  Spread spread_{};
};

std::vector<std::uint16_t> forward(const Call &call, ThreadPool &pool, const Kernels &kernels) {
  Experts experts(call.shape, call.activation, pool, kernels);
  std::vector<std::uint16_t> out(call.tokens * call.shape.hidden);
  if (experts.forward(call.input(), call.addresses, out.data()) != StepError::none) std::abort();
  return out;
}

// The rows of two objects that hold every other expert, combined by the contract's last step.
std::vector<std::uint16_t> by_rows(const Call &call, ThreadPool &pool, const Kernels &kernels) {
  const std::size_t hidden = call.shape.hidden;
  std::vector<float> rows(call.tokens * call.shape.top_k * hidden);
  for (std::size_t part = 0; part < 2; ++part) {
    Experts experts(call.shape, call.activation, pool, kernels);
    std::vector<std::uint64_t> held = call.addresses;
    for (std::size_t expert = 1 - part; expert < held.size(); expert += 2) held[expert] = 0;
    if (experts.rows(call.input(), held, rows.data()) != StepError::none) std::abort();
  }
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

// gate_up from the last expert to the first, one at a time; down in two calls.
std::vector<std::uint16_t> in_pieces(const Call &call, ThreadPool &pool, const Kernels &kernels) {
  Experts experts(call.shape, call.activation, pool, kernels);
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
  const std::vector<std::uint16_t> wanted = forward(call, pool, kernels);
  bool good[2] = {};
  std::vector<std::thread> callers;
  for (bool &result : good) callers.emplace_back([&] { result = forward(call, pool, kernels) == wanted; });
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

// Every kernel set of this machine, every way to call it, one thread and several. How many comparisons, 0 where one
// failed.
std::uint64_t compare(const Call &call, const std::vector<std::uint16_t> &wanted, Pools &pools, int several,
                      std::uint64_t number) {
  using Way = std::vector<std::uint16_t> (*)(const Call &, ThreadPool &, const Kernels &);
  static constexpr std::pair<const char *, Way> kWays[] = {
      {"forward", forward}, {"in pieces", in_pieces}, {"by rows", by_rows}};
  std::uint64_t compared = 0;
  for (const Kernels *kernels : moetier::built_kernels()) {
    if (!kernels->available()) continue;
    for (const int threads : {1, several}) {
      for (const auto &[name, way] : kWays) {
        if (!same(way(call, pools.of(threads), *kernels), wanted, kernels->name, name, threads, number)) return 0;
        ++compared;
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
    const std::vector<std::uint16_t> wanted = forward(call, pools.of(1), portable);
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
