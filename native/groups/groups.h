// The parameters of a call of hop_multiply_groups.
#pragma once
#include "common/cpu.h"
#include "hop.h"

namespace hop {

struct GroupCall {
    const hop_group_product& p;
    const void* x;
    const float* x_scale;
    const hop_group_data& weight;
    const void* bias;
    void* y;
    int threads;
};

HOP_AT_EACH_LEVEL(
    int multiply_floats(const GroupCall& call);
    int multiply_integers(const GroupCall& call);  // for x in HOP_INT8
)

}  // namespace hop
