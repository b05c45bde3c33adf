// Quantized factors of products and convolutions: what is fixed of one, and its structure for tensors.
#pragma once
#include "hop.h"
#include "torch/description.h"

namespace hop::torch {

inline constexpr std::string_view kFormats[] = {"",     "int8", "uint8", "int4",    "uint4",    "e2m1",    "e4m3",
                                                "e5m2", "e8m0", "float32", "bfloat16", "float16", "int32"};
constexpr int kFormatCount = 13;

// Of blocks of a tensor, a size for each dimension, -1 for all of it; none where the block is empty.
struct ScaleDescription {
    int32_t format = HOP_NONE;
    float factor = 1;
    Sizes block;
};

// A factor: `format` and then, in any order,
//
//     tiled                 as of HOP_TILED; what lies behind the last column must be zero, and is not looked at
//     columns               summed along its last dimension but one
//     sums                  of a tiled one: the sum of the codes of each row comes with it, int32
//     zero=stored, zero=128 from -128 to 255; stored ones lie as the scales do
//     scale=1,-1            float32, of these blocks
//     factor=1065353216     of scale, the bits of a float32
//     block_scale=e8m0:1,32 or e4m3, float32
struct FactorDescription {
    int32_t format = HOP_NONE, zero = 0;
    bool tiled = false, columns = false, stores_zero = false, stores_sums = false;
    ScaleDescription scale, block_scale;

    bool read(Words& words);  // whether the word is one of a factor's
    bool has_zero() const { return zero || stores_zero; }
    bool is_plain() const { return !has_zero() && scale.block.empty() && block_scale.block.empty(); }  // codes are numbers
};

inline bool is_narrow(int format) { return format == HOP_INT4 || format == HOP_UINT4 || format == HOP_E2M1; }
inline int64_t item_bytes(int format) {
    return format == HOP_FLOAT32 || format == HOP_INT32 ? 4 : format == HOP_BFLOAT16 || format == HOP_FLOAT16 ? 2 : 1;
}

// The tensors of a factor; views that are none stand for tensors that lie in contiguous memory.
struct Buffers {
    View codes, scale, zero, block_scale, sums;
};

// A factor of `shape`, the tensor that its codes stand for: rows and k are its last two dimensions, or, with columns, k and
// rows. Its scales lie in contiguous memory.
struct Factor {
    hop_operand operand{};
    hop_steps steps{};
    hop_data data{};
    int64_t batch = 1, rows = 1, k = 0;
    bool needs_copy = false;     // of its codes: their rows do not lie evenly
    const char* declined = nullptr;  // why the kernels do not take it
};
Factor make(const FactorDescription& description, const char* name, const Sizes& shape, bool batched, bool is_lhs,
            const Buffers& buffers);

Sizes per_dimension(const Sizes& block, size_t dim);      // as hop.numerics.blocks.per_dimension
Sizes counts(const Sizes& shape, const Sizes& block);     // as hop.numerics.blocks.counts
void expect(const View& x, const Sizes& shape, int format);  // raises unless x has them

}  // namespace hop::torch
