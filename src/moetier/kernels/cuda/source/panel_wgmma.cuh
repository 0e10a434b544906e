// Panels by wgmma (sm_90a): 128 rows x 128 pairs. Two warpgroups compute, each one half of the rows, a warp one row tile of
// it; a third fills the ring, activations by bulk copies, which is why they lie in memory in the order of the tiles. A block
// of threads lives as long as the launch and takes item after item, so that the ring is full when the next one begins.
#pragma once
#include "hopper.cuh"
#include "panel.cuh"

constexpr int PAIRS = 128, ROW_TILES = 8;
constexpr int PITCH = PAIRS + 9;  // floats from one row of results to the next: no bank conflicts either way
constexpr int COPIERS = 128, PANEL_THREADS = THREADS + COPIERS;
constexpr int COMPUTE_REGISTERS = 232, COPY_REGISTERS = 40;  // 2 * 232 + 40 is what the launch gives to three warpgroups
constexpr bool BY_TILE = true;
using Members = MembersOf<PAIRS>;
using Flags = FlagsOf<PAIRS, ROW_TILES * 16>;

// Of each block 64 bytes a pair: in shared memory wgmma's right operand with its swizzle of 64 bytes, whose four pieces of 16
// bytes change places with bits 1 and 2 of the pair's number m in its tile.
constexpr int BLOCK_BYTES = PAIRS * 64;

__device__ __forceinline__ int place_in_block(int k) {  // registers (j, j + 4) of `unpack_bf16` are neighbours along k
  int c = k >> 3, j = k & 7;
  return ((j & 3) >> 1) * 16 + (j & 1) * 8 + 2 * c + (j >> 2);
}
__device__ __forceinline__ int swizzled(int piece, int m) { return piece ^ (m >> 1 & 3); }

// Where a pair's block is in an array of activations, `blocks` blocks a pair: [tile][block][pair of the tile][32].
__device__ __forceinline__ size_t block_of(const Place &place, int, int blocks, int block) {
  return (size_t(place.first) * blocks + size_t(block) * place.count + place.m) * 32;
}

// Where a tile's activations begin, from some block on.
__device__ __forceinline__ size_t first_block(const Tile &tile, int blocks, int block) {
  return block_of({tile.first, u16(tile.count), 0}, 0, blocks, block);
}

template <int STAGE> struct Layout {  // of one stage in shared memory
  static constexpr int codes = STAGE * BLOCK_BYTES, scales = codes + ROW_TILES * STAGE * 256;
  static constexpr int stride = (scales + ROW_TILES * STAGE * 16 + 1023) / 1024 * 1024;
};

template <int BLOCKS> struct RingOf {
  static constexpr int STAGE = largest_divisor(BLOCKS / segments(BLOCKS), STAGE_BLOCKS), STEPS = BLOCKS / STAGE;
  using Stages = Layout<STAGE>;
  static constexpr int BYTES = DEPTH * Stages::stride;
};

struct Cursor {  // which stage of the ring is next, and the parity of its barriers
  int slot = 0;
  u32 phase = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == DEPTH) slot = 0, phase ^= 1;
  }
};

// full: the bytes of a stage have come; empty: every computing warp is done with it. told: who the pairs of an item are;
// forgotten: every computing warp is done with that.
struct Ring {
  unsigned long long barriers[2 * DEPTH + 4];
  Tile tiles[DEPTH];  // of the item whose first stage this is

  __device__ u32 barrier(int i) const { return shared_address(barriers + i); }
  __device__ u32 full(int slot) const { return barrier(slot); }
  __device__ u32 empty(int slot) const { return barrier(DEPTH + slot); }
  __device__ u32 told(int item) const { return barrier(2 * DEPTH + item % 2); }
  __device__ u32 forgotten(int item) const { return barrier(2 * DEPTH + 2 + item % 2); }
  __device__ void init() {
    if (threadIdx.x != 0) return;
    for (int i = 0; i < DEPTH; i++) barrier_init(full(i), 1 + COPIERS), barrier_init(empty(i), THREADS / 32);
    for (int i = 0; i < 2; i++) barrier_init(told(i), COPIERS / 32), barrier_init(forgotten(i), THREADS / 32);
    barriers_are_ready();
  }
};

__device__ __forceinline__ void sync_panel() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }
__device__ __forceinline__ bool sync_panel_or(bool value) {
  int any;
  asm volatile("{\n.reg .pred p, q;\nsetp.ne.s32 p, %1, 0;\nbar.red.or.pred q, 1, %2, p;\nselp.s32 %0, 1, 0, q;\n}"
               : "=r"(any) : "r"(int(value)), "n"(THREADS) : "memory");
  return any;
}

