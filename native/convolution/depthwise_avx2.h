// Depthwise convolutions with AVX2: bytes as int16. Included in a namespace (isa.h), after depthwise.h.

constexpr int64_t kWidenedSteps = 16;  // steps whose weight is widened at a time

// Computes exactly `Steps` steps, or any number if 0. `words`: even and odd taps of four vectors of eight channels, for
// each step.
template <bool Turned, int Steps>
inline void depthwise_block(const int64_t* from, int64_t channel, int rows, const int64_t* offsets, int64_t any,
                            const __m256i* words, bool add, int32_t* sums) {
    const int64_t steps = Steps ? Steps : any;
    const __m256i flip = _mm256_set1_epi8(-128), low = _mm256_set1_epi16(0xff);
    for (int row = 0; row < rows; ++row, sums += kBlock) {
        const uint8_t* x = reinterpret_cast<const uint8_t*>(from[row]) + channel;
        __m256i s[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()};
        HOP_UNROLL
        for (int64_t step = 0; step < steps; ++step) {
            __m256i line[4];
            HOP_UNROLL
            for (int i = 0; i < 4; ++i) {
                line[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + offsets[step * kTaps + i]));
                if (Turned) line[i] = _mm256_xor_si256(line[i], flip);
            }
            const __m256i low01 = _mm256_unpacklo_epi8(line[0], line[1]), high01 = _mm256_unpackhi_epi8(line[0], line[1]),
                          low23 = _mm256_unpacklo_epi8(line[2], line[3]), high23 = _mm256_unpackhi_epi8(line[2], line[3]);
            const __m256i quads[4] = {_mm256_unpacklo_epi16(low01, low23), _mm256_unpackhi_epi16(low01, low23),
                                      _mm256_unpacklo_epi16(high01, high23), _mm256_unpackhi_epi16(high01, high23)};
            HOP_UNROLL
            for (int i = 0; i < 4; ++i) {
                const __m256i* w = words + step * 8 + 2 * i;
                s[i] = _mm256_add_epi32(s[i], _mm256_madd_epi16(_mm256_and_si256(quads[i], low), w[0]));
                s[i] = _mm256_add_epi32(s[i], _mm256_madd_epi16(_mm256_srli_epi16(quads[i], 8), w[1]));
            }
        }
        auto* out = reinterpret_cast<__m256i*>(sums);
        const __m256i found[4] = {_mm256_permute2x128_si256(s[0], s[1], 0x20), _mm256_permute2x128_si256(s[2], s[3], 0x20),
                                  _mm256_permute2x128_si256(s[0], s[1], 0x31), _mm256_permute2x128_si256(s[2], s[3], 0x31)};
        HOP_UNROLL
        for (int i = 0; i < 4; ++i)
            _mm256_storeu_si256(out + i, add ? _mm256_add_epi32(_mm256_loadu_si256(out + i), found[i]) : found[i]);
    }
}

inline void depthwise_rows(const int64_t* from, int64_t channel, int rows, const int64_t* offsets, int64_t steps,
                           bool turned, const int8_t* weight, int32_t* sums) {
    constexpr int kOften = 3;  // steps of a 3x3 kernel
    __m256i words[kWidenedSteps * 8];
    for (int64_t first = 0; first < steps; first += kWidenedSteps) {
        const int64_t count = steps - first < kWidenedSteps ? steps - first : kWidenedSteps;
        for (int64_t i = 0; i < 4 * count; ++i) {
            const __m256i w = load256(weight + first * kTapBytes + i * 32);
            words[2 * i] = _mm256_srai_epi16(_mm256_slli_epi16(w, 8), 8);
            words[2 * i + 1] = _mm256_srai_epi16(w, 8);
        }
        const auto run = steps == kOften ? turned ? depthwise_block<true, kOften> : depthwise_block<false, kOften>
                         : turned        ? depthwise_block<true, 0>
                                         : depthwise_block<false, 0>;
        run(from, channel, rows, offsets + first * kTaps, count, words, first > 0, sums);
    }
}
