// Products of up to kFewSums rows without packing rhs: packing reads and writes all of rhs, which few rows do not
// amortize.
#pragma once
#include "gemm/product.h"

namespace hop {

constexpr int64_t kFewSums = 16;

// Whether `few_sums` supports the product: int8 or uint8 operands with contiguous rows or columns of rhs, and int32
// output.
inline bool takes_few_sums(const Job& job) {
    const auto plain = [](const hop_operand& o) {
        return (o.format == HOP_INT8 || o.format == HOP_UINT8) && o.layout == HOP_STRIDED && o.zero == 0 &&
               o.zero_format == HOP_NONE && o.scale.format == HOP_NONE && o.fold.format == HOP_NONE;
    };
    const hop_product& p = job.p;
    return p.m <= kFewSums && p.k > 0 && p.output.format == HOP_INT32 && p.output.bias_format == HOP_NONE && plain(p.lhs) &&
           plain(p.rhs) && (p.rhs.k_stride == 1 || p.rhs.row_stride == 1);
}

namespace portable { void few_sums(const Job& job); }
#if defined(__x86_64__)
namespace avx2 { void few_sums(const Job& job); }
#endif

}  // namespace hop
