// Convolutions with AVX-512.
#include "convolution/convolution.h"

#if HOP_HAS_AVX512
#include <immintrin.h>

#include <atomic>
#include <cstring>
#include <type_traits>

#include "common/isa.h"

HOP_BEGIN_TARGET(HOP_TARGET_AVX512)
namespace hop {
namespace avx512 {

#include "gemm/engine_avx512.h"
#include "common/transpose.h"
#include "convolution/image.h"
#include "convolution/weight.h"
#include "convolution/finish.h"
#include "convolution/finish_avx512.h"
#include "convolution/depthwise.h"
#include "convolution/depthwise_avx512.h"
#include "convolution/rows.h"
#include "convolution/run.h"

// Reads rows of uint8 in place.
class Windowed : public Avx512<Int8> {
public:
    using Avx512<Int8>::Avx512;
    static constexpr bool kWhole = false;

    template <int R, class Between>
    void windows(const uint8_t* a, int64_t stride, int rows, const Step* steps, int64_t count, const uint8_t* b,
                 int32_t* sums, bool add, Between between) {
        in_row_blocks<12>(rows, [&](auto n, int first) {
            const auto once = [&] { if (first == 0) between(); };
            block<n.value>(a + first * stride, stride, steps, count, b, sums + first * kBlock, add, once);
        });
    }

private:
    template <int N, class Between>
    static void block(const uint8_t* a, int64_t stride, const Step* steps, int64_t count, const uint8_t* b, int32_t* sums,
                      bool add, const Between& between) {
        constexpr int kThirds = (N + 2) / 3;  // one register for three rows
        __m512i c[N][2];
        HOP_UNROLL
        for (int i = 0; i < N; ++i) {
            HOP_UNROLL
            for (int half = 0; half < 2; ++half)
                c[i][half] = add ? load512(sums + i * kBlock + half * kRows) : _mm512_setzero_si512();
        }
        for (int64_t s = 0; s < count; ++s) {
            const uint8_t* rows[kThirds];
            HOP_UNROLL
            for (int i = 0; i < kThirds; ++i) rows[i] = a + steps[s].lhs + 3 * i * stride;
            const uint8_t* right = b + steps[s].rhs;
            for (int quad = 0; quad < kQuads; ++quad, right += 64) {
                const __m512i x = load512(right), y = load512(right + kTile);
                HOP_UNROLL
                for (int i = 0; i < N; ++i) {
                    const __m512i four = four_codes(rows[i / 3] + i % 3 * stride);
                    c[i][0] = _mm512_dpbusd_epi32(c[i][0], four, x);
                    c[i][1] = _mm512_dpbusd_epi32(c[i][1], four, y);
                }
                HOP_UNROLL
                for (int i = 0; i < kThirds; ++i) rows[i] += 4;
            }
            between();
        }
        HOP_UNROLL
        for (int i = 0; i < N; ++i) {
            HOP_UNROLL
            for (int half = 0; half < 2; ++half) store512(sums + i * kBlock + half * kRows, c[i][half]);
        }
    }
};

int convolution(Convolution& c) {
    if (c.windows) return Convolving<Windowed, true>(c).run();
    c.job.shift = 128;
    return Convolving<Avx512<Int8>, false>(c).run();
}

}  // namespace avx512
}  // namespace hop
HOP_END_TARGET

#endif
