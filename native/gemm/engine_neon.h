// Products with NEON: int8 as 16-bit products, bfloat16 as float32. Included by each file that uses this engine, in the
// namespace of its instructions.
#include "common/rounding.h"
#include "gemm/decode_plainly.h"
#include "gemm/tiles_neon.h"
#include "gemm/order_pairs.h"
#include "gemm/skeleton_neon.h"
#include "gemm/lhs_floats.h"
#include "gemm/lanes_neon.h"

// Eight 16-bit products at a time, added in pairs to 32-bit sums, two for each column. CPUs without dot products
// multiply and add in different units.
struct Int8 {
    using Sum = int32_t;
    using Vector = int32x4_t;
    static constexpr int kBytes = 1, kLhsBytes = 1, kMost = 3, kVectors = 8;

    template <int Count>
    static void begin(const Sum*, bool, Vector (&sums)[Count]) {
        HOP_UNROLL
        for (int i = 0; i < Count; ++i) sums[i] = vdupq_n_s32(0);
    }
    template <int Count>
    static void end(Sum* to, bool add, const Vector (&sums)[Count]) {
        HOP_UNROLL
        for (int i = 0; i < Count; i += 2, to += 4) {
            const Vector x = vpaddq_s32(sums[i], sums[i + 1]);
            vst1q_s32(to, add ? vaddq_s32(vld1q_s32(to), x) : x);
        }
    }

    template <int N, int T>
    HOP_INLINED static void four(const uint8_t* a, const uint8_t* b, int at, Vector (&sums)[N][T * kVectors]) {
        for (int quad = at; quad < at + 4; ++quad) {
            int8x16_t x[N];
            HOP_UNROLL
            for (int i = 0; i < N; ++i) {
                int32_t codes;
                std::memcpy(&codes, a + i * kSlice + quad * 4, 4);
                x[i] = vreinterpretq_s8_s32(vdupq_n_s32(codes));
            }
            HOP_UNROLL
            for (int j = 0; j < T * 4; ++j) {
                const int8x16_t y = load_codes(b + j / 4 * kTile + quad * 64 + j % 4 * 16);
                HOP_UNROLL
                for (int i = 0; i < N; ++i) {
                    sums[i][2 * j] = vpadalq_s16(sums[i][2 * j], vmull_s8(vget_low_s8(x[i]), vget_low_s8(y)));
                    sums[i][2 * j + 1] = vpadalq_s16(sums[i][2 * j + 1], vmull_high_s8(x[i], y));
                }
            }
        }
    }
};

struct Bfloat16 {
    using Sum = float;
    using Vector = float32x4_t;
    static constexpr int kBytes = 2, kLhsBytes = 4, kMost = 6, kVectors = 4;
    static void lhs_tile(const uint8_t* tile, uint8_t* out) { lhs_floats(tile, out); }

    template <int Count>
    static void begin(const Sum* from, bool add, Vector (&sums)[Count]) { load_sums(from, add, sums); }
    template <int Count>
    static void end(Sum* to, bool, const Vector (&sums)[Count]) { store_sums(to, sums); }

    // Processes k 0, 2, 1 and 3 of each quad, in this order.
    template <int N, int T>
    HOP_INLINED static void four(const uint8_t* a, const uint8_t* b, int at, Vector (&sums)[N][T * kVectors]) {
        const uint32x4_t upper = vdupq_n_u32(0xffff0000);
        const auto* rows = reinterpret_cast<const float*>(a) + at;
        for (int e = 0; e < 2; ++e, rows += 2 * kQuads, b += kTile)
            for_lanes<2>([&](auto second) HOP_INLINED {
                Vector x[N];
                HOP_UNROLL
                for (int i = 0; i < N; ++i) x[i] = vld1q_f32(rows + i * kSlice + second.value * kQuads);
                for_lanes<4>([&](auto lane) HOP_INLINED {
                    HOP_UNROLL
                    for (int j = 0; j < T * 4; ++j) {
                        const uint8_t* words = b + j / 4 * 2 * kTile + (at + lane.value) * 64 + j % 4 * 16;
                        const uint32x4_t both = vreinterpretq_u32_u8(vld1q_u8(words));
                        const Vector y = vreinterpretq_f32_u32(second.value ? vandq_u32(both, upper) : vshlq_n_u32(both, 16));
                        HOP_UNROLL
                        for (int i = 0; i < N; ++i) sums[i][j] = vfmaq_laneq_f32(sums[i][j], y, x[i], lane.value);
                    }
                });
            });
    }
};
