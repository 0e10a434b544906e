// NEON with the dot-product extension (Armv8.2 and later: Graviton 2, Ampere Altra, Apple M1).
//
// sdot multiplies signed by signed bytes, so weights enter as w itself. Codes of 4 rows are transposed as 4-byte words,
// after which lane r of every word belongs to row r and one register of q serves four words by its lanes.

#include <arm_neon.h>
#include <sys/auxv.h>

#include "cpu/elementwise.h"
#include "cpu/prefetch.h"

#ifndef HWCAP_ASIMDDP
#define HWCAP_ASIMDDP (1UL << 20)
#endif

namespace moetier {
namespace {

constexpr std::size_t kGroup = 4;    // rows of activations that share a pass over the weights
constexpr std::size_t kQuarters = 4; // registers of 4 rows in a tile

// w of 4 rows: even k of word j in w[j], odd k in w[4 + j].
[[gnu::always_inline]] inline void unpack(const std::uint8_t *codes, int8x16_t *w) {
  static constexpr std::int8_t kIntegers[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  const int8x16_t table = vld1q_s8(kIntegers);
  const uint32x4_t a0 = vreinterpretq_u32_u8(vld1q_u8(codes));
  const uint32x4_t a1 = vreinterpretq_u32_u8(vld1q_u8(codes + 16));
  const uint32x4_t a2 = vreinterpretq_u32_u8(vld1q_u8(codes + 32));
  const uint32x4_t a3 = vreinterpretq_u32_u8(vld1q_u8(codes + 48));
  const uint64x2_t b0 = vreinterpretq_u64_u32(vtrn1q_u32(a0, a1));
  const uint64x2_t b1 = vreinterpretq_u64_u32(vtrn2q_u32(a0, a1));
  const uint64x2_t b2 = vreinterpretq_u64_u32(vtrn1q_u32(a2, a3));
  const uint64x2_t b3 = vreinterpretq_u64_u32(vtrn2q_u32(a2, a3));
  const uint64x2_t words[4] = {vtrn1q_u64(b0, b2), vtrn1q_u64(b1, b3), vtrn2q_u64(b0, b2), vtrn2q_u64(b1, b3)};
  for (int j = 0; j < 4; ++j) {
    const uint8x16_t bytes = vreinterpretq_u8_u64(words[j]);
    w[j] = vqtbl1q_s8(table, vandq_u8(bytes, vdupq_n_u8(15)));
    w[4 + j] = vqtbl1q_s8(table, vshrq_n_u8(bytes, 4));
  }
}

[[gnu::always_inline]] inline int32x4_t dot(const int8x16_t *w, const std::int8_t *q) {
  const int8x16_t even = vld1q_s8(q);
  const int8x16_t odd = vld1q_s8(q + 16);
  int32x4_t d0 = vdotq_laneq_s32(vdupq_n_s32(0), w[0], even, 0);
  int32x4_t d1 = vdotq_laneq_s32(vdupq_n_s32(0), w[4], odd, 0);
  d0 = vdotq_laneq_s32(d0, w[1], even, 1);
  d1 = vdotq_laneq_s32(d1, w[5], odd, 1);
  d0 = vdotq_laneq_s32(d0, w[2], even, 2);
  d1 = vdotq_laneq_s32(d1, w[6], odd, 2);
  d0 = vdotq_laneq_s32(d0, w[3], even, 3);
  d1 = vdotq_laneq_s32(d1, w[7], odd, 3);
  return vaddq_s32(d0, d1);
}

// sum + d * 2^c: +0 where c is too small, NaN where it is too large; the product is exact, so fusing changes no bit.
[[gnu::always_inline]] inline float32x4_t add_block(float32x4_t sum, int32x4_t d, int32x4_t scales,
                                                    std::int32_t exponent) {
  const int32x4_t field = vaddq_s32(scales, vdupq_n_s32(exponent >> 23));
  const uint32x4_t some = vcgeq_s32(field, vdupq_n_s32(kMinShift + 127));
  const uint32x4_t over = vcgtq_s32(field, vdupq_n_s32(kMaxShift + 127));
  const uint32x4_t bits = vandq_u32(vreinterpretq_u32_s32(vshlq_n_s32(field, 23)), some);
  const uint32x4_t power = vbslq_u32(over, vdupq_n_u32(0x7FC00000U), bits);
  return vfmaq_f32(sum, vcvtq_f32_s32(d), vreinterpretq_f32_u32(power));
}

[[gnu::always_inline]] inline void load_scales(const std::uint8_t *scales, int32x4_t *out) {
  const uint8x16_t bytes = vld1q_u8(scales);
  const uint16x8_t low = vmovl_u8(vget_low_u8(bytes));
  const uint16x8_t high = vmovl_u8(vget_high_u8(bytes));
  out[0] = vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(low)));
  out[1] = vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(low)));
  out[2] = vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(high)));
  out[3] = vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(high)));
}

