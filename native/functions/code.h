// Elementary functions (functions.h) at one level.
namespace {
#include HOP_HEADER(functions/lanes)
#include "functions/evaluate.h"
#if defined(HOP_IN_AVX512)
#include "functions/exp_avx512.h"
#else
#include "functions/exp_doubles.h"
#endif
}  // namespace

void evaluate(Function f, const float* x, float* y, int64_t n) {
    switch (f) {
        case Function::exp: return exp_row(x, y, n);
        case Function::exp2: return evaluate_by<Exp2>(f, x, y, n);
        case Function::log: return evaluate_by<Log>(f, x, y, n);
        case Function::tanh: return evaluate_by<Tanh>(f, x, y, n);
        case Function::erf: return evaluate_by<Erf>(f, x, y, n);
        case Function::sigmoid: return evaluate_by<Sigmoid>(f, x, y, n);
        case Function::rsqrt: return evaluate_by<Rsqrt>(f, x, y, n);
        case Function::gelu: return evaluate_by<Gelu>(f, x, y, n);
        case Function::gelu_tanh: return evaluate_by<GeluTanh>(f, x, y, n);
        case Function::silu: return evaluate_by<Silu>(f, x, y, n);
    }
}
