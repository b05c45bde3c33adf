// Four float64 in a register. Included in a namespace.

using V = __m256d;
using I = __m256i;
constexpr int kWidth = 4;
constexpr int kParts = 1;  // no table of parts of a power of two: a gather takes longer than a longer polynomial

HOP_INLINE V set(double x) { return _mm256_set1_pd(x); }
HOP_INLINE I whole(uint64_t x) { return _mm256_set1_epi64x(static_cast<int64_t>(x)); }
HOP_INLINE V load(const float* x) { return _mm256_cvtps_pd(_mm_loadu_ps(x)); }
HOP_INLINE void store(float* y, V v) { _mm_storeu_ps(y, _mm256_cvtpd_ps(v)); }
HOP_INLINE V fused(V a, V b, V c) { return _mm256_fmadd_pd(a, b, c); }
HOP_INLINE V over(V a, V b) { return _mm256_div_pd(a, b); }
HOP_INLINE V root(V a) { return _mm256_sqrt_pd(a); }
// Of a bound and a number; NaN if the number is NaN.
HOP_INLINE V smaller(V bound, V x) { return _mm256_min_pd(bound, x); }
HOP_INLINE V larger(V bound, V x) { return _mm256_max_pd(bound, x); }
HOP_INLINE I bits(V v) { return _mm256_castpd_si256(v); }
HOP_INLINE V number(I i) { return _mm256_castsi256_pd(i); }
HOP_INLINE I both(I a, I b) { return _mm256_and_si256(a, b); }
HOP_INLINE I either(I a, I b) { return _mm256_or_si256(a, b); }
HOP_INLINE I sum(I a, I b) { return _mm256_add_epi64(a, b); }
HOP_INLINE I difference(I a, I b) { return _mm256_sub_epi64(a, b); }
template <int n>
HOP_INLINE I left(I a) { return _mm256_slli_epi64(a, n); }
template <int n>
HOP_INLINE I right(I a) { return _mm256_srli_epi64(a, n); }
// Looks up one of 16 entries by the low four bits.
HOP_INLINE V lookup(const double* table, I index) { return _mm256_i64gather_pd(table, both(index, whole(15)), 8); }
HOP_INLINE V where_negative(V x, V a, V b) { return _mm256_blendv_pd(b, a, x); }
HOP_INLINE int at_most(I a, I b) { return ~_mm256_movemask_pd(number(_mm256_cmpgt_epi64(a, b))) & 15; }
HOP_INLINE int between(V x, double low, double high) {
    return _mm256_movemask_pd(_mm256_and_pd(_mm256_cmp_pd(x, set(low), _CMP_GT_OQ), _mm256_cmp_pd(x, set(high), _CMP_LT_OQ)));
}
