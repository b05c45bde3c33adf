// Convolutions with NEON.
#include "common/isa.h"
#include "convolution/convolution.h"

#if defined(__AARCH64EL__)
#include <arm_neon.h>

#include <atomic>
#include <cstring>
#include <type_traits>

HOP_BEGIN_NEON
namespace hop {
namespace neon {

#include "gemm/engine_neon.h"
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

}  // namespace neon
}  // namespace hop
HOP_END_NEON

#endif
