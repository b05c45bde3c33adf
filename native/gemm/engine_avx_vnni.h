// Integer products with AVX-VNNI: dot products of four bytes, added in int32. Included by each file that uses this engine,
// in the namespace of its instructions.
#include "gemm/engine_avx2.h"

// The first operand of vpdpbusd is unsigned, so 128 is added to the codes of lhs (Job::shift).
struct Bytes8 : Int32Sums {
    static constexpr int kBytes = 1, kLhsBytes = 1, kMost = 6;  // six rows: 12 accumulators, and 3 operand registers
    static constexpr bool kWidens = false;

    template <int N>
    HOP_INLINED static void quad(const uint8_t* a, const uint8_t* b, int at, Vector (&sums)[N][2]) {
        const __m256i left = load256(b + at * 64), right = load256(b + at * 64 + 32);
        HOP_UNROLL
        for (int i = 0; i < N; ++i) {
            int32_t four;
            std::memcpy(&four, a + i * kSlice + at * 4, 4);
            const __m256i x = _mm256_set1_epi32(four);
            sums[i][0] = _mm256_dpbusd_avx_epi32(sums[i][0], x, left);
            sums[i][1] = _mm256_dpbusd_avx_epi32(sums[i][1], x, right);
        }
    }
};
