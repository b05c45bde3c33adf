// Sums of groups with AVX-512. Included in a namespace (isa.h), after epilogue.h.

inline __m512 numbers_of(__m512i c, const int32_t*) { return _mm512_cvtepi32_ps(c); }
inline __m512 numbers_of(__m512i c, const float*) { return _mm512_castsi512_ps(c); }

template <bool Paired, bool First, class Sum>
inline void add_rows(const GroupSums<Sum>& sums, int begin, int end) {
    const Side& lhs = *sums.lhs;
    const Sum* c = sums.c + begin * kBlock;
    float* y = sums.y + begin * kBlock;
    __m512 scale[2];
    __m512i pair[2];
    for (int half = 0; half < 2; ++half) {
        scale[half] = _mm512_load_ps(sums.rhs->scale + half * kRows);
        pair[half] = load512(sums.rhs->pair + half * kRows);
    }
    for (int i = begin; i < end; ++i, c += kBlock, y += kBlock) {
        HOP_UNROLL
        for (int half = 0; half < 2; ++half) {
            __m512i own = load512(c + half * kRows);
            if (Paired) own = _mm512_dpwssd_epi32(own, _mm512_set1_epi32(lhs.pair[i]), pair[half]);
            const __m512 x = _mm512_mul_ps(_mm512_mul_ps(numbers_of(own, c), _mm512_set1_ps(lhs.scale[i])), scale[half]);
            _mm512_storeu_ps(y + half * kRows, First ? x : _mm512_add_ps(_mm512_loadu_ps(y + half * kRows), x));
        }
    }
}

// Like add_group of groups_plain.h, bit for bit.
template <class Sum>
inline void add_group(const Job& job, const GroupSums<Sum>& sums, int begin, int end) {
    const bool zeros = std::is_same<Sum, int32_t>::value && (lhs_has_zero(job) || has_zero(job.p.rhs));
    const bool paired = zeros && are_paired(job);
    if (zeros && !paired) centered(job, sums.c, begin, end, *sums.lhs, *sums.rhs, sums.terms);
    if (paired) return sums.first ? add_rows<true, true>(sums, begin, end) : add_rows<true, false>(sums, begin, end);
    if (sums.first) add_rows<false, true>(sums, begin, end);
    else add_rows<false, false>(sums, begin, end);
}
