// The functions in float64, with the formulas of hop/numerics/functions.py.
#pragma once
#include <cmath>

#include "functions/functions.h"

namespace hop::functions {

// A function in float64, and a generous bound of its relative error.
struct Wide {
    double y, off;
};

inline Wide wide(Function f, double x) {
    constexpr double few = 0x1p-50;
    switch (f) {
        case Function::exp: return {std::exp(x), 0x1p-51};
        case Function::exp2: return {std::exp2(x), 0x3p-52};
        case Function::log: return {std::log(x), few};
        case Function::tanh: return {std::tanh(x), few};
        case Function::erf: return {std::erf(x), few};
        case Function::sigmoid: return {1 / (1 + std::exp(-x)), few};
        case Function::rsqrt: return {1 / std::sqrt(x), few};
        case Function::silu: return {x / (1 + std::exp(-x)), few};
        case Function::gelu: {
            const double below = x < -16 ? -16 : x < 0 ? x : 0;
            return {x * std::erfc(x * -0.70710678118654757) / 2, (below * below + 4) * 0x1p-52};
        }
        case Function::gelu_tanh: {
            const double v = -1.5957691216057308 * (x + 0.044715 * x * x * x);
            return {x / (1 + std::exp(v)), ((v < 0 ? 0 : v > 128 ? 128 : v) + 2) * 0x1p-51};
        }
    }
    return {0, 0};
}

}  // namespace hop::functions
