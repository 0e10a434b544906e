// A panel: the weight rows that one block of the prefill kernels computes, for up to PAIRS pairs. The bf16 matrix units take
// activations q * 2^e and integers w, so a block of 32 comes out as d * 2^e exactly (from a zero accumulator: nothing is
// added inside the matrix unit that the contract does not have), and one fused multiply-add, whose product is exact, brings
// in the weight's scale. panel_mma.cuh does it with mma (sm_80 and newer), panel_wgmma.cuh with wgmma (sm_90a).
#pragma once
#include "common.cuh"

constexpr int THREADS = 256;

// w is given to the matrix unit as the bf16 w * 2^-127 (a code's bits in place: 0.5 is subnormal, which it takes), q as
// q * 2^(e + SHIFT): for a tame e that is finite, and so is, and normal, every d * 2^(e + SHIFT - 127).
constexpr int SHIFT = 66;

// A block that is not tame becomes NaN, and so every row sum that it enters: those are computed again.
__device__ __forceinline__ u16 folded(const Quantized &b) {
  return is_tame(b.e) ? u16(__float_as_uint(__fmul_rn(float(b.q), power(b.e + SHIFT))) >> 16) : 0x7FC0;
}

struct Tile {
  int slot, first, count;  // pairs order[first .. first + count) of the expert in `slot`
};
struct Place {  // of a pair: number m of the tile of `count` pairs that begins at order[first]
  int first;
  u16 count, m;
};

template <int PAIRS> struct MembersOf {  // who the pairs of a tile are
  int pairs[PAIRS];
  float weights[PAIRS];
};
template <int PAIRS, int ROWS> struct FlagsOf {
  u8 bad_pair[PAIRS];  // has a block with a NaN: filled by `repair`
  u8 row_tame[ROWS];
};

struct Half {  // row tiles, the first `valid` of which exist
  const u8 *codes, *scales;
  int valid;
};
struct Panel {
  Half a, b;
};

// 8 codes -> 4 registers of two bf16: codes (j, j + 4) in register j, each w * 2^-127. The product puts a nibble at two
// places; the mask keeps the sign of the upper copy and the other bits of the lower one.
__device__ __forceinline__ void unpack_bf16(u32 codes, u32 (&out)[4]) {
#pragma unroll
  for (int j = 0; j < 2; j++) {
    u32 word = j ? codes >> 8 : codes;
    out[2 * j] = (word & 0x000F000Fu) * 0x1040u & 0x81C081C0u;
    out[2 * j + 1] = (word & 0x00F000F0u) * 0x104u & 0x81C081C0u;
  }
}

// Codes of the two rows that a lane holds, and the factors of their scales.
struct Fragment {
  u32 top[4], bottom[4];
  float scale[2];

  // tile: the row tile's 256 bytes of one block; bytes: its 16 scales
  __device__ __forceinline__ void load(const u8 *tile, const u8 *bytes, u32 (&wild)[2]) {
    const int lane = threadIdx.x % 32;
    unpack_bf16(*(const u32 *)(tile + lane * 4), top);
    unpack_bf16(*(const u32 *)(tile + 128 + lane * 4), bottom);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      u32 word = scale_word(bytes, lane / 4 + 8 * half);
      wild[half] |= wild_scales(word);
      scale[half] = __uint_as_float(scale_byte(word, lane / 4) * 128 + (u32(127 - SHIFT - 1) << 23));  // 2^(s - 128 + 127 - SHIFT)
    }
  }
};

// A stage of a panel's weights: TILES row tiles (two halves) of STAGE blocks; codes, then scales.
template <int TILES, int BLOCKS, int STAGE>
__device__ __forceinline__ void copy_weights(u32 stage, const Panel &panel, int block) {
  constexpr int HALF = TILES / 2;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const Half &half = h ? panel.b : panel.a;
#pragma unroll
    for (int first = 0; first < HALF * STAGE * 16; first += THREADS) {
      int i = first + threadIdx.x, tile = i / (STAGE * 16);
      if (tile < half.valid)
        copy16(stage + (h * HALF * STAGE * 16 + i) * 16,
               half.codes + (size_t(tile) * BLOCKS + block) * 256 + i % (STAGE * 16) * 16);
    }
    int tile = threadIdx.x / STAGE;
    if (tile < half.valid)
      copy16(stage + TILES * STAGE * 256 + (h * HALF * STAGE + threadIdx.x) * 16,
             half.scales + (size_t(tile) * BLOCKS + block + threadIdx.x % STAGE) * 16);
  }
}
