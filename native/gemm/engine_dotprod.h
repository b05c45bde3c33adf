// int8 products with dot products of four bytes. Included by each file that uses this engine, in the namespace of its
// instructions.
#include "common/rounding.h"
#include "gemm/decode_plainly.h"
#include "gemm/tiles_neon.h"
#include "gemm/order_pairs.h"
#include "gemm/skeleton_neon.h"
#include "gemm/lanes_neon.h"

struct Int8 {
    using Sum = int32_t;
    using Vector = int32x4_t;
    static constexpr int kBytes = 1, kLhsBytes = 1, kMost = 6, kVectors = 4;

    template <int Count>
    static void begin(const Sum* from, bool add, Vector (&sums)[Count]) { load_sums(from, add, sums); }
    template <int Count>
    static void end(Sum* to, bool, const Vector (&sums)[Count]) { store_sums(to, sums); }

    template <int N, int T>
    HOP_INLINED static void four(const uint8_t* a, const uint8_t* b, int at, Vector (&sums)[N][T * kVectors]) {
        int8x16_t x[N];
        HOP_UNROLL
        for (int i = 0; i < N; ++i) x[i] = load_codes(a + i * kSlice + at * 4);
        for_lanes<4>([&](auto lane) HOP_INLINED {
            HOP_UNROLL
            for (int j = 0; j < T * 4; ++j) {
                const int8x16_t y = load_codes(b + j / 4 * kTile + (at + lane.value) * 64 + j % 4 * 16);
                HOP_UNROLL
                for (int i = 0; i < N; ++i) sums[i][j] = vdotq_laneq_s32(sums[i][j], y, x[i], lane.value);
            }
        });
    }
};
