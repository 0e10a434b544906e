// Decode of few tokens, memory-bound. A warp streams its segment of row tiles through its own ring in shared memory and
// multiplies by int8 tensor-core instructions of 16 rows x 32 k x 8 tokens: a tile of the record is exactly one instruction's
// left operand.
#pragma once
#include "hybrid.cuh"

// GROUP, a macro: pairs of one expert that share a pass over its weights, at most.

// What a warp's ring holds of one stage: codes and scales of TILES row tiles, then activations of up to GROUP pairs.
template <int TILES, int BLOCKS> struct Stage {
  static constexpr int codes = TILES * BLOCKS * 256, scales = TILES * BLOCKS * 16;
  static constexpr int q = codes + scales, meta = q + GROUP * BLOCKS * 32, bytes = meta + GROUP * BLOCKS * 8;
  static constexpr int stride = (bytes + 15) / 16 * 16;
};

// Where a warp copies weights from: codes and scales of each row tile, at its chain's first block.
template <int TILES, int BLOCKS> struct Weights {
  const u8 *codes[TILES], *scales[TILES];
};

// A warp's ring of DEPTH stages in shared memory. Stages are filled and used in turn, each as often as the other.
template <int TILES, int BLOCKS, int DEPTH> struct Ring {
  using Layout = Stage<TILES, BLOCKS>;
  u32 address;
  const u8 *memory;
  int fill_at = 0, use_at = 0;

  __device__ __forceinline__ explicit Ring(const u8 *memory) : address(shared_address(memory)), memory(memory) {}
  __device__ __forceinline__ u32 unused() const { return address + fill_at * Layout::stride; }
  __device__ __forceinline__ const u8 *used() const { return memory + use_at * Layout::stride; }

  // Starts the copy of BLOCKS blocks of weights from `block` on into the next unused stage.
  __device__ __forceinline__ void fill(const Weights<TILES, BLOCKS> &weights, int block, int lane) const {
    const u32 stage = unused();
#pragma unroll
    for (int t = 0; t < TILES; t++) {
#pragma unroll
      for (int i = 0; i < BLOCKS * 16; i += 32)
        if (BLOCKS % 2 == 0 || i + lane < BLOCKS * 16)
          copy16(stage + t * BLOCKS * 256 + (i + lane) * 16, weights.codes[t] + block * 256 + (i + lane) * 16);
      const u8 *scales = weights.scales[t];
#if __CUDA_ARCH__ >= 1000
      asm("" : "+l"(scales));  // else the compiler puts the pointers into local memory, to pick one by index
#endif
      if (lane / BLOCKS == t) copy16(stage + Layout::codes + lane * 16, scales + (block + lane % BLOCKS) * 16);
    }
  }
  __device__ __forceinline__ void filled() { fill_at = fill_at + 1 == DEPTH ? 0 : fill_at + 1; }

  // Waits for the oldest stage: its weights, and what was committed DEPTH - 2 commits ago.
  __device__ __forceinline__ void wait() const {
    wait_copies<DEPTH - 2>();
    __syncwarp();
  }
  __device__ __forceinline__ void advance() { use_at = use_at + 1 == DEPTH ? 0 : use_at + 1; }
};

// Where a lane copies activations from: of up to GROUP pairs, whose row numbers are in shared memory. The common single
// pair has pointers of its own: 16 bytes of q and, in the first lanes, one Meta a lane.
template <int TILES, int BLOCKS> struct Activations {
  const s8 *q;
  const Meta *meta;
  const u16 *rows;
  int count, pitch, first;  // first: the chain's first block, of `pitch` blocks a row

  __device__ __forceinline__ Activations(const s8 *all_q, const Meta *all_meta, const u16 *rows, int count, int pitch, int first,
                                         int lane)
      : q(all_q), meta(all_meta), rows(rows), count(count), pitch(pitch), first(first) {
    if (count == 1) {
      size_t at = rows[0] * pitch + first;
      q += at * 32 + lane * 16;
      meta += at + lane;
    }
  }
  __device__ __forceinline__ void copy(u32 stage, int block, int lane) const {
    using Layout = Stage<TILES, BLOCKS>;
    if (count == 1) {
      if (lane < BLOCKS * 2) copy16(stage + Layout::q + lane / 2 * GROUP * 32 + lane % 2 * 16, q + block * 32);
      if (lane < BLOCKS) copy8(stage + Layout::meta + lane * GROUP * 8, meta + block);
      return;
    }
    for (int at = lane; at < count * BLOCKS * 2; at += 32) {
      int m = at / (BLOCKS * 2), b = at / 2 % BLOCKS;
      copy16(stage + Layout::q + (b * GROUP + m) * 32 + at % 2 * 16,
             q + size_t(rows[m] * pitch + first + block + b) * 32 + at % 2 * 16);
    }
    for (int at = lane; at < count * BLOCKS; at += 32) {
      int m = at / BLOCKS, b = at % BLOCKS;
      copy8(stage + Layout::meta + (b * GROUP + m) * 8, meta + rows[m] * pitch + first + block + b);
    }
  }
};

