// int8 products with matrix products of two rows of 8 by two columns. Included by each file that uses this engine, in
// the namespace of its instructions.
#include "common/rounding.h"
#include "gemm/decode_plainly.h"
#include "gemm/tiles_neon.h"
#include "gemm/order_pairs.h"
#include "gemm/skeleton_neon.h"
#include "gemm/pairs_neon.h"

struct Int8 {
    using Sum = int32_t;
    using Vector = int32x4_t;
    static constexpr int kBytes = 1;
    static Vector load(const Sum* p) { return vld1q_s32(p); }
    static void store(Sum* p, Vector x) { vst1q_s32(p, x); }
    static const uint8_t* columns(const uint8_t* b, int part) { return b + part / 2 * kTile + part % 2 * 32; }

    // [8 pairs of rows][8 times 8 k][2 rows][8 k]
    static void lhs_tile(const uint8_t* tile, uint8_t* out) {
        for (int row = 0; row < kRows; row += 2, tile += 2 * kSlice)
            for (int k = 0; k < kSlice; k += 8, out += 16) {
                std::memcpy(out, tile + k, 8);
                std::memcpy(out + 8, tile + kSlice + k, 8);
            }
    }

    template <int P, int H>
    HOP_INLINED static void four(const uint8_t* a, const uint8_t* b, int at, Vector (&sums)[P][4 * H]) {
        HOP_UNROLL
        for (int quad = 0; quad < 4; quad += 2) {
            HOP_UNROLL
            for (int half = 0; half < H; ++half) {
                const uint8_t* codes = b + (at + quad) * 64 + half * 32;
                int8x16_t y[4];  // 8 k of two columns each
                HOP_UNROLL
                for (int j = 0; j < 2; ++j) {
                    const int32x4_t first = vreinterpretq_s32_s8(load_codes(codes + j * 16));
                    const int32x4_t second = vreinterpretq_s32_s8(load_codes(codes + 64 + j * 16));
                    y[2 * j] = vreinterpretq_s8_s32(vzip1q_s32(first, second));
                    y[2 * j + 1] = vreinterpretq_s8_s32(vzip2q_s32(first, second));
                }
                HOP_UNROLL
                for (int i = 0; i < P; ++i) {
                    const int8x16_t x = load_codes(a + i * 2 * kSlice + (at + quad) * 8);
                    HOP_UNROLL
                    for (int j = 0; j < 4; ++j) sums[i][half * 4 + j] = vmmlaq_s32(sums[i][half * 4 + j], x, y[j]);
                }
            }
        }
    }
};
