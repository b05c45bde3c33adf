// Integer products with AVX-512 without VNNI.
#include "gemm/product.h"

#if HOP_HAS_AVX512
#include <immintrin.h>

#include <atomic>
#include <cstring>
#include <type_traits>
#include <utility>

#include "common/isa.h"

HOP_BEGIN_TARGET(HOP_TARGET_AVX512_PLAIN)
namespace hop {
namespace avx512_plain {

#include "gemm/engine_avx512_words.h"
#include "gemm/each.h"
#include "gemm/few_in_rows_avx2.h"

int integers(Job& job) {
    return is_narrow(job.p.rhs.format) ? avx2::integers(job) : Multiplication<WideWords<WordsOrFew>>(job).run();
}

}  // namespace avx512_plain
}  // namespace hop
HOP_END_TARGET

#endif