// Sums of a warp: rows g and g + 8 of each tile; for one pair every column holds that pair, so one value a row is kept,
// else columns 2c and 2c + 1. wild: not zero where an operand left the range in which this arithmetic is the contract's.
template <int TILES, int COLUMNS> struct Sums {
  float value[TILES][2 * COLUMNS];
  u32 wild;
  __device__ __forceinline__ void clear() {
    wild = 0;
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
      for (int i = 0; i < 2 * COLUMNS; i++) value[t][i] = 0.f;
  }
};

template <int TILES, int BLOCKS, int COLUMNS>
__device__ __forceinline__ void multiply(const Tables &tables, Sums<TILES, COLUMNS> &sums, const u8 *stage, const u8 *all_q,
                                         const u8 *all_meta, int count, int lane) {
  const int g = lane >> 2, c = lane & 3;
#pragma unroll
  for (int i = 0; i < TILES * BLOCKS * 4; i += 32)  // a lane checks four scales
    if (TILES * BLOCKS * 4 - i >= 32 || i + lane < TILES * BLOCKS * 4) sums.wild |= wild_scales(*(const u32 *)(stage + TILES * BLOCKS * 256 + (i + lane) * 4));
#pragma unroll
  for (int b = 0; b < BLOCKS; b++) {
    uint2 q = *(const uint2 *)(all_q + (b * GROUP + (COLUMNS == 1 ? 0 : g)) * 32 + c * 8);
    Meta meta[COLUMNS];
    if (COLUMNS == 1) {
      meta[0] = ((const Meta *)all_meta)[b * GROUP];
      sums.wild |= meta[0].exponent & 1;
    } else {
      int4 two = *(const int4 *)(all_meta + (b * GROUP + 2 * c) * 8);
      meta[0] = {two.x, __int_as_float(two.y)}, meta[COLUMNS - 1] = {two.z, __int_as_float(two.w)};
      sums.wild |= (2 * c < count ? two.x & 1 : 0) | (2 * c + 1 < count ? two.z & 1 : 0);
    }
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      const u8 *tile = stage + (t * BLOCKS + b) * 256 + lane * 4;
      u32 a[4];
      unpack(tables, *(const u32 *)tile, a[0], a[2]);
      unpack(tables, *(const u32 *)(tile + 128), a[1], a[3]);
      int d[4];
      multiply16(d, tables.magic, a, q.x, q.y);
      const u8 *scales = stage + TILES * BLOCKS * 256 + (t * BLOCKS + b) * 16;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        u32 byte = scale_byte(scale_word(scales, g + 8 * half), g);  // times 2^16
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) {
          float factor = __uint_as_float(byte * 128 + u32(meta[j].exponent));  // 2^c
          float &sum = sums.value[t][half * COLUMNS + j];
          sum = __fmaf_rn(__fsub_rn(__int_as_float(d[half * 2 + j]), meta[j].base), factor, sum);  // the product is exact
        }
      }
    }
  }
}

// The same, of a stage that holds its activations too.
template <int TILES, int BLOCKS, int COLUMNS>
__device__ __forceinline__ void multiply(const Tables &tables, Sums<TILES, COLUMNS> &sums, const u8 *stage, int count, int lane) {
  using Layout = Stage<TILES, BLOCKS>;
  multiply<TILES, BLOCKS, COLUMNS>(tables, sums, stage, stage + Layout::q, stage + Layout::meta, count, lane);
}

