/* Reads memory apart from our own code: a plain loop, and eight streams whose lines are asked for ahead. */
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

static uint64_t total(__m256i a, __m256i b, __m256i c, __m256i d) {
  uint64_t out[4];
  __m256i sum = _mm256_add_epi64(_mm256_add_epi64(a, b), _mm256_add_epi64(c, d));
  _mm256_storeu_si256((__m256i *)out, sum);
  return out[0] + out[1] + out[2] + out[3];
}

uint64_t plain(const uint8_t *data, size_t bytes) {
  __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
  for (size_t at = 0; at < bytes; at += 128) {
    a = _mm256_add_epi64(a, _mm256_loadu_si256((const __m256i *)(data + at)));
    b = _mm256_add_epi64(b, _mm256_loadu_si256((const __m256i *)(data + at + 32)));
    c = _mm256_add_epi64(c, _mm256_loadu_si256((const __m256i *)(data + at + 64)));
    d = _mm256_add_epi64(d, _mm256_loadu_si256((const __m256i *)(data + at + 96)));
  }
  return total(a, b, c, d);
}

uint64_t streams(const uint8_t *data, size_t bytes) {
  __m256i a = _mm256_setzero_si256(), b = a;
  const size_t part = bytes / 8;
  for (size_t at = 0; at < part; at += 64)
    for (size_t i = 0; i < 8; ++i) {
      const uint8_t *line = data + i * part + at;
      _mm_prefetch((const char *)(line + 4096), _MM_HINT_T0);
      a = _mm256_add_epi64(a, _mm256_loadu_si256((const __m256i *)line));
      b = _mm256_add_epi64(b, _mm256_loadu_si256((const __m256i *)(line + 32)));
    }
  return total(a, b, _mm256_setzero_si256(), _mm256_setzero_si256());
}
