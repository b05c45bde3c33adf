// Quantizing (quantize.h) at a level: of float32; quantize_words_code.h has the other dtypes.
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

int quantize(const QuantizeCall& c, int32_t dtype) {
    return dtype == HOP_F32 ? quantize_tensor<F32>(c) : quantize_words(c, dtype);
}

int quantize_product(const QuantizeCall& c, const Product& p, int32_t dtype) {
    return dtype == HOP_F32 ? quantize_rows_product<F32>(c, p) : quantize_words_product(c, p, dtype);
}

void quantize_f32(const QuantizeCall& c, const Strip& s, const TwoLevel* outer, Room& room) {
    quantize_strip<F32>(c, s, outer, room);
}

void encode_f32(const QuantizeCall& c, const Strip& s, const Unit& u, const Factors& f, bool known) {
    encode_unit<F32>(c, s, u, f, known);
}

void find_scales_f32(const QuantizeCall& c, const Stats& s, int64_t first, int64_t count, Factors& f) {
    find_scales<F32>(c, s, first, count, nullptr, f);
}
