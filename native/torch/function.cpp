// hop_native::function.
#include "functions/functions.h"

#include "hop.h"
#include "torch/operators.h"

namespace hop::torch {

void function(StableIValue* values, uint64_t count) {
    Stack stack(values, count);
    Tensor x = contiguous(stack.tensor());
    const std::string name = stack.text();
    int32_t which = 0;
    while (which < kFunctions && name != kFunctionNames[which]) ++which;
    if (which == kFunctions) fail("unknown function " + name);
    const View v = view("x", x);
    const int format = v.format();
    const int32_t dtype = format == HOP_FLOAT32 ? HOP_F32 : format == HOP_BFLOAT16 ? HOP_BF16 : HOP_F16;
    if (dtype == HOP_F16 && format != HOP_FLOAT16) fail("x must be float32, bfloat16 or float16");
    Tensor made = empty(Sizes(v.sizes, v.sizes + v.dim), dtype_of(HOP_FLOAT32));
    if (hop_function(which, dtype, v.data, static_cast<float*>(data_of(made)), v.numel(), threads())) fail("no memory for a table");
    stack.give(std::move(made));
}

}  // namespace hop::torch