template <std::size_t Count>
void group(const StripJob &job, std::size_t first) {
  const std::size_t per_segment = job.blocks / segments(job.blocks);
  for (std::size_t tile = 0; tile < 2; ++tile) {
    const std::size_t start = tile * job.blocks;
    float32x4_t total[Count][kQuarters];
    for (auto &row : total) {
      for (float32x4_t &quarter : row) quarter = vdupq_n_f32(0.0F);
    }
    for (std::size_t begin = 0; begin < job.blocks; begin += per_segment) {
      float32x4_t sum[Count][kQuarters];
      for (auto &row : sum) {
        for (float32x4_t &quarter : row) quarter = vdupq_n_f32(0.0F);
      }
      for (std::size_t b = begin; b < begin + per_segment; ++b) {
        prefetch_codes(job, start + b);
        __builtin_prefetch(job.next.scales + (start + b) * kTileRows);
        int32x4_t scales[kQuarters];
        load_scales(job.strip.scales + (start + b) * kTileRows, scales);
#pragma GCC unroll 4
        for (std::size_t quarter = 0; quarter < kQuarters; ++quarter) {
          int8x16_t w[8];
          unpack(job.strip.codes + (start + b) * kTileCodes + quarter * kTileCodes / kQuarters, w);
#pragma GCC unroll 4
          for (std::size_t m = 0; m < Count; ++m) {
            const ActBlock &act = job.rows[first + m][b];
            sum[m][quarter] = add_block(sum[m][quarter], dot(w, act.q), scales[quarter], act.exponent);
          }
        }
      }
      for (std::size_t m = 0; m < Count; ++m) {
        for (std::size_t i = 0; i < kQuarters; ++i) total[m][i] = vaddq_f32(total[m][i], sum[m][i]);
      }
    }
    for (std::size_t m = 0; m < Count; ++m) {
      float *out = job.out + (first + m) * kStripRows + tile * kTileRows;
      for (std::size_t i = 0; i < kQuarters; ++i) vst1q_f32(out + 4 * i, total[m][i]);
    }
  }
}

void strip(const StripJob &job) {
  using Group = void (*)(const StripJob &, std::size_t);
  static constexpr Group kGroups[kGroup] = {group<1>, group<2>, group<3>, group<4>};
  const std::size_t number = (job.count + kGroup - 1) / kGroup;
  for (std::size_t i = 0; i < number; ++i) { // of nearly equal sizes
    const std::size_t first = i * job.count / number;
    kGroups[(i + 1) * job.count / number - first - 1](job, first);
  }
}

std::size_t multiply(std::size_t rounds) {
  int8x16_t w[8];
  for (int8x16_t &part : w) part = vdupq_n_s8(3);
  std::int8_t q[kBlock] = {1};
  for (std::size_t round = 0; round < rounds; ++round) {
    int32x4_t d = dot(w, q);
    asm volatile("" : "+m"(q) : "w"(d)); // every round counts
  }
  return 2 * kBlock * kTileRows / kQuarters;
}

bool available() {
  return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
}

} // namespace

extern const Kernels kNeon;
const Kernels kNeon = {"neon",     available, strip, activate, quantize_f32, quantize_bf16,
                       accumulate, to_bf16,   read,  multiply, kNever,       nullptr};

} // namespace moetier
