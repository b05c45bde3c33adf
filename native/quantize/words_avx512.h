// Codes of finite elements whose scale the rule found: from the products on, 32 words per vector. Included in a
// namespace (isa.h), after avx512.h.

// The lower or upper words of two vectors of lanes, in memory order of the elements.
template <class T, bool upper>
HOP_INLINE __m512i words_of(__m512i a, __m512i b) {
    alignas(64) static constexpr struct Order {
        uint16_t at[32];
        constexpr Order() : at() {
            for (int j = 0; j < 32; ++j) {
                at[j] = uint16_t(kPairs<T> ? j / 2 * 2 + upper + j % 2 * 32 : j % 16 * 2 + upper + j / 16 * 32);
            }
        }
    } order;
    return _mm512_permutex2var_epi16(a, _mm512_load_si512(order.at), b);
}

// The lower or upper bytes of two vectors of words.
template <bool upper>
HOP_INLINE __m512i bytes_of_words(__m512i a, __m512i b) {
    alignas(64) static constexpr struct Order {
        uint8_t at[64];
        constexpr Order() : at() {
            for (int j = 0; j < 64; ++j) at[j] = uint8_t(2 * j + upper);
        }
    } order;
    return _mm512_permutex2var_epi8(a, _mm512_load_si512(order.at), b);
}

// The uppermost byte of each element.
template <class T>
HOP_INLINE __m512i signs_of(const Four& x) {
    if (T::infinity == 0x7f80) return bytes_of_words<true>(x.words[0], x.words[1]);
    __m512i n[4];
    for (int k = 0; k < 4; ++k) n[k] = _mm512_castps_si512(x.v[k]);
    return bytes_of_words<true>(words_of<T, true>(n[0], n[1]), words_of<T, true>(n[2], n[3]));
}

// ---- integers

// Quotients in units of 2^-16, from a product with 2^16 / scale: the error is at most 3 units, so only quotients within
// kMargin of a tie are divided. `first` is the position of 0 plus half a code and the margin, so that the upper word is
// the code, and the lower word is at least 2 * kMargin unless a tie is near.
constexpr float kMargin = 4;

template <class T, int size, bool affine>
struct FixedCodes {
    const float *scale, *inverse, *first, *zero;  // per block; `first` and `zero`: one for all unless `affine`
    __m512i low, high;                            // bounds of codes, in words

    HOP_MEMBER __m512i operator()(const Four& x, int64_t block) const {
        constexpr bool interleaved = T::infinity == 0x7f80;
        Four by, from;
        spread<size>(inverse + block, by, interleaved);
        spread<affine ? size : 64>(first + (affine ? block : 0), from, interleaved);
        __m512i n[4];
        for (int k = 0; k < 4; ++k) n[k] = _mm512_cvtps_epi32(_mm512_fmadd_ps(x.v[k], by.v[k], from.v[k]));
        const __m512i rest = _mm512_min_epu16(words_of<T, false>(n[0], n[1]), words_of<T, false>(n[2], n[3]));
        const __mmask32 near = _mm512_cmplt_epu16_mask(rest, _mm512_set1_epi16(int16_t(2 * kMargin)));
        if (__builtin_expect(near != 0, 0)) divide(x, block, n);
        return bytes_of_words<false>(bounded(words_of<T, true>(n[0], n[1])), bounded(words_of<T, true>(n[2], n[3])));
    }
    HOP_MEMBER __m512i bounded(__m512i words) const {
        return _mm512_min_epi16(_mm512_max_epi16(words, low), high);
    }
    HOP_MEMBER void divide(const Four& x, int64_t block, __m512i n[4]) const {
        constexpr bool interleaved = T::infinity == 0x7f80;
        Four by, from;
        spread<size>(scale + block, by, interleaved);
        spread<affine ? size : 64>(zero + (affine ? block : 0), from, interleaved);
        for (int k = 0; k < 4; ++k) {
            const __m512i steps = _mm512_cvtps_epi32(_mm512_div_ps(x.v[k], by.v[k]));
            n[k] = _mm512_slli_epi32(_mm512_add_epi32(steps, _mm512_cvtps_epi32(from.v[k])), 16);
        }
    }
};

// ---- floats

HOP_INLINE __mmask16 above_zero(__m512 x) { return _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_GT_OQ); }

// 8-bit floats: like encode_float, in lanes up to the sum, and in words from there. With `divides`, by is 1 / scale,
// and quotients are between products a little above and below; if these have two codes, elements are divided.
template <class T, int size, int mantissa, bool divides>
struct ByteFloats {
    static constexpr int shift = 23 - mantissa;
    const float *by, *scale;
    FloatFormat f;
    float raised;  // with `divides`: lower bound of elements above 0

