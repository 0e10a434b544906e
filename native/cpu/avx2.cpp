// AVX2 and FMA (Haswell, Zen and later).

#include "cpu/ymm.h"

namespace moetier {
namespace {

struct Maddubs {
  // Pairs of products fit 16 bits (2 * 24 * 127 = 6,096), and so does the sum of four of them (24,384).
  [[gnu::always_inline]] static __m256i block(const __m256i *u, const std::int8_t *q) {
    __m256i halves[2];
    for (int half = 0; half < 2; ++half) {
      halves[half] = _mm256_maddubs_epi16(u[4 * half], word(q + 16 * half));
      for (int j = 1; j < 4; ++j) {
        const __m256i pairs = _mm256_maddubs_epi16(u[4 * half + j], word(q + 16 * half + 4 * j));
        halves[half] = _mm256_add_epi16(halves[half], pairs);
      }
    }
    const __m256i ones = _mm256_set1_epi16(1);
    return _mm256_add_epi32(_mm256_madd_epi16(halves[0], ones), _mm256_madd_epi16(halves[1], ones));
  }
};

bool available() {
  return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0;
}

} // namespace

extern const Kernels kAvx2;
const Kernels kAvx2 = {"avx2",     available, strip<Maddubs>, activate,          quantize_f32, quantize_bf16,
                       accumulate, to_bf16,   read,           multiply<Maddubs>, kNever,       nullptr};

} // namespace moetier
