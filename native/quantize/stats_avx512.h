// Statistics of small blocks for scale rules: a tree of shuffles keeps the larger integers, which are in the order of
// the numbers or magnitudes. Included in a namespace (isa.h).

template <class T>
HOP_INLINE __m512i larger(__m512i a, __m512i b) {
    return sizeof(typename T::Word) == 2 ? _mm512_max_epu16(a, b) : _mm512_max_epu32(a, b);
}

// Reduces groups a and b to the halves of one vector.
template <class T>
HOP_INLINE __m512i halves(__m512i a, __m512i b) {
    return larger<T>(_mm512_shuffle_i32x4(a, b, 0x44), _mm512_shuffle_i32x4(a, b, 0xee));
}

// Reduces 16 groups, two in each vector, to the largest word of each, in lanes.
template <class T>
HOP_INLINE __m512i largest_of_16(const __m512i v[8]) {
    __m512i quarter[4], eighth[2];
    for (int i = 0; i < 4; ++i) {
        const __m512i a = v[2 * i], b = v[2 * i + 1];
        quarter[i] = larger<T>(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
    }
    for (int i = 0; i < 2; ++i) {
        const __m512i a = quarter[2 * i], b = quarter[2 * i + 1];
        eighth[i] = larger<T>(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    }
    const __m512 a = _mm512_castsi512_ps(eighth[0]), b = _mm512_castsi512_ps(eighth[1]);
    const __m512i low = _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0x88));
    const __m512i high = _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0xdd));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i found = _mm512_permutexvar_epi32(order, larger<T>(low, high));
    if (sizeof(typename T::Word) == 4) return found;
    return _mm512_and_si512(larger<T>(found, _mm512_srli_epi32(found, 16)), _mm512_set1_epi32(0xffff));
}

template <class T>
HOP_INLINE __m512 widened(__m512i words) {
    if (sizeof(typename T::Word) == 4) return _mm512_castsi512_ps(words);
    if (T::infinity == 0x7f80) return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(words));
}

struct Magnitudes {
    template <class T>
    static __m512i of(const typename T::Word* x) {
        const __m512i mask = _mm512_set1_epi32(T::magnitude == 0x7fff ? 0x7fff7fff : 0x7fffffff);
        return _mm512_and_si512(_mm512_loadu_si512(x), mask);
    }
};

// Integers in the order of the numbers, or, with `down`, of their negatives.
template <bool down>
struct Order {
    template <class T>
    static __m512i of(const typename T::Word* x) {
        constexpr bool half = sizeof(typename T::Word) == 2;
        const __m512i words = _mm512_loadu_si512(x),
                      sign = _mm512_set1_epi32(half ? int32_t(0x80008000) : int32_t(0x80000000));
        const __m512i negative = half ? _mm512_srai_epi16(words, 15) : _mm512_srai_epi32(words, 31);
        const __m512i order = _mm512_xor_si512(words, _mm512_or_si512(negative, sign));
        return down ? _mm512_xor_si512(order, _mm512_set1_epi32(-1)) : order;
    }
};

template <class T, int vectors, class What>
HOP_INLINE __m512i largest_of(const typename T::Word* x) {
    __m512i found = What::template of<T>(x);
    for (int k = 1; k < vectors; ++k) {
        found = larger<T>(found, What::template of<T>(x + k * 64 / int(sizeof(typename T::Word))));
    }
    return found;
}

template <class T, int size, class What>
HOP_INLINE __m512i largest_of_groups(const typename T::Word* x) {
    constexpr int words = 64 / sizeof(typename T::Word), vectors = size / words ? size / words : 1;
    __m512i v[8];
    for (int i = 0; i < 8; ++i) {
        const auto* at = x + 2 * size * i;
        v[i] = largest_of<T, vectors, What>(at);
        if (size >= words) v[i] = halves<T>(v[i], largest_of<T, vectors, What>(at + size));
    }
    return largest_of_16<T>(v);
}

// high[i] = max(high[i], amax of group i) for 16 groups of `size`; returns false if there is a NaN or an infinity.
template <class T, int size>
HOP_INLINE bool amax_of_16_groups(const typename T::Word* x, float* high) {
    const __m512i found = largest_of_groups<T, size, Magnitudes>(x);
    if (_mm512_cmpge_epu32_mask(found, _mm512_set1_epi32(int32_t(T::infinity)))) return false;
    _mm512_storeu_ps(high, _mm512_max_ps(widened<T>(found), _mm512_loadu_ps(high)));
    return true;
}

// The same for the range.
template <class T, int size>
HOP_INLINE bool range_of_16_groups(const typename T::Word* x, float* low, float* high) {
    constexpr uint32_t half = T::magnitude + 1u;
    const __m512i up = largest_of_groups<T, size, Order<false>>(x), down = largest_of_groups<T, size, Order<true>>(x);
    const __m512i infinite = _mm512_set1_epi32(int32_t(half + T::infinity)), sign = _mm512_set1_epi32(int32_t(half));
    // -infinity maps to half - 1 - T::infinity in `up`, and so to half + T::infinity in `down`.
    if (_mm512_cmpge_epu32_mask(up, infinite) | _mm512_cmpge_epu32_mask(down, infinite)) return false;
    // Values from `half` on are the words of nonnegative numbers, plus half; smaller values do not count.
    const __m512i above = _mm512_maskz_sub_epi32(_mm512_cmpge_epu32_mask(up, sign), up, sign);
    const __m512i below = _mm512_maskz_sub_epi32(_mm512_cmpge_epu32_mask(down, sign), down, sign);
    const __m512 least = _mm512_sub_ps(_mm512_setzero_ps(), widened<T>(below));
    _mm512_storeu_ps(high, _mm512_max_ps(widened<T>(above), _mm512_loadu_ps(high)));
    _mm512_storeu_ps(low, _mm512_min_ps(least, _mm512_loadu_ps(low)));
    return true;
}