    HOP_MEMBER __m512i operator()(const Four& x, int64_t block) const {
        const __m512i infinity = _mm512_set1_epi32(int32_t(kInfinity)), least = _mm512_set1_epi32(int32_t(f.least));
        // The low bits of a sum are the code, with the exponent of the unit above it.
        const __m512i unit_of = _mm512_set1_epi32(int32_t((uint32_t(shift) << 23) + ((0u - f.base) & 0xff)));
        const __m512 largest = _mm512_castsi512_ps(_mm512_set1_epi32(int32_t(f.largest)));
        Four s;
        spread<size>(by + block, s, T::infinity == 0x7f80);
        __m512i unit[4], sum[4], differ = _mm512_setzero_si512();
        for (int k = 0; k < 4; ++k) {
            __m512 m = _mm512_range_ps(_mm512_mul_ps(x.v[k], s.v[k]), largest, 0b1010);  // the lesser magnitude
            if (divides) m = _mm512_mask_max_ps(m, above_zero(x.v[k]), m, _mm512_set1_ps(raised));
            const __m512i e = _mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(m), infinity), least);
            unit[k] = _mm512_add_epi32(e, unit_of);
            const __m512 u = _mm512_castsi512_ps(unit[k]);
            if (divides) {
                sum[k] = _mm512_castps_si512(_mm512_fmadd_ps(m, _mm512_set1_ps(kAbove), u));
                const __m512i other = _mm512_castps_si512(_mm512_fmadd_ps(m, _mm512_set1_ps(kBelow), u));
                differ = _mm512_ternarylogic_epi32(differ, sum[k], other, 0xf6);  // differ | (a ^ b)
            } else {
                sum[k] = _mm512_castps_si512(_mm512_add_ps(m, u));
            }
        }
        if (divides && __builtin_expect(_mm512_test_epi32_mask(differ, differ) != 0, 0)) return divided(x, block);
        __m512i words[2];
        for (int k = 0; k < 2; ++k) {
            const __m512i exponent = _mm512_srli_epi16(words_of<T, true>(unit[2 * k], unit[2 * k + 1]), 7 - mantissa);
            words[k] = _mm512_add_epi16(words_of<T, false>(sum[2 * k], sum[2 * k + 1]), exponent);
        }
        return select(_mm512_set1_epi8(0x7f), bytes_of_words<false>(words[0], words[1]), signs_of<T>(x));
    }
    HOP_MEMBER __m512i divided(const Four& x, int64_t block) const {
        Four own = x, s;
        spread<size>(scale + block, s, kPairs<T>);
        for (int k = 0; k < 4; ++k) {
            const __m512 lowest = _mm512_mul_ps(s.v[k], _mm512_set1_ps(raised));
            own.v[k] = _mm512_mask_max_ps(x.v[k], above_zero(x.v[k]), x.v[k], lowest);
        }
        return FloatCodes<T, size, true>{scale, f}(own, block);
    }
};

// e2m1: rounding a magnitude to quarters, down and up, determines its code, which is in a table.
template <class T, int size>
struct E2m1Codes {
    const float* by;

    HOP_MEMBER __m512i operator()(const Four& x, int64_t block) const {
        constexpr int down = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC, up = _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC;
        const __m512 whole = _mm512_set1_ps(0x1p21f);  // whose last bit is a quarter
        Four s;
        spread<size>(by + block, s, T::infinity == 0x7f80);
        __m512i n[4];
        for (int k = 0; k < 4; ++k) {
            const __m512 m = _mm512_range_ps(_mm512_mul_ps(x.v[k], s.v[k]), _mm512_set1_ps(6), 0b1010);
            n[k] = _mm512_add_epi32(_mm512_castps_si512(_mm512_add_round_ps(m, whole, down)),
                                    _mm512_castps_si512(_mm512_add_round_ps(m, whole, up)));
        }
        const __m512i quarters = bytes_of_words<false>(words_of<T, false>(n[0], n[1]), words_of<T, false>(n[2], n[3]));
        const __m512i codes = _mm512_permutexvar_epi8(quarters, table());
        return select(_mm512_set1_epi8(7), codes, _mm512_srli_epi16(signs_of<T>(x), 4));
    }
    // Indexed by twice the quarters, one more or less if the magnitude is between two.
    static __m512i table() {
        alignas(64) static constexpr struct Table {
            uint8_t code[64];
            constexpr Table() : code() {
                constexpr int ties[7] = {1, 3, 5, 7, 10, 14, 20};  // ties round to the even one of two codes
                for (int i = 0; i < 64; ++i)
                    for (int k = 0; k < 7; ++k) code[i] = uint8_t(code[i] + (i >= 2 * ties[k] + (k % 2 == 0)));
            }
        } made;
        return _mm512_load_si512(made.code);
    }
};
