// Dot products of two int16 with AVX2; codes are widened to int16. Included in a namespace, after lanes.h.

using RowCode = int16_t;
using Quads = __m256i;  // 8 columns of two codes
using Four = __m256i;   // two codes, broadcast to all columns
constexpr int kRowsAtOnce = 6, kLinesAtOnce = 2, kVectors = 4;

HOP_INLINE Quads quads(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
HOP_INLINE Four four(const RowCode* p) {
    int32_t both;
    __builtin_memcpy(&both, p, 4);
    return _mm256_set1_epi32(both);
}
HOP_INLINE Ints dot(Ints sum, Four x, Quads y) { return Ints(_mm256_add_epi32(__m256i(sum), _mm256_madd_epi16(x, y))); }
HOP_INLINE void store_codes(RowCode* to, Ints codes) {
    const __m256i x = __m256i(codes);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)));
}

HOP_INLINE __m256i eight_quads(const int8_t* p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }

// Interleaves two tokens of 8 channels.
HOP_INLINE void interleave(const int8_t* const rows[2], uint8_t* to) {
    __m128i r[2];
    for (int i = 0; i < 2; ++i) r[i] = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(rows[i])));
    auto* out = reinterpret_cast<__m128i*>(to);
    _mm_storeu_si128(out, _mm_unpacklo_epi16(r[0], r[1]));
    _mm_storeu_si128(out + 1, _mm_unpackhi_epi16(r[0], r[1]));
}

#include "attention/eight_lanes.h"
