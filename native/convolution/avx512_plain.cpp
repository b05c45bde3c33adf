// Convolutions with AVX-512 without VNNI; depthwise ones with AVX2.
#include "convolution/convolution.h"

#if HOP_HAS_AVX512
#include <immintrin.h>

#include <atomic>
#include <cstring>
#include <type_traits>

#include "common/isa.h"

HOP_BEGIN_TARGET(HOP_TARGET_AVX512_PLAIN)
namespace hop {
namespace avx512_plain {

#include "gemm/engine_avx512_words.h"
#include "common/transpose.h"
#include "convolution/image.h"
#include "convolution/weight.h"
#include "convolution/finish.h"
#include "convolution/finish_avx2.h"
#include "convolution/depthwise.h"
#include "convolution/depthwise_avx2.h"
#include "convolution/rows.h"
#include "convolution/run.h"

int convolution(Convolution& c) { return Convolving<WideWords<Avx2<Int8>>, false>(c).run(); }

}  // namespace avx512_plain
}  // namespace hop
HOP_END_TARGET

#endif