// Sums of one tile to parts[row * pitch + column * step]; then, where something was wild, again by the contract's letter.
template <int COLUMNS, class Target>
__device__ __forceinline__ void store(const float *values, int count, int lane, Target target) {
  const int g = lane >> 2, c = lane & 3;
#pragma unroll
  for (int half = 0; half < 2; half++)
#pragma unroll
    for (int j = 0; j < COLUMNS; j++) {
      int m = COLUMNS == 1 ? 0 : 2 * c + j;
      if (COLUMNS == 1 ? c == 0 : m < count) target(g + 8 * half, m) = values[half * COLUMNS + j];
    }
}
template <class Target>
__device__ __noinline__ void repair(const u8 *codes, const u8 *scales, const s8 *q, const Meta *meta, const u16 *rows, int count,
                                    int pitch, int first, int blocks, Target target) {
  __syncwarp();
  for (int i = threadIdx.x % 32; i < 16 * count; i += 32) {
    int row = i % 16, m = i / 16;
    size_t at = size_t(rows[m]) * pitch + first;
    target(row, m) = exact_chain(codes + row * 16, scales + row, q + at * 32, [&](int b) { return meta[at + b].e(); }, blocks);
  }
}

// Gate and up: 32 rows of h at a time, four row tiles.
constexpr int UP_BLOCKS = HIDDEN / 32, UP_SEGMENTS = segments(UP_BLOCKS), UP_CHAIN = UP_BLOCKS / UP_SEGMENTS;
constexpr int UP_TILES = UP_SEGMENTS >= 2 ? UP_SEGMENTS / 2 : 1;  // of the four row tiles of a block: those of one warp
constexpr int UP_WARPS = UP_SEGMENTS * 4 / UP_TILES;

struct UpTarget {  // partial sums in shared memory: float [segment][tile][16][GROUP]
  float *tile;
  __device__ __forceinline__ float &operator()(int row, int m) const { return tile[row * GROUP + m]; }
};

// The weights of 32 rows of h from `row` on: tiles 0 and 1 are gate, 2 and 3 up; a warp has UP_TILES of them, one segment.
template <int STAGE>
__device__ __forceinline__ Weights<UP_TILES, STAGE> up_weights(const u8 *record, int row, int warp) {
  const int part = row / INNER, mine = warp / UP_SEGMENTS * UP_TILES;
  record += size_t(part) * SLICE_BYTES;
  auto matrix = [&](int t) { return (mine + t) / 2; };
  auto start = [&](int t) {
    return (size_t(row - part * INNER) / 16 + (mine + t) % 2) * UP_BLOCKS + warp % UP_SEGMENTS * UP_CHAIN;
  };
  Weights<UP_TILES, STAGE> weights;
#pragma unroll
  for (int t = 0; t < UP_TILES; t++) {
    weights.codes[t] = record + matrix(t) * CODES + start(t) * 256;
    weights.scales[t] = record + 3 * CODES + matrix(t) * SCALES + start(t) * 16;
  }
  return weights;
}

// A warp's sums to the partial sums in shared memory, by the letter where something was wild.
template <int STAGE, int COLUMNS>
__device__ __forceinline__ void store_up(float *parts, const Sums<UP_TILES, COLUMNS> &sums, const Weights<UP_TILES, STAGE> &weights,
                                         const s8 *q, const Meta *meta, const u16 *rows, int count, int warp, int lane) {
  const int segment = warp % UP_SEGMENTS, tile = warp / UP_SEGMENTS * UP_TILES;
  const bool wild = __any_sync(~0u, sums.wild);
#pragma unroll
  for (int t = 0; t < UP_TILES; t++) {
    UpTarget target = {parts + (segment * 4 + tile + t) * 16 * GROUP};
    store<COLUMNS>(sums.value[t], count, lane, target);
    if (wild)
      repair(weights.codes[t], weights.scales[t], q, meta, rows, count, UP_BLOCKS, segment * UP_CHAIN, UP_CHAIN, target);
  }
}

// h of one row (a lane) for pair m, from the partial sums.
__device__ __forceinline__ Quantized finish_up(const float *parts, int m, float route_weight, int lane) {
  const float *at = parts + lane * GROUP + m;
  float gate = at[0], up = at[32 * GROUP];
#pragma unroll
  for (int s = 1; s < UP_SEGMENTS; s++) {
    gate = __fadd_rn(gate, at[s * 64 * GROUP]);
    up = __fadd_rn(up, at[(s * 64 + 32) * GROUP]);
  }
  return quantize(swiglu(gate, up, route_weight));
}

// Down: 16 rows of every pair's answer at a time, then combined token by token. A chain is one segment of one slice; a task is one chain of one item (up to GROUP pairs of one expert); warps take tasks in turn through one ring.
constexpr int DOWN_BLOCKS = INNER / 32, DOWN_SEGMENTS = segments(DOWN_BLOCKS), DOWN_CHAIN = DOWN_BLOCKS / DOWN_SEGMENTS;
constexpr int CHAINS = DOWN_SEGMENTS * SLICES, DOWN_WARPS = 8, DOWN_STAGE = largest_divisor(DOWN_CHAIN, DOWN_BLOCKS_A_STAGE);
using DownStage = Stage<1, DOWN_STAGE>;

