// Float products with AVX-512: bfloat16 as float32.
#include "gemm/product.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <atomic>
#include <cstring>
#include <type_traits>

#include "common/isa.h"

HOP_BEGIN_TARGET(HOP_AVX512)
namespace hop {
namespace avx512 {

#include "gemm/engine_avx512.h"
#include "gemm/lhs_floats.h"
#include "gemm/floats_avx512.h"

// Fused multiply-adds of single floats: four for each quad, so that a single chain would be limited by latency.
struct Singles {
    static constexpr int kLhsBytes = 4, kChains = 2;
    static void lhs_tile(const uint8_t* tile, uint8_t* out) { lhs_floats(tile, out); }

    template <int N>
    static HOP_IN_REGISTERS void add(const uint8_t* a, __m512i left, __m512i right, int quad, int e, __m512 (&sums)[N][2]) {
        const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
        const __m512 first[2] = {_mm512_castsi512_ps(_mm512_slli_epi32(left, 16)),
                                 _mm512_castsi512_ps(_mm512_slli_epi32(right, 16))};
        const __m512 second[2] = {_mm512_castsi512_ps(_mm512_and_si512(left, upper)),
                                  _mm512_castsi512_ps(_mm512_and_si512(right, upper))};
        HOP_UNROLL
        for (int i = 0; i < N; ++i) {
            const float* row = reinterpret_cast<const float*>(a) + i * kSlice + e * 2 * kQuads + quad;
            const __m512 x = _mm512_set1_ps(row[0]), y = _mm512_set1_ps(row[kQuads]);
            HOP_UNROLL
            for (int half = 0; half < 2; ++half) {
                sums[i][half] = _mm512_fmadd_ps(x, first[half], sums[i][half]);
                sums[i][half] = _mm512_fmadd_ps(y, second[half], sums[i][half]);
            }
        }
    }
};

#include "gemm/few_rows_in_order.h"

int floats(Job& job) { return Multiplication<Floats<Singles, OneSumOrGroups<FewRows<Singles>, FewGroups<KeptFloats<Singles>>>>>(job).run(); }

}  // namespace avx512
}  // namespace hop
HOP_END_TARGET

#endif
