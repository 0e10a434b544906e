// AVX-VNNI with 256-bit registers (Alder Lake, Zen 5 and later, also where AVX-512 is switched off).

#include <cpuid.h>

#include "cpu/ymm.h"

namespace moetier {
namespace {

struct Dpbusd {
  [[gnu::always_inline]] static __m256i block(const __m256i *u, const std::int8_t *q) {
    __m256i even = _mm256_setzero_si256(); // two chains: the instruction's latency is several cycles
    __m256i odd = _mm256_setzero_si256();
    for (int j = 0; j < 4; ++j) {
      even = _mm256_dpbusd_avx_epi32(even, u[j], word(q + 4 * j));
      odd = _mm256_dpbusd_avx_epi32(odd, u[4 + j], word(q + 16 + 4 * j));
    }
    return _mm256_add_epi32(even, odd);
  }
};

bool available() {
  constexpr unsigned kAvxVnniBit = 1U << 4; // of eax; older compilers have no name for it
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0 &&
         __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a & kAvxVnniBit) != 0;
}

} // namespace

extern const Kernels kAvxVnni;
const Kernels kAvxVnni = {"avxvnni",  available, strip<Dpbusd>, activate,         quantize_f32, quantize_bf16,
                          accumulate, to_bf16,   read,          multiply<Dpbusd>, kNever,       nullptr};

} // namespace moetier
