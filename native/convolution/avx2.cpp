// Convolutions with AVX2.
#include "convolution/convolution.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <atomic>
#include <cstring>
#include <type_traits>

#include "common/isa.h"

HOP_BEGIN_TARGET(HOP_TARGET_AVX2)
namespace hop {
namespace avx2 {

#include "gemm/engine_avx2.h"
#include "common/transpose.h"
#include "convolution/image.h"
#include "convolution/weight.h"
#include "convolution/finish.h"
#include "convolution/finish_avx2.h"
#include "convolution/depthwise.h"
#include "convolution/depthwise_avx2.h"
#include "convolution/rows.h"
#include "convolution/run.h"

int convolution(Convolution& c) { return Convolving<Avx2<Int8>, false>(c).run(); }

}  // namespace avx2
}  // namespace hop
HOP_END_TARGET

#endif
