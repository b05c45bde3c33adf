// Integers with noise, 64 at a time. Included in a namespace (isa.h), after avx512.h.

// As encode_integer_with, by a product with 1 / scale. Three roundings change a quotient of 512 or less by at most
// 2^-13, so only results within kNear of an integer are divided; the code of a larger quotient is a bound anyway. With
// `bounded`, elements may be infinite or NaN, and codes may be out of bounds.
template <bool bounded>
struct NoisyCodes {
    static constexpr float kNear = 0x1p-12f;
    __m512 scale, inverse;
    __m512i low, high;

    HOP_MEMBER __m512 magnitude_of(__m512 y) const {
        __m512 magnitude = _mm512_abs_ps(y);
        if (bounded)
            magnitude = _mm512_maskz_min_ps(_mm512_cmp_ps_mask(y, y, _CMP_ORD_Q), magnitude, _mm512_set1_ps(0x1p20f));
        return magnitude;
    }
    // The code of a quotient y, given its magnitude after stochastic rounding.
    HOP_MEMBER __m512i code_of(__m512 y, __m512i steps) const {
        const __mmask16 negative = _mm512_movepi32_mask(_mm512_castps_si512(y));
        const __m512i code = _mm512_mask_sub_epi32(steps, negative, _mm512_setzero_si512(), steps);
        return bounded ? _mm512_min_epi32(_mm512_max_epi32(code, low), high) : code;
    }
    template <class T, class Noise>
    HOP_MEMBER __m512i of_64(const Four& x, const Noise* random) const {
        __m512i noise[4], code[4];
        load_noise<T>(random, noise);
        uint32_t near = 0;
        for (int k = 0; k < 4; ++k) {
            const __m512 y = _mm512_mul_ps(x.v[k], inverse);
            const __m512 up = _mm512_fmadd_ps(_mm512_cvtepi32_ps(noise[k]), _mm512_set1_ps(0x1p-24f), magnitude_of(y));
            const __m512 rest = _mm512_sub_ps(up, _mm512_roundscale_ps(up, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
            near |= _mm512_cmp_ps_mask(_mm512_abs_ps(rest), _mm512_set1_ps(kNear), _CMP_LT_OQ);
            code[k] = code_of(y, _mm512_cvttps_epi32(up));
        }
        if (__builtin_expect(near != 0, 0)) {
            for (int k = 0; k < 4; ++k) {
                const __m512 y = _mm512_div_ps(x.v[k], scale);
                code[k] = code_of(y, whole_steps_512(magnitude_of(y), noise[k]));
            }
        }
        return bytes_of<T>(code);
    }
    // Like whole_steps.
    static HOP_MEMBER __m512i whole_steps_512(__m512 magnitude, __m512i noise) {
        const __m512i whole = _mm512_cvttps_epi32(magnitude);
        const __m512 part = _mm512_mul_ps(_mm512_sub_ps(magnitude, _mm512_cvtepi32_ps(whole)), _mm512_set1_ps(0x1p24f));
        return _mm512_add_epi32(whole, _mm512_srli_epi32(_mm512_add_epi32(_mm512_cvttps_epi32(part), noise), 24));
    }
    static HOP_MEMBER __m512i noise_of_16(const uint32_t* words) {
        return _mm512_and_si512(_mm512_loadu_si512(words), _mm512_set1_epi32(0xffffff));
    }
    static HOP_MEMBER __m512i noise_of_16(const uint8_t* bytes) {
        return _mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes))), 16);
    }
    // The noise of 64 elements, in the order of `load`.
    template <class T, class Noise>
    static HOP_MEMBER void load_noise(const Noise* random, __m512i noise[4]) {
        for (int k = 0; k < 4; ++k) noise[k] = noise_of_16(random + 16 * k);
        if (!kPairs<T>) return;
        const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
        for (int k = 0; k < 4; k += 2) {
            const __m512i first = noise[k], second = noise[k + 1];
            noise[k] = _mm512_permutex2var_epi32(first, even, second);
            noise[k + 1] = _mm512_permutex2var_epi32(first, odd, second);
        }
    }
};

template <class T, bool bounded, class Noise>
static HOP_ALONE bool encode_integers_with_noise(const hop_quantizer& q, const typename T::Word* x, int64_t n, int64_t size,
                                                 const Factors& by, const Noise* noise, uint8_t* out) {
    Four f;
    for (int64_t at = 0, i = 0; at < n; at += size, ++i) {
        const float scale = by.by[i], magnitude = float_of(bits_of(scale) & kMagnitude);
        if (!(magnitude > 0x1p-100f && magnitude < 0x1p100f)) return false;
        const int32_t zero = by.zero ? code_of_zero(q, by.zero[i]) : q.zero;
        const NoisyCodes<bounded> codes{_mm512_set1_ps(scale), _mm512_set1_ps(1.0f / scale),
                                        _mm512_set1_epi32(q.low - zero), _mm512_set1_epi32(q.high - zero)};
        const __m512i shift = _mm512_set1_epi8(char(zero));
        const int64_t end = least(at + size, n);
        int64_t k = at;
        for (; k + 64 <= end; k += 64) {
            load(x + k, f, T{});
            const __m512i made = codes.template of_64<T>(f, noise + k);
            _mm512_storeu_si512(out + k, _mm512_add_epi8(made, shift));
        }
        if (k == end) continue;
        typename T::Word rest[64] = {};
        const __mmask64 used = (__mmask64(1) << (end - k)) - 1;
        __builtin_memcpy(rest, x + k, size_t(end - k) * sizeof(rest[0]));
        load(rest, f, T{});
        Noise random[64] = {};
        __builtin_memcpy(random, noise + k, size_t(end - k) * sizeof(random[0]));
        const __m512i made = codes.template of_64<T>(f, random);
        _mm512_mask_storeu_epi8(out + k, used, _mm512_add_epi8(made, shift));
    }
    return true;
}

// Codes, one byte each, of a row of integer blocks.
template <class T, class Noise>
static bool encode_with_noise(const hop_quantizer& q, const typename T::Word* x, int64_t n, int64_t size,
                              const Factors& by, bool known, const Noise* noise, uint8_t* out) {
    if (q.format != HOP_INTEGER || size < 64) return false;
    const bool symmetric = float(q.high - q.zero) >= q.range && float(q.zero - q.low) >= q.range;
    if (known && q.rule == HOP_AMAX && symmetric)
        return encode_integers_with_noise<T, false>(q, x, n, size, by, noise, out);
    return encode_integers_with_noise<T, true>(q, x, n, size, by, noise, out);
}
