// Stores rows of sums with AVX2: codes with intrinsics, other results as in finish_plain.h. Included in a namespace
// (isa.h), after finish.h. The formulas are those of finish_avx512.h.

inline __m256 floats_at(const float* x) { return _mm256_load_ps(x); }

// float32(sums - less) of eight columns.
inline __m256 exact_sums(const Columns& c, const int32_t* sums, int at) {
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(load256(sums + at), load256(c.less + at)));
}

// Stores the codes of 32 steps: the low bytes of steps plus zero points.
inline void put_codes(const Columns& c, const __m256i (&steps)[4], uint8_t* out) {
    __m256i codes[4];
    HOP_UNROLL
    for (int i = 0; i < 4; ++i)
        codes[i] = _mm256_and_si256(_mm256_add_epi32(steps[i], load256(c.target.zero + 8 * i)), _mm256_set1_epi32(0xff));
    const __m256i bytes = _mm256_packus_epi16(_mm256_packus_epi32(codes[0], codes[1]), _mm256_packus_epi32(codes[2], codes[3]));
    const __m256i ordered = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    if (c.count == kBlock) return _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), ordered);
    alignas(32) uint8_t all[kBlock];
    _mm256_store_si256(reinterpret_cast<__m256i*>(all), ordered);
    std::memcpy(out, all, static_cast<size_t>(c.count));
}

inline __m256 bounded_steps(const Columns& c, __m256 x, int at) {
    return _mm256_max_ps(_mm256_min_ps(x, floats_at(c.most + at)), floats_at(c.least + at));
}

inline void multiplier_rows(const Columns& c, const int32_t* sums, int rows, const int64_t* at, uint8_t* output) {
    for (int i = 0; i < rows; ++i, sums += kBlock) {
        if (at[i] < 0) continue;
        __m256i steps[4];
        HOP_UNROLL
        for (int k = 0; k < 4; ++k) {
            const __m256 x = _mm256_mul_ps(exact_sums(c, sums, 8 * k), floats_at(c.factor + 8 * k));
            steps[k] = _mm256_cvtps_epi32(bounded_steps(c, x, 8 * k));
        }
        put_codes(c, steps, output + at[i]);
    }
}

template <bool Biased, class Slow>
inline void division_rows(const Columns& c, const int32_t* sums, int rows, const int64_t* at, uint8_t* output, bool exactly,
                          Slow slow) {
    const __m256 lhs = _mm256_set1_ps(c.lhs), sure = _mm256_set1_ps(exactly ? 1.f : 0.5f - 512 * 0x1p-21f);
    const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    for (int i = 0; i < rows; ++i, sums += kBlock) {
        if (at[i] < 0) continue;
        __m256i steps[4];
        __m256 unsure = _mm256_setzero_ps();
        HOP_UNROLL
        for (int k = 0; k < 4; ++k) {
            __m256 y = _mm256_mul_ps(_mm256_mul_ps(exact_sums(c, sums, 8 * k), lhs), floats_at(c.scale + 8 * k));
            if (Biased) y = _mm256_add_ps(y, floats_at(c.bias + 8 * k));
            const __m256 bounded = bounded_steps(c, _mm256_mul_ps(y, floats_at(c.factor + 8 * k)), 8 * k);
            const __m256 whole = _mm256_round_ps(bounded, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
            const __m256 rest = _mm256_and_ps(_mm256_sub_ps(bounded, whole), magnitude);
            unsure = _mm256_or_ps(unsure, _mm256_cmp_ps(rest, sure, _CMP_GT_OQ));
            steps[k] = _mm256_cvtps_epi32(whole);
        }
        if (_mm256_movemask_ps(unsure)) slow(sums, at[i]);
        else put_codes(c, steps, output + at[i]);
    }
}

inline void store_rows(const hop_output& o, const Columns& c, const int32_t* sums, int rows, const int64_t* at,
                       void* output) {
    auto* codes = static_cast<uint8_t*>(output);
    if (!c.quick || !(o.format == HOP_INT8 || o.format == HOP_UINT8)) return store_plainly(o, c, sums, rows, at, output);
    if (o.requantize == HOP_MULTIPLIER) return multiplier_rows(c, sums, rows, at, codes);
    const auto slow = [&](const int32_t* row, int64_t to) { store_plainly(o, c, row, 1, &to, output); };
    const bool exactly = o.requantize == HOP_RECIPROCAL;
    return c.biased ? division_rows<true>(c, sums, rows, at, codes, exactly, slow)
                    : division_rows<false>(c, sums, rows, at, codes, exactly, slow);
}
