// The parameters of a call of hop_attend.
#pragma once
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "functions/functions.h"
#include "quantize/quantize.h"

namespace hop {

struct AttentionCall {
    const hop_attention& a;
    const int8_t *q, *k, *v;
    const float *q_scale, *k_scale, *v_scale;
    const void* mask;
    void* result;
    int threads;
};

// Whether each head of keys has so few rows that packing keys and values costs more than it saves, and keys and values
// can be read in place, 16 elements at a time.
inline bool has_few_rows(const hop_attention& a) {
    constexpr int64_t most = 4;
    return a.queries * (a.heads / a.key_heads) <= most && a.width % 16 == 0 && a.value_width % 16 == 0;
}

HOP_AT_EACH_LEVEL(int attend(const AttentionCall& c);)
#if defined(__x86_64__)
namespace avx_vnni { int attend(const AttentionCall& c); }
#endif

}  // namespace hop
