// The quantization loops for bfloat16 and float16 (quantize.h) at one level.
namespace {
#include "quantize/elements.h"
#include "quantize/loops.h"
}  // namespace

const Loops* loops_of_words(int32_t dtype) {
    switch (dtype) {
        case HOP_BF16: return &loops_of<BF16>();
        case HOP_F16: return &loops_of<F16>();
        default: return nullptr;
    }
}
