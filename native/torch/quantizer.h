// Quantizers: their constants, and how a shape is divided into their blocks.
#pragma once
#include "hop.h"
#include "torch/description.h"

namespace hop::torch {

// A quantizer: integer, float or codebook, and then, in any order, the nonzero fields of hop_quantizer, floats as their
// bits, and
//
//     codes=int8                    the dtype of codes with a byte each; several per byte are uint8
//     rule=amax                     or given, minmax, absmean, current, microscaling, two_level
//     scale=e4m3                    the dtype of scales
//     block=1,-1                    the elements that share a scale
//     flat                          blocks run over the elements, row by row
//     outer=-1,-1                   for two_level: the elements that share an amax
//     result=bfloat16               for dequantize
//     thresholds=.. numbers=..      for codebooks
class QuantizerDescription {
public:
    explicit QuantizerDescription(const std::string& text) : QuantizerDescription(Words(text)) {}
    explicit QuantizerDescription(Words words);
    QuantizerDescription(const QuantizerDescription&) = delete;

    hop_quantizer q{};
    int codes = HOP_NONE, scale = HOP_FLOAT32, result = HOP_FLOAT32;
    Sizes block, outer;
    bool flat = false;

    int per_byte() const { return q.bits == 1 || q.bits == 2 || q.bits == 4 ? 8 / q.bits : 1; }
    int stored_codes() const { return per_byte() > 1 ? int(HOP_UINT8) : codes; }
    bool has_second() const { return q.affine || q.rule == HOP_TWO_LEVEL; }
    int second() const { return q.rule == HOP_TWO_LEVEL ? int(HOP_FLOAT32) : codes; }

    // Shapes of the stored tensors, for a tensor of `shape`.
    Sizes rows(const Sizes& shape) const;  // the shape that blocks divide
    Sizes codes_shape(const Sizes& shape) const;
    Sizes scale_shape(const Sizes& shape) const;
    Sizes second_shape(const Sizes& shape) const;

    // Divides a nonempty tensor of `shape` as the kernels require it; row_stride is the distance of rows, 0 for a
    // contiguous tensor. Returns the reason why they cannot, or a null pointer.
    const char* cut(const Sizes& shape, int64_t row_stride, hop_blocks& made) const;

private:
    bool read(Words& words);
    void check(const Words& words);
    std::vector<float> thresholds_, numbers_;
    std::vector<uint8_t> tables_, index_;
};

}  // namespace hop::torch
