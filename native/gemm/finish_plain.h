// Converts sums to a floating-point output, for any instruction set. Included in a namespace (isa.h), after epilogue.h.

// Computes (float(c) · s_lhs) · s_rhs, plus the bias; each operation is rounded.
template <class Sum>
inline void finish_rows(const Job& job, const FinishedRows<Sum>& f) {
    for (int i = 0; i < f.rows; ++i) {
        const Sum* c = f.c + i * kBlock;
        const int64_t at = f.at(job, i);
        alignas(64) float y[kBlock];
        alignas(64) uint16_t words[kBlock];
        for (int j = 0; j < kBlock; ++j) y[j] = static_cast<float>(c[j]);
        if (f.lhs)
            for (int j = 0; j < kBlock; ++j) y[j] = y[j] * f.lhs[i] * f.rhs[j];
        if (f.bias)
            for (int j = 0; j < kBlock; ++j) y[j] = y[j] + f.bias[j];
        switch (job.p.output.format) {
            case HOP_FLOAT32: store_elements(job, static_cast<float*>(job.output) + at, y, f.columns); continue;
            case HOP_BFLOAT16:
                for (int j = 0; j < kBlock; ++j) words[j] = to_bfloat16(y[j]);
                break;
            default:
                for (int j = 0; j < kBlock; ++j) words[j] = to_float16(y[j]);
        }
        store_elements(job, static_cast<uint16_t*>(job.output) + at, words, f.columns);
    }
}
