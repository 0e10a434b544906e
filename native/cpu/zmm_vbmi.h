// The nibble lookup of AVX-512 with VBMI.
#pragma once

#include "cpu/zmm.h"

namespace moetier {
namespace {

struct Permute {
  // w + 12 for each code, four times over: the permute looks at six bits of a byte, so nothing needs masking.
  alignas(64) static constexpr std::uint8_t kTable[64] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0,
                                                          12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0,
                                                          12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0,
                                                          12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
  [[gnu::always_inline]] static __m512i low_nibbles(__m512i bytes) {
    return _mm512_permutexvar_epi8(bytes, _mm512_load_si512(kTable));
  }
};

bool has_avx512_vbmi() {
  return has_avx512_vnni() && __builtin_cpu_supports("avx512vbmi") != 0;
}

} // namespace
} // namespace moetier
