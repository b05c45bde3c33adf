// Convolutions with AVX-512.
#include "convolution/convolution.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <atomic>
#include <cstring>
#include <type_traits>

#include "common/isa.h"

HOP_BEGIN_TARGET(HOP_AVX512)
namespace hop {
namespace avx512 {

#include "gemm/engine_avx512.h"
#include "common/transpose.h"
#include "convolution/image.h"
#include "convolution/weight.h"
#include "convolution/finish.h"
#include "convolution/finish_avx512.h"
#include "convolution/depthwise.h"
#include "convolution/depthwise_avx512.h"
#include "convolution/rows.h"
#include "convolution/run.h"

int convolution(Convolution& c) {
    c.job.shift = 128;
    return Convolving<Avx512<Int8>, false>(c).run();
}

}  // namespace avx512
}  // namespace hop
HOP_END_TARGET

#endif
