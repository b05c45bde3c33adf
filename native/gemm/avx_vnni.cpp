// Integer products with AVX-VNNI.
#include "gemm/product.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <atomic>
#include <cstring>
#include <type_traits>
#include <utility>

#include "common/isa.h"

HOP_BEGIN_TARGET(HOP_TARGET_AVX_VNNI)
namespace hop {
namespace avx_vnni {

#include "gemm/engine_avx_vnni.h"
#include "gemm/kept_groups.h"
#include "gemm/each.h"
#define HOP_IN_AVX_VNNI
#include "gemm/narrow_avx2.h"
#undef HOP_IN_AVX_VNNI

int integers(Job& job) {
    constexpr int few = 4;  // rows for which reading the codes takes longer than multiplying them
    if (is_narrow(job.p.rhs.format)) {
        if (job.p.m <= few) return avx2::integers(job);
        if (job.p.rhs.format == HOP_INT4) job.rhs_shift = 8;
        return Multiplication<Narrow>(job).run();
    }
    job.shift = 128;
    return Multiplication<Avx2<Bytes8>>(job).run();
}

}  // namespace avx_vnni
}  // namespace hop
HOP_END_TARGET

#endif
