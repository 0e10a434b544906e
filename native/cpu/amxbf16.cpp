// AMX bf16 (Sapphire Rapids and later), from a few rows of activations on; fewer go through AVX-512.
//
// The powers of two of a block go into the operands: q * 2^e and w * 2^(s - 128) are bf16 values. A tile product over
// K = 32 is then one block, all its partial sums are multiples of 2^(e + s - 128) below 2^24 of them, hence exact, and
// the instruction adds the whole to the sum in its tile with one rounding (Intel SDM, TDPBF16PS): the contract's v,
// added in the contract's order. So sums stay in the tile registers for a whole segment. Where a power would leave
// bf16's normal numbers, which tiles flush, the strip goes through AVX-512.

#include <algorithm>
#include <memory>

#include "cpu/tiles.h"

namespace moetier {
namespace {

// Two groups of rows of activations times two weight tiles: every tile that is loaded is used twice. The intrinsics
// take numbers only.
#define MOETIER_SUMS_00 0
#define MOETIER_SUMS_01 1
#define MOETIER_SUMS_10 2
#define MOETIER_SUMS_11 3
#define MOETIER_ACTS_0 4
#define MOETIER_ACTS_1 5
#define MOETIER_WEIGHTS_0 6
#define MOETIER_WEIGHTS_1 7

// From how many rows on. A weight tile costs about 52 operations of the vector units to unpack, whatever the rows,
// where AVX-512 needs 27 and 11 for each row.
constexpr std::size_t kFewest = 6;
constexpr std::size_t kMostGroups = kMostRows / kTokens;
constexpr std::size_t kPiece = 8; // blocks of both weight tiles that are unpacked at a time: 16 KiB
constexpr int kLeastScale = 2;    // 2^(s - 128) is a normal number,
constexpr int kMostScale = 252;   // and 12 times it no infinity
constexpr int kMostExponent = 121;

using TileSums = float[kTokens][kTileRows];

struct Block {
  __m512i rows[2][16]; // of each weight tile: 16 rows in the lanes, two bf16 values each
};

// A run of blocks within one segment.
struct Piece {
  std::size_t begin;
  std::size_t blocks;
  bool first; // of its segment
  bool last;
};

// The pieces of a strip, one after the other.
class Pieces {
public:
  explicit Pieces(std::size_t blocks) : segment_(blocks / segments(blocks)) {}

  Piece at(std::size_t begin) const {
    const std::size_t inside = begin % segment_;
    const std::size_t left = segment_ - inside;
    return {begin, left < kPiece ? left : kPiece, inside == 0, left <= kPiece};
  }

private:
  std::size_t segment_;
};

// bf16 bits of w * 2^125 for each code, twice over, but -0 for both zeros: adding (s - 253) << 7 with saturation gives
// w * 2^(s - 128), and leaves -0 as it is.
[[gnu::always_inline]] inline __m512i weight_table() {
  alignas(64) static constexpr auto kTable = [] {
    constexpr int kOne = 252 << 7;
    constexpr int kPositive[8] = {-0x8000,      kOne,         kOne + 0x80,  kOne + 0xC0,
                                  kOne + 0x100, kOne + 0x140, kOne + 0x180, kOne + 0x1C0};
    std::array<std::int16_t, 32> table{};
    for (std::size_t code = 0; code < 32; ++code) {
      table[code] = static_cast<std::int16_t>(kPositive[code % 8] | (code % 16 < 8 ? 0 : -0x8000));
    }
    return table;
  }();
  return _mm512_load_si512(kTable.data());
}

// (s - 253) << 7 of a tile's 16 rows, in the lane order of `transpose`, twice in each lane.
[[gnu::always_inline]] inline __m512i load_shifts(const std::uint8_t *scales) {
  const __m256i order = _mm256_setr_epi8(0, 0, 4, 4, 8, 8, 12, 12, 1, 1, 5, 5, 9, 9, 13, 13, //
                                         2, 2, 6, 6, 10, 10, 14, 14, 3, 3, 7, 7, 11, 11, 15, 15);
  const __m256i bytes = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i *>(scales)));
  const __m512i twice = _mm512_cvtepu8_epi16(_mm256_shuffle_epi8(bytes, order));
  return _mm512_slli_epi16(_mm512_sub_epi16(twice, _mm512_set1_epi16(253)), 7);
}

