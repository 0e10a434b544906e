// AVX-512 with VNNI and VBMI (Zen 4, Ice Lake and later).

#include "cpu/zmm_vbmi.h"

namespace moetier {

extern const Kernels kAvx512;
const Kernels kAvx512 = {"avx512",   has_avx512_vbmi, strip<Permute>, activate, quantize_f32, quantize_bf16,
                         accumulate, to_bf16,         read,           multiply, kNever,       nullptr};

} // namespace moetier
