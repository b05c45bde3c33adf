// Stores rows of sums with AVX-512; all data of the columns stays in registers. Included in a namespace (isa.h), after
// finish.h.

// float32(sums - less), for each half of a row.
struct Sums512 {
    __m512i less[2];
    explicit Sums512(const Columns& c) : less{load512(c.less), load512(c.less + 16)} {}
    __m512i integer(const int32_t* sums, int half) const {
        return _mm512_sub_epi32(load512(sums + half * 16), less[half]);
    }
    __m512 real(const int32_t* sums, int half) const { return _mm512_cvtepi32_ps(integer(sums, half)); }
};

struct Scales512 {
    __m512 lhs, scale[2], bias[2];
    explicit Scales512(const Columns& c)
        : lhs(_mm512_set1_ps(c.lhs)), scale{_mm512_load_ps(c.scale), _mm512_load_ps(c.scale + 16)},
          bias{_mm512_load_ps(c.bias), _mm512_load_ps(c.bias + 16)} {}
    template <bool Biased>
    __m512 real(__m512 sum, int half) const {
        const __m512 y = _mm512_mul_ps(_mm512_mul_ps(sum, lhs), scale[half]);
        return Biased ? _mm512_add_ps(y, bias[half]) : y;
    }
};

// Rounds to bfloat16 in the high words of lanes. `nan`: whether y may contain NaN.
inline __m512i rounded_512(__m512 y, bool nan) {
    const __m512i bits = _mm512_castps_si512(y),
                  odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    if (!nan) return rounded;
    return _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(y, y, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
}
inline __m512i bfloat16_512(__m512 left, __m512 right, bool nan) {
    const __m512i order = _mm512_set_epi16(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1, 30, 28, 26, 24,
                                           22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i both =
        _mm512_mask_mov_epi16(_mm512_srli_epi32(rounded_512(left, nan), 16), 0xaaaaaaaau, rounded_512(right, nan));
    return _mm512_permutexvar_epi16(order, both);
}

inline __m256i bytes_of(__m512i left, __m512i right) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm512_cvtepi32_epi8(left)), _mm512_cvtepi32_epi8(right), 1);
}

inline bool is_line(const void* out) { return reinterpret_cast<uintptr_t>(out) % 64 == 0; }

template <bool Biased>
inline void float_rows(int format, const Columns& c, const int32_t* sums, int rows, const int64_t* at, void* output) {
    const Sums512 exact(c);
    const Scales512 scales(c);
    const __mmask32 used = c.count == kBlock ? ~__mmask32(0) : (__mmask32(1) << c.count) - 1;
    for (int i = 0; i < rows; ++i, sums += kBlock) {
        if (at[i] < 0) continue;
        const __m512 left = scales.real<Biased>(exact.real(sums, 0), 0),
                     right = scales.real<Biased>(exact.real(sums, 1), 1);
        if (format == HOP_FLOAT32) {
            float* out = static_cast<float*>(output) + at[i];
            if (c.past && is_line(out)) {
                _mm512_stream_ps(out, left);
                _mm512_stream_ps(out + 16, right);
                continue;
            }
            _mm512_mask_storeu_ps(out, static_cast<__mmask16>(used), left);
            _mm512_mask_storeu_ps(out + 16, static_cast<__mmask16>(used >> 16), right);
            continue;
        }
        __m512i words;
        if (format == HOP_BFLOAT16)
            words = bfloat16_512(left, right, !c.finite);
        else
            words = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtps_ph(left, 0)), _mm512_cvtps_ph(right, 0), 1);
        uint16_t* out = static_cast<uint16_t*>(output) + at[i];
        if (c.past && is_line(out)) _mm512_stream_si512(reinterpret_cast<__m512i*>(out), words);
        else _mm512_mask_storeu_epi16(out, used, words);
    }
}

