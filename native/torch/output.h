// What a product or a convolution writes: the words that describe codes, and the checks of what is given for them.
#pragma once
#include "hop.h"
#include "torch/factor.h"

namespace hop::torch {

// `output`, the format of the result, such as bfloat16; and for codes, in any order,
//
//     requantize=0            as of Requantize
//     low=-128 high=127       the codes
//     zero=stored, zero=0
//     lower=0 upper=1086324736   bounds of a fused activation, the bits of a float32
//     scale=-1                blocks that share a scale, of the result
//
// Without them the result holds numbers.
struct OutputDescription {
    bool codes = false;
    hop_output fixed{};  // its format, and what is fixed of codes
    Sizes block;

    void begin(Words& words);  // at `output`
    bool read(Words& words);
};

// What is known of a result for a bias, or none, of `columns` elements.
void set(hop_output& output, const OutputDescription& description, const View& bias, int64_t columns);

}  // namespace hop::torch
