// Block scales of a weight with the least squared error, bit for bit as in hop/numerics/weight_search.py.
#pragma once
#include <cstdint>

#include "common/cpu.h"

namespace hop {

constexpr int kMostSearched = 1024;  // elements of a block
constexpr int kMostSearchBits = 20;

enum class Searched : int32_t { scale, affine, code };

// Blocks of `block` elements of contiguous rows. The rule's scales and zero points are replaced where others are
// better: float32 scales, or codes of the scale values[code] * outer * factor, up to `last`.
struct Search {
    Searched kind;
    int32_t block, bits, count, last;
    bool e2m1;  // else integers from low to high
    float low, high, factor;
    float slack;  // of codes: how many times the rule's squared error the error of another may be
    const float *candidates, *values, *outer;  // outer: one per row if outer_stride is 1; nullptr: 1
    int64_t rows, cols, outer_stride;
    const float* x;
    float *scale, *zero_point;
    uint8_t* codes;
};

void search_scales(const Search& s, int threads);

HOP_AT_EACH_LEVEL(void search(const Search& s, int threads);)

}  // namespace hop
