// Quantization (quantize.h) at one level; quantize_words_code.h has the loops for bfloat16 and float16.
namespace {
#include "quantize/elements.h"
#include HOP_HEADER(quantize/noise)
#include "quantize/noise_wide.h"
#include "common/transpose.h"
#include "common/transpose_lines.h"
#include "quantize/loops.h"
#include "quantize/strip.h"
#include "quantize/run.h"
#include "quantize/product.h"

const Loops* loops_for(int32_t dtype) { return dtype == HOP_F32 ? &loops_of<F32>() : loops_of_words(dtype); }
}  // namespace

int quantize(const QuantizeCall& c, int32_t dtype) {
    const Loops* loops = loops_for(dtype);
    return loops ? quantize_tensor(c, *loops) : HOP_UNSUPPORTED;
}

int quantize_product(const QuantizeCall& c, const Product& p, int32_t dtype) {
    const Loops* loops = loops_for(dtype);
    return loops ? quantize_rows_product(c, *loops, p) : HOP_UNSUPPORTED;
}

void quantize_f32(const QuantizeCall& c, const Strip& s, const TwoLevel* outer, Room& room) {
    quantize_strip(c, loops_of<F32>(), s, outer, room);
}

void encode_f32(const QuantizeCall& c, const Strip& s, const Unit& u, const Factors& f, bool known) {
    encode_unit(c, loops_of<F32>(), s, u, f, known);
}

void find_scales_f32(const QuantizeCall& c, const Stats& s, int64_t first, int64_t count, Factors& f) {
    find_scales(c, kLargest, s, first, count, nullptr, f);
}
