// Float products with AVX-512's bfloat16 dot products. Integer products are in avx512.cpp.
#include "gemm/product.h"

#if HOP_HAS_AVX512
#include <immintrin.h>

#include <atomic>
#include <cstring>
#include <type_traits>

#include "common/isa.h"

HOP_BEGIN_TARGET(HOP_TARGET_AVX512_BF16)
namespace hop {
namespace avx512_bf16 {

#include "gemm/engine_avx512.h"
#include "gemm/floats_avx512.h"

// Multiplies pairs of bfloat16 words directly.
struct Pairs {
    static constexpr int kLhsBytes = 2;

    // [16 rows][2][32]: k 0 and 2 of each quad, then k 1 and 3; so the rows of two tiles have the same distance.
    static void lhs_tile(const uint8_t* tile, uint8_t* out) {
        for (int row = 0; row < kRows; ++row)
            for (int e = 0; e < 2; ++e) store512(out + (2 * row + e) * kSlice, load512(tile + e * kTile + row * kSlice));
    }

    template <int N>
    static HOP_IN_REGISTERS void add(const uint8_t* a, __m512i left, __m512i right, int quad, int e, __m512 (&sums)[N][2]) {
        HOP_UNROLL
        for (int i = 0; i < N; ++i) {
            int32_t pair;
            std::memcpy(&pair, a + (2 * i + e) * kSlice + quad * 4, 4);
            const auto x = (__m512bh)_mm512_set1_epi32(pair);
            sums[i][0] = _mm512_dpbf16_ps(sums[i][0], x, (__m512bh)left);
            sums[i][1] = _mm512_dpbf16_ps(sums[i][1], x, (__m512bh)right);
        }
    }
};

#include "gemm/few_rows_in_order.h"

int floats(Job& job) { return Multiplication<Floats<Pairs, OneSumOrGroups<FewRows<Pairs>, FewGroups<KeptFloats<Pairs>>>>>(job).run(); }

}  // namespace avx512_bf16
}  // namespace hop
HOP_END_TARGET

#endif
