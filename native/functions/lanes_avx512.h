// Eight float64 in a register. Included in a namespace.

using V = __m512d;
using I = __m512i;
constexpr int kWidth = 8;
constexpr int kParts = 16;  // parts of a power of two, in a table

HOP_INLINE V set(double x) { return _mm512_set1_pd(x); }
HOP_INLINE I whole(uint64_t x) { return _mm512_set1_epi64(static_cast<int64_t>(x)); }
HOP_INLINE V load(const float* x) { return _mm512_cvtps_pd(_mm256_loadu_ps(x)); }
HOP_INLINE void store(float* y, V v) { _mm256_storeu_ps(y, _mm512_cvtpd_ps(v)); }
HOP_INLINE V fused(V a, V b, V c) { return _mm512_fmadd_pd(a, b, c); }
HOP_INLINE V over(V a, V b) { return _mm512_div_pd(a, b); }
HOP_INLINE V root(V a) { return _mm512_sqrt_pd(a); }
// Minimum and maximum of a bound and a number; NaN if the number is NaN.
HOP_INLINE V smaller(V bound, V x) { return _mm512_min_pd(bound, x); }
HOP_INLINE V larger(V bound, V x) { return _mm512_max_pd(bound, x); }
HOP_INLINE I bits(V v) { return _mm512_castpd_si512(v); }
HOP_INLINE V number(I i) { return _mm512_castsi512_pd(i); }
HOP_INLINE I both(I a, I b) { return _mm512_and_si512(a, b); }
HOP_INLINE I either(I a, I b) { return _mm512_or_si512(a, b); }
HOP_INLINE I sum(I a, I b) { return _mm512_add_epi64(a, b); }
HOP_INLINE I difference(I a, I b) { return _mm512_sub_epi64(a, b); }
template <int n>
HOP_INLINE I left(I a) { return _mm512_slli_epi64(a, n); }
template <int n>
HOP_INLINE I right(I a) { return _mm512_srli_epi64(a, n); }
// Looks up one of 16 entries by the low four bits.
HOP_INLINE V lookup(const double* table, I index) {
    return _mm512_permutex2var_pd(_mm512_loadu_pd(table), index, _mm512_loadu_pd(table + 8));
}
HOP_INLINE V where_negative(V x, V a, V b) { return _mm512_mask_blend_pd(_mm512_movepi64_mask(bits(x)), b, a); }
HOP_INLINE int at_most(I a, I b) { return _mm512_cmple_epi64_mask(a, b); }
HOP_INLINE int between(V x, double low, double high) {
    return _mm512_cmp_pd_mask(x, set(low), _CMP_GT_OQ) & _mm512_cmp_pd_mask(x, set(high), _CMP_LT_OQ);
}
