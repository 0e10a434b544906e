// AMX tile registers: what both AMX kernels need of them.
#pragma once

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "cpu/zmm_vbmi.h"

#if defined(MOETIER_EMULATE_AMX)
#include "tests/amx_emulation.h"
#endif

namespace moetier {
namespace {

constexpr std::size_t kTokens = 16; // rows of activations in a tile, at most

// What the hardware reads for its tile registers (Intel SDM, LDTILECFG).
struct alignas(64) TileConfig {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

// Not GCC's intrinsic, which tells the compiler of 8 of the 64 bytes that are read.
inline void load_config(const TileConfig &config) {
#if defined(MOETIER_EMULATE_AMX)
  emulation::load_config(&config);
#else
  asm volatile("ldtilecfg %0" : : "m"(config));
#endif
}

// The tile registers are this thread's for the life of the object.
class Tiles {
public:
  explicit Tiles(const TileConfig &config) { load_config(config); }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles &) = delete;
  Tiles &operator=(const Tiles &) = delete;
};

// The tile intrinsics do not say that they read or write memory.
[[gnu::always_inline]] inline void tile_memory() {
  asm volatile("" : : : "memory");
}

// For `count` rows in groups of 16, the last of which reaches back where the count is no multiple of 16 and computes
// some rows twice.
constexpr std::size_t tile_groups(std::size_t count) {
  return (count + kTokens - 1) / kTokens;
}
constexpr std::size_t first_of_group(std::size_t group, std::size_t count) {
  return (group + 1) * kTokens <= count ? group * kTokens : count - kTokens;
}

#if defined(MOETIER_EMULATE_AMX)
bool has_tiles(unsigned) {
  return has_avx512_vbmi();
}
#else
// The processor has tiles and the feature of CPUID leaf 7, EDX bit `feature`, the kernel saves them, and this process
// may use them: Linux wants to be asked.
bool has_tiles(unsigned feature) {
  constexpr unsigned kTileBit = 1U << 24;
  constexpr int kRequestPermission = 0x1023; // ARCH_REQ_XCOMP_PERM
  constexpr int kTileData = 18;              // XFEATURE_XTILEDATA
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  if (!has_avx512_vbmi() || __get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  if ((d & kTileBit) == 0 || (d & feature) == 0) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

} // namespace
} // namespace moetier
