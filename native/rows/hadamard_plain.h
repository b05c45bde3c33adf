// The last stages of the Hadamard transform. Included in a namespace (isa.h), before hadamard.h.

template <int half>
static void butterflies(float* __restrict__ y, int64_t n) {
    for (int64_t i = 0; i < n; i += 2 * half) {
        float a[half], b[half];
        for (int j = 0; j < half; ++j) a[j] = y[i + j], b[j] = y[i + j + half];
        for (int j = 0; j < half; ++j) y[i + j] = a[j] + b[j], y[i + j + half] = a[j] - b[j];
    }
}

// The stages within 16 elements, and the factor.
static void near_butterflies(float* __restrict__ y, int64_t n, int64_t size, float factor) {
    if (size >= 16) butterflies<8>(y, n);
    if (size >= 8) butterflies<4>(y, n);
    butterflies<2>(y, n);
    butterflies<1>(y, n);
    for (int64_t i = 0; i < n; ++i) y[i] *= factor;
}
