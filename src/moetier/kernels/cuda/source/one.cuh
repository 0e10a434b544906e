// Decode of one token: one launch of a block a multiprocessor. Each warp streams all its weights of the layer, those of gate
// and up and then those of down, through one ring in shared memory without a pause.
//
// What is multiplied at a time is a group: eight chains (segments of a row tile) of 16 rows. An int8 tensor-core instruction
// of 16 rows x 32 k x 8 columns takes its left operand from four chains, 8 codes of each row, and its right operand is zero but
// where a column meets its own chain; so the columns of the result are chains, and no lane holds a sum that another holds too.
#pragma once
#include "hybrid.cuh"

constexpr int WARPS = ONE_WARPS, DEPTH = ONE_DEPTH;  // DEPTH: stages of a warp's ring
constexpr int ROW_TILE = 16, GROUP_CHAINS = 8;

// Gate and up: a unit is 32 rows of h, so two row tiles of gate and two of up; its chains are numbered in that order.
struct Up {
  static constexpr bool IS_DOWN = false;
  static constexpr int BLOCKS = HIDDEN / 32, SEGMENTS = segments(BLOCKS), CHAIN = BLOCKS / SEGMENTS;
  static constexpr int STAGE = largest_divisor(CHAIN, ONE_BLOCKS), CHAINS = 4 * SEGMENTS, INPUTS = SEGMENTS;
  __device__ static constexpr size_t codes(int chain) {  // from the first chain's, in a record
    return size_t(chain / (2 * SEGMENTS)) * CODES + size_t(chain % (2 * SEGMENTS)) * CHAIN * 256;
  }
  __device__ static size_t scales(int chain) {
    return size_t(chain / (2 * SEGMENTS)) * SCALES + size_t(chain % (2 * SEGMENTS)) * CHAIN * 16;
  }
  __device__ static int part(int chain) { return chain % SEGMENTS * 4 + chain / SEGMENTS; }  // place of its sums
};
// Down: an item is a row tile of HIDDEN for one pair; its chains are those of the first slice, then the second, ...
struct Down {
  static constexpr bool IS_DOWN = true;
  static constexpr int BLOCKS = INNER / 32, SEGMENTS = segments(BLOCKS), CHAIN = BLOCKS / SEGMENTS;
  static constexpr int STAGE = largest_divisor(CHAIN, ONE_BLOCKS), CHAINS = SEGMENTS * SLICES, INPUTS = CHAINS;
  __device__ static constexpr size_t codes(int chain) {
    return size_t(chain / SEGMENTS) * SLICE_BYTES + size_t(chain % SEGMENTS) * CHAIN * 256;
  }
  __device__ static size_t scales(int chain) {
    return size_t(chain / SEGMENTS) * SLICE_BYTES + size_t(chain % SEGMENTS) * CHAIN * 16;
  }
  __device__ static int part(int chain) { return chain; }
};
template <class P> constexpr int GROUPS = (P::CHAINS + GROUP_CHAINS - 1) / GROUP_CHAINS;
template <class P> constexpr int HELD = P::CHAINS < GROUP_CHAINS ? P::CHAINS : GROUP_CHAINS;  // chains of a group
template <class P> constexpr int PITCH = P::CHAIN * 32 + 32;  // bytes between the activations of chains: other banks
template <class P> constexpr int SUMS = P::CHAINS * ROW_TILE;  // of a unit or an item

constexpr int TEAMS = WARPS / GROUPS<Up>;  // of warps that compute a unit together
constexpr int UNITS = INTERMEDIATE / 32, ROW_TILES = HIDDEN / ROW_TILE;
__device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int STAGE_BYTES = larger(Up::STAGE, Down::STAGE) * GROUP_CHAINS * 272;
// A thread's part of x, eight values each.
constexpr int EIGHTS = HIDDEN / 8, MOST_EIGHTS = (EIGHTS + WARPS * 32 - 1) / (WARPS * 32);
// After the rings: activations, first x, then h of every pair; their exponents; sums.
constexpr int Q_BYTES = larger(Up::INPUTS * PITCH<Up>, TOP_K * Down::INPUTS * PITCH<Down>);
constexpr int EXPONENT_BYTES = (larger(Up::BLOCKS, TOP_K * UNITS) * 4 + 15) / 16 * 16;
static_assert(WARPS % GROUPS<Up> == 0 && Up::STAGE <= 4 && Down::STAGE <= 4 && TOP_K <= 32 && DEPTH >= 2);

struct Progress {  // of all blocks; zero between launches
  u32 units, left;
};

