// Dot products of four bytes with VNNI. Included in a namespace, after lanes.h.

#include "attention/bytes.h"

using Quads = __m512i;  // 16 columns of four signed bytes
using Four = __m512i;   // four unsigned bytes, broadcast to all columns
constexpr int kRowsAtOnce = 6, kLinesAtOnce = 4, kVectors = 2;

HOP_INLINE Quads quads(const uint8_t* p) { return _mm512_loadu_si512(p); }
HOP_INLINE Four four(const RowCode* p) {
    int32_t bytes;
    __builtin_memcpy(&bytes, p, 4);
    return _mm512_set1_epi32(bytes);
}
HOP_INLINE Ints dot(Ints sum, Four x, Quads y) { return Ints(_mm512_dpbusd_epi32(__m512i(sum), x, y)); }
HOP_INLINE Floats fused(Floats a, Floats b, Floats c) { return Floats(_mm512_fmadd_ps(__m512(a), __m512(b), __m512(c))); }
HOP_INLINE bool any(Ints mask) { return _mm512_movepi32_mask(__m512i(mask)) != 0; }
