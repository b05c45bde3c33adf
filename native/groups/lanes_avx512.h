// Sixteen float32 values, and decoding of codes to them, with AVX-512. Included in a namespace (isa.h).

using Lanes = __m512;
constexpr bool kFromRegisters = true;
constexpr int kFewRows = 4, kFewColumns = 4;    // of a product from registers
constexpr int kTileRows = 4, kTileColumns = 6;  // of a product from a strip

HOP_INLINE Lanes load(const float* p) { return _mm512_loadu_ps(p); }
HOP_INLINE void store(float* p, Lanes x) { _mm512_storeu_ps(p, x); }
HOP_INLINE Lanes all(float x) { return _mm512_set1_ps(x); }
HOP_INLINE Lanes times(Lanes a, Lanes b) { return _mm512_mul_ps(a, b); }
HOP_INLINE Lanes minus(Lanes a, Lanes b) { return _mm512_sub_ps(a, b); }
HOP_INLINE Lanes add_product(Lanes a, Lanes b, Lanes sum) { return _mm512_fmadd_ps(a, b, sum); }

// Loads two 32-bit values, each repeated eight times.
HOP_INLINE __m512i two_words(const void* p) {
    const __m512i order = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    int64_t both;
    std::memcpy(&both, p, 8);
    return _mm512_castps_si512(_mm512_permutevar_ps(_mm512_castsi512_ps(_mm512_set1_epi64(both)), order));
}
HOP_INLINE Lanes two(const float* p) { return _mm512_castsi512_ps(two_words(p)); }
HOP_INLINE Lanes halves(float a, float b) { return _mm512_insertf32x8(_mm512_set1_ps(a), _mm256_set1_ps(b), 1); }

HOP_INLINE Lanes from_bytes(const uint8_t* p, bool is_signed) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm512_cvtepi32_ps(is_signed ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
}

// Adds in halves: lanes j and j + 8, then j and j + 4, j + 2, j + 1.
HOP_INLINE float total(Lanes x) {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 pair = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
}

// A table of 16 values.
struct Table {
    __m512 numbers;
    static HOP_INLINED inline Table of(const float* p) { return {_mm512_loadu_ps(p)}; }
};

template <bool Offset>
HOP_INLINE Table scaled(const Table& t, float s, float m) {
    const __m512 product = _mm512_mul_ps(t.numbers, _mm512_set1_ps(s));
    return {Offset ? _mm512_sub_ps(product, _mm512_set1_ps(m)) : product};
}

// Moves byte j of 16 to the lowest byte of lane j; the other bytes are arbitrary.
HOP_INLINE __m512i spread_bytes(const uint8_t* p) {
    const __m512i order = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), order);
}

// Looks up 32 codes: the low halves of 16 bytes, and the high halves. Permutations ignore the other bits of an index.
HOP_INLINE void look_up(const Table& t, const uint8_t* low, Lanes& a, Lanes& b) {
    const __m512i bytes = spread_bytes(low);
    a = _mm512_permutexvar_ps(bytes, t.numbers);
    b = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), t.numbers);
}

// Looks up 32 codes of 2 bits, two of them in 4 bits, in separate tables for the first and the second.
HOP_INLINE __m512i fields_of_four(const uint8_t* p) {
    const __m512i shifts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    return _mm512_srlv_epi32(two_words(p), shifts);
}
HOP_INLINE void look_up_pairs(const Table& first, const Table& second, const uint8_t* codes, Lanes& a, Lanes& b) {
    const __m512i fields = fields_of_four(codes);
    a = _mm512_permutexvar_ps(fields, first.numbers), b = _mm512_permutexvar_ps(fields, second.numbers);
}

// kMagic: the bits of 2^23; adding a smaller integer to them gives 2^23 + that integer.
constexpr int kLow = 15, kMagic = 0x4b000000;

// Decodes 5-bit codes with a table of scaled values; and codes of 3, 6 and 8 bits to values that are scaled afterwards.
template <int Bits>
struct Decoder {
    static constexpr bool kScales = Bits == 5;
    __m512 numbers[2];    // for codes of 5 bits; for 3 bits, the contribution of the high bits of two codes together
    __m512 low_of[2];     // for 3 bits, by the low bits of two codes together
    __m512i rotate[2];    // moves the high bits of codes 2 j and 2 j + 1 to bit 4
    __m512 less;          // subtracted from decoded codes of 6 bits

