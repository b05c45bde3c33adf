#include "rows/rows.h"

#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <type_traits>

#include "common/cpu.h"
#include "common/isa.h"
#include "common/parallel.h"
#include "functions/functions.h"
#include "functions/polynomials.h"
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
#include "quantize/stats.h"
#include "quantize/scales.h"
#include "quantize/encode.h"
#include "quantize/plain.h"
#include "quantize/measure.h"
#include "quantize/strip.h"
namespace functions_here {
#include "functions/lanes_plain.h"
#include "functions/evaluate.h"
#include "functions/exp_doubles.h"
}  // namespace functions_here
#include "rows/sums.h"
#include "rows/norm.h"
#include "rows/each.h"
#include "rows/softmax.h"
#include "rows/hadamard_plain.h"
#include "rows/hadamard.h"
#include "rows/gelu_plain.h"
#include "rows/run.h"
}  // namespace
}  // namespace portable

#if defined(__x86_64__)
HOP_BEGIN_TARGET(HOP_AVX2)
namespace avx2 {
namespace {
#include "quantize/numbers.h"
#include "quantize/stats.h"
#include "quantize/scales.h"
#include "quantize/encode.h"
#include "quantize/plain.h"
#include "quantize/measure.h"
#include "quantize/strip.h"
namespace functions_here {
#include "functions/lanes_avx2.h"
#include "functions/evaluate.h"
#include "functions/exp_doubles.h"
}  // namespace functions_here
#include "rows/sums.h"
#include "rows/norm.h"
#include "rows/each.h"
#include "rows/softmax.h"
#include "rows/hadamard_plain.h"
#include "rows/hadamard.h"
#include "rows/gelu_plain.h"
#include "rows/run.h"
}  // namespace
}  // namespace avx2
HOP_END_TARGET

HOP_BEGIN_TARGET(HOP_AVX512)
namespace avx512 {
namespace {
#include "quantize/numbers.h"
#include "quantize/stats.h"
#include "quantize/scales.h"
#include "quantize/encode.h"
#include "common/bytes_avx512.h"
#include "quantize/avx512.h"
#include "quantize/codes_avx512.h"
#include "quantize/words_avx512.h"
#include "quantize/book_avx512.h"
#include "quantize/choose_avx512.h"
#include "quantize/codes_with_noise_avx512.h"
#include "quantize/stats_avx512.h"
#include "quantize/measure.h"
#include "quantize/strip.h"
namespace functions_here {
#include "functions/lanes_avx512.h"
#include "functions/evaluate.h"
#include "functions/exp_avx512.h"
}  // namespace functions_here
#include "rows/sums.h"
#include "rows/norm.h"
#include "rows/each.h"
#include "rows/softmax.h"
#include "rows/hadamard_avx512.h"
#include "rows/hadamard.h"
#include "rows/gelu_avx512.h"
#include "rows/run.h"
}  // namespace
}  // namespace avx512
HOP_END_TARGET
#endif
}  // namespace hop

int hop_compute_rows(const hop_rows* rows, const void* x, const void* other, const void* weight, const void* bias,
                     const void* given_scale, int32_t given_codes, const uint8_t* given_zero_point, void* result,
                     void* scale, void* second, int32_t threads) {
    static constexpr hop_quantizer none{};
    const hop::RowsCall call{*rows, x, other, nullptr, nullptr, nullptr,
                             hop::QuantizeCall{rows->quantizer ? *rows->quantizer : none, rows->blocks, nullptr, given_scale,
                                               given_codes != 0, given_zero_point, nullptr, static_cast<uint8_t*>(result),
                                               scale, second, threads},
                             result, threads};
    return HOP_BY_LEVEL(compute_rows(call, weight, bias));
}
