// Plain loops of sums.h. Included in a namespace (isa.h), from sums.h.

template <class T>
static Range range_of_row(const typename T::Word* __restrict__ x, int64_t n) {
    using Word = typename T::Word;
    using Signed = typename T::Signed;
    Word least = Word(~Word(0)), most = 0;
    Signed top = Signed(Word(~T::magnitude));
    for (int64_t i = 0; i < n; ++i) {
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
    Parts sum;
    for (int64_t done = 0; done < n; done += kSummed) {
        const int64_t end = least(n, done + kSummed);
        uint32_t upper = 0, lower = 0;
        for (int64_t i = done; i < end; ++i) {
            const float t = (tiny ? x[i] * by.first : x[i]) * by.second, s = t + kWhole, rest = t - (s - kWhole);
            upper += bits_of(s);
            lower += bits_of(rest * 0x1p20f + kWhole);
        }
        sum.add(upper, lower, end - done);
    }
    return sum.high * (1 << 20) + sum.low;
}

// Sets y to x - mean if `centers`. Returns Σ rint(float32((x · by)²)), for |x · by| <= 2^21.
template <bool tiny, bool centers>
static int64_t sum_of_square_steps(const float* x, int64_t n, float mean, Power by, float* y) {
    Parts sum;
    for (int64_t done = 0; done < n; done += kSummed) {
        const int64_t end = least(n, done + kSummed);
        uint32_t upper = 0, lower = 0;
        for (int64_t i = done; i < end; ++i) {
            const float d = centers ? x[i] - mean : x[i];
            if (centers) y[i] = d;
            const float t = (tiny ? d * by.first : d) * by.second, q = t * t, s = q * 0x1p-21f + kWhole;
            upper += bits_of(s);
            lower += bits_of(q - (s - kWhole) * 0x1p21f + kWhole);
        }
        sum.add(upper, lower, end - done);
    }
    return sum.high * (1 << 21) + sum.low;
}
