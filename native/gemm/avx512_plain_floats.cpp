// Float products with AVX-512, in float32.
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

#include "common/rounding.h"
#include "gemm/decode_plainly.h"
#include "gemm/columns_avx2.h"
#include "gemm/tiles_plain.h"
#include "gemm/words_avx2.h"
#include "gemm/scales.h"
#include "gemm/pack_lhs.h"
#include "gemm/pack_rhs.h"
#include "gemm/epilogue.h"
#include "gemm/groups_plain.h"
#include "gemm/finish_plain.h"
#include "gemm/requantize.h"
#include "gemm/gemm.h"
#include "gemm/row_blocks.h"
#include "gemm/kept_groups.h"
#include "gemm/loads_avx2.h"
#include "gemm/each.h"
#include "gemm/vectors_avx512.h"
#include "gemm/numbers_avx2.h"
#include "gemm/group_zeros_avx2.h"
#include "gemm/narrow_tile.h"
#include "gemm/tiles_of_rows_avx2.h"
#include "gemm/few_floats_avx2.h"
#include "gemm/floats_avx2.h"

int floats(Job& job) { return Multiplication<Floats>(job).run(); }

}  // namespace avx512_plain
}  // namespace hop
HOP_END_TARGET

#endif
