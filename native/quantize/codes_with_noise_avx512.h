// Integers with noise, 64 at a time. Included in a namespace (isa.h), after avx512.h.

// As encode_integer_with, by a product with 1 / scale: three roundings move a quotient of 512 or less by 2^-13 at most,
// so that only within kNear of an integer it is divided after all; what is larger has the code of the bound anyway.
// With `bounded` elements may be infinite or NaN, and codes out of bounds.
template <bool bounded>
struct NoisyCodes {
    static constexpr float kNear = 0x1p-12f;
    __m512 scale, inverse;
    __m512i low, high;

    HOP_MEMBER __m512 raised(__m512 y, __m512 noise) const {
        __m512 magnitude = _mm512_abs_ps(y);
        if (bounded)
            magnitude = _mm512_maskz_min_ps(_mm512_cmp_ps_mask(y, y, _CMP_ORD_Q), magnitude, _mm512_set1_ps(0x1p20f));
        return _mm512_fmadd_ps(noise, _mm512_set1_ps(1.0f / 256), magnitude);  // noise / 256 is exact
    }
    HOP_MEMBER __m512i code_of(__m512 y, __m512 raised) const {
        const __m512i steps = _mm512_cvttps_epi32(raised);
        const __mmask16 negative = _mm512_movepi32_mask(_mm512_castps_si512(y));
        const __m512i code = _mm512_mask_sub_epi32(steps, negative, _mm512_setzero_si512(), steps);
        return bounded ? _mm512_min_epi32(_mm512_max_epi32(code, low), high) : code;
    }
    template <class T>
    HOP_MEMBER __m512i of_64(const Four& x, __m512i bytes) const {
        bytes = _mm512_permutexvar_epi8(noise_order<T>(), bytes);
        __m512 noise[4];
        __m512i code[4];
        uint32_t near = 0;
        for (int k = 0; k < 4; ++k) {
            const __m512i byte = _mm512_and_si512(_mm512_srli_epi32(bytes, 8 * k), _mm512_set1_epi32(255));
            noise[k] = _mm512_cvtepi32_ps(byte);
            const __m512 y = _mm512_mul_ps(x.v[k], inverse), up = raised(y, noise[k]);
            const __m512 rest = _mm512_sub_ps(up, _mm512_roundscale_ps(up, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
            near |= _mm512_cmp_ps_mask(_mm512_abs_ps(rest), _mm512_set1_ps(kNear), _CMP_LT_OQ);
            code[k] = code_of(y, up);
        }
        if (__builtin_expect(near != 0, 0)) {
            for (int k = 0; k < 4; ++k) {
                const __m512 y = _mm512_div_ps(x.v[k], scale);
                code[k] = code_of(y, raised(y, noise[k]));
            }
        }
        return bytes_of<T>(code);
    }
    // The place of each lane's four bytes in memory: the inverse of byte_order.
    template <class T>
    static __m512i noise_order() {
        alignas(64) static constexpr struct Order {
            uint8_t at[64];
            constexpr Order() : at() {
                for (int lane = 0; lane < 16; ++lane)
                    for (int k = 0; k < 4; ++k)
                        at[lane * 4 + k] = uint8_t(sizeof(typename T::Word) == 2 && T::infinity == 0x7f80
                                                       ? k / 2 * 32 + lane * 2 + k % 2
                                                       : k * 16 + lane);
            }
        } order;
        return _mm512_load_si512(order.at);
    }
};

template <class T, bool bounded>
static HOP_ALONE bool encode_integers_with_noise(const hop_quantizer& q, const typename T::Word* x, int64_t n, int64_t size,
                                       const Factors& by, const uint8_t* noise, uint8_t* out) {
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
            const __m512i made = codes.template of_64<T>(f, _mm512_loadu_si512(noise + k));
            _mm512_storeu_si512(out + k, _mm512_add_epi8(made, shift));
        }
        if (k == end) continue;
        typename T::Word rest[64] = {};
        const __mmask64 used = (__mmask64(1) << (end - k)) - 1;
        __builtin_memcpy(rest, x + k, size_t(end - k) * sizeof(rest[0]));
        load(rest, f, T{});
        const __m512i made = codes.template of_64<T>(f, _mm512_maskz_loadu_epi8(used, noise + k));
        _mm512_mask_storeu_epi8(out + k, used, _mm512_add_epi8(made, shift));
    }
    return true;
}

// Codes, a byte each, of a row of blocks of integers; false where the plain loops must make them.
template <class T>
static bool encode_with_noise(const hop_quantizer& q, const typename T::Word* x, int64_t n, int64_t size,
                              const Factors& by, bool known, const uint8_t* noise, uint8_t* out) {
    if (q.format != HOP_INTEGER || size < 64) return false;
    const bool symmetric = float(q.high - q.zero) >= q.range && float(q.zero - q.low) >= q.range;
    if (known && q.rule == HOP_AMAX && symmetric)
        return encode_integers_with_noise<T, false>(q, x, n, size, by, noise, out);
    return encode_integers_with_noise<T, true>(q, x, n, size, by, noise, out);
}
