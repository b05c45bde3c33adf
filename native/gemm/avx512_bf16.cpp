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
#include "gemm/floats_avx512.h"

// Pairs of words as they lie.
struct Pairs {
    static constexpr int kLhsBytes = 2, kChains = 1;

    // [16 rows][2][32]: of k 0 and 2 of each quad, and of k 1 and 3; so rows of two tiles lie equally far apart.
    static void lhs_tile(const uint8_t* tile, uint8_t* out) {
        for (int row = 0; row < kRows; ++row)
            for (int e = 0; e < 2; ++e) store512(out + (2 * row + e) * kSlice, load512(tile + e * kTile + row * kSlice));
    }

    // Two words of a row of such a tile, for each column.
    static __m512bh both(const uint8_t* a, int row, int quad, int e) {
        int32_t pair;
        std::memcpy(&pair, a + (2 * row + e) * kSlice + quad * 4, 4);
        return (__m512bh)_mm512_set1_epi32(pair);
    }

    template <int N>
    static void part(const uint8_t* a, const uint8_t* b, int quad, int e, __m512 (&sums)[N][2]) {
        const auto left = (__m512bh)load512(b + e * kTile + quad * 64);
        const auto right = (__m512bh)load512(b + (2 + e) * kTile + quad * 64);
        HOP_UNROLL
        for (int i = 0; i < N; ++i) {
            const __m512bh x = both(a, i, quad, e);
            sums[i][0] = _mm512_dpbf16_ps(sums[i][0], x, left);
            sums[i][1] = _mm512_dpbf16_ps(sums[i][1], x, right);
        }
    }
};

#include "gemm/few_rows_in_order.h"

int floats(Job& job) { return Multiplication<Floats<Pairs, FewRows>>(job).run(); }

}  // namespace avx512_bf16
}  // namespace hop
HOP_END_TARGET

#endif
