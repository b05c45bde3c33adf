// A function of one number, correctly rounded: the float64 value is moved slightly to the side of the midpoint (of two
// float32 numbers) on which the exact value is (hard_cases.h), and rounded once. Slow; for the few numbers that
// evaluate.h does not decide.
#pragma once
#include "functions/hard_cases.h"
#include "functions/wide.h"

namespace hop::functions {

inline double fraction(double x) { return x - std::floor(x); }

// The factor that moves the float64 value y of x to the side of a midpoint on which the exact value is.
inline double toward(Function f, double x, const Wide& w) {
    const Sides& s = kSides[static_cast<int>(f)];
    if (!s.parts) return 1;
    const double z = f == Function::log ? w.y : f == Function::tanh || f == Function::erf ? std::fabs(x) : x;
    int part = 0;
    if (s.parts > 1) {
        const double at = fraction(z * s.split) * s.parts;
        while (part < s.parts - 1 && !(at < part + 1)) ++part;
    }
    return (fraction(z * s.factors[part]) < 0.5 ? w.off : -w.off) + 1;
}

}  // namespace hop::functions