struct Work {  // of the block, in shared memory: registers are scarce
  int pairs, units, items, tiles;  // pairs with a slot; units of all blocks; items and row tiles of this block
  bool pending;                    // the CPU computes some pair
  int pair[TOP_K], slot[TOP_K];    // of those with a slot
  int order[TOP_K], turn[TOP_K];   // in ascending expert id: which pair, and which of those with a slot or why none
};
constexpr int NO_SLOT = -1, NOT_ROUTED = -2;

// Start of a group's weights.
struct Weights {
  const u8 *codes, *scales;
};
__device__ __forceinline__ Weights up_weights(const u8 *record, int unit, int group) {
  const int slice = unit / (INNER / 32), tile = unit % (INNER / 32) * 2;
  record += size_t(slice) * SLICE_BYTES;
  return {record + size_t(tile) * Up::BLOCKS * 256 + Up::codes(group * GROUP_CHAINS),
          record + 3 * CODES + size_t(tile) * Up::BLOCKS * 16 + Up::scales(group * GROUP_CHAINS)};
}
__device__ __forceinline__ Weights down_weights(const u8 *record, int tile, int group) {
  return {record + 2 * CODES + size_t(tile) * Down::BLOCKS * 256 + Down::codes(group * GROUP_CHAINS),
          record + 3 * CODES + 2 * SCALES + size_t(tile) * Down::BLOCKS * 16 + Down::scales(group * GROUP_CHAINS)};
}

// An item of the block: `nth` of its row tiles, for one of the pairs with a slot, one of its groups.
struct Item {
  int nth, pair, group;
  __device__ __forceinline__ Item(const Work &work, int number) {
    nth = number / (work.pairs * GROUPS<Down>);
    const int rest = number % (work.pairs * GROUPS<Down>);
    pair = rest / GROUPS<Down>, group = rest % GROUPS<Down>;
  }
};

// Numbers of what a warp computes, in order: units first, first + step, ...; then items warp, warp + WARPS, ...
__device__ __forceinline__ int first_unit(int warp) { return blockIdx.x + gridDim.x * (warp / GROUPS<Up>); }
__device__ __forceinline__ int unit_step() { return gridDim.x * TEAMS; }

struct SlotWeights {
  const u8 *records;
  size_t stride;
  template <class P> __device__ __forceinline__ Weights weights(const Work &work, int number, int warp) const {
    if (P::IS_DOWN) {
      const Item i(work, number);
      return down_weights(records + size_t(work.slot[i.pair]) * stride, blockIdx.x + gridDim.x * i.nth, i.group);
    }
    return up_weights(records + size_t(work.slot[number / UNITS]) * stride, number % UNITS, warp % GROUPS<Up>);
  }
};

// Shared memory of a stage: codes [block][chain][row] of 16 bytes, rows swizzled so that lanes meet no bank twice; then
// scales [block][chain][row].
struct Stream {  // fills a warp's ring
  u32 ring, swizzled[2];
  int at = 0, number, left = 0;  // left: stages of this unit or item
  bool down = false;
  const u8 *codes, *scales;  // a lane's

  __device__ __forceinline__ Stream(u32 ring, int warp, int lane) : ring(ring), number(first_unit(warp)) {
    const int row = lane % 16, odd = lane / 16;
    swizzled[0] = odd * 256 + (row ^ 2 * odd) * 16;
    swizzled[1] = swizzled[0] ^ 64;
  }
  template <class P> __device__ __forceinline__ void begin(const Weights &weights, int lane) {
    left = P::CHAIN / P::STAGE;
    codes = weights.codes + (lane < 16 ? 0 : P::codes(1)) + lane % 16 * 16;
    scales = weights.scales + P::scales(lane / P::STAGE) + lane % P::STAGE * 16;
  }
  __device__ __forceinline__ void begin(const Work &work, const SlotWeights &slots, int warp, int lane) {
    if (!down && number >= work.units) down = true, number = warp;
    if (!down)
      begin<Up>(slots.weights<Up>(work, number, warp), lane);
    else if (number < work.items)
      begin<Down>(slots.weights<Down>(work, number, warp), lane);
  }
  template <class P> __device__ __forceinline__ void copy(u32 stage, int lane) {
#pragma unroll
    for (int b = 0; b < P::STAGE; b++)
#pragma unroll
      for (int chain = 0; chain < HELD<P>; chain += 2)
        if (HELD<P> > 1 || lane < 16)
          copy16(stage + (b * GROUP_CHAINS + chain) * 256 + swizzled[chain / 2 % 2], codes + P::codes(chain) + b * 256);
    if (lane < HELD<P> * P::STAGE)
      copy16(stage + P::STAGE * GROUP_CHAINS * 256 + (lane % P::STAGE * GROUP_CHAINS + lane / P::STAGE) * 16, scales);
    codes += P::STAGE * 256, scales += P::STAGE * 16;
  }
  __device__ __forceinline__ void fill(const Work &work, const SlotWeights &slots, int warp, int lane) {
    if (left > 0) {
      if (down)
        copy<Down>(ring + at * STAGE_BYTES, lane);
      else
        copy<Up>(ring + at * STAGE_BYTES, lane);
      if (--left == 0) {
        number += down ? WARPS : unit_step();
        begin(work, slots, warp, lane);
      }
    }
    commit();
    at = at + 1 == DEPTH ? 0 : at + 1;
  }
};

