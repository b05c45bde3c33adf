#include "rows/rows.h"

int hop_compute_rows(const hop_rows* rows, const void* x, const void* other, const void* weight, const void* bias,
                     const void* given_scale, int32_t given_codes, const uint8_t* given_zero_point, void* result,
                     void* scale, void* second, int32_t threads) {
    static constexpr hop_quantizer none{};
    const hop::RowsCall call{*rows, x, other, nullptr, nullptr, nullptr,
                             hop::QuantizeCall{rows->quantizer ? *rows->quantizer : none, rows->blocks, nullptr, given_scale,
                                               given_codes != 0, given_zero_point, nullptr, 0, static_cast<uint8_t*>(result),
                                               scale, second, threads, false},
                             result, threads};
    return HOP_BY_LEVEL(compute_rows(call, weight, bias));
}
