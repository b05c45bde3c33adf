// Integer products with AVX-512 without VNNI: int8 as int16, in vectors of 512 bits. Included by each file that uses this
// engine, in the namespace of its instructions.
#include "gemm/engine_avx2.h"

// An engine for AVX2, with wider vectors.
template <class Engine>
class WideWords : public Engine {
public:
    using typename Engine::Sum;
    using Engine::Engine, Engine::kLhsBytes;

    template <int R, class Between>
    void multiply(const uint8_t* a, const uint8_t* b, int rows, int64_t slices, Sum* sums, bool add, Between& between) {
        in_row_blocks<kMost>(rows, [&](auto n, int first) {
            block<n.value>(a + first * kRow, R * kLhsBytes * kTile, b, slices, 0, kQuads, sums + first * kBlock, add,
                           Once<Between>{between, first == 0});
        });
    }

    template <int R, class Between>
    void step(const uint8_t* a, const uint8_t* b, int rows, int quad, Sum* sums, Between&) {
        in_row_blocks<kMost>(rows, [&](auto n, int first) {
            block<n.value>(a + first * kRow, 0, b, 1, quad, this->quads_, sums + first * kBlock, false, [] {});
        });
    }

private:
    static constexpr int kMost = 12, kRow = kLhsBytes * kSlice;  // 12 rows: 24 accumulators

    template <int N, class Between>
    void block(const uint8_t* a, int64_t stride, const uint8_t* b, int64_t slices, int quad, int quads, Sum* sums, bool add,
               const Between& between) {
        const bool fetches = this->fetches_;  // packed codes, which are in memory
        __m512i c[N][2];
        HOP_UNROLL
        for (int i = 0; i < N; ++i) {
            HOP_UNROLL
            for (int tile = 0; tile < 2; ++tile)
                c[i][tile] = add ? _mm512_loadu_si512(sums + i * kBlock + tile * kRows) : _mm512_setzero_si512();
        }
        for (; slices > 0; --slices, a += stride, b += 2 * kTile) {
            for (int q = quad; q < quad + quads; ++q) {
                if (fetches) fetch_in_order(b + q * 128), fetch_in_order(b + q * 128 + 64);
                __m512i even[2], odd[2];
                HOP_UNROLL
                for (int tile = 0; tile < 2; ++tile) {
                    const __m512i codes = _mm512_loadu_si512(b + tile * kTile + q * 64);
                    even[tile] = _mm512_srai_epi16(_mm512_slli_epi16(codes, 8), 8);
                    odd[tile] = _mm512_srai_epi16(codes, 8);
                }
                HOP_UNROLL
                for (int i = 0; i < N; ++i) {
                    int32_t pairs[2];
                    std::memcpy(&pairs[0], a + i * kRow + q * 4, 4);
                    std::memcpy(&pairs[1], a + i * kRow + kSlice + q * 4, 4);
                    const __m512i x = _mm512_set1_epi32(pairs[0]), y = _mm512_set1_epi32(pairs[1]);
                    HOP_UNROLL
                    for (int tile = 0; tile < 2; ++tile) {
                        c[i][tile] = _mm512_add_epi32(c[i][tile], _mm512_madd_epi16(x, even[tile]));
                        c[i][tile] = _mm512_add_epi32(c[i][tile], _mm512_madd_epi16(y, odd[tile]));
                    }
                }
            }
            between();
        }
        HOP_UNROLL
        for (int i = 0; i < N; ++i) {
            HOP_UNROLL
            for (int tile = 0; tile < 2; ++tile) _mm512_storeu_si512(sums + i * kBlock + tile * kRows, c[i][tile]);
        }
    }
};
