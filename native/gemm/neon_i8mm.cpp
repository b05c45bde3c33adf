// int8 products with matrix products of two rows of 8 by two columns.
#include "common/isa.h"
#include "gemm/product.h"

#if defined(__AARCH64EL__) && HOP_NEON_TARGETS
#include <arm_neon.h>

#include <atomic>
#include <cstring>
#include <type_traits>

HOP_BEGIN_NEON
HOP_BEGIN_TARGET(HOP_TARGET_I8MM)
namespace hop {
namespace neon_i8mm {

#include "gemm/engine_i8mm.h"

int integers(Job& job) { return Multiplication<Pairs<Int8>>(job).run(); }

}  // namespace neon_i8mm
}  // namespace hop
HOP_END_TARGET
HOP_END_NEON

#endif
