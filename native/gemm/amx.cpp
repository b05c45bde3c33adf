// Products with the AMX matrix unit: int8 and bfloat16.
#include "gemm/product.h"

#if HOP_HAS_AVX512
#include <immintrin.h>

#include <atomic>
#include <cstring>

#include "common/cpu.h"
#include "common/isa.h"

HOP_BEGIN_TARGET(HOP_TARGET_AMX)
namespace hop {
namespace amx {

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
#include "gemm/few_rows.h"
#include "gemm/gemm.h"
#include "common/registers_amx.h"

struct Int8 {
    using Sum = int32_t;
    static constexpr int kBytes = 1;
};
struct Bfloat16 {
    using Sum = float;
    static constexpr int kBytes = 2;
};

template <class Numbers>
class Amx {
public:
    using Sum = typename Numbers::Sum;
    static constexpr int kBytes = Numbers::kBytes, kLhsBytes = kBytes;
    static constexpr bool kFewRows = kBytes == 2, kKept = false;
    using Few = FewRows;

    Amx(int rows, int quads) : registers_(rows, quads) {}

    template <int R, class Between>
    void multiply(const uint8_t* a, const uint8_t* b, int, int64_t slices, Sum* sums, bool add, Between& between) {
        written();
        if (add) load<R>(sums);
        else zero<R>();
        for (int64_t s = 0; s < slices; ++s, a += R * kBytes * kTile, b += 2 * kBytes * kTile) {
            for (int e = 0; e < kBytes; ++e) product<R>(a + e * kTile, b + e * kTile);
            between();
        }
        store<R>(sums);
    }

    template <int R, class Between>
    void step(const uint8_t* a, const uint8_t* b, int, int quad, Sum* sums, Between& between) {
        written();
        zero<R>();
        for (int e = 0; e < kBytes; ++e) {
            product<R>(a + e * kTile + quad * 4, b + e * kTile + quad * 64);
            between();
        }
        store<R>(sums);
    }

private:
    static constexpr int kStride = kBlock * 4;  // bytes of a row of sums

    template <int R>
    static void product(const uint8_t* a, const uint8_t* b) {
        if (kBytes == 1) {
            _tile_loadd(4, a, 64);
            if (R == 2) _tile_loadd(5, a + kBytes * kTile, 64);
        } else {  // bypass the first-level cache, which is needed for decoded words
            _tile_stream_loadd(4, a, 64);
            if (R == 2) _tile_stream_loadd(5, a + kBytes * kTile, 64);
        }
        _tile_loadd(6, b, 64);
        _tile_loadd(7, b + kBytes * kTile, 64);
        dot<0, 4, 6>();
        dot<1, 4, 7>();
        if (R == 2) {
            dot<2, 5, 6>();
            dot<3, 5, 7>();
        }
    }

    template <int C, int A, int B>
    static void dot();

    template <int R>
    static void zero() {
        _tile_zero(0);
        _tile_zero(1);
        if (R == 2) {
            _tile_zero(2);
            _tile_zero(3);
        }
    }
    template <int R>
    static void load(const Sum* sums) {
        _tile_loadd(0, sums, kStride);
        _tile_loadd(1, sums + kRows, kStride);
        if (R == 2) {
            _tile_loadd(2, sums + kRows * kBlock, kStride);
            _tile_loadd(3, sums + kRows * kBlock + kRows, kStride);
        }
    }
    template <int R>
    static void store(Sum* sums) {
        _tile_stored(0, sums, kStride);
        _tile_stored(1, sums + kRows, kStride);
        if (R == 2) {
            _tile_stored(2, sums + kRows * kBlock, kStride);
            _tile_stored(3, sums + kRows * kBlock + kRows, kStride);
        }
    }

    Registers registers_;
};

// clang-format off
#define HOP_DOT(C, A, B) \
    template <> template <> inline void Amx<Int8>::dot<C, A, B>() { _tile_dpbssd(C, A, B); } \
    template <> template <> inline void Amx<Bfloat16>::dot<C, A, B>() { _tile_dpbf16ps(C, A, B); }
HOP_DOT(0, 4, 6)
HOP_DOT(1, 4, 7)
HOP_DOT(2, 5, 6)
HOP_DOT(3, 5, 7)
#undef HOP_DOT
// clang-format on

int integers(Job& job) { return Multiplication<Amx<Int8>>(job).run(); }
int floats(Job& job) { return Multiplication<Amx<Bfloat16>>(job).run(); }

}  // namespace amx
}  // namespace hop
HOP_END_TARGET

#endif
