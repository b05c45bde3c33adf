// Sixteen float32 numbers, and codes that become such, with AVX-512. Included in a namespace (isa.h).

using Lanes = __m512;
constexpr int kFewRows = 4, kFewColumns = 4;    // of a product from registers
constexpr int kTileRows = 4, kTileColumns = 6;  // of one from a strip

HOP_INLINE Lanes load(const float* p) { return _mm512_loadu_ps(p); }
HOP_INLINE void store(float* p, Lanes x) { _mm512_storeu_ps(p, x); }
HOP_INLINE Lanes all(float x) { return _mm512_set1_ps(x); }
HOP_INLINE Lanes times(Lanes a, Lanes b) { return _mm512_mul_ps(a, b); }
HOP_INLINE Lanes minus(Lanes a, Lanes b) { return _mm512_sub_ps(a, b); }
HOP_INLINE Lanes add_product(Lanes a, Lanes b, Lanes sum) { return _mm512_fmadd_ps(a, b, sum); }

// Two numbers, eight times each.
HOP_INLINE Lanes two(const float* p) {
    return _mm512_insertf32x8(_mm512_set1_ps(p[0]), _mm256_set1_ps(p[1]), 1);
}

// In halves: lanes j and j + 8, then j and j + 4, j + 2, j + 1.
HOP_INLINE float total(Lanes x) {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 pair = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
}

// A table of 16 numbers.
struct Table {
    __m512 numbers;
    static HOP_INLINED inline Table of(const float* p) { return {_mm512_loadu_ps(p)}; }
};

template <bool Offset>
HOP_INLINE Table scaled(const Table& t, float s, float m) {
    const __m512 product = _mm512_mul_ps(t.numbers, _mm512_set1_ps(s));
    return {Offset ? _mm512_sub_ps(product, _mm512_set1_ps(m)) : product};
}

// The numbers of 32 codes: those of the low halves of 16 bytes, and those of the high ones.
HOP_INLINE void look_up(const Table& t, const uint8_t* low, Lanes& a, Lanes& b) {
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(low)));
    a = _mm512_permutexvar_ps(bytes, t.numbers);  // of which it reads the low four bits
    b = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), t.numbers);
}

// 32 codes of 5, 6 or 8 bits, as numbers.
template <int Bits>
struct Decoder {
    __m512 low, high[2];  // what four bits stand for; what the high bits of two codes add, by those of both
    __m512i shifts;

    explicit Decoder(bool is_signed) {
        alignas(64) float of_low[16], of_high[2][16];
        constexpr int fields = Bits == 5 ? 2 : 4, half = fields / 2;
        for (int i = 0; i < 16; ++i) {
            of_low[i] = static_cast<float>(i);
            const int field[2] = {i % fields, i / fields % fields};
            for (int j = 0; j < 2; ++j)
                of_high[j][i] = static_cast<float>(16 * (field[j] - (is_signed && field[j] >= half ? fields : 0)));
        }
        low = _mm512_load_ps(of_low), high[0] = _mm512_load_ps(of_high[0]), high[1] = _mm512_load_ps(of_high[1]);
        const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        shifts = Bits == 5 ? _mm512_slli_epi32(lane, 1) : _mm512_slli_epi32(_mm512_and_si512(lane, _mm512_set1_epi32(7)), 2);
    }

    HOP_INLINED void operator()(const uint8_t* codes, const uint8_t* of_high, Lanes& a, Lanes& b) const {
        if constexpr (Bits == 8) {
            a = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes))));
            b = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + 16))));
            return;
        }
        const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
        __m512i fields;  // of lane j: the high bits of codes 2 j and 2 j + 1, the lowest ones
        if constexpr (Bits == 5) {
            uint32_t word;
            std::memcpy(&word, of_high, 4);
            fields = _mm512_srlv_epi32(_mm512_set1_epi32(static_cast<int>(word)), shifts);
        } else {
            uint32_t word[2];
            std::memcpy(word, of_high, 8);
            const __m512i both = _mm512_inserti32x8(
                _mm512_set1_epi32(static_cast<int>(word[0])), _mm256_set1_epi32(static_cast<int>(word[1])), 1);
            fields = _mm512_srlv_epi32(both, shifts);
        }
        a = _mm512_add_ps(_mm512_permutexvar_ps(bytes, low), _mm512_permutexvar_ps(fields, high[0]));
        b = _mm512_add_ps(_mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), low), _mm512_permutexvar_ps(fields, high[1]));
    }
};

// `count` float16 numbers.
HOP_INLINE void from_halves(const uint16_t* p, int64_t count, float* to) {
    int64_t i = 0;
    for (; i + 16 <= count; i += 16)
        _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + i))));
    if (i == count) return;
    const auto rest = static_cast<__mmask16>((1u << (count - i)) - 1);
    _mm512_mask_storeu_ps(to + i, rest, _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(rest, p + i)));
}

// 32 numbers as they lie: the even ones, then the odd ones.
HOP_INLINE void apart(const float* p, float* to) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512 first = _mm512_loadu_ps(p), second = _mm512_loadu_ps(p + 16);
    _mm512_storeu_ps(to, _mm512_permutex2var_ps(first, even, second));
    _mm512_storeu_ps(to + 16, _mm512_permutex2var_ps(first, _mm512_add_epi32(even, _mm512_set1_epi32(1)), second));
}
