// Hand-written loops of sums.h: each multiplication by a power of two and the addition after it become one fused
// instruction, with the same result. Included in a namespace (isa.h), from sums.h.

HOP_INLINE __m256 eight(float x) { return _mm256_set1_ps(x); }
HOP_INLINE __m256i bits_of(__m256 x) { return _mm256_castps_si256(x); }

HOP_INLINE uint32_t total_of(__m256i v) {
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    const __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
    return uint32_t(_mm_cvtsi128_si32(two)) + uint32_t(_mm_extract_epi32(two, 1));
}

// The first `count` of eight elements, then zeros.
HOP_INLINE __m256 some_of(const float* x, int64_t count) {
    float rest[8] = {};
    __builtin_memcpy(rest, x, size_t(count) * sizeof(float));
    return _mm256_loadu_ps(rest);
}

template <class T>
static Range range_of_row(const typename T::Word* __restrict__ x, int64_t n) {
    using Word = typename T::Word;
    using Signed = typename T::Signed;
    Word least = Word(~Word(0)), most = 0;
    Signed top = Signed(Word(~T::magnitude));
    int64_t i = 0;
    if constexpr (sizeof(Word) == 4) {
        __m256i lows[2], mosts[2], tops[2];
        for (int k = 0; k < 2; ++k)
            lows[k] = _mm256_set1_epi32(-1), mosts[k] = _mm256_setzero_si256(), tops[k] = _mm256_set1_epi32(top);
        // Prefetch distance, to the next row: CPUs prefetch lines of another page too late.
        const int64_t ahead = n < kColumns ? n : kColumns;
        for (; i + 16 <= n; i += 16) {
            _mm_prefetch(reinterpret_cast<const char*>(x + i + ahead), _MM_HINT_T0);
            for (int k = 0; k < 2; ++k) {
                const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i + 8 * k));
                lows[k] = _mm256_min_epu32(lows[k], w);
                mosts[k] = _mm256_max_epu32(mosts[k], w);
                tops[k] = _mm256_max_epi32(tops[k], w);
            }
        }
        for (int k = 0; k < 2; ++k) {
            Word words[8];
            const auto each = [&](__m256i v, auto keep) {
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(words), v);
                for (const Word w : words) keep(w);
            };
            each(lows[k], [&](Word w) { least = w < least ? w : least; });
            each(mosts[k], [&](Word w) { most = w > most ? w : most; });
            each(tops[k], [&](Word w) { top = Signed(w) > top ? Signed(w) : top; });
        }
    }
    for (; i < n; ++i) {
        const Word w = x[i];
        least = w < least ? w : least;
        most = w > most ? w : most;
        top = Signed(w) > top ? Signed(w) : top;
    }
    return range_of_words<T>(least, most, top);
}

// Σ rint(x · by · 2^20), for |x · by| <= 2^21.
template <bool tiny>
static int64_t sum_of_steps(const float* __restrict__ x, int64_t n, Power by) {
    const __m256 whole = eight(kWhole), first = eight(by.first), second = eight(by.second), up = eight(0x1p20f);
    Parts sum;
    for (int64_t done = 0; done < n; done += kSummed) {
        const int64_t end = least(n, done + kSummed);
        __m256i upper = _mm256_setzero_si256(), lower = upper;
        const auto add = [&](__m256 v) HOP_INLINED {
            if (tiny) v = _mm256_mul_ps(v, first);
            const __m256 s = _mm256_fmadd_ps(v, second, whole), rest = _mm256_fmsub_ps(v, second, _mm256_sub_ps(s, whole));
            upper = _mm256_add_epi32(upper, bits_of(s));
            lower = _mm256_add_epi32(lower, bits_of(_mm256_fmadd_ps(rest, up, whole)));
        };
        int64_t i = done;
        for (; i + 8 <= end; i += 8) add(_mm256_loadu_ps(x + i));
        if (i < end) add(some_of(x + i, end - i));
        sum.add(total_of(upper), total_of(lower), divide_up(end - done, 8) * 8);
    }
    return sum.high * (1 << 20) + sum.low;
}

// Sets y to x - mean if `centers`. Returns Σ rint(float32((x · by)²)), for |x · by| <= 2^21.
template <bool tiny, bool centers>
static int64_t sum_of_square_steps(const float* x, int64_t n, float mean, Power by, float* y) {
    const __m256 whole = eight(kWhole), first = eight(by.first), second = eight(by.second), middle = eight(mean);
    const __m256 down = eight(0x1p-21f), up = eight(0x1p21f);
    Parts sum;
    for (int64_t done = 0; done < n; done += kSummed) {
        const int64_t end = least(n, done + kSummed);
        __m256i upper = _mm256_setzero_si256(), lower = upper;
        const auto add = [&](__m256 d) HOP_INLINED {
            if (tiny) d = _mm256_mul_ps(d, first);
            const __m256 t = _mm256_mul_ps(d, second), q = _mm256_mul_ps(t, t), s = _mm256_fmadd_ps(q, down, whole);
            const __m256 rest = _mm256_fnmadd_ps(_mm256_sub_ps(s, whole), up, q);
            upper = _mm256_add_epi32(upper, bits_of(s));
            lower = _mm256_add_epi32(lower, bits_of(_mm256_add_ps(rest, whole)));
        };
        int64_t i = done;
        for (; i + 8 <= end; i += 8) {
            __m256 d = _mm256_loadu_ps(x + i);
            if (centers) d = _mm256_sub_ps(d, middle), _mm256_storeu_ps(y + i, d);
            add(d);
        }
        if (i < end) {
            float rest[8] = {};
            for (int64_t k = 0; k < end - i; ++k) rest[k] = centers ? x[i + k] - mean : x[i + k];
            if (centers) __builtin_memcpy(y + i, rest, size_t(end - i) * sizeof(float));
            add(_mm256_loadu_ps(rest));
        }
        sum.add(total_of(upper), total_of(lower), divide_up(end - done, 8) * 8);
    }
    return sum.high * (1 << 21) + sum.low;
}
