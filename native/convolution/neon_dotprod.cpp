// Convolutions with dot products of four bytes.
#include "common/isa.h"
#include "convolution/convolution.h"

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
#include "common/transpose.h"
#include "convolution/image.h"
#include "convolution/weight.h"
#include "convolution/finish.h"
#include "convolution/finish_plain.h"
#include "convolution/depthwise.h"
#include "convolution/depthwise_plain.h"
#include "convolution/rows.h"
#include "convolution/run.h"

int convolution(Convolution& c) { return Convolving<Lanes<Int8>, false>(c).run(); }

}  // namespace neon_dotprod
}  // namespace hop
HOP_END_TARGET
HOP_END_NEON

#endif
