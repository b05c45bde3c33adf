// Converts sums to a floating-point output, with AVX-512. Included in a namespace (isa.h), after epilogue.h.

// bfloat16 words in the upper halves of lanes; the lower halves are arbitrary.
inline __m512i bfloat16_above(__m512 x) {
    const __m512i bits = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    return _mm512_mask_mov_epi32(up, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
}

inline __m256i float16(__m512 x) {
    const __m256i found = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m256i sign = _mm256_and_si256(found, _mm256_set1_epi16(static_cast<short>(0x8000)));
    return _mm256_mask_mov_epi16(found, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm256_or_si256(sign, _mm256_set1_epi16(0x7e00)));
}

inline void store_line(void* out, __m512i x, bool past, __mmask32 words) {
    if (past) _mm512_stream_si512(static_cast<__m512i*>(out), x);
    else _mm512_mask_storeu_epi16(out, words, x);
}

template <bool Scaled, bool Biased, int Format, class Sum>
inline void finish_rows_as(const Job& job, const FinishedRows<Sum>& f) {
    constexpr int64_t bytes = Format == HOP_FLOAT32 ? 4 : 2;
    const bool whole = f.columns == kBlock && is_past_cache(job, bytes);
    const auto words = static_cast<uint64_t>(~uint64_t(0)) >> (64 - f.columns * bytes / 2);  // mask of 16-bit words to store
    const __m512i odd = _mm512_add_epi16(_mm512_slli_epi16(load512(kCounting), 1), _mm512_set1_epi16(1));
    __m512 scale[2], bias[2];
    for (int half = 0; half < 2; ++half) {
        scale[half] = Scaled ? _mm512_loadu_ps(f.rhs + half * kRows) : _mm512_setzero_ps();
        bias[half] = Biased ? _mm512_loadu_ps(f.bias + half * kRows) : _mm512_setzero_ps();
    }
    for (int i = 0; i < f.rows; ++i) {
        __m512 y[2];
        HOP_UNROLL
        for (int half = 0; half < 2; ++half) {
            y[half] = numbers_of(load512(f.c + i * kBlock + half * kRows), f.c);
            if (Scaled) y[half] = _mm512_mul_ps(_mm512_mul_ps(y[half], _mm512_set1_ps(f.lhs[i])), scale[half]);
            if (Biased) y[half] = _mm512_add_ps(y[half], bias[half]);
        }
        char* out = static_cast<char*>(job.output) + f.at(job, i) * bytes;
        const bool past = whole && reinterpret_cast<uintptr_t>(out) % 64 == 0;
        if constexpr (Format == HOP_FLOAT32) {
            store_line(out, _mm512_castps_si512(y[0]), past, static_cast<__mmask32>(words));
            store_line(out + 64, _mm512_castps_si512(y[1]), past, static_cast<__mmask32>(words >> 32));
        } else if constexpr (Format == HOP_BFLOAT16) {
            const __m512i found = _mm512_permutex2var_epi16(bfloat16_above(y[0]), odd, bfloat16_above(y[1]));
            store_line(out, found, past, static_cast<__mmask32>(words));
        } else {
            const __m512i found = _mm512_inserti64x4(_mm512_castsi256_si512(float16(y[0])), float16(y[1]), 1);
            store_line(out, found, past, static_cast<__mmask32>(words));
        }
    }
}

template <bool Scaled, bool Biased, class Sum>
inline void finish_rows_of(const Job& job, const FinishedRows<Sum>& f) {
    switch (job.p.output.format) {
        case HOP_FLOAT32: return finish_rows_as<Scaled, Biased, HOP_FLOAT32>(job, f);
        case HOP_BFLOAT16: return finish_rows_as<Scaled, Biased, HOP_BFLOAT16>(job, f);
        default: return finish_rows_as<Scaled, Biased, HOP_FLOAT16>(job, f);
    }
}

// Like finish_rows of finish_plain.h, bit for bit.
template <class Sum>
inline void finish_rows(const Job& job, const FinishedRows<Sum>& f) {
    if (f.lhs && f.bias) finish_rows_of<true, true>(job, f);
    else if (f.lhs) finish_rows_of<true, false>(job, f);
    else if (f.bias) finish_rows_of<false, true>(job, f);
    else finish_rows_of<false, false>(job, f);
}
