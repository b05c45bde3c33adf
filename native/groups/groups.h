// A call of hop_multiply_groups.
#pragma once
#include "hop.h"

namespace hop {

struct GroupCall {
    const hop_group_product& p;
    const void* x;
    const hop_group_data& weight;
    const void* bias;
    void* y;
    int threads;
};

}  // namespace hop
