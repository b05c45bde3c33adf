// Elementary functions of float32, correctly rounded (hop/numerics/functions.py).
#pragma once
#include <cstdint>

#include "common/cpu.h"

namespace hop {

enum class Function : int32_t { exp = 0, exp2, log, tanh, erf, sigmoid, rsqrt, gelu, gelu_tanh, silu };
constexpr int kFunctions = 10;
constexpr const char* kFunctionNames[] = {"exp", "exp2", "log", "tanh", "erf", "sigmoid", "rsqrt", "gelu", "gelu_tanh", "silu"};

namespace functions {

float exactly(Function f, float x);

// The function of each of the 65,536 bfloat16 or float16 (HOP_BF16, HOP_F16) numbers, indexed by their bits; computed
// at first use. A null pointer if there is not enough memory.
const float* table(Function f, int32_t dtype);

}  // namespace functions

// Computes the function of n contiguous numbers; y may alias x.
HOP_AT_EACH_LEVEL(void evaluate(Function f, const float* x, float* y, int64_t n);)

}  // namespace hop
