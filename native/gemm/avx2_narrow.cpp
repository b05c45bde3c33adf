// Integer products with 4-bit codes, with AVX2.
#include "gemm/product.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <atomic>
#include <cstring>
#include <type_traits>
#include <utility>

#include "common/isa.h"

HOP_BEGIN_TARGET(HOP_TARGET_AVX2)
namespace hop {
namespace avx2 {

#include "gemm/engine_avx2.h"
#include "gemm/kept_groups.h"
#include "gemm/each.h"
#include "gemm/narrow_avx2.h"
#include "gemm/vectors_avx2.h"
#include "gemm/group_zeros_avx2.h"
#include "gemm/narrow_tile.h"
#include "gemm/tiles_of_rows_avx2.h"
#include "gemm/few_narrow_avx2.h"

int narrow_integers(Job& job) {
    if (job.p.rhs.format == HOP_INT4) job.rhs_shift = 8;
    return Multiplication<NarrowOrFew>(job).run();
}

}  // namespace avx2
}  // namespace hop
HOP_END_TARGET

#endif