struct Work {  // the step's pairs, grouped: filled by `plan`
  const u8 *record[MAX_PAIRS];  // of each item
  int slot[MAX_PAIRS], id[MAX_PAIRS];
  u16 rank[MAX_PAIRS], count[MAX_PAIRS], member[MAX_PAIRS][GROUP];
  u16 order[MAX_PAIRS];  // of each token: its pairs in ascending expert id
};

__device__ __forceinline__ int plan(Work &work, const int *ids, const int *slot_table, const u8 *slots, size_t stride, int pairs) {
  const int p = threadIdx.x;
  if (p < pairs) {
    int id = ids[p];
    work.id[p] = id;
    work.slot[p] = id >= 0 && id < EXPERTS ? slot_table[id] : -1;
  }
  __syncthreads();
  int rank = 0;
  if (p < pairs) {
    int place = 0, token = p / TOP_K;
    for (int i = 0; i < p; i++) rank += work.id[i] == work.id[p];
    work.rank[p] = u16(rank);
    for (int i = token * TOP_K; i < (token + 1) * TOP_K; i++)
      place += work.id[i] < work.id[p] || (work.id[i] == work.id[p] && i < p);
    work.order[token * TOP_K + place] = u16(p);
  }
  __syncthreads();
  const bool live = p < pairs && work.slot[p] >= 0;
  if (live) {
    int head = p, item = 0;  // head: the pair that opens this pair's item
    bool last = true;        // no later pair is in this item
    for (int i = 0; i < p; i++)
      if (work.id[i] == work.id[p] && work.rank[i] == rank / GROUP * GROUP) head = i;
    for (int i = p + 1; i < pairs; i++) last &= work.id[i] != work.id[p];
    last |= rank % GROUP == GROUP - 1;
    for (int i = 0; i < head; i++) item += work.slot[i] >= 0 && work.rank[i] % GROUP == 0;
    work.member[item][rank % GROUP] = u16(p);
    work.record[item] = slots + size_t(work.slot[p]) * stride;
    if (last) work.count[item] = u16(rank % GROUP + 1);
  }
  return __syncthreads_count(live && rank % GROUP == 0);
}

struct Task {  // where a warp's stream of stages is
  int number, block, rows;  // rows: the row tile of HIDDEN
  __device__ __forceinline__ int item() const { return number / CHAINS; }
  __device__ __forceinline__ int chain() const { return number % CHAINS; }
  __device__ __forceinline__ int first() const { return chain() * DOWN_CHAIN; }  // block of the pair's activations
  __device__ __forceinline__ void advance() {
    block += DOWN_STAGE;
    if (block == DOWN_CHAIN) block = 0, number += DOWN_WARPS;
  }
  __device__ __forceinline__ const u8 *codes(const Work &work) const {
    return work.record[item()] + size_t(chain() / DOWN_SEGMENTS) * SLICE_BYTES + 2 * CODES + tile() * 256;
  }
  __device__ __forceinline__ const u8 *scales(const Work &work) const {
    return work.record[item()] + size_t(chain() / DOWN_SEGMENTS) * SLICE_BYTES + 3 * CODES + 2 * SCALES + tile() * 16;
  }
  __device__ __forceinline__ size_t tile() const {
    return size_t(rows) * DOWN_BLOCKS + chain() % DOWN_SEGMENTS * DOWN_CHAIN;
  }
  __device__ __forceinline__ Weights<1, DOWN_STAGE> weights(const Work &work) const { return {{codes(work)}, {scales(work)}}; }
  __device__ __forceinline__ void copy_pairs(const Work &work, u32 stage, const s8 *hq, const Meta *hmeta, int lane) const {
    int count = work.count[item()];
    Activations<1, DOWN_STAGE>(hq, hmeta, work.member[item()], count, INTERMEDIATE / 32, first(), lane).copy(stage, block, lane);
  }
};

struct DownTarget {  // partial sums in shared memory: float [pair][chain][16]
  float *parts;
  const u16 *members;
  int chain;
  __device__ __forceinline__ float &operator()(int row, int m) const { return parts[(members[m] * CHAINS + chain) * 16 + row]; }
};

