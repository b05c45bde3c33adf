// The replacement of avx512.h and avx2.h for other instruction sets. Included in a namespace (isa.h).

template <class T, int size>
HOP_INLINE void amax_of_groups(const typename T::Word* x, int64_t groups, float* high, bool& known) {
    amax_of_groups_plainly<T, size>(x, groups, high, known);
}

template <class T, int size>
HOP_INLINE void range_of_groups(const typename T::Word* x, int64_t groups, float* low, float* high, bool& known) {
    range_of_groups_plainly<T, size>(x, groups, low, high, known);
}

// Widens n elements to float32, times one factor each unless `factor` is nullptr; prefetches the next strip.
template <class T>
static HOP_ALONE void widen_line(const typename T::Word* __restrict__ x, int64_t n, const float* __restrict__ factor,
                                 float* __restrict__ out) {
    constexpr int64_t some = 64;
    for (int64_t at = 0; at < n; at += some) {
        __builtin_prefetch(x + at + kColumns);
        const int64_t count = least(some, n - at);
        for (int64_t i = at; i < at + count; ++i) out[i] = T::widen(x[i]);
        if (!factor) continue;
        for (int64_t i = at; i < at + count; ++i) out[i] = out[i] * factor[i];
    }
}

template <class T>
static HOP_ALONE float amax_of_run(const typename T::Word* x, int64_t n, bool& known) {
    return amax_of<T>(x, n, known);
}

template <class T>
static HOP_ALONE void range_of_run(const typename T::Word* x, int64_t n, float& low, float& high, bool& known) {
    range_of<T>(x, n, low, high, known);
}

template <class T>
HOP_INLINE bool encode_quickly(const hop_quantizer&, const FloatFormat&, const typename T::Word*, int64_t, int64_t,
                               const Factors&, bool, bool, uint8_t*) {
    return false;
}

template <class T, class Noise>
static bool encode_with_noise(const hop_quantizer&, const typename T::Word*, int64_t, int64_t, const Factors&, bool,
                              const Noise*, uint8_t*) {
    return false;
}
