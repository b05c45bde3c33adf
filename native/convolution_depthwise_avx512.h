// Depthwise convolutions by VNNI. Included in a namespace (isa.h), after convolution_depthwise.h.

template <bool Turned>
inline void depthwise_sums(const uint8_t* x, const int64_t* offsets, int64_t steps, uint8_t sign, const int8_t* weight,
                           int32_t* sums) {
    const __m256i flip = _mm256_set1_epi8(static_cast<char>(sign));
    __m256i s[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()};
    for (int64_t step = 0; step < steps; ++step, offsets += kTaps, weight += kTapBytes) {
        __m256i line[4];
        for (int i = 0; i < 4; ++i) {
            line[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + offsets[i]));
            if (Turned) line[i] = _mm256_xor_si256(line[i], flip);
        }
        const __m256i low01 = _mm256_unpacklo_epi8(line[0], line[1]), high01 = _mm256_unpackhi_epi8(line[0], line[1]);
        const __m256i low23 = _mm256_unpacklo_epi8(line[2], line[3]), high23 = _mm256_unpackhi_epi8(line[2], line[3]);
        const __m256i quads[4] = {_mm256_unpacklo_epi16(low01, low23), _mm256_unpackhi_epi16(low01, low23),
                                  _mm256_unpacklo_epi16(high01, high23), _mm256_unpackhi_epi16(high01, high23)};
        for (int i = 0; i < 4; ++i)
            s[i] = _mm256_dpbusd_epi32(s[i], quads[i],
                                       _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weight + i * 32)));
    }
    auto* out = reinterpret_cast<__m256i*>(sums);
    _mm256_storeu_si256(out, _mm256_permute2x128_si256(s[0], s[1], 0x20));
    _mm256_storeu_si256(out + 1, _mm256_permute2x128_si256(s[2], s[3], 0x20));
    _mm256_storeu_si256(out + 2, _mm256_permute2x128_si256(s[0], s[1], 0x31));
    _mm256_storeu_si256(out + 3, _mm256_permute2x128_si256(s[2], s[3], 0x31));
}

inline void depthwise_row(const uint8_t* x, const int64_t* offsets, int64_t steps, uint8_t sign, const int8_t* weight,
                          int32_t* sums) {
    sign ? depthwise_sums<true>(x, offsets, steps, sign, weight, sums)
         : depthwise_sums<false>(x, offsets, steps, sign, weight, sums);
}