template <int COLUMNS>
__device__ __forceinline__ void finish(Sums<1, COLUMNS> &sums, const Work &work, const Task &task, float *parts, const s8 *hq,
                                       const Meta *hmeta, int lane) {
  DownTarget target = {parts, work.member[task.item()], task.chain()};
  int count = work.count[task.item()];
  store<COLUMNS>(sums.value[0], count, lane, target);
  if (__any_sync(~0u, sums.wild))
    repair(task.codes(work), task.scales(work), hq, hmeta, target.members, count, INTERMEDIATE / 32, task.first(), DOWN_CHAIN,
           target);
  sums.clear();
}

using DownRing = Ring<1, DOWN_STAGE, DOWN_DEPTH>;

// Starts the first stages of a row tile's weights, before the activations are there; `down_sums` goes on from there.
__device__ __forceinline__ void down_prefetch(DownRing ring, const Work &work, int tasks, int rows, int warp, int lane) {
  Task next = {warp, 0, rows};
#pragma unroll 1
  for (int i = 0; i < DOWN_DEPTH - 1; i++, next.advance()) {
    if (next.number < tasks) ring.fill(next.weights(work), next.block, lane);
    ring.filled();
  }
}

// Partial sums of row tile `rows` for every task of the work, by all the block's warps.
__device__ __forceinline__ void down_sums(const Tables &tables, DownRing ring, const Work &work, int tasks, int rows, float *parts,
                                          const s8 *hq, const Meta *hmeta, int warp, int lane) {
  Task next = {warp, 0, rows};
#pragma unroll 1
  for (int i = 0; i < DOWN_DEPTH - 1; i++, next.advance()) {
    if (next.number < tasks) next.copy_pairs(work, ring.unused(), hq, hmeta, lane);
    commit();
    ring.filled();
  }
  Sums<1, 1> one;
  Sums<1, 2> many;
  one.clear(), many.clear();
#pragma unroll 1
  for (Task task = {warp, 0, rows}; task.number < tasks; task.advance()) {
    ring.wait();
    if (next.number < tasks) {
      ring.fill(next.weights(work), next.block, lane);
      next.copy_pairs(work, ring.unused(), hq, hmeta, lane);
    }
    commit();
    ring.filled();
    next.advance();
    const int count = work.count[task.item()];
    if (count == 1)
      multiply<1, DOWN_STAGE, 1>(tables, one, ring.used(), 1, lane);
    else
      multiply<1, DOWN_STAGE, 2>(tables, many, ring.used(), count, lane);
    if (task.block + DOWN_STAGE == DOWN_CHAIN) {
      if (count == 1)
        finish(one, work, task, parts, hq, hmeta, lane);
      else
        finish(many, work, task, parts, hq, hmeta, lane);
    }
    ring.advance();
  }
  wait_copies<0>();
  __syncthreads();
}

// Rows of y from the partial sums of 16 rows (tile `tile` of HIDDEN), then the tokens' sums. out: bf16 bits [tokens, HIDDEN],
// or null: then rows float32 [pairs, HIDDEN] of the pairs that have a slot. In a hybrid step the CPU's rows are in `rows`.
// pairs: of real tokens; the other tokens of `all` pairs come out as zeros.
__device__ __forceinline__ void combine(const Work &work, float *parts, const float *route_weights, int pairs, int all, int tile,
                                        float *rows, u16 *out) {
  const size_t n = size_t(tile) * 16;
  for (int i = threadIdx.x; i < pairs * 16; i += DOWN_WARPS * 32) {
    int p = i / 16, r = i % 16;
    if (work.slot[p] < 0) continue;
    float y = whole_row<DOWN_SEGMENTS>(parts + p * CHAINS * 16 + r);
    if (out)
      parts[p * CHAINS * 16 + r] = y;
    else
      rows[p * size_t(HIDDEN) + n + r] = y;
  }
  if (!out) return;
  __syncthreads();
  for (int i = threadIdx.x; i < all / TOP_K * 16; i += DOWN_WARPS * 32) {
    int token = i / 16, r = i % 16;
    float acc = 0.f;
    for (int k = 0; k < TOP_K && token * TOP_K < pairs; k++) {
      int p = work.order[token * TOP_K + k], id = work.id[p];
      if (id < 0 || id >= EXPERTS) continue;
      float y = work.slot[p] >= 0 ? parts[p * CHAINS * 16 + r]
                : HYBRID          ? load_host(rows + p * size_t(HIDDEN) + n + r)
                                  : __int_as_float(0x7FC00000);  // no row: the token is NaN
      acc = __fadd_rn(acc, flush(WEIGHTED ? y : __fmul_rn(y, route_weights[p])));
    }
    out[token * size_t(HIDDEN) + n + r] = to_bf16(acc);
  }
}
