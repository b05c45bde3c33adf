#include "attention/attention.h"

#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "common/cpu.h"
#include "common/isa.h"
#include "common/parallel.h"
#include "functions/functions.h"
#include "functions/polynomials.h"
#include "quantize/quantize.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // of what the intrinsics leave undefined on purpose
#endif

namespace hop {
namespace {

// Memory of this thread, valid until its next call.
char* scratch(size_t bytes) {
    static thread_local Scratch own;
    own.trim();
    return own.get(bytes);
}

}  // namespace

namespace portable {
namespace {
#include "quantize/numbers.h"
#include "gemm/row_blocks.h"
#include "attention/lanes.h"
#include "attention/dots_plain.h"
namespace functions_here {
#include "functions/lanes_plain.h"
#include "functions/evaluate.h"
#include "functions/exp_doubles.h"
}  // namespace functions_here
#include "attention/pack.h"
#include "attention/probabilities.h"
#include "attention/run.h"
}  // namespace
}  // namespace portable

#if defined(__x86_64__)
HOP_BEGIN_TARGET(HOP_AVX2)
namespace avx2 {
namespace {
#include "quantize/numbers.h"
#include "gemm/row_blocks.h"
#include "attention/lanes.h"
#include "attention/dots_avx2.h"
namespace functions_here {
#include "functions/lanes_avx2.h"
#include "functions/evaluate.h"
#include "functions/exp_doubles.h"
}  // namespace functions_here
#include "attention/pack.h"
#include "attention/probabilities.h"
#include "attention/run.h"
}  // namespace
}  // namespace avx2
HOP_END_TARGET

HOP_BEGIN_TARGET(HOP_AVX512)
namespace avx512 {
namespace {
#include "quantize/numbers.h"
#include "gemm/row_blocks.h"
#include "attention/lanes.h"
#include "attention/dots_avx512.h"
namespace functions_here {
#include "functions/lanes_avx512.h"
#include "functions/evaluate.h"
#include "functions/exp_avx512.h"
}  // namespace functions_here
#include "attention/pack.h"
#include "attention/probabilities.h"
#include "attention/run.h"
}  // namespace
}  // namespace avx512
HOP_END_TARGET
#endif
}  // namespace hop

int hop_attend(const hop_attention* attention, const int8_t* q, const float* q_scale, const int8_t* k, const float* k_scale,
               const int8_t* v, const float* v_scale, const void* mask, void* result, int32_t threads) {
    const hop::AttentionCall call{*attention, q, k, v, q_scale, k_scale, v_scale, mask, result, threads};
    return HOP_BY_LEVEL(attend(call));
}