// Groups that do not make up 16, or that contain a NaN or an infinity.
template <class T, int size>
static HOP_ALONE void amax_of_few_groups(const typename T::Word* x, int64_t groups, float* high, bool& known) {
    amax_of_groups_plainly<T, size>(x, groups, high, known);
}

template <class T, int size>
static HOP_ALONE void range_of_few_groups(const typename T::Word* x, int64_t groups, float* low, float* high, bool& known) {
    range_of_groups_plainly<T, size>(x, groups, low, high, known);
}

template <class T, int size>
HOP_INLINE void amax_of_groups(const typename T::Word* x, int64_t groups, float* high, bool& known) {
    int64_t i = 0;
    for (; i + 16 <= groups; i += 16)
        if (!amax_of_16_groups<T, size>(x + i * size, high + i))
            amax_of_few_groups<T, size>(x + i * size, 16, high + i, known);
    amax_of_few_groups<T, size>(x + i * size, groups - i, high + i, known);
}

template <class T, int size>
HOP_INLINE void range_of_groups(const typename T::Word* x, int64_t groups, float* low, float* high, bool& known) {
    int64_t i = 0;
    for (; i + 16 <= groups; i += 16) {
        if (!range_of_16_groups<T, size>(x + i * size, low + i, high + i))
            range_of_few_groups<T, size>(x + i * size, 16, low + i, high + i, known);
    }
    range_of_few_groups<T, size>(x + i * size, groups - i, low + i, high + i, known);
}

// Widens n elements to float32, times one factor each unless `factor` is nullptr.
template <class T>
static HOP_ALONE void widen_line(const typename T::Word* __restrict__ x, int64_t n, const float* __restrict__ factor,
                                 float* __restrict__ out) {
    for (int64_t i = 0; i < n; i += 16) {
        const auto some = __mmask16(n - i < 16 ? (1 << (n - i)) - 1 : 0xffff);
        __m512 v;
        if (sizeof(typename T::Word) == 4) {
            v = _mm512_maskz_loadu_ps(some, x + i);
        } else {
            _mm_prefetch(reinterpret_cast<const char*>(x + i + kColumns), _MM_HINT_T0);
            const __m256i words = _mm256_maskz_loadu_epi16(some, x + i);
            v = T::infinity == 0x7f80 ? _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16)) : _mm512_cvtph_ps(words);
        }
        if (factor) v = _mm512_mul_ps(v, _mm512_maskz_loadu_ps(some, factor + i));
        _mm512_mask_storeu_ps(out + i, some, v);
    }
}

template <class T>
static HOP_ALONE float amax_of_run(const typename T::Word* x, int64_t n, bool& known) {
    return amax_of<T>(x, n, known);
}

// Like range_of: reads each number once, as an integer in the order of the numbers.
template <class T>
static HOP_ALONE void range_of_run(const typename T::Word* x, int64_t n, float& low, float& high, bool& known) {
    using S = typename T::Signed;
    constexpr bool half = sizeof(S) == 2;
    constexpr int64_t words = 64 / int64_t(sizeof(S));
    const __m512i magnitude = half ? _mm512_set1_epi16(0x7fff) : _mm512_set1_epi32(int32_t(kMagnitude));
    __m512i least[2], most[2];
    for (int k = 0; k < 2; ++k) least[k] = most[k] = _mm512_setzero_si512();
    const auto take = [&](__m512i own, int k) {
        const __m512i negative = half ? _mm512_srai_epi16(own, 15) : _mm512_srai_epi32(own, 31);
        const __m512i order = _mm512_ternarylogic_epi32(own, negative, magnitude, 0x78);  // own ^ (negative & magnitude)
        least[k] = half ? _mm512_min_epi16(least[k], order) : _mm512_min_epi32(least[k], order);
        most[k] = half ? _mm512_max_epi16(most[k], order) : _mm512_max_epi32(most[k], order);
    };
    int64_t i = 0;
    for (; i + 2 * words <= n; i += 2 * words)
        for (int k = 0; k < 2; ++k) take(_mm512_loadu_si512(x + i + k * words), k);
    alignas(64) typename T::Word rest[2 * words] = {};
    __builtin_memcpy(rest, x + i, size_t(n - i) * sizeof(rest[0]));
    for (int k = 0; k < 2 && i < n; ++k) take(_mm512_load_si512(rest + k * words), k);
    alignas(64) S below[2 * words], above[2 * words];
    for (int k = 0; k < 2; ++k) {
        _mm512_store_si512(below + k * words, least[k]);
        _mm512_store_si512(above + k * words, most[k]);
    }
    S bottom = 0, top = 0;
    for (int k = 0; k < 2 * words; ++k) {
        bottom = below[k] < bottom ? below[k] : bottom;
        top = above[k] > top ? above[k] : top;
    }
    if (top >= S(T::infinity) || bottom <= S(~T::infinity)) {
        known = false;
        return range_of_any<T>(x, n, low, high);
    }
    const float lowest = bottom < 0 ? T::widen(typename T::Word(S(bottom ^ S(T::magnitude)))) : 0.0f;
    const float highest = T::widen(typename T::Word(top));
    low = lowest < low ? lowest : low;
    high = highest > high ? highest : high;
}
