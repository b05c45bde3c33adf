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

HOP_AT_EACH_LEVEL(int attend(const AttentionCall& c);)

}  // namespace hop
