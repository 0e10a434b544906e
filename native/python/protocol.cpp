// Describes protocol.h to Python: of each struct its size and its fields, with the compiler's own offsets.

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <nanobind/nanobind.h>

#include "protocol.h"

namespace nb = nanobind;

namespace {

// "p" a pointer, "f" a float, else "i" or "u" with its bits; how many of them, and where.
template <typename T>
nb::tuple described(const char *name, std::size_t offset) {
  using Element = std::remove_extent_t<T>;
  const std::size_t count = sizeof(T) / sizeof(Element);
  const char *kind = "p";
  if constexpr (std::is_floating_point_v<Element>)
    kind = "f32";
  else if constexpr (std::is_integral_v<Element>) {
    constexpr const char *kinds[2][4] = {{"u8", "u16", "u32", "u64"}, {"i8", "i16", "i32", "i64"}};
    kind = kinds[std::is_signed_v<Element>][sizeof(Element) == 1   ? 0
                                            : sizeof(Element) == 2 ? 1
                                            : sizeof(Element) == 4 ? 2
                                                                   : 3];
  }
  return nb::make_tuple(name, kind, count, offset);
}

} // namespace

#define FIELD(STRUCT, NAME) described<decltype(STRUCT::NAME)>(#NAME, offsetof(STRUCT, NAME))

void bind_protocol(nb::module_ &module) {
  module.def("protocol", [] {
    nb::dict structs;
    structs["Box"] =
        nb::make_tuple(sizeof(Box), nb::make_tuple(FIELD(Box, posted), FIELD(Box, layer), FIELD(Box, tokens),
                                                   FIELD(Box, streamed), FIELD(Box, late), FIELD(Box, device_pad),
                                                   FIELD(Box, answered), FIELD(Box, refused), FIELD(Box, cpu_pad)));
    structs["Costs"] =
        nb::make_tuple(sizeof(Costs), nb::make_tuple(FIELD(Costs, cpu_call), FIELD(Costs, cpu_expert),
                                                     FIELD(Costs, cpu_pair), FIELD(Costs, stream_expert),
                                                     FIELD(Costs, cpu_expert_beside), FIELD(Costs, device_pair)));
    structs["Step"] =
        nb::make_tuple(sizeof(Step), nb::make_tuple(FIELD(Step, sequence), FIELD(Step, awaited), FIELD(Step, released),
                                                    FIELD(Step, pending), FIELD(Step, planned), FIELD(Step, left),
                                                    FIELD(Step, pad), FIELD(Step, from), FIELD(Step, to)));
    structs["HybridStep"] = nb::make_tuple(
        sizeof(HybridStep),
        nb::make_tuple(FIELD(HybridStep, live), FIELD(HybridStep, step), FIELD(HybridStep, box),
                       FIELD(HybridStep, counts), FIELD(HybridStep, patience), FIELD(HybridStep, costs),
                       FIELD(HybridStep, heat), FIELD(HybridStep, records), FIELD(HybridStep, record_bytes),
                       FIELD(HybridStep, layer), FIELD(HybridStep, staging_first), FIELD(HybridStep, staging),
                       FIELD(HybridStep, streams), FIELD(HybridStep, step_ids), FIELD(HybridStep, box_ids),
                       FIELD(HybridStep, box_weights), FIELD(HybridStep, box_x), FIELD(HybridStep, box_streamed),
                       FIELD(HybridStep, box_rows)));
    nb::dict numbers;
    numbers["MAX_PAIRS"] = MAX_PAIRS;
    numbers["MAX_STAGED"] = MAX_STAGED;
    numbers["STEP_THREADS"] = STEP_THREADS;
    numbers["STREAM_BLOCKS"] = STREAM_BLOCKS;
    nb::dict counts;
    counts["calls"] = int(CALLS);
    counts["calls_missed"] = int(CALLS_MISSED);
    counts["hits"] = int(HITS);
    counts["misses"] = int(MISSES);
    counts["streamed"] = int(STREAMED);
    counts["pairs_cpu"] = int(PAIRS_CPU);
    counts["waited_ns"] = int(WAITED_NS);
    counts["COUNTS"] = int(COUNTS);
    return nb::make_tuple(structs, numbers, counts);
  });
}
