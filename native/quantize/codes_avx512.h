// Codes of 64 elements at a time. Included in a namespace (isa.h), after avx512.h.

// ---- integers

// From products with values above and below 1 / scale (encode.h). `low` and `high` are the bounds of codes minus the
// code of 0; they and `zero` have one entry per block, or, unless `affine`, one for all blocks.
template <class T, int size, bool affine>
struct IntegerCodes {
    const float *scale, *above, *below, *low, *high;
    const int32_t* zero;

    HOP_MEMBER __m512i operator()(const Four& x, int64_t block) const {
        constexpr bool interleaved = T::infinity == 0x7f80;
        const __m512 whole = _mm512_set1_ps(kWhole);
        Four p, q;
        spread<size>(above + block, p, interleaved);
        spread<size>(below + block, q, interleaved);
        __m512i n[4];
        __m512i differ = _mm512_setzero_si512();
        for (int k = 0; k < 4; ++k) {
            const __m512 v = known(x.v[k]);
            p.v[k] = _mm512_fmadd_ps(v, p.v[k], whole);
            q.v[k] = _mm512_fmadd_ps(v, q.v[k], whole);
            const __m512i a = _mm512_castps_si512(p.v[k]), b = _mm512_castps_si512(q.v[k]);
            differ = _mm512_ternarylogic_epi32(differ, a, b, 0xf6);  // differ | (a ^ b)
        }
        if (__builtin_expect(_mm512_test_epi32_mask(differ, differ) != 0, 0)) divide(x, block, p);
        clamp(low + (affine ? block : 0), high + (affine ? block : 0), p);
        if (affine) spread<size>(reinterpret_cast<const float*>(zero + block), q, interleaved);
        for (int k = 0; k < 4; ++k) {
            const __m512i code = _mm512_castps_si512(p.v[k]);
            n[k] = affine ? _mm512_add_epi32(code, _mm512_castps_si512(q.v[k])) : code;
        }
        if (!affine) return _mm512_add_epi8(bytes_of<T>(n), _mm512_set1_epi8(char(*zero)));
        return bytes_of<T>(n);
    }
    HOP_MEMBER __m512 known(__m512 v) const { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(v, v, _CMP_ORD_Q), v); }
    HOP_MEMBER void clamp(const float* least, const float* most, Four& p) const {
        constexpr bool interleaved = T::infinity == 0x7f80;
        const __m512 whole = _mm512_set1_ps(kWhole);
        Four a, b;
        spread<affine ? size : 64>(least, a, interleaved);
        spread<affine ? size : 64>(most, b, interleaved);
        for (int k = 0; k < 4; ++k) {
            const __m512 raised = _mm512_max_ps(p.v[k], _mm512_add_ps(a.v[k], whole));
            p.v[k] = _mm512_min_ps(raised, _mm512_add_ps(b.v[k], whole));
        }
    }
    // The bounds here are far inside the range of kWhole, and may be those of any block.
    HOP_MEMBER void divide(const Four& x, int64_t block, Four& p) const {
        const __m512 most = _mm512_set1_ps(1024.0f), least = _mm512_set1_ps(-1024.0f);
        Four s;
        spread<size>(scale + block, s, T::infinity == 0x7f80);
        for (int k = 0; k < 4; ++k) {
            const __m512 y = _mm512_div_ps(known(x.v[k]), s.v[k]);
            p.v[k] = _mm512_add_ps(_mm512_min_ps(_mm512_max_ps(y, least), most), _mm512_set1_ps(kWhole));
        }
    }
};

// ---- floats

template <class T, int size, bool divides>
struct FloatCodes {
    const float* by;
    FloatFormat f;

    HOP_MEMBER __m512i operator()(const Four& x, int64_t block) const {
        const __m512i magnitude = _mm512_set1_epi32(int32_t(kMagnitude)),
                      infinity = _mm512_set1_epi32(int32_t(kInfinity));
        const uint32_t shift = 23 - f.mantissa, half = 1u << f.sign;
        // The constant that encode_float subtracts from the code is added to the unit here, whose low bits are free.
        const __m512i unit_of = _mm512_set1_epi32(int32_t((shift << 23) + ((0u - f.base) & (2 * half - 1))));
        const __m512i least = _mm512_set1_epi32(int32_t(f.least)), largest = _mm512_set1_epi32(int32_t(f.largest));
        const __m512i digits = _mm512_set1_epi32(int32_t(half - 1));
        const __m128i by_unit = _mm_cvtsi32_si128(int32_t(shift)),
                      by_sign = _mm_cvtsi32_si128(int32_t(31 - f.sign));
        Four s;
        spread<size>(by + block, s, T::infinity == 0x7f80);
        __m512i n[4];
        for (int k = 0; k < 4; ++k) {
            const __m512i y =
                _mm512_castps_si512(divides ? _mm512_div_ps(x.v[k], s.v[k]) : _mm512_mul_ps(x.v[k], s.v[k]));
            const __m512i own = _mm512_and_si512(y, magnitude), m = _mm512_min_epu32(own, largest);
            const __m512i e = _mm512_max_epu32(_mm512_and_si512(m, infinity), least),
                          unit = _mm512_add_epi32(e, unit_of);
            const __m512 sum = _mm512_add_ps(_mm512_castsi512_ps(m), _mm512_castsi512_ps(unit));
            const __m512i code = _mm512_add_epi32(_mm512_castps_si512(sum), _mm512_srl_epi32(unit, by_unit));
            n[k] = select(digits, code, _mm512_srl_epi32(y, by_sign));
            const __mmask16 nan = _mm512_cmpgt_epu32_mask(own, infinity);
            n[k] = _mm512_mask_mov_epi32(n[k], nan, _mm512_set1_epi32(int32_t(f.nan)));
        }
        return bytes_of<T>(n);
    }
};

