// Statistics of blocks for scale rules. Included in a namespace (isa.h).

// Merges the statistics of other elements of the same blocks into s.
static void merge(const Stats& other, int64_t blocks, int rule, Stats& s) {
    s.known = s.known && other.known;
    for (int64_t i = 0; i < blocks; ++i) {
        s.high[i] = other.high[i] > s.high[i] ? other.high[i] : s.high[i];
        if (rule == HOP_MINMAX) s.low[i] = other.low[i] < s.low[i] ? other.low[i] : s.low[i];
        if (rule == HOP_ABSMEAN) s.sum[i] += other.sum[i], s.count[i] += other.count[i];
    }
}

// ---- amax, on integers: magnitudes compare like their bits

template <class T>
HOP_INLINE typename T::Word top_of(const typename T::Word* x, int64_t n) {
    typename T::Word most = 0;
    for (int64_t i = 0; i < n; ++i) {
        const typename T::Word m = x[i] & T::magnitude;
        most = m > most ? m : most;
    }
    return most;
}

// For a block with a NaN.
template <class T>
static HOP_SELDOM typename T::Word top_of_known(const typename T::Word* x, int64_t n) {
    typename T::Word most = 0;
    for (int64_t i = 0; i < n; ++i) {
        const typename T::Word own = x[i] & T::magnitude, m = own > T::infinity ? 0 : own;
        most = m > most ? m : most;
    }
    return most;
}

template <class T>
HOP_INLINE float amax_of(const typename T::Word* x, int64_t n, bool& known) {
    typename T::Word most = top_of<T>(x, n);
    if (most >= T::infinity) {
        known = false;
        most = top_of_known<T>(x, n);
    }
    return T::widen(most);
}

// ---- the range: floats as integers in the same order

template <class T>
HOP_INLINE void range_of_known(const typename T::Word* x, int64_t n, float& low, float& high) {
    using S = typename T::Signed;
    S least = 0, most = 0;
    for (int64_t i = 0; i < n; ++i) {
        const S own = S(x[i]), order = S(own ^ S((own >> (8 * sizeof(S) - 1)) & S(T::magnitude)));
        least = order < least ? order : least;
        most = order > most ? order : most;
    }
    const float below = least < 0 ? T::widen(typename T::Word(S(least ^ S(T::magnitude)))) : 0.0f;
    const float above = T::widen(typename T::Word(most));
    low = below < low ? below : low;
    high = above > high ? above : high;
}

// For a block with a NaN or an infinity.
template <class T>
static HOP_SELDOM void range_of_any(const typename T::Word* x, int64_t n, float& low, float& high) {
    for (int64_t i = 0; i < n; ++i) {
        const float own = T::widen(x[i]), known = own == own ? own : 0.0f;
        const float below = known < -kLargest ? -kLargest : known, above = known > kLargest ? kLargest : known;
        low = below < low ? below : low;
        high = above > high ? above : high;
    }
}

template <class T>
HOP_INLINE void range_of(const typename T::Word* x, int64_t n, float& low, float& high, bool& known) {
    if (top_of<T>(x, n) < T::infinity) return range_of_known<T>(x, n, low, high);
    known = false;
    range_of_any<T>(x, n, low, high);
}

// ---- the sum, in an order that does not depend on instructions or threads

constexpr int kSums = 16;

template <class T>
HOP_INLINE double magnitude_of(typename T::Word word) {
    const uint32_t own = bits_of(T::widen(word)) & kMagnitude;
    return double(float_of(own > kInfinity ? 0 : own < 0x7f7fffff ? own : 0x7f7fffff));
}

template <class T>
static HOP_ALONE void sum_of(const typename T::Word* x, int64_t n, double& sum, int64_t& count, bool& known) {
    double part[kSums] = {};
    const int64_t whole = n / kSums * kSums;
    count += n;
    if (top_of<T>(x, n) < T::infinity) {
        for (int64_t i = 0; i < whole; i += kSums)
            for (int j = 0; j < kSums; ++j) part[j] += double(float_of(bits_of(T::widen(x[i + j])) & kMagnitude));
    } else {
        known = false;
        for (int64_t i = 0; i < whole; i += kSums)
            for (int j = 0; j < kSums; ++j) part[j] += magnitude_of<T>(x[i + j]);
        for (int64_t i = 0; i < n; ++i) count -= (x[i] & T::magnitude) > T::infinity;
    }
    for (int64_t i = whole; i < n; ++i) part[i - whole] += magnitude_of<T>(x[i]);
    for (int step = kSums / 2; step; step /= 2)
        for (int j = 0; j < step; ++j) part[j] += part[j + step];
    sum += part[0];
}

// ---- adjacent groups

template <class T, int size>
HOP_INLINE void amax_of_groups_plainly(const typename T::Word* x, int64_t groups, float* high, bool& known) {
    for (int64_t i = 0; i < groups; ++i) {
        const float own = amax_of<T>(x + i * size, size, known);
        high[i] = own > high[i] ? own : high[i];
    }
}

template <class T, int size>
HOP_INLINE void range_of_groups_plainly(const typename T::Word* x, int64_t groups, float* low, float* high,
                                        bool& known) {
    for (int64_t i = 0; i < groups; ++i) range_of<T>(x + i * size, size, low[i], high[i], known);
}
