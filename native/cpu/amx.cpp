// AMX int8 (Sapphire Rapids and later) for 16 and more rows of activations; fewer go through AVX-512.
//
// A tile product takes 16 rows of q (A), a weight tile's block of 32 k as words (B: the order of zmm.h's unpack) and
// gives 16 x 16 exact sums d. Blocks of 32 have their own scales, so every block's sums leave the tile registers, and a
// product fills only half of the K = 64 that the hardware could take: the vector work on the sums is the limit anyway.

#include "cpu/tiles.h"

namespace moetier {
namespace {

constexpr std::size_t kPiece = 16; // blocks that are unpacked at a time: 18 KiB of two weight tiles

// Tile registers; the intrinsics take numbers only.
#define MOETIER_SUMS 0
#define MOETIER_ACTS 1
#define MOETIER_WEIGHTS 2
#define MOETIER_MORE_SUMS 3

struct SignedPermute {
  // w for each code, four times over.
  alignas(64) static constexpr std::int8_t kTable[64] = {
      0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12, 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12,
      0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12, 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  [[gnu::always_inline]] static __m512i low_nibbles(__m512i bytes) {
    return _mm512_permutexvar_epi8(bytes, _mm512_load_si512(kTable));
  }
};

constexpr TileConfig kConfig = {
    .row_bytes = {64, 32, 64, 64}, // of SUMS, ACTS, WEIGHTS, MORE_SUMS
    .rows = {16, 16, 8, 16},
};

// Blocks of one segment of both weight tiles, unpacked.
struct Piece {
  __m512i words[2][kPiece][8];
  __m512i scales[2][kPiece];
};

void unpack_piece(const StripJob &job, std::size_t first, std::size_t count, Piece &piece) {
  for (std::size_t tile = 0; tile < 2; ++tile) {
    for (std::size_t b = 0; b < count; ++b) {
      const std::size_t at = tile * job.blocks + first + b;
      prefetch_codes(job, at);
      prefetch(job.next.scales + at * kTileRows);
      __m512i w[8];
      unpack<SignedPermute>(job.strip.codes + at * kTileCodes, w);
      for (int j = 0; j < 8; ++j) piece.words[tile][b][j] = w[j];
      piece.scales[tile][b] = load_scales(job.strip.scales + at * kTileRows);
    }
  }
}

// Adds `count` unpacked blocks of one weight tile to the sums of 16 rows. `acts` is the first row's first of these.
template <bool Checked>
void add_piece(const Piece &piece, std::size_t tile, std::size_t count, const ActBlock *acts, std::size_t stride,
               __m512 *sums) {
  constexpr std::size_t kBuffers = 2; // the sums of one block are read while those of the next are computed
  alignas(64) std::int32_t d[kBuffers][kTokens][kTileRows];
  const auto multiply_block = [&](std::size_t b) {
    tile_memory();
    _tile_zero(MOETIER_SUMS);
    _tile_loadd(MOETIER_ACTS, acts[b].q, static_cast<int>(stride * sizeof(ActBlock)));
    _tile_loadd(MOETIER_WEIGHTS, piece.words[tile][b], 64);
    _tile_dpbssd(MOETIER_SUMS, MOETIER_ACTS, MOETIER_WEIGHTS);
    _tile_stored(MOETIER_SUMS, d[b % kBuffers], 64);
  };
  __m512 sum[kTokens];
#pragma GCC unroll 16
  for (std::size_t m = 0; m < kTokens; ++m) sum[m] = sums[m];
  multiply_block(0);
  for (std::size_t b = 0; b < count; ++b) {
    if (b + 1 < count) multiply_block(b + 1);
    const __m512i scales = piece.scales[tile][b];
    const ActBlock *row = acts + b;
#pragma GCC unroll 16
    for (std::size_t m = 0; m < kTokens; ++m) {
      const __m512i dots = _mm512_load_si512(d[b % kBuffers][m]);
      sum[m] = add_block<Checked>(sum[m], dots, scales, _mm512_set1_epi32(row->exponent));
      row += stride;
    }
  }
#pragma GCC unroll 16
  for (std::size_t m = 0; m < kTokens; ++m) sums[m] = sum[m];
}

template <bool Checked>
void tiles(const StripJob &job) {
  const Tiles configured(kConfig);
  Piece piece;
  constexpr std::size_t kGroups = kMostRows / kTokens;
  __m512 sums[kGroups][2][kTokens];
  __m512 totals[kGroups][2][kTokens];
  const std::size_t groups = tile_groups(job.count);
  const auto first_row = [&](std::size_t g) { return first_of_group(g, job.count); };
  const std::size_t per_segment = job.blocks / segments(job.blocks);
  std::memset(totals, 0, sizeof totals);
  for (std::size_t begin = 0; begin < job.blocks; begin += per_segment) {
    std::memset(sums, 0, sizeof sums);
    for (std::size_t at = begin; at < begin + per_segment; at += kPiece) {
      const std::size_t left = begin + per_segment - at;
      const std::size_t blocks = left < kPiece ? left : kPiece;
      unpack_piece(job, at, blocks, piece);
      for (std::size_t g = 0; g < groups; ++g) {
        const ActBlock *acts = job.rows[first_row(g)] + at;
        for (std::size_t tile = 0; tile < 2; ++tile) {
          add_piece<Checked>(piece, tile, blocks, acts, job.stride, sums[g][tile]);
        }
      }
    }
    for (std::size_t g = 0; g < groups; ++g) {
      for (std::size_t m = 0; m < kTokens; ++m) {
        totals[g][0][m] = _mm512_add_ps(totals[g][0][m], sums[g][0][m]);
        totals[g][1][m] = _mm512_add_ps(totals[g][1][m], sums[g][1][m]);
      }
    }
  }
  for (std::size_t g = 0; g < groups; ++g) {
    for (std::size_t m = 0; m < kTokens; ++m) {
      float *out = job.out + (first_row(g) + m) * kStripRows;
      _mm512_store_ps(out, in_row_order(totals[g][0][m]));
      _mm512_store_ps(out + kTileRows, in_row_order(totals[g][1][m]));
    }
  }
}

void amx_strip(const StripJob &job) {
  if (job.count < kTokens || job.stride == 0) {
    strip<Permute>(job);
  } else if (needs_check(job)) {
    tiles<true>(job);
  } else {
    tiles<false>(job);
  }
}

std::size_t multiply_tiles(std::size_t rounds) {
  const Tiles configured(kConfig);
  alignas(64) std::int8_t ones[16][64];
  std::memset(ones, 1, sizeof ones);
  tile_memory();
  _tile_loadd(MOETIER_ACTS, ones, 64);
  _tile_loadd(MOETIER_WEIGHTS, ones, 64);
  _tile_zero(MOETIER_SUMS);
  _tile_zero(MOETIER_MORE_SUMS);
  for (std::size_t round = 0; round < rounds; ++round) {
    _tile_dpbssd(MOETIER_SUMS, MOETIER_ACTS, MOETIER_WEIGHTS);
    _tile_dpbssd(MOETIER_MORE_SUMS, MOETIER_ACTS, MOETIER_WEIGHTS);
  }
  return 2 * 2 * kTokens * kTileRows * kBlock;
}

bool available() {
  constexpr unsigned kInt8 = 1U << 25;
  static const bool granted = has_tiles(kInt8);
  return granted;
}

} // namespace

extern const Kernels kAmx;
const Kernels kAmx = {"amx",      available, amx_strip, activate,       quantize_f32, quantize_bf16,
                      accumulate, to_bf16,   read,      multiply_tiles, kTokens,      nullptr};

} // namespace moetier