// ---- codebooks

// Products with 1 / scale give the codes of quotients, unless a threshold is close: three roundings change a value by
// at most 3 units in its last place. The index is looked up for a value reduced by kLower, so that the one remaining
// comparison is with the close threshold, even if that is where the next index entry begins.
constexpr int32_t kClose = 4;

// For at most 16 codes, or for more by an index, with tables of the thresholds after the first.
template <class T, int size, bool few>
struct BookCodes {
    const float *scale, *inverse;  // inverse is nullptr if quotients are required
    const hop_quantizer& q;
    const ByteTables* next;

    HOP_MEMBER __m512i operator()(const Four& x, int64_t block) const {
        constexpr bool interleaved = T::infinity == 0x7f80;
        Four by;
        __m512i n[4];
        if (inverse) {
            spread<size>(inverse + block, by, interleaved);
            uint32_t close = 0;
            for (int k = 0; k < 4; ++k) by.v[k] = _mm512_mul_ps(x.v[k], by.v[k]);
            codes_of(by, n, close);
            if (__builtin_expect(!close, 1)) return bytes_of<T>(n);
        }
        uint32_t any = 0;
        spread<size>(scale + block, by, interleaved);
        for (int k = 0; k < 4; ++k) by.v[k] = _mm512_div_ps(x.v[k], by.v[k]);
        codes_of(by, n, any);
        return bytes_of<T>(n);
    }
    HOP_MEMBER void codes_of(const Four& y, __m512i n[4], uint32_t& close) const {
        if (few) {
            for (int k = 0; k < 4; ++k) n[k] = search(y.v[k], close);
        } else {
            __m512 threshold[4];
            for (int k = 0; k < 4; ++k) n[k] = look_up(y.v[k]);
            next->of_lanes(n, threshold);
            for (int k = 0; k < 4; ++k) {
                const __mmask16 reached = _mm512_cmp_ps_mask(y.v[k], threshold[k], _CMP_GE_OQ);
                close |= near(y.v[k], threshold[k]);
                n[k] = _mm512_mask_add_epi32(n[k], reached, n[k], _mm512_set1_epi32(1));
            }
        }
        for (int k = 0; k < 4; ++k) {
            const __mmask16 known = _mm512_cmp_ps_mask(y.v[k], y.v[k], _CMP_ORD_Q);
            n[k] = _mm512_mask_mov_epi32(_mm512_set1_epi32(q.zero_code), known, n[k]);
        }
    }
    HOP_MEMBER static uint32_t near(__m512 y, __m512 threshold) {
        const __m512i gap = _mm512_sub_epi32(_mm512_castps_si512(y), _mm512_castps_si512(threshold));
        return _mm512_cmple_epu32_mask(_mm512_add_epi32(gap, _mm512_set1_epi32(kClose)), _mm512_set1_epi32(2 * kClose));
    }
    HOP_MEMBER __m512i search(__m512 y, uint32_t& close) const {
        const __m512 table = _mm512_loadu_ps(q.thresholds), above = _mm512_loadu_ps(q.thresholds + 1);
        __m512i code = _mm512_setzero_si512();
        for (int step = 8; step; step /= 2) {
            const __m512i next = _mm512_add_epi32(code, _mm512_set1_epi32(step));
            const __mmask16 reached = _mm512_cmp_ps_mask(y, _mm512_permutexvar_ps(next, table), _CMP_GE_OQ);
            code = _mm512_mask_mov_epi32(code, reached, next);
        }
        close |= near(y, _mm512_permutexvar_ps(code, table)) | near(y, _mm512_permutexvar_ps(code, above));
        return code;
    }
    // The least code of the floats that share the upper half of y, after y is lowered by kLower.
    HOP_MEMBER __m512i look_up(__m512 y) const {
        const __mmask16 negative = _mm512_movepi32_mask(_mm512_castps_si512(y));
        const float by = inverse ? kLower : 0;
        const __m512 factor = _mm512_mask_mov_ps(_mm512_set1_ps(1 - by), negative, _mm512_set1_ps(1 + by));
        const __m512i high = _mm512_srli_epi32(_mm512_castps_si512(_mm512_mul_ps(y, factor)), 16);
        return _mm512_and_si512(_mm512_i32gather_epi32(high, q.index, 1), _mm512_set1_epi32(0xff));
    }
};