// Both weight tiles of block b as bf16. Each lane of a word has bytes 0 to 3 of a row's four: a pair of values is the
// low nibbles of bytes 0 and 2, those of 1 and 3, the high nibbles of 0 and 2, of 1 and 3. `widen` has the same order.
[[gnu::always_inline]] inline void unpack_block(const StripJob &job, std::size_t b, Block &block) {
  const __m512i table = weight_table();
  for (std::size_t tile = 0; tile < 2; ++tile) {
    const std::size_t at = tile * job.blocks + b;
    prefetch_codes(job, at);
    prefetch(job.next.scales + at * kTileRows);
    const __m512i shift = load_shifts(job.strip.scales + at * kTileRows);
    __m512i words[4];
    transpose(job.strip.codes + at * kTileCodes, words);
    for (int i = 0; i < 4; ++i) {
      const auto values = [&](__m512i codes) {
        return _mm512_adds_epi16(_mm512_permutexvar_epi16(codes, table), shift);
      };
      block.rows[tile][2 * i] = values(words[i]);
      block.rows[tile][2 * i + 1] = values(_mm512_srli_epi16(words[i], 8));
      block.rows[tile][2 * i + 8] = values(_mm512_srli_epi16(words[i], 4));
      block.rows[tile][2 * i + 9] = values(_mm512_srli_epi16(words[i], 12));
    }
  }
}

void widen(const ActBlock *row, std::size_t blocks, std::uint16_t *out) {
  const __m256i order =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15));
  for (std::size_t b = 0; b < blocks; ++b) {
    const __m256i q = _mm256_shuffle_epi8(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(row[b].q)), order);
    const __m512 power = _mm512_castsi512_ps(_mm512_set1_epi32(row[b].exponent + 0x40000000)); // 2^e
    const auto values = [&](__m128i bytes) {
      return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)), power);
    };
    const __m512 low = values(_mm256_castsi256_si128(q));
    const __m512 high = values(_mm256_extracti128_si256(q, 1));
    _mm512_storeu_si512(out + b * kBlock, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low)));
  }
}

// One or two groups of activations times both weight tiles of a block, added to the sums in the tiles.
template <bool Two>
[[gnu::always_inline]] inline void multiply_block(const Block &block, const std::uint16_t *acts,
                                                  const std::uint16_t *more_acts, std::size_t stride) {
  const auto row_bytes = static_cast<long>(stride * sizeof(std::uint16_t));
  _tile_loadd(MOETIER_ACTS_0, acts, row_bytes);
  _tile_loadd(MOETIER_WEIGHTS_0, block.rows[0], 64);
  _tile_dpbf16ps(MOETIER_SUMS_00, MOETIER_ACTS_0, MOETIER_WEIGHTS_0);
  _tile_loadd(MOETIER_WEIGHTS_1, block.rows[1], 64);
  _tile_dpbf16ps(MOETIER_SUMS_01, MOETIER_ACTS_0, MOETIER_WEIGHTS_1);
  if constexpr (Two) {
    _tile_loadd(MOETIER_ACTS_1, more_acts, row_bytes);
    _tile_dpbf16ps(MOETIER_SUMS_10, MOETIER_ACTS_1, MOETIER_WEIGHTS_0);
    _tile_dpbf16ps(MOETIER_SUMS_11, MOETIER_ACTS_1, MOETIER_WEIGHTS_1);
  }
}

template <bool Two>
[[gnu::always_inline]] inline void clear_sums() {
  _tile_zero(MOETIER_SUMS_00);
  _tile_zero(MOETIER_SUMS_01);
  if constexpr (Two) {
    _tile_zero(MOETIER_SUMS_10);
    _tile_zero(MOETIER_SUMS_11);
  }
}

template <bool Two>
[[gnu::always_inline]] inline void load_sums(TileSums (*sums)[2]) {
  tile_memory();
  _tile_loadd(MOETIER_SUMS_00, sums[0][0], 64);
  _tile_loadd(MOETIER_SUMS_01, sums[0][1], 64);
  if constexpr (Two) {
    _tile_loadd(MOETIER_SUMS_10, sums[1][0], 64);
    _tile_loadd(MOETIER_SUMS_11, sums[1][1], 64);
  }
}

template <bool Two>
[[gnu::always_inline]] inline void store_sums(TileSums (*sums)[2]) {
  _tile_stored(MOETIER_SUMS_00, sums[0][0], 64);
  _tile_stored(MOETIER_SUMS_01, sums[0][1], 64);
  if constexpr (Two) {
    _tile_stored(MOETIER_SUMS_10, sums[1][0], 64);
    _tile_stored(MOETIER_SUMS_11, sums[1][1], 64);
  }
  tile_memory();
}

