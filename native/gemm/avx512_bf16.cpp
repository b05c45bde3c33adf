// Products of floats with AVX-512's dot products of bfloat16. Those of integers are avx512.cpp's.
#include "gemm/product.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <atomic>
#include <cstring>
#include <type_traits>

#include "common/isa.h"

HOP_BEGIN_TARGET(HOP_AVX512_BF16)
namespace hop {
namespace avx512_bf16 {

#include "gemm/engine_avx512.h"

// Words as they lie, two products at once.
struct PairsOfWords {
    using Sum = float;
    using Vector = __m512;
    static constexpr int kBytes = 2, kLhsBytes = 2;
    static constexpr bool kOwnLhs = true, kFewRows = true;
    template <int N, bool Zero>
    using Narrow = NarrowWordsOfGroups<N, Zero, PairsOfWords>;
    static Vector zero() { return _mm512_setzero_ps(); }
    static Vector load(const Sum* p) { return _mm512_loadu_ps(p); }
    static void store(Sum* p, Vector x) { _mm512_storeu_ps(p, x); }
    static Vector plus(Vector a, Vector b) { return _mm512_add_ps(a, b); }
    static __m512 number(Vector x) { return x; }

    // [16 rows][2][32]: of k 0 and 2 of each quad, and of k 1 and 3; so rows of two tiles lie equally far apart.
    static void lhs_tile(const uint8_t* tile, uint8_t* out) {
        for (int row = 0; row < kRows; ++row)
            for (int e = 0; e < 2; ++e) store512(out + (2 * row + e) * kSlice, load512(tile + e * kTile + row * kSlice));
    }

    static __m512bh pair(const uint8_t* row, int quad, int e) {
        int32_t words;
        std::memcpy(&words, row + e * kSlice + quad * 4, 4);
        return (__m512bh)_mm512_set1_epi32(words);
    }
    static void add(Vector& sum, const uint8_t* row, int quad, int e, __m512i words) {
        sum = _mm512_dpbf16_ps(sum, pair(row, quad, e), (__m512bh)words);
    }

    template <int N, int S>
    static void quad(const uint8_t* a, const uint8_t* b, int at, Vector (&sums)[S][N][2]) {
        HOP_UNROLL
        for (int s = 0; s < S; ++s) {
            HOP_UNROLL
            for (int e = 0; e < 2; ++e) {
                const auto left = (__m512bh)load512(b + e * kTile + (at + s) * 64);
                const auto right = (__m512bh)load512(b + (2 + e) * kTile + (at + s) * 64);
                HOP_UNROLL
                for (int i = 0; i < N; ++i) {
                    const auto x = pair(a + 2 * i * kSlice, at + s, e);
                    sums[s][i][0] = _mm512_dpbf16_ps(sums[s][i][0], x, left);
                    sums[s][i][1] = _mm512_dpbf16_ps(sums[s][i][1], x, right);
                }
            }
        }
    }
};

int floats(Job& job) { return Multiplication<Avx512<PairsOfWords>>(job).run(); }

}  // namespace avx512_bf16
}  // namespace hop
HOP_END_TARGET

#endif
