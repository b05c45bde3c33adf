// e^x of rows in pairs of float32, 16 lanes at a time, twice as many as in float64. Included in a namespace, after
// evaluate.h.
//
// x = n ln 2 / 32 + r, r = first + second; `first` is exact, because float32 can represent the difference. With T =
// 2^(n / 32) from a table,
//
//     e^x = T + T first + (T (r^2 p(r) + second) + rest of the table)
//
// The first sum is exact as a pair of float32. The error of the rest is below 2^-34 for T in [1, 2): about six
// roundings of numbers below 2^-13, and the polynomial, contribute at most 2^-36 each. Float64 decides where adding and
// subtracting that error gives different float32 results, about one number in 2^10, and outside of `least` to `most`,
// where results are subnormal or infinite.

HOP_INLINE __m512 f32(float x) { return _mm512_set1_ps(x); }

inline void exp_row(const float* x, float* y, int64_t n) {
    using F = __m512;
    constexpr float least = -87.3f, most = 88.7f, none = -104;  // e^x is 0 below
    const auto& c = functions::kExpPairs;
    const F magic = f32(0x1.8p23f), error = f32(0x1p-34f);
    const F high0 = _mm512_loadu_ps(functions::kPowersHigh), high1 = _mm512_loadu_ps(functions::kPowersHigh + 16);
    const F low0 = _mm512_loadu_ps(functions::kPowersLow), low1 = _mm512_loadu_ps(functions::kPowersLow + 16);
    for (int64_t i = 0; i < n; i += 16) {
        const auto lanes = static_cast<__mmask16>(n - i < 16 ? (1u << (n - i)) - 1 : 0xffff);
        const bool whole = n - i >= 16;
        const F v = whole ? _mm512_loadu_ps(x + i) : _mm512_maskz_loadu_ps(lanes, x + i);
        const F t = _mm512_fmadd_ps(v, f32(0x1.715476p+5f), magic), k = _mm512_sub_ps(t, magic);  // 32 / ln 2
        const F first = _mm512_fnmadd_ps(k, f32(functions::kExpStep[0]), v);
        const F second = _mm512_mul_ps(k, f32(-functions::kExpStep[1]));
        const F r = _mm512_add_ps(first, second), square = _mm512_mul_ps(r, r);
        const F p = _mm512_fmadd_ps(_mm512_fmadd_ps(r, f32(c[2]), f32(c[1])), r, f32(c[0]));
        const F q = _mm512_fmadd_ps(square, p, second);
        const __m512i index = _mm512_castps_si512(t);
        const F high = _mm512_permutex2var_ps(high0, index, high1), low = _mm512_permutex2var_ps(low0, index, low1);
        const F by = _mm512_mul_ps(high, first), s = _mm512_add_ps(high, by);
        const F more = _mm512_fmadd_ps(high, q, _mm512_fmsub_ps(high, first, by));
        const F rest = _mm512_add_ps(more, _mm512_fmadd_ps(low, first, low));
        const F tail = _mm512_add_ps(_mm512_sub_ps(by, _mm512_sub_ps(s, high)), rest);
        const F above = _mm512_add_ps(s, _mm512_add_ps(tail, error)), below = _mm512_add_ps(s, _mm512_sub_ps(tail, error));
        const F result = _mm512_scalef_ps(above, _mm512_mul_ps(k, f32(0x1p-5f)));  // times 2^floor(k / 32)
        const __mmask16 outside = _mm512_cmp_ps_mask(v, f32(least), _CMP_NGE_UQ) | _mm512_cmp_ps_mask(v, f32(most), _CMP_NLE_UQ);
        __mmask16 open = _mm512_cmp_ps_mask(above, below, _CMP_NEQ_UQ) | outside;
        if (__builtin_expect(!open & whole, 1)) {
            _mm512_storeu_ps(y + i, result);
            continue;
        }
        const __mmask16 zero = _mm512_cmp_ps_mask(v, f32(none), _CMP_LT_OQ);
        open = static_cast<__mmask16>(open & ~zero & lanes);
        float in[16], out[16];
        _mm512_storeu_ps(in, v);
        _mm512_mask_storeu_ps(y + i, lanes, _mm512_mask_mov_ps(result, zero, _mm512_setzero_ps()));
        if (!open) continue;
        evaluate_by<Exp>(Function::exp, in, out, 16);
        _mm512_mask_storeu_ps(y + i, open, _mm512_loadu_ps(out));
    }
}
