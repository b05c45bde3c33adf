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

#include "common/scratch.h"
#define HOP_CODE "rows/code.h"
#include "common/levels.h"

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
