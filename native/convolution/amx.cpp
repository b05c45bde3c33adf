// Convolutions with the AMX matrix unit.
#include "convolution/convolution.h"

#if HOP_HAS_AVX512
#include <immintrin.h>

#include <atomic>
#include <cstring>

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
#include "gemm/gemm.h"
#include "common/registers_amx.h"
#include "common/transpose.h"
#include "convolution/image.h"
#include "convolution/weight.h"
#include "convolution/finish.h"
#include "convolution/finish_avx512.h"
#include "convolution/depthwise.h"
#include "convolution/depthwise_avx512.h"
#include "convolution/rows.h"
#include "convolution/run.h"

// The engine of convolutions that reads rows in place, as int8 or uint8.
template <bool Unsigned>
class Windowed {
public:
    static constexpr int kLhsBytes = 1;
    static constexpr bool kWhole = true;

    Windowed(int rows, int quads) : registers_(rows, quads) {}

    template <int R, class Between>
    void windows(const uint8_t* a, int64_t stride, int, const Step* steps, int64_t count, const uint8_t* b, int32_t* sums,
                 bool add, Between between) {
        written();
        if (add) {
            _tile_loadd(0, sums, kStride);
            _tile_loadd(1, sums + kRows, kStride);
            if (R == 2) {
                _tile_loadd(2, sums + kRows * kBlock, kStride);
                _tile_loadd(3, sums + kRows * kBlock + kRows, kStride);
            }
        } else {
            _tile_zero(0);
            _tile_zero(1);
            if (R == 2) {
                _tile_zero(2);
                _tile_zero(3);
            }
        }
        for (int64_t s = 0; s < count; ++s) {
            const uint8_t *left = a + steps[s].lhs, *right = b + steps[s].rhs;
            _tile_loadd(6, right, 64);
            _tile_loadd(4, left, stride);
            _tile_loadd(7, right + kTile, 64);
            if (Unsigned) _tile_dpbusd(0, 4, 6);
            else _tile_dpbssd(0, 4, 6);
            if (Unsigned) _tile_dpbusd(1, 4, 7);
            else _tile_dpbssd(1, 4, 7);
            if (R == 2) {
                _tile_loadd(5, left + kRows * stride, stride);
                if (Unsigned) _tile_dpbusd(2, 5, 6);
            else _tile_dpbssd(2, 5, 6);
                if (Unsigned) _tile_dpbusd(3, 5, 7);
            else _tile_dpbssd(3, 5, 7);
            }
            between();
        }
        _tile_stored(0, sums, kStride);
        _tile_stored(1, sums + kRows, kStride);
        if (R == 2) {
            _tile_stored(2, sums + kRows * kBlock, kStride);
            _tile_stored(3, sums + kRows * kBlock + kRows, kStride);
        }
    }

private:
    static constexpr int kStride = kBlock * 4;  // bytes of a row of sums
    Registers registers_;
};

int convolution(Convolution& c) {
    if (c.job.p.lhs.format == HOP_UINT8) return Convolving<Windowed<true>, true>(c).run();
    return Convolving<Windowed<false>, true>(c).run();
}

}  // namespace amx
}  // namespace hop
HOP_END_TARGET

#endif
