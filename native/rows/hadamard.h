// The Hadamard transform of blocks of a row (hop/dispatch/hadamard.py), in place: the first stage combines elements
// half a block apart, the last stage neighbors. Included in a namespace (isa.h), after norm.h and near_butterflies.

template <class T>
static void hadamard_row(const RowsCall& c, const typename T::Word* x, int64_t n, float* __restrict__ y) {
    const auto size = int64_t(c.r.number);
    widen_row<T>(x, n, y);
    for (int64_t half = size / 2; half > 8; half /= 2) {
        for (int64_t i = 0; i < n; i += 2 * half) {
            float* __restrict__ first = y + i;
            for (int64_t j = 0; j < half; ++j) {
                const float a = first[j], b = first[j + half];
                first[j] = a + b;
                first[j + half] = a - b;
            }
        }
    }
    near_butterflies(y, n, size, float(1.0 / __builtin_sqrt(double(size))));
}