// Codes as in hop.requantization.FloatMultiplier, with the bias in `less`. Bounds are integers, so they may be applied
// before rounding.
inline void multiplier_rows(const Columns& c, const int32_t* sums, int rows, const int64_t* at, uint8_t* output) {
    const Sums512 exact(c);
    const __m512 factor[2] = {_mm512_load_ps(c.factor), _mm512_load_ps(c.factor + 16)};
    const __m512 least[2] = {_mm512_load_ps(c.least), _mm512_load_ps(c.least + 16)};
    const __m512 most[2] = {_mm512_load_ps(c.most), _mm512_load_ps(c.most + 16)};
    const __m256i zero = bytes_of(load512(c.target.zero), load512(c.target.zero + 16));
    const __mmask32 used = c.count == kBlock ? ~__mmask32(0) : (__mmask32(1) << c.count) - 1;
    for (int i = 0; i < rows; ++i, sums += kBlock) {
        if (at[i] < 0) continue;
        __m512i steps[2];
        for (int half = 0; half < 2; ++half) {
            const __m512 x = _mm512_mul_ps(exact.real(sums, half), factor[half]);
            steps[half] = _mm512_cvtps_epi32(_mm512_max_ps(_mm512_min_ps(x, most[half]), least[half]));
        }
        _mm256_mask_storeu_epi8(output + at[i], used, _mm256_add_epi8(bytes_of(steps[0], steps[1]), zero));
    }
}

// Codes by division. The relative difference of y · (1 / scale) and y / scale is below 2^-22, so the nearest integer is
// the same unless the value is very close to the midpoint of two; such rows are passed to `slow`.
template <bool Biased, class Slow>
inline void division_rows(const Columns& c, const int32_t* sums, int rows, const int64_t* at, uint8_t* output,
                          bool exactly, Slow slow) {
    const Sums512 exact(c);
    const Scales512 scales(c);
    const __m512 factor[2] = {_mm512_load_ps(c.factor), _mm512_load_ps(c.factor + 16)};
    const __m512 least[2] = {_mm512_load_ps(c.least), _mm512_load_ps(c.least + 16)};
    const __m512 most[2] = {_mm512_load_ps(c.most), _mm512_load_ps(c.most + 16)};
    // No step exceeds 510. If the factor is the convention's multiplier itself, all codes are exact.
    const __m512 sure = _mm512_set1_ps(exactly ? 1.f : 0.5f - 512 * 0x1p-21f);
    const __m256i zero = bytes_of(load512(c.target.zero), load512(c.target.zero + 16));
    const __mmask32 used = c.count == kBlock ? ~__mmask32(0) : (__mmask32(1) << c.count) - 1;
    for (int i = 0; i < rows; ++i, sums += kBlock) {
        if (at[i] < 0) continue;
        __m512i steps[2];
        __mmask16 unsure = 0;
        for (int half = 0; half < 2; ++half) {
            const __m512 x = _mm512_mul_ps(scales.real<Biased>(exact.real(sums, half), half), factor[half]);
            const __m512 bounded = _mm512_max_ps(_mm512_min_ps(x, most[half]), least[half]);
            const __m512 whole = _mm512_roundscale_ps(bounded, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
            unsure |= _mm512_cmp_ps_mask(_mm512_abs_ps(_mm512_sub_ps(bounded, whole)), sure, _CMP_GT_OQ);
            steps[half] = _mm512_cvtps_epi32(whole);
        }
        if (unsure) slow(sums, at[i]);
        else _mm256_mask_storeu_epi8(output + at[i], used, _mm256_add_epi8(bytes_of(steps[0], steps[1]), zero));
    }
}

inline void store_rows(const hop_output& o, const Columns& c, const int32_t* sums, int rows, const int64_t* at,
                       void* output) {
    auto* codes = static_cast<uint8_t*>(output);
    const bool gives_codes = o.format == HOP_INT8 || o.format == HOP_UINT8;
    if (gives_codes && c.quick && o.requantize == HOP_MULTIPLIER) return multiplier_rows(c, sums, rows, at, codes);
    if (gives_codes && c.quick) {
        const auto slow = [&](const int32_t* row, int64_t to) {
            const int64_t one[] = {to};
            store_plainly(o, c, row, 1, one, output);
        };
        const bool exactly = o.requantize == HOP_RECIPROCAL;
        return c.biased ? division_rows<true>(c, sums, rows, at, codes, exactly, slow)
                        : division_rows<false>(c, sums, rows, at, codes, exactly, slow);
    }
    if (gives_codes || o.format == HOP_INT32) return store_plainly(o, c, sums, rows, at, output);
    return c.biased ? float_rows<true>(o.format, c, sums, rows, at, output)
                    : float_rows<false>(o.format, c, sums, rows, at, output);
}
