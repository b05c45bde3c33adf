// Depthwise convolutions with VNNI. Included in a namespace (isa.h), after depthwise.h.

// Computes exactly `Steps` steps, with the weight in registers; or any number if 0.
template <bool Turned, int Steps>
inline void depthwise_block(const int64_t* from, int64_t channel, int rows, const int64_t* offsets, int64_t any,
                            const int8_t* weight, int32_t* sums) {
    const int64_t steps = Steps ? Steps : any;
    const __m256i flip = _mm256_set1_epi8(-128);
    const auto* weights = reinterpret_cast<const __m256i*>(weight);
    __m256i kept[Steps ? Steps * 4 : 1];
    for (int i = 0; i < Steps * 4; ++i) kept[i] = _mm256_loadu_si256(weights + i);
    for (int row = 0; row < rows; ++row, sums += kBlock) {
        const uint8_t* x = reinterpret_cast<const uint8_t*>(from[row]) + channel;
        __m256i s[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()};
        for (int64_t step = 0; step < steps; ++step) {
            __m256i line[4];
            for (int i = 0; i < 4; ++i) {
                line[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + offsets[step * kTaps + i]));
                if (Turned) line[i] = _mm256_xor_si256(line[i], flip);
            }
            const __m256i low01 = _mm256_unpacklo_epi8(line[0], line[1]),
                          high01 = _mm256_unpackhi_epi8(line[0], line[1]),
                          low23 = _mm256_unpacklo_epi8(line[2], line[3]),
                          high23 = _mm256_unpackhi_epi8(line[2], line[3]);
            const __m256i quads[4] = {_mm256_unpacklo_epi16(low01, low23), _mm256_unpackhi_epi16(low01, low23),
                                      _mm256_unpacklo_epi16(high01, high23), _mm256_unpackhi_epi16(high01, high23)};
            for (int i = 0; i < 4; ++i)
                s[i] = _mm256_dpbusd_epi32(s[i], quads[i],
                                           Steps ? kept[step * 4 + i] : _mm256_loadu_si256(weights + step * 4 + i));
        }
        auto* out = reinterpret_cast<__m256i*>(sums);
        _mm256_storeu_si256(out, _mm256_permute2x128_si256(s[0], s[1], 0x20));
        _mm256_storeu_si256(out + 1, _mm256_permute2x128_si256(s[2], s[3], 0x20));
        _mm256_storeu_si256(out + 2, _mm256_permute2x128_si256(s[0], s[1], 0x31));
        _mm256_storeu_si256(out + 3, _mm256_permute2x128_si256(s[2], s[3], 0x31));
    }
}

inline void depthwise_rows(const int64_t* from, int64_t channel, int rows, const int64_t* offsets, int64_t steps,
                           bool turned, const int8_t* weight, int32_t* sums) {
    constexpr int kOften = 3;  // steps of a 3x3 kernel
    const auto run = steps == kOften ? turned ? depthwise_block<true, kOften> : depthwise_block<false, kOften>
                     : turned        ? depthwise_block<true, 0>
                                     : depthwise_block<false, 0>;
    run(from, channel, rows, offsets, steps, weight, sums);
}
