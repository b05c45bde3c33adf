// Products with NEON: int8 as 16-bit products, bfloat16 as float32.
#include "common/isa.h"
#include "gemm/product.h"

#if defined(__AARCH64EL__)
#include <arm_neon.h>

#include <atomic>
#include <cstring>
#include <type_traits>

HOP_BEGIN_NEON
namespace hop {
namespace neon {

#include "gemm/engine_neon.h"

int integers(Job& job) { return Multiplication<Lanes<Int8>>(job).run(); }
int floats(Job& job) { return Multiplication<Lanes<Bfloat16>>(job).run(); }

}  // namespace neon
}  // namespace hop
HOP_END_NEON

#endif