// An item's weights and activations into the ring, by a warpgroup: weights in pieces of 16 bytes, activations in bulk (all in
// bulk takes longer: that engine works copy by copy, and a row tile's weights of a stage are no more than 1 KiB).
template <int BLOCKS>
__device__ __forceinline__ void copy_item(u8 *shared, Ring &ring, Cursor &at, const Tile &tile, const Panel &panel, const u16 *x) {
  using Stages = typename RingOf<BLOCKS>::Stages;
  constexpr int STAGE = RingOf<BLOCKS>::STAGE, HALF = ROW_TILES / 2, PIECES = STAGE * 16;
  const u32 thread = threadIdx.x - THREADS;
  const u8 *activations = (const u8 *)(x + size_t(thread) * tile.count * 32);
#pragma unroll 1
  for (int step = 0; step < RingOf<BLOCKS>::STEPS; step++) {
    const u32 stage = shared_address(shared) + at.slot * Stages::stride, full = ring.full(at.slot);
    barrier_wait(ring.empty(at.slot), at.phase ^ 1);  // the parity before the first counts as past: the ring starts empty
    if (thread == 0) {
      if (step == 0) ring.tiles[at.slot] = tile;
      barrier_expect(full, STAGE * tile.count * 64);
    }
    __syncwarp();
    if (thread < STAGE) bulk_copy(stage + thread * BLOCK_BYTES, activations, tile.count * 64, full);
    activations += STAGE * tile.count * 64;
#pragma unroll 1
    for (int h = 0; h < 2; h++) {
      const u8 *codes = (h ? panel.b.codes : panel.a.codes) + step * (STAGE * 256);
      const u8 *scales = (h ? panel.b.scales : panel.a.scales) + step * (STAGE * 16);
      const u32 valid = min(h ? panel.b.valid : panel.a.valid, HALF);
#pragma unroll
      for (int first = 0; first < HALF * PIECES; first += COPIERS) {
        const u32 i = first + thread, row_tile = i / PIECES;
        if (row_tile < valid)
          copy16(stage + Stages::codes + (h * HALF * PIECES + i) * 16, codes + row_tile * (BLOCKS * 256) + i % PIECES * 16);
      }
      const u32 row_tile = thread / STAGE;
      if (row_tile < valid)
        copy16(stage + Stages::scales + (h * HALF * STAGE + thread) * 16, scales + row_tile * (BLOCKS * 16) + thread % STAGE * 16);
    }
    arrive_when_copied(full);
    at.advance();
  }
}

// N pairs of a warpgroup's rows: what the matrix unit gives for a block, the segment's sum, the sum of segments.
template <int N> struct Part {
  float d[N / 2], acc[N / 2], total[N / 2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < N / 2; i++) d[i] = 0.f, acc[i] = 0.f, total[i] = 0.f;
  }
  // activations: the lower word of their descriptor
  __device__ __forceinline__ void start(const Fragment &f, u32 activations) {
    const u32 first[4] = {f.top[0], f.bottom[0], f.top[1], f.bottom[1]};
    const u32 second[4] = {f.top[2], f.bottom[2], f.top[3], f.bottom[3]};
    wgmma<N>(d, first, whole(activations), 0);
    wgmma<N>(d, second, whole(activations + 32 / 16), 1);
    wgmma_commit();
  }
  __device__ __forceinline__ void add(const float (&scale)[2]) {
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
      settled(d[i]);
      acc[i] = __fmaf_rn(d[i], scale[i / 2 % 2], acc[i]);  // the product is exact
    }
  }
  __device__ __forceinline__ void end_segment() {
#pragma unroll
    for (int i = 0; i < N / 2; i++) total[i] = __fadd_rn(total[i], acc[i]), acc[i] = 0.f;
  }
  __device__ __forceinline__ void store(float *results, int row, int first_pair) const {
    const int c = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < N / 2; i++)
      results[(row + i / 2 % 2 * 8) * PITCH + first_pair + i / 4 * 8 + 2 * c + i % 2] = total[i];
  }
};
template <> struct Part<0> {
  __device__ void clear() {}
  __device__ void start(const Fragment &, u32) {}
  __device__ void add(const float (&)[2]) {}
  __device__ void end_segment() {}
  __device__ void store(float *, int, int) const {}
};

