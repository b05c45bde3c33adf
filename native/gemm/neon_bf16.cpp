// bfloat16 products with matrix products of two rows of 4 by two columns.
#include "common/isa.h"
#include "gemm/product.h"

#if defined(__AARCH64EL__) && HOP_NEON_TARGETS
#include <arm_neon.h>

#include <atomic>
#include <cstring>
#include <type_traits>

HOP_BEGIN_NEON
HOP_BEGIN_TARGET(HOP_TARGET_BF16)
namespace hop {
namespace neon_bf16 {

#include "gemm/engine_bf16.h"

int floats(Job& job) { return Multiplication<Pairs<Bfloat16>>(job).run(); }

}  // namespace neon_bf16
}  // namespace hop
HOP_END_TARGET
HOP_END_NEON

#endif
