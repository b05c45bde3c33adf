// int8 products with dot products of four bytes.
#include "common/isa.h"
#include "gemm/product.h"

#if defined(__AARCH64EL__) && HOP_NEON_TARGETS
#include <arm_neon.h>

#include <atomic>
#include <cstring>
#include <type_traits>

HOP_BEGIN_NEON
HOP_BEGIN_TARGET(HOP_TARGET_DOTPROD)
namespace hop {
namespace neon_dotprod {

#include "gemm/engine_dotprod.h"

int integers(Job& job) { return Multiplication<Lanes<Int8>>(job).run(); }

}  // namespace neon_dotprod
}  // namespace hop
HOP_END_TARGET
HOP_END_NEON

#endif
