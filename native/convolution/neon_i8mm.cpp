// Convolutions with matrix products of two rows of 8 by two columns.
#include "common/isa.h"
#include "convolution/convolution.h"

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
#include "common/transpose.h"
#include "convolution/image.h"
#include "convolution/weight.h"
#include "convolution/finish.h"
#include "convolution/finish_plain.h"
#include "convolution/depthwise.h"
#include "convolution/depthwise_plain.h"
#include "convolution/rows.h"
#include "convolution/run.h"

int convolution(Convolution& c) { return Convolving<Pairs<Int8>, false>(c).run(); }

}  // namespace neon_i8mm
}  // namespace hop
HOP_END_TARGET
HOP_END_NEON

#endif
