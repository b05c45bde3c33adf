// What a product or a convolution writes: the words that describe codes, and the checks of what is given for them.
#pragma once
#include "hop.h"
#include "torch/factor.h"

namespace hop::torch {

// Codes: `output`, and then, in any order,
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
    hop_output fixed{};
    Sizes block;

    bool read(Words& words);
};

// The dtypes of a result, and of a bias; a bias has `columns` elements.
void set(hop_output& output, const OutputDescription& description, int32_t dtype, const View& bias, int64_t columns);

}  // namespace hop::torch