// The strip's sums while they are computed.
struct Work {
  Block blocks[2][kPiece]; // of the piece that is multiplied and of the next, which is unpacked meanwhile
  alignas(64) TileSums sums[kMostGroups][2];
  __m512 totals[kMostGroups][2][kTokens];
};

// One piece for one or two groups of rows, while `unpack(i)` prepares block i of the next piece.
template <bool Two, typename Unpack>
[[gnu::always_inline]] inline void pass(const StripJob &job, const Piece &piece, const Block *blocks, std::size_t group,
                                        bool kept, Work &work, Unpack unpack) {
  const auto first = [&](std::size_t g) {
    return job.count < kTokens ? job.wide : job.wide + first_of_group(g, job.count) * job.wide_stride;
  };
  const std::uint16_t *acts = first(group) + piece.begin * kBlock;
  const std::uint16_t *more_acts = Two ? first(group + 1) + piece.begin * kBlock : nullptr;
  if (piece.first) {
    clear_sums<Two>();
  } else if (!kept) {
    load_sums<Two>(work.sums + group);
  }
  for (std::size_t i = 0; i < piece.blocks; ++i) {
    multiply_block<Two>(blocks[i], acts + i * kBlock, more_acts + i * kBlock, job.wide_stride);
    unpack(i);
  }
  if (piece.last || !kept) store_sums<Two>(work.sums + group);
}

void add_to_totals(std::size_t groups, Work &work) {
  for (std::size_t g = 0; g < groups; ++g) {
    for (std::size_t tile = 0; tile < 2; ++tile) {
      for (std::size_t m = 0; m < kTokens; ++m) {
        __m512 &total = work.totals[g][tile][m];
        total = _mm512_add_ps(total, _mm512_load_ps(work.sums[g][tile][m]));
      }
    }
  }
}

void write_totals(const StripJob &job, std::size_t groups, const Work &work) {
  const std::size_t rows = job.count < kTokens ? job.count : kTokens;
  for (std::size_t g = 0; g < groups; ++g) {
    float *out = job.out + (job.count < kTokens ? 0 : first_of_group(g, job.count)) * kStripRows;
    for (std::size_t m = 0; m < rows; ++m) {
      _mm512_store_ps(out + m * kStripRows, in_row_order(work.totals[g][0][m]));
      _mm512_store_ps(out + m * kStripRows + kTileRows, in_row_order(work.totals[g][1][m]));
    }
  }
}

TileConfig config_for(std::size_t rows) {
  TileConfig config;
  for (std::size_t tile = 0; tile < 8; ++tile) {
    config.row_bytes[tile] = 64;
    config.rows[tile] = static_cast<std::uint8_t>(tile >= MOETIER_WEIGHTS_0 || rows > kTokens ? kTokens : rows);
  }
  return config;
}

void tiles(const StripJob &job) {
  const Tiles configured(config_for(job.count));
  Work work;
  const std::size_t groups = tile_groups(job.count);
  const bool kept = groups <= 2; // the sums of all groups fit the tile registers
  const Pieces pieces(job.blocks);
  std::memset(work.totals, 0, sizeof work.totals);
  std::size_t turn = 0;
  Piece piece = pieces.at(0);
  for (std::size_t i = 0; i < piece.blocks; ++i) unpack_block(job, i, work.blocks[turn][i]);
  while (piece.blocks != 0) {
    const std::size_t end = piece.begin + piece.blocks;
    const Piece next = end < job.blocks ? pieces.at(end) : Piece{end, 0, true, true};
    Block *after = work.blocks[1 - turn];
    const auto unpack_next = [&](std::size_t i) {
      if (i < next.blocks) unpack_block(job, next.begin + i, after[i]);
    };
    tile_memory();
    for (std::size_t g = 0; g < groups; g += 2) {
      const auto unpack = [&](std::size_t i) {
        if (g + 2 >= groups) unpack_next(i);
      };
      if (g + 1 < groups) {
        pass<true>(job, piece, work.blocks[turn], g, kept, work, unpack);
      } else {
        pass<false>(job, piece, work.blocks[turn], g, kept, work, unpack);
      }
    }
    for (std::size_t i = piece.blocks; i < next.blocks; ++i) unpack_next(i);
    if (piece.last) add_to_totals(groups, work);
    piece = next;
    turn = 1 - turn;
  }
  write_totals(job, groups, work);
}

