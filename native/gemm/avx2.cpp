// Integer products with AVX2: int8 as int16.
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
#include "gemm/each.h"
#include "gemm/few_in_rows_avx2.h"

int narrow_integers(Job& job);

int integers(Job& job) { return is_narrow(job.p.rhs.format) ? narrow_integers(job) : Multiplication<WordsOrFew>(job).run(); }

}  // namespace avx2
}  // namespace hop
HOP_END_TARGET

#endif
