// A call of hop_attend.
#pragma once
#include "hop.h"

namespace hop {

struct AttentionCall {
    const hop_attention& a;
    const int8_t *q, *k, *v;
    const float *q_scale, *k_scale, *v_scale;
    const void* mask;
    void* result;
    int threads;
};

}  // namespace hop
