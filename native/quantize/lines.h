// Converts elements of any dtype to float32 and back, a line at a time, for loops that are compiled for float32 only.
// Included in a namespace (isa.h), after numbers.h.

#if defined(HOP_IN_AVX2)
// Eight words in the lower halves of lanes, rounded like BF16::narrow and F16::narrow.
HOP_INLINE __m256i words_of(__m256 x, BF16) {
    const __m256i b = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(b, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(b, odd), _mm256_set1_epi32(0x7fff)), 16);
    const __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    return _mm256_blendv_epi8(up, _mm256_set1_epi32(0x7fc0), _mm256_castps_si256(nan));
}

// Stores 16 values.
HOP_INLINE void store_words(__m256 a, __m256 b, uint16_t* out, BF16) {
    const __m256i words = _mm256_packus_epi32(words_of(a, BF16{}), words_of(b, BF16{}));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_permute4x64_epi64(words, 0xd8));
}
HOP_INLINE void store_words(__m256 a, __m256 b, uint16_t* out, F16) {
    const auto word = [](__m256 x) HOP_INLINED {
        const __m256i sign = _mm256_set1_epi32(int32_t(0x80000000)), quiet = _mm256_set1_epi32(0x7fc00000);
        const __m256i nan = _mm256_or_si256(_mm256_and_si256(_mm256_castps_si256(x), sign), quiet);
        const __m256 known = _mm256_blendv_ps(x, _mm256_castsi256_ps(nan), _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
        return _mm256_cvtps_ph(known, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    };
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), word(a));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 8), word(b));
}

template <class T>
static HOP_ALONE void narrow_line(const float* __restrict__ x, int64_t n, typename T::Word* __restrict__ out) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) store_words(_mm256_loadu_ps(x + i), _mm256_loadu_ps(x + i + 8), out + i, T{});
    if (i == n) return;
    float rest[16] = {};
    uint16_t words[16];
    __builtin_memcpy(rest, x + i, size_t(n - i) * sizeof(float));
    store_words(_mm256_loadu_ps(rest), _mm256_loadu_ps(rest + 8), words, T{});
    __builtin_memcpy(out + i, words, size_t(n - i) * sizeof(words[0]));
}
#else
template <class T>
static HOP_ALONE void narrow_line(const float* __restrict__ x, int64_t n, typename T::Word* __restrict__ out) {
    for (int64_t i = 0; i < n; ++i) out[i] = T::narrow(x[i]);
}
#endif
