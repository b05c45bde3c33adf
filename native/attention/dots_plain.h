// Dot products of four bytes, in plain C++. Included in a namespace, after lanes.h.

#include "attention/bytes.h"

struct Quads {
    const int8_t* at;
};
struct Four {
    int32_t bytes[4];
};
constexpr int kRowsAtOnce = 1, kLinesAtOnce = 1, kVectors = 1;

HOP_INLINE Quads quads(const uint8_t* p) { return {reinterpret_cast<const int8_t*>(p)}; }
HOP_INLINE Four four(const RowCode* p) { return {{p[0], p[1], p[2], p[3]}}; }
HOP_INLINE Ints dot(Ints sum, const Four& x, Quads y) {
    for (int i = 0; i < kLanes; ++i)
        for (int k = 0; k < 4; ++k) sum[i] += x.bytes[k] * y.at[4 * i + k];
    return sum;
}
HOP_INLINE Floats fused(Floats a, Floats b, Floats c) { return a * b + c; }
HOP_INLINE bool any(Ints mask) { return any_of(mask); }