    explicit Decoder(bool is_signed) {
        const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __m512 first = _mm512_cvtepi32_ps(lane);
        numbers[0] = first, numbers[1] = _mm512_add_ps(first, _mm512_set1_ps(is_signed ? -16.0f : 16.0f));
        const int width = Bits == 5 ? 1 : 2;
        const __m512i at = Bits == 5 ? _mm512_slli_epi32(lane, 1) : _mm512_slli_epi32(_mm512_and_si512(lane, _mm512_set1_epi32(7)), 2);
        for (int i = 0; i < 2; ++i) rotate[i] = _mm512_add_epi32(at, _mm512_set1_epi32(32 - 4 + i * width));
        less = _mm512_set1_ps(8388608.0f + (is_signed ? static_cast<float>(1 << (Bits - 1)) : 0.0f));
        sign = is_signed ? 1 << (Bits - 1) : 0;
        if (Bits != 3) return;
        for (int i = 0; i < 2; ++i) {
            alignas(64) float high[16], low[16];
            for (int j = 0; j < 16; ++j)
                high[j] = (j >> i & 1) * (is_signed ? -4.0f : 4.0f), low[j] = static_cast<float>(j >> 2 * i & 3);
            numbers[i] = _mm512_load_ps(high), low_of[i] = _mm512_load_ps(low);
        }
    }

    template <bool Offset>
    HOP_INLINED void scaled(const uint8_t* codes, const uint8_t* high, float s, float m, Lanes& a, Lanes& b) const {
        __m512 table[2];
        for (int i = 0; i < 2; ++i) {
            table[i] = _mm512_mul_ps(numbers[i], _mm512_set1_ps(s));
            if (Offset) table[i] = _mm512_sub_ps(table[i], _mm512_set1_ps(m));
        }
        __m512i code[2];
        joined(codes, high, code);
        a = _mm512_permutex2var_ps(table[0], code[0], table[1]);
        b = _mm512_permutex2var_ps(table[0], code[1], table[1]);
    }

    HOP_INLINED void operator()(const uint8_t* codes, const uint8_t* high, Lanes& a, Lanes& b) const {
        if constexpr (Bits == 3) {
            uint32_t word;
            std::memcpy(&word, high, 4);
            const __m512i lane = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            const __m512i low = fields_of_four(codes), fields = _mm512_srlv_epi32(_mm512_set1_epi32(static_cast<int>(word)), lane);
            a = _mm512_add_ps(_mm512_permutexvar_ps(low, low_of[0]), _mm512_permutexvar_ps(fields, numbers[0]));
            b = _mm512_add_ps(_mm512_permutexvar_ps(low, low_of[1]), _mm512_permutexvar_ps(fields, numbers[1]));
            return;
        }
        if constexpr (Bits == 8) {
            const auto number = [](const uint8_t* p) {
                return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
            };
            a = number(codes), b = number(codes + 16);
            return;
        }
        __m512i code[2];
        joined(codes, high, code);
        const __m512i all_bits = _mm512_set1_epi32((1 << Bits) - 1), turned = _mm512_set1_epi32(kMagic | sign);
        for (int i = 0; i < 2; ++i)  // (code & all_bits) ^ turned
            code[i] = _mm512_ternarylogic_epi32(code[i], all_bits, turned, 0x6a);
        a = _mm512_sub_ps(_mm512_castsi512_ps(code[0]), less), b = _mm512_sub_ps(_mm512_castsi512_ps(code[1]), less);
    }

private:
    int sign;  // the highest bit of signed codes

    // Leaves a code in the low bits of each lane.
    HOP_INLINED void joined(const uint8_t* codes, const uint8_t* high, __m512i (&code)[2]) const {
        const __m512i bytes = spread_bytes(codes), low = _mm512_set1_epi32(kLow);
        __m512i fields;
        if constexpr (Bits == 5) {
            int32_t word;
            std::memcpy(&word, high, 4);
            fields = _mm512_set1_epi32(word);
        } else {
            fields = two_words(high);
        }
        const __m512i nibble[2] = {bytes, _mm512_srli_epi32(bytes, 4)};
        for (int i = 0; i < 2; ++i)  // low ? nibble : field
            code[i] = _mm512_ternarylogic_epi32(low, nibble[i], _mm512_rorv_epi32(fields, rotate[i]), 0xca);
    }
};

// Converts `count` float16 numbers.
HOP_INLINE void from_halves(const uint16_t* p, int64_t count, float* to) {
    int64_t i = 0;
    for (; i + 16 <= count; i += 16)
        _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + i))));
    if (i == count) return;
    const auto rest = static_cast<__mmask16>((1u << (count - i)) - 1);
    _mm512_mask_storeu_ps(to + i, rest, _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(rest, p + i)));
}

// Reorders 32 contiguous values: the even ones, then the odd ones.
HOP_INLINE void apart(const float* p, float* to) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512 first = _mm512_loadu_ps(p), second = _mm512_loadu_ps(p + 16);
    _mm512_storeu_ps(to, _mm512_permutex2var_ps(first, even, second));
    _mm512_storeu_ps(to + 16, _mm512_permutex2var_ps(first, _mm512_add_epi32(even, _mm512_set1_epi32(1)), second));
}