// Activations of a group's chains in shared memory: q of input i at i * PITCH, exponents (see Meta) [block][input].
struct Inputs {
  const u8 *q;
  const int *exponents;
};

// Sums of a group: a lane has rows g and g + 8 of chains 2c and 2c + 1. wild, untame: see `repair`.
struct GroupSums {
  float value[2][2];
  u32 wild, untame;
};

struct Constants {  // kept in registers, see Tables
  u32 low, high;
  int magic[4];
  __device__ __forceinline__ Constants() {
    __shared__ volatile u32 constants[3];
    constants[0] = 0x03020100u, constants[1] = 0x0C080604u, constants[2] = MAGIC;
    __syncwarp();
    low = constants[0], high = constants[1];
    for (int i = 0; i < 4; i++) magic[i] = int(constants[2]);
  }
  __device__ __forceinline__ u32 look_up(u32 codes) const { return permute(low, high, codes); }  // of four
};

// x >> 16, by the multipliers: byte permutes keep the unit that shifts busy.
__device__ __forceinline__ u32 upper_half(u32 x) {
  u32 d;
  asm("dp2a.lo.u32.u32 %0, %1, %2, %3;" : "=r"(d) : "r"(x), "r"(0x0100), "r"(0));
  return d;
}

// A lane's part of the right operands, in shared memory: for the chains that come first, and for the other four.
struct Right {
  const u8 *q[2];  // the lane's own chain's activations, or zeros
  int step[2];     // bytes from one block to the next
};

// One block of every chain. The look-up of a negative code is 0 in `positive` (a set top bit of a selector nibble replicates
// the table byte's top bit) and that of a positive one in `negative`, so the sum is the difference of two.
template <class P>
__device__ __forceinline__ void multiply_block(const Constants &constants, GroupSums &sums, const u8 *codes, const u8 *scales,
                                               const Right &right, int block, const int *exponents, int lane) {
  const int g = lane >> 2, c = lane & 3;
  int positive[4], negative[4];
#pragma unroll
  for (int half = 0; half < (HELD<P> > 4 ? 2 : 1); half++) {
    const u8 *mine = codes + half * 1024, *q = right.q[half] + block * right.step[half];
    const uint4 one = *(const uint4 *)mine, two = *(const uint4 *)(mine + 128);
    const uint4 low = *(const uint4 *)q, high = *(const uint4 *)(q + 16);
    const u32 first[4] = {one.x, one.y, one.z, one.w}, second[4] = {two.x, two.y, two.z, two.w};
    const u32 b[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 f = first[i], s = second[i], not_f = f ^ 0x88888888u, not_s = s ^ 0x88888888u;
      const u32 a[4] = {constants.look_up(f), constants.look_up(s), constants.look_up(upper_half(f)), constants.look_up(upper_half(s))};
      const u32 n[4] = {constants.look_up(not_f), constants.look_up(not_s), constants.look_up(upper_half(not_f)),
                        constants.look_up(upper_half(not_s))};
      const bool start = half == 0 && i == 0;
      multiply16(positive, start ? constants.magic : positive, a, b[2 * i], b[2 * i + 1]);
      multiply16(negative, start ? constants.magic : negative, n, b[2 * i], b[2 * i + 1]);
    }
  }
  int exponent[2];
  if (P::INPUTS % 2 == 0) {
    const int2 two = *(const int2 *)exponents;
    exponent[0] = two.x, exponent[1] = two.y;
  } else {
    exponent[0] = exponent[1] = *exponents;
  }
  sums.untame |= u32(exponent[0] | exponent[1]);
  if (HELD<P> == 8 || lane < HELD<P> * 4) sums.wild |= wild_scales(*(const u32 *)(scales + lane * 4));
#pragma unroll
  for (int i = 0; i < 4; i++) {  // row g + 8 * (i / 2), chain 2c + i % 2
    const u32 byte = scale_byte(scale_word(scales + (2 * c + i % 2) * 16, g + i / 2 * 8), g);  // times 2^16
    const float factor = __uint_as_float(byte * 128 + u32(exponent[i % 2]));
    const float d = __fsub_rn(__int_as_float(positive[i]), __int_as_float(negative[i]));
    float &sum = sums.value[i / 2][i % 2];
    sum = __fmaf_rn(d, factor, sum);  // the difference and the product are exact
  }
}

