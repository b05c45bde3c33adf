// Quantizing (quantize.h) of bfloat16 and float16 at a level.
namespace {
#include "quantize/elements.h"
#include HOP_HEADER(quantize/noise)
#include "quantize/noise_wide.h"
#include "common/transpose.h"
#include "common/transpose_lines.h"
#include "quantize/strip.h"
#include "quantize/run.h"
#include "quantize/product.h"
}  // namespace

int quantize_words(const QuantizeCall& c, int32_t dtype) {
    switch (dtype) {
        case HOP_BF16: return quantize_tensor<BF16>(c);
        case HOP_F16: return quantize_tensor<F16>(c);
        default: return HOP_UNSUPPORTED;
    }
}

int quantize_words_product(const QuantizeCall& c, const Product& p, int32_t dtype) {
    switch (dtype) {
        case HOP_BF16: return quantize_rows_product<BF16>(c, p);
        case HOP_F16: return quantize_rows_product<F16>(c, p);
        default: return HOP_UNSUPPORTED;
    }
}