// Whether every power of two of the strip is one that tiles take as it is.
bool fits_bf16(const StripJob &job) {
  const ScaleRange scales = scales_of(job);
  return scales.lo >= kLeastScale && scales.hi <= kMostScale && job.range.hi <= kMostExponent &&
         !needs_check(scales, job.range);
}

void amxbf16_strip(const StripJob &job) {
  if (job.wide != nullptr && fits_bf16(job)) {
    tiles(job);
  } else {
    strip<Permute>(job);
  }
}

std::size_t multiply_tiles(std::size_t rounds) {
  const Tiles configured(config_for(kTokens));
  alignas(64) std::uint16_t ones[kTokens][kBlock];
  for (auto &row : ones) std::fill_n(row, kBlock, std::uint16_t{0x3F80});
  clear_sums<true>();
  tile_memory();
  _tile_loadd(MOETIER_ACTS_0, ones, 64);
  _tile_loadd(MOETIER_ACTS_1, ones, 64);
  _tile_loadd(MOETIER_WEIGHTS_0, ones, 64);
  _tile_loadd(MOETIER_WEIGHTS_1, ones, 64);
  for (std::size_t round = 0; round < rounds; ++round) {
    _tile_dpbf16ps(MOETIER_SUMS_00, MOETIER_ACTS_0, MOETIER_WEIGHTS_0);
    _tile_dpbf16ps(MOETIER_SUMS_01, MOETIER_ACTS_0, MOETIER_WEIGHTS_1);
    _tile_dpbf16ps(MOETIER_SUMS_10, MOETIER_ACTS_1, MOETIER_WEIGHTS_0);
    _tile_dpbf16ps(MOETIER_SUMS_11, MOETIER_ACTS_1, MOETIER_WEIGHTS_1);
  }
  return 4 * 2 * kTokens * kTileRows * kBlock;
}

// Whether this processor's tile product rounds as its manual says: a strip of random blocks whose sums round at nearly
// every addition gives the bits of AVX-512.
bool rounds_as_specified() {
  constexpr std::size_t kBlocks = 64;
  struct Sample {
    alignas(64) std::uint8_t codes[2 * kBlocks * kTileCodes];
    alignas(64) std::uint8_t scales[2 * kBlocks * kTileRows];
    ActBlock rows[kTokens][kBlocks];
    std::uint16_t wide[kTokens][kBlocks * kBlock];
    alignas(64) float sums[2][kTokens][kStripRows];
  };
  const auto sample = std::make_unique<Sample>();
  std::uint32_t state = 1;
  const auto random = [&](std::uint32_t bound) {
    state = state * 1664525U + 1013904223U;
    return (state >> 16) % bound;
  };
  for (std::uint8_t &code : sample->codes) code = static_cast<std::uint8_t>(random(256));
  for (std::uint8_t &scale : sample->scales) scale = static_cast<std::uint8_t>(116 + random(20));
  const ActBlock *rows[kTokens];
  for (std::size_t m = 0; m < kTokens; ++m) {
    rows[m] = sample->rows[m];
    for (ActBlock &block : sample->rows[m]) {
      float x[kBlock];
      for (float &value : x) value = static_cast<float>(random(4096)) - 2048.0F;
      quantize_block(x, &block);
    }
    widen(rows[m], kBlocks, sample->wide[m]);
  }
  const Strip weights = {sample->codes, sample->scales};
  StripJob job = {weights,         weights,          kBlocks, rows,    0,
                  sample->wide[0], kBlocks * kBlock, kTokens, {0, 10}, Prefetch::by_instructions,
                  nullptr};
  job.out = sample->sums[0][0];
  tiles(job);
  job.out = sample->sums[1][0];
  strip<Permute>(job);
  return std::memcmp(sample->sums[0], sample->sums[1], sizeof sample->sums[0]) == 0;
}

bool available() {
  constexpr unsigned kBf16 = 1U << 22;
  static const bool usable = has_tiles(kBf16) && __builtin_cpu_supports("avx512bf16") != 0 && rounds_as_specified();
  return usable;
}

} // namespace

extern const Kernels kAmxBf16;
const Kernels kAmxBf16 = {"amxbf16",  available, amxbf16_strip, activate,       quantize_f32, quantize_bf16,
                          accumulate, to_bf16,   read,          multiply_tiles, kFewest,      widen};

} // namespace moetier
