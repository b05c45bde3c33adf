// Quantized operands of products and convolutions: their constants, and the hop_operand for given tensors.
#pragma once
#include "hop.h"
#include "torch/description.h"

namespace hop::torch {

inline constexpr std::string_view kFormats[] = {"",     "int8", "uint8", "int4",    "uint4",    "e2m1",    "e4m3",
                                                "e5m2", "e8m0", "float32", "bfloat16", "float16", "int32"};
constexpr int kFormatCount = 13;

// The blocks of a tensor, with a size for each dimension, -1 for a whole one; `block` is empty if there are no scales.
struct ScaleDescription {
    int32_t format = HOP_NONE;
    float factor = 1;
    Sizes block;
};

// An operand: `format` and then, in any order,
//
//     tiled                 as HOP_TILED; the padding after the last column must be zero, and is not checked
//     columns               summed along the second-to-last dimension
//     sums                  if tiled: the int32 sums of the codes of each row are passed
//     zero=stored, zero=128 from -128 to 255; stored zero points have the blocks of the scales
//     scale=1,-1            float32, with these blocks
//     factor=1065353216     of scale, the bits of a float32
//     block_scale=e8m0:1,32 or e4m3, float32
struct FactorDescription {
    int32_t format = HOP_NONE, zero = 0;
    bool tiled = false, columns = false, stores_zero = false, stores_sums = false;
    ScaleDescription scale, block_scale;

    bool read(Words& words);  // whether the word describes an operand
    bool has_zero() const { return zero || stores_zero; }
    bool is_plain() const { return !has_zero() && scale.block.empty() && block_scale.block.empty(); }  // codes are the values
};

inline bool is_narrow(int format) { return format == HOP_INT4 || format == HOP_UINT4 || format == HOP_E2M1; }
inline int64_t item_bytes(int format) {
    return format == HOP_FLOAT32 || format == HOP_INT32 ? 4 : format == HOP_BFLOAT16 || format == HOP_FLOAT16 ? 2 : 1;
}

// The tensors of an operand; empty views stand for contiguous tensors.
struct Buffers {
    View codes, scale, zero, block_scale, sums;
};

// An operand of `shape`, the shape of the dequantized tensor: its last two dimensions are rows and k, or, with columns,
// k and rows. Its scales are contiguous.
struct Factor {
    hop_operand operand{};
    hop_steps steps{};
    hop_data data{};
    int64_t batch = 1, rows = 1, k = 0;
    bool needs_copy = false;     // the codes: their rows do not have a constant stride
    const char* declined = nullptr;  // the reason why no kernel supports it
};
Factor make(const FactorDescription& description, const char* name, const Sizes& shape, bool batched, bool is_lhs,
            const Buffers& buffers);

Sizes per_dimension(const Sizes& block, size_t dim);      // like hop.numerics.blocks.per_dimension
Sizes counts(const Sizes& shape, const Sizes& block);     // like hop.numerics.blocks.counts
void expect(const View& x, const Sizes& shape, int format);  // raises unless x has this shape and format

}  // namespace hop::torch
