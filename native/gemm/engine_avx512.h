// Integer products with AVX-512 VNNI. Included by each file that uses this engine, in the namespace of its
// instructions.
#include "common/rounding.h"
#include "gemm/tiles_avx512.h"
#include "gemm/decode_plainly.h"
#include "gemm/words_avx512.h"
#include "gemm/scales.h"
#include "gemm/pack_lhs.h"
#include "gemm/pack_rhs.h"
#include "gemm/epilogue.h"
#include "gemm/groups_avx512.h"
#include "gemm/finish_avx512.h"
#include "gemm/requantize.h"
#include "gemm/row_blocks.h"
#include "gemm/kept_groups.h"
#include "gemm/kept_groups_avx512.h"
#include "gemm/gemm.h"
#include "gemm/few_groups_avx512.h"
#include "gemm/codes_of_groups_avx512.h"
#include "gemm/narrow_sums_avx512.h"

// Accumulators per element: few rows need several, because a single one would be limited by latency.
constexpr int sums_of(int rows) { return rows <= 2 ? 4 : rows <= 5 ? 2 : 1; }

// The first operand of vpdpbusd is unsigned, so 128 is added to the codes of lhs (Job::shift).
struct Int8 {
    using Sum = int32_t;
    using Vector = __m512i;
    static constexpr int kBytes = 1, kLhsBytes = 1;
    static constexpr int kFetched = 4;  // up to this many rows, memory is the bottleneck
    static constexpr bool kFewRows = true;
    template <int N, bool Zero>
    using Narrow = NarrowInt8<N, Zero>;
    template <int N, int>
    using Bytes = BytesInt8<N>;
    static Vector zero() { return _mm512_setzero_si512(); }
    static Vector load(const Sum* p) { return load512(p); }
    static void store(Sum* p, Vector x) { store512(p, x); }
    static Vector plus(Vector a, Vector b) { return _mm512_add_epi32(a, b); }
    static __m512 number(Vector x) { return _mm512_cvtepi32_ps(x); }

    template <int N, int S>
    HOP_INLINED static void quad(const uint8_t* a, const uint8_t* b, int at, Vector (&sums)[S][N][2]) {
        HOP_UNROLL
        for (int s = 0; s < S; ++s) {
            if (N <= kFetched) fetch_in_order(b + (at + s) * 128), fetch_in_order(b + (at + s) * 128 + 64);
            const __m512i left = load512(b + (at + s) * 64), right = load512(b + kTile + (at + s) * 64);
            HOP_UNROLL
            for (int i = 0; i < N; ++i) {
                int32_t four;
                std::memcpy(&four, a + i * kSlice + (at + s) * 4, 4);
                const __m512i x = _mm512_set1_epi32(four);
                sums[s][i][0] = _mm512_dpbusd_epi32(sums[s][i][0], x, left);
                sums[s][i][1] = _mm512_dpbusd_epi32(sums[s][i][1], x, right);
            }
        }
    }
};

template <class Numbers>
class Avx512 : public Numbers {
public:
    using Sum = typename Numbers::Sum;
    using Vector = typename Numbers::Vector;
    using Numbers::kBytes, Numbers::kLhsBytes, Numbers::kFewRows, Numbers::kFetched;
    using Few = OneSumOrGroups<NarrowSums<Numbers>, FewGroups<Numbers>>;
    static constexpr bool kKept = true;
    static constexpr int64_t kLongChunk = 32 << 10;  // rhs is read a tenth as often as lhs: the second-level cache is fast enough

    Avx512(int, int quads) : quads_(quads) {}

    template <int R, class Between>
    void multiply(const uint8_t* a, const uint8_t* b, int rows, int64_t slices, Sum* sums, bool add, Between& between) {
        in_row_blocks<kMost>(rows, [&](auto n, int first) {
            block<n.value, sums_of(n.value)>(a + first * kRow, R * kLhsBytes * kTile, b, slices, 0, kQuads,
                                             sums + first * kBlock, add, Once<Between>{between, first == 0});
        });
    }

    template <int R, class Between>
    void step(const uint8_t* a, const uint8_t* b, int rows, int quad, Sum* sums, Between& between) {
        in_row_blocks<kMost>(rows, [&](auto n, int first) {
            block<n.value, sums_of(n.value)>(a + first * kRow, 0, b, 1, quad, quads_, sums + first * kBlock, false,
                                             Once<Between>{between, false});
        });
    }

    static bool keeps(const Job& job) { return keeps_groups(job); }
    template <class Between>
    void groups(const Job& job, const KeptGroups& kept, int rows, Between& between) {
        keep_groups<Numbers>(job, kept, rows, between);
    }

private:
    static constexpr int kMost = 12, kRow = kLhsBytes * kSlice;  // rows at a time: 24 accumulators; bytes of one row

    template <int N, int S, class Between>
    static void block(const uint8_t* a, int64_t stride, const uint8_t* b, int64_t slices, int quad, int quads,
                      Sum* sums, bool add, const Between& between) {
        Vector c[S][N][2];
        HOP_UNROLL
        for (int s = 0; s < S; ++s) {
            HOP_UNROLL
            for (int i = 0; i < N; ++i) {
                HOP_UNROLL
                for (int half = 0; half < 2; ++half)
                    c[s][i][half] = add && s == 0 ? Numbers::load(sums + i * kBlock + half * kRows) : Numbers::zero();
            }
        }
        for (; slices > 0; --slices, a += stride, b += 2 * kBytes * kTile) {
            for (int q = quad; q < quad + quads; q += S) Numbers::template quad<N, S>(a, b, q, c);
            between();
        }
        HOP_UNROLL
        for (int i = 0; i < N; ++i) {
            HOP_UNROLL
            for (int half = 0; half < 2; ++half) {
                Vector x = c[0][i][half];
                HOP_UNROLL
                for (int s = 1; s < S; ++s) x = Numbers::plus(x, c[s][i][half]);
                Numbers::store(sums + i * kBlock + half * kRows, x);
            }
        }
    }

    int quads_;
};
