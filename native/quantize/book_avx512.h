// Codes of codebooks whose thresholds are on a few lines (hop_codebook_tables), for finite elements and scales found by
// the rule. Included in a namespace (isa.h), after words_avx512.h.
//
// The exponent of a magnitude selects its line, or two lines and where the second begins. A multiply-add then gives the
// position between thresholds, in units of 2^-16, with an error of at most kPieceMargin units, including that of
// products with 1 / scale. Values within the margin of a threshold are divided and compared exactly.
template <class T, int size, bool few, bool is_signed>
struct PieceCodes {
    __m512 begin[2], slope, offset, limit;
    __m512i zero;  // the position of 0
    const float* inverse;
    float raised;
    BookCodes<T, size, few> exactly;

    PieceCodes(const hop_quantizer& q, const float* scale, const float* inverted, const ByteTables* next,
               float lowest)
        : inverse(inverted), raised(lowest), exactly{scale, nullptr, q, next} {
        const uint8_t* tables = q.tables + kPieces;
        for (int k = 0; k < 2; ++k) begin[k] = _mm512_loadu_ps(tables + 64 * k);
        slope = _mm512_loadu_ps(tables + 128);
        offset = _mm512_loadu_ps(tables + 192);
        limit = _mm512_loadu_ps(tables + 256);
        zero = _mm512_set1_epi32((q.tables[2050] << 16) + 0x8000 + kPieceMargin);
    }
    HOP_MEMBER __m512i operator()(const Four& x, int64_t block) const {
        const __m512 tiny = _mm512_set1_ps(kPieceLeast), lowest = _mm512_set1_ps(raised > kPieceLeast ? raised : kPieceLeast);
        Four by;
        spread<size>(inverse + block, by, kPairs<T>);
        __m512i n[4], gap = _mm512_set1_epi32(-1);
        for (int k = 0; k < 4; ++k) {
            const __m512 y = _mm512_mul_ps(x.v[k], by.v[k]);
            const __m512 m = is_signed ? _mm512_range_ps(y, tiny, 0b1011)  // the larger magnitude
                                       : _mm512_mask_max_ps(tiny, above_zero(x.v[k]), y, lowest);
            const __m512i exponent = _mm512_srli_epi32(_mm512_castps_si512(m), 23);
            const __m512 second = _mm512_permutex2var_ps(begin[0], exponent, begin[1]);  // low bits: the first line
            const __mmask16 beyond = _mm512_cmp_ps_mask(m, second, _CMP_GE_OQ);
            const __m512i first = _mm512_castps_si512(second);
            const __m512i line = _mm512_mask_add_epi32(first, beyond, first, _mm512_set1_epi32(1));
            gap = _mm512_min_epu32(gap, _mm512_sub_epi32(_mm512_castps_si512(m), first));
            const __m512 steps = _mm512_fmadd_ps(m, _mm512_permutexvar_ps(line, slope), _mm512_permutexvar_ps(line, offset));
            __m512 rank = _mm512_min_ps(steps, _mm512_permutexvar_ps(line, limit));
            if (is_signed) {
                const __m512i sign = _mm512_set1_epi32(int32_t(0x80000000));
                rank = _mm512_castsi512_ps(select(sign, _mm512_castps_si512(y), _mm512_castps_si512(rank)));
            }
            n[k] = _mm512_add_epi32(_mm512_cvtps_epi32(rank), zero);
        }
        const __m512i rest = _mm512_min_epu16(words_of<T, false>(n[0], n[1]), words_of<T, false>(n[2], n[3]));
        const __mmask32 near = _mm512_cmplt_epu16_mask(rest, _mm512_set1_epi16(2 * kPieceMargin));
        const __mmask16 begins = _mm512_cmplt_epu32_mask(gap, _mm512_set1_epi32(int32_t(kBeginNear)));
        if (__builtin_expect((near | begins) != 0, 0)) return raised_exactly(x, block);
        __m512i words[2];
        for (int k = 0; k < 2; ++k) {
            words[k] = words_of<T, true>(n[2 * k], n[2 * k + 1]);
            if (is_signed) words[k] = _mm512_max_epi16(words[k], _mm512_setzero_si512());
        }
        return bytes_of_words<false>(words[0], words[1]);
    }
    HOP_MEMBER __m512i raised_exactly(const Four& x, int64_t block) const {
        Four own = x, s;
        spread<size>(exactly.scale + block, s, kPairs<T>);
        for (int k = 0; k < 4; ++k) {
            const __m512 lowest = _mm512_mul_ps(s.v[k], _mm512_set1_ps(raised));
            if (!is_signed) own.v[k] = _mm512_mask_max_ps(x.v[k], above_zero(x.v[k]), x.v[k], lowest);
        }
        return exactly(own, block);
    }
};
