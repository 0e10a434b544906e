// AVX-512 with VNNI but not VBMI (Cascade Lake, Cooper Lake).

#include "cpu/zmm.h"

namespace moetier {
namespace {

struct Shuffle {
  [[gnu::always_inline]] static __m512i low_nibbles(__m512i bytes) {
    const __m128i table = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0); // w + 12
    const __m512i nibble = _mm512_set1_epi8(15);
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), _mm512_and_si512(bytes, nibble));
  }
};

} // namespace

extern const Kernels kAvx512Vnni;
const Kernels kAvx512Vnni = {"avx512vnni", has_avx512_vnni, strip<Shuffle>, activate, quantize_f32, quantize_bf16,
                             accumulate,   to_bf16,         read,           multiply, kNever,       nullptr};

} // namespace moetier