// Row sums of an item, its panel times A + B pairs, into results[row * PITCH + pair]; row_tame[row]: its scales were tame.
// While the matrix unit works on one part of a block, the other part's sums are added up, B's one block late. After a round of
// stages all is waited for: the assembler would else make every multiplication wait.
template <int A, int B, int BLOCKS>
__device__ __forceinline__ void row_sums(u8 *shared, float *results, Ring &ring, Cursor &at, u8 *row_tame) {
  using Stages = typename RingOf<BLOCKS>::Stages;
  constexpr int STAGE = RingOf<BLOCKS>::STAGE, STEPS = RingOf<BLOCKS>::STEPS, STEPS_A_SEGMENT = STEPS / segments(BLOCKS);
  constexpr int ROUND = STEPS_A_SEGMENT % 2 == 0 ? 2 : 1;
  constexpr bool EVEN = ROUND * STAGE % 2 == 0;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Part<A> a;
  Part<B> b;
  a.clear(), b.clear();
  u32 wild[2] = {};
  Fragment f[2];
  auto load = [&](Fragment &fragment, int stage, int block) {
    const int tile = warp * STAGE + block;
    fragment.load(shared + stage + Stages::codes + tile * 256, shared + stage + Stages::scales + tile * 16, wild);
  };
  load(f[0], at.slot * Stages::stride, 0);  // whose coming has been waited for
#pragma unroll 1
  for (int step = 0; step < STEPS; step += ROUND) {
    u32 first_block = 0, empty = 0;
    int stage = 0;
#pragma unroll
    for (int i = 0; i < ROUND * STAGE; i++) {
      const int block = i % STAGE;
      const bool last_of_stage = block + 1 == STAGE, last = i + 1 == ROUND * STAGE;
      const u32 empty_before = empty;
      if (block == 0) {
        stage = at.slot * Stages::stride;
        first_block = descriptor(shared_address(shared) + stage), empty = ring.empty(at.slot);
        at.advance();
      }
      Fragment &now = f[i % 2], &other = f[(i + 1) % 2];
      const u32 activations = first_block + block * BLOCK_BYTES / 16;
      wgmma_fence();
      a.start(now, activations);
      if (B > 0 && i > 0) {
        wgmma_wait<1>();
        b.add(other.scale);
        wgmma_fence();
      }
      if (block == 0 && i > 0 && lane == 0) barrier_arrive(empty_before);
      b.start(now, activations + A * 64 / 16);
      if (!last_of_stage) {
        load(other, stage, block + 1);
      } else if (!last || (EVEN && step + ROUND < STEPS)) {
        barrier_wait(ring.full(at.slot), at.phase);
        load(other, at.slot * Stages::stride, 0);
      }
      wgmma_wait<(B > 0)>();
      a.add(now.scale);
    }
    wgmma_wait<0>();
    if (lane == 0) barrier_arrive(empty);
    b.add(f[(ROUND * STAGE - 1) % 2].scale);
    if (!EVEN && step + ROUND < STEPS) {  // no sooner: its registers are those of the block before
      barrier_wait(ring.full(at.slot), at.phase);
      load(f[0], at.slot * Stages::stride, 0);
    }
    if ((step + ROUND) % STEPS_A_SEGMENT == 0) a.end_segment(), b.end_segment();
  }
  sync_panel();  // the results before are read
  const int row = warp * 16 + lane / 4;
  if (lane % 4 == 0) row_tame[row] = wild[0] == 0, row_tame[row + 8] = wild[1] == 0;
  a.store(results, row, 0);
  b.store(results, row, A);
  sync_panel();
}

template <int BLOCKS, class... Arguments> __device__ __forceinline__ void row_sums_of(int count, Arguments &...arguments) {
  switch ((count + 15) / 16) {
    case 1: return row_sums<16, 0, BLOCKS>(arguments...);
    case 2: return row_sums<32, 0, BLOCKS>(arguments...);
    case 3: return row_sums<48, 0, BLOCKS>(arguments...);
    case 4: return row_sums<64, 0, BLOCKS>(arguments...);
    case 5: return row_sums<64, 16, BLOCKS>(arguments...);
    case 6: return row_sums<64, 32, BLOCKS>(arguments...);
    case 7: return row_sums<64, 48, BLOCKS>(arguments...);
    default: return row_sums<64, 64, BLOCKS>(arguments...);
  }
}

// All items of a block of threads: a warpgroup copies and tells who the pairs are, two compute and finish.
template <class Job> __device__ __forceinline__ void run(u8 *shared, const Job &job) {
  using Of = RingOf<Job::BLOCKS>;
  __shared__ Ring ring;
  __shared__ Members members[2];
  __shared__ Flags flags;
  ring.init();
  __syncthreads();
  const int items = job.items(), lane = threadIdx.x % 32;
  float *results = (float *)(shared + Of::BYTES);
  u8 *row_tame = flags.row_tame;
  int number = 0;  // of the block's items
  Cursor at;
  if (threadIdx.x >= THREADS) {
    fewer_registers<COPY_REGISTERS>();
#pragma unroll 1
    for (int item = blockIdx.x; item < items; item += gridDim.x, number++) {
      const Tile tile = job.tile(item);
      copy_item<Job::BLOCKS>(shared, ring, at, tile, job.panel(item, tile), job.activations(item, tile));
      barrier_wait(ring.forgotten(number), (number / 2 & 1) ^ 1);
      job.tell(tile, members[number % 2], threadIdx.x - THREADS, COPIERS);
      __syncwarp();
      if (lane == 0) barrier_arrive(ring.told(number));
    }
  } else {
    more_registers<COMPUTE_REGISTERS>();
#pragma unroll 1
    for (int item = blockIdx.x; item < items; item += gridDim.x, number++) {
      barrier_wait(ring.full(at.slot), at.phase);
      const Tile tile = ring.tiles[at.slot];
      row_sums_of<Job::BLOCKS>(tile.count, shared, results, ring, at, row_tame);
      barrier_wait(ring.told(number), number / 2 & 1);
      job.check(item, tile, members[number % 2], results, flags);
      job.finish(item, tile, members[number % 2], results);
      __syncwarp();
      if (lane == 0) barrier_arrive(ring.forgotten(number));
    }
  }
}