// Again by the letter of the contract, where an operand was outside the range in which the above is the contract's.
template <class P>
__device__ __noinline__ void repair(Weights weights, Inputs inputs, int group, float *parts) {
  __syncwarp();
  for (int i = threadIdx.x % 32; i < HELD<P> * ROW_TILE; i += 32) {
    const int row = i % ROW_TILE, held = i / ROW_TILE, chain = group * GROUP_CHAINS + held, input = chain % P::INPUTS;
    parts[P::part(chain) * ROW_TILE + row] = exact_chain(
        weights.codes + P::codes(held) + row * 16, weights.scales + P::scales(held) + row,
        (const s8 *)(inputs.q + input * PITCH<P>), [&](int b) { return Meta{inputs.exponents[b * P::INPUTS + input], 0.f}.e(); },
        P::CHAIN);
  }
}

// The sums of the next task in the ring to `parts`, while the ring is filled with what comes later.
template <class P>
__device__ __forceinline__ void group_sums(const Constants &constants, Stream &stream, const Work &work, const SlotWeights &slots,
                                           const u8 *ring, int &use_at, const Inputs &inputs, const u8 *zeros, int number,
                                           int group, float *parts, int warp, int lane) {
  const int g = lane >> 2, c = lane & 3;
  const int *exponents = inputs.exponents + (group * GROUP_CHAINS + 2 * c) % P::INPUTS;
  const int mine = c * 256 + (g ^ 2 * c) * 16;
  Right right;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const bool own = g == c + 4 * half && g < HELD<P>;
    right.q[half] = own ? inputs.q + (group * GROUP_CHAINS + g) % P::INPUTS * PITCH<P> : zeros;
    right.step[half] = own ? 32 : 0;
  }
  GroupSums sums = {};
#pragma unroll 1
  for (int step = 0; step < P::CHAIN / P::STAGE; step++) {
    wait_copies<DEPTH - 2>();
    __syncwarp();
    stream.fill(work, slots, warp, lane);
    const u8 *stage = ring + use_at * STAGE_BYTES, *scales = stage + P::STAGE * GROUP_CHAINS * 256;
#pragma unroll
    for (int b = 0; b < P::STAGE; b++)
      multiply_block<P>(constants, sums, stage + b * GROUP_CHAINS * 256 + mine, scales + b * GROUP_CHAINS * 16, right, b,
                        exponents + b * P::INPUTS, lane);
    for (int half = 0; half < 2; half++) right.q[half] += P::STAGE * right.step[half];
    exponents += P::STAGE * P::INPUTS;
    use_at = use_at + 1 == DEPTH ? 0 : use_at + 1;
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int held = 2 * c + i % 2;
    if (held < HELD<P>) parts[P::part(group * GROUP_CHAINS + held) * ROW_TILE + g + i / 2 * 8] = sums.value[i / 2][i % 2];
  }
  if (__any_sync(~0u, sums.wild | sums.untame & 1)) repair<P>(slots.weights<P>(work, number, warp), inputs, group, parts);
}

__device__ __forceinline__ void named_barrier(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
// All lanes of the warps that share a unit.
__device__ __forceinline__ void team_barrier(int warp) {
  if (GROUPS<Up> == 1)
    __syncwarp();
  else
    named_barrier(1 + warp / GROUPS<Up>, GROUPS<Up> * 32);
}

// Rows of h of a unit, one a lane, from its sums.
__device__ __forceinline__ Quantized finish_up(const float *parts, float route_weight, int lane) {
  float gate = parts[lane], up = parts[32 + lane];
#pragma unroll
  for (int s = 1; s < Up::SEGMENTS; s++) gate = __fadd_rn(gate, parts[s * 64 + lane]), up = __fadd_rn(up, parts[s * 64 + 32 + lane]);
  return quantize(swiglu(gate, up, route_weight));
}
