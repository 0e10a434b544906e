#include "core/kernels.h"

#include <array>

namespace moetier {

extern const Kernels kPortable;
#if defined(MOETIER_ARM)
extern const Kernels kNeon;
#endif
#if defined(MOETIER_X86)
extern const Kernels kAmxBf16;
extern const Kernels kAmx;
extern const Kernels kAvx512;
extern const Kernels kAvx512Vnni;
extern const Kernels kAvxVnni;
extern const Kernels kAvx2;
#endif

namespace {

// The dispatch table, best first.
constexpr std::array kTable = {
#if defined(MOETIER_ARM)
    &kNeon,
#endif
#if defined(MOETIER_X86)
    &kAmxBf16,  &kAmx, &kAvx512, &kAvx512Vnni, &kAvxVnni, &kAvx2,
#endif
    &kPortable,
};

} // namespace

std::span<const Kernels *const> built_kernels() {
  return kTable;
}

const Kernels *find_kernels(std::string_view name) {
  for (const Kernels *kernels : kTable) {
    if (name == kernels->name && kernels->available()) return kernels;
  }
  return nullptr;
}

// By vendor, since prefetchers are a vendor's design and each was measured to lose with the other's choice
// (docs/performance.md: Zen 4, and a Xeon with AMX). Whatever was not measured gets the instructions, which lose less.
Prefetch best_prefetch() {
#if defined(MOETIER_X86)
  static const bool amd = __builtin_cpu_is("amd") != 0;
  if (amd) return Prefetch::by_processor;
#endif
  return Prefetch::by_instructions;
}

} // namespace moetier
