// The machine's limits, measured with the same threads and instructions as the kernels.
#pragma once

#include <chrono>
#include <cstdint>
#include <span>

#include "core/kernels.h"
#include "core/pool.h"

namespace moetier {

// Bytes a second at which the pool reads `memory` once in one of the kernel set's ways, 0 to kReadWays - 1; it should
// be larger than every cache.
double read_rate(ThreadPool &pool, const Kernels &kernels, std::size_t way, std::span<const std::uint8_t> memory);

// Integer operations (a multiply and an add are two) a second of all threads at once, without memory.
double multiply_rate(ThreadPool &pool, const Kernels &kernels);

// Seconds from a call of the pool until the last of its threads is at work, `idle` after the call before.
double start_time(ThreadPool &pool, std::chrono::nanoseconds idle);

} // namespace moetier
