// e^x of rows in float64. Included in a namespace, after evaluate.h.

inline void exp_row(const float* x, float* y, int64_t n) { evaluate_by<Exp>(Function::exp, x, y, n); }
