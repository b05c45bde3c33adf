// bfloat16 products with matrix products of two rows of 4 by two columns. Included by each file that uses this engine,
// in the namespace of its instructions.
#include "common/rounding.h"
#include "gemm/decode_plainly.h"
#include "gemm/tiles_neon.h"
#include "gemm/order_halves.h"
#include "gemm/skeleton_neon.h"
#include "gemm/pairs_neon.h"

inline bfloat16x8_t load_words(const uint8_t* p) { return vreinterpretq_bf16_u8(vld1q_u8(p)); }

// A tile of rhs words is [2 times 8 columns][16 quads][8 columns][4 k].
struct Bfloat16 {
    using Sum = float;
    using Vector = float32x4_t;
    static constexpr int kBytes = 2;
    static Vector load(const Sum* p) { return vld1q_f32(p); }
    static void store(Sum* p, Vector x) { vst1q_f32(p, x); }
    static const uint8_t* columns(const uint8_t* b, int part) { return b + part * kTile; }

    // [8 pairs of rows][16 quads][2 rows][4 k], from [2 times 8 quads][16 rows][32 k].
    static void lhs_tile(const uint8_t* tile, uint8_t* out) {
        for (int row = 0; row < kRows; row += 2, tile += 2 * kSlice)
            for (int quad = 0; quad < kQuads; ++quad, out += 16) {
                const uint8_t* words = tile + quad / 8 * kTile + quad % 8 * 8;
                std::memcpy(out, words, 8);
                std::memcpy(out + 8, words + kSlice, 8);
            }
    }

    template <int P, int H>
    HOP_INLINED static void four(const uint8_t* a, const uint8_t* b, int at, Vector (&sums)[P][4 * H]) {
        for (int quad = at; quad < at + 4; ++quad) {
            HOP_UNROLL
            for (int half = 0; half < H; ++half) {
                bfloat16x8_t y[4];  // 4 k of two columns each
                HOP_UNROLL
                for (int j = 0; j < 4; ++j) y[j] = load_words(b + half * kTile + quad * 64 + j * 16);
                HOP_UNROLL
                for (int i = 0; i < P; ++i) {
                    const bfloat16x8_t x = load_words(a + i * 4 * kSlice + quad * 16);
                    HOP_UNROLL
                    for (int j = 0; j < 4; ++j) sums[i][half * 4 + j] = vbfmmlaq_f32(sums[i][half * 4 + j], x, y[j]);
                }
            }
        }
    }
};
