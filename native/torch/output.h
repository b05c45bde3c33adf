// The result of a product or a convolution: words that describe codes, and checks of the corresponding tensors.
#pragma once
#include "hop.h"
#include "torch/factor.h"

namespace hop::torch {

// `output`, the format of the result, such as bfloat16; and for codes, in any order,
//
//     requantize=0            as in Requantize
//     low=-128 high=127       the range of codes
//     zero=stored, zero=0
//     lower=0 upper=1086324736   bounds of a fused activation, as the bits of a float32
//     scale=-1                blocks of the result that share a scale
//
// Without these, the result contains plain values.
struct OutputDescription {
    bool codes = false;
    hop_output fixed{};  // the format, and the constants of codes
    Sizes block;

    void begin(Words& words);  // at `output`
    bool read(Words& words);
};

// Sets the fields of the output for a bias, or none, of `columns` elements.
void set(hop_output& output, const OutputDescription& description, const View& bias, int64_t columns);

}  // namespace hop::torch
