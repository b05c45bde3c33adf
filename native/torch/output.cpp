#include "torch/output.h"

namespace hop::torch {

void OutputDescription::begin(Words& words) {
    if (!words.next()) fail("the description ends before the format of the output");
    fixed.format = words.one_of(words.word, kFormats, kFormatCount);
}

bool OutputDescription::read(Words& words) {
    const auto bound = [&](int i) {
        fixed.bounds[i] = words.real();
        fixed.bounded |= 1 << i;
    };
    if (words.name == "requantize") fixed.requantize = words.integer(HOP_DIVISION, HOP_RECIPROCAL);
    else if (words.name == "low") fixed.low = words.integer(-128, 255);
    else if (words.name == "high") fixed.high = words.integer(-128, 255);
    else if (words.name == "zero" && words.value == "stored") fixed.zero_format = HOP_INT8;  // any value but HOP_NONE
    else if (words.name == "zero") fixed.zero = words.integer(-128, 255);
    else if (words.name == "lower") bound(0);
    else if (words.name == "upper") bound(1);
    else if (words.name == "scale") block = words.block(), codes = true;
    else return false;
    return true;
}

void set(hop_output& output, const OutputDescription& description, const View& bias, int64_t columns) {
    output = description.fixed;
    output.row_stride = columns;
    const bool bytes = output.format == HOP_INT8 || output.format == HOP_UINT8;
    if (output.format < HOP_FLOAT32 && !(bytes && description.codes))
        fail("'" + std::string(kFormats[output.format]) + "' is not a format of this result");
    if (description.codes && !bytes) fail("output codes must be int8 or uint8, not " + std::string(kFormats[output.format]));
    if (bytes) {
        const int32_t least = output.format == HOP_INT8 ? -128 : 0;
        if (output.low < least || output.high > least + 255 || output.low > output.high)
            fail("output codes from " + std::to_string(output.low) + " to " + std::to_string(output.high) + " do not fit into a byte");
        if (output.zero_format != HOP_NONE) output.zero_format = output.format;
    }
    if (bias) {
        output.bias_format = bias.format();
        if (output.bias_format < HOP_FLOAT32)
            fail("bias must be float32, bfloat16, float16 or int32, got dtype number " + std::to_string(bias.dtype));
        expect(bias, {columns}, output.bias_format);
    }
}

}  // namespace hop::torch
