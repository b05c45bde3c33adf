// Hand-written loops of encode.h and stats.h, 32 elements at a time. Included in a namespace (isa.h).

struct Four {
    __m256 v[4];
};

HOP_INLINE void load(const uint32_t* x, Four& f, F32) {
    for (int k = 0; k < 4; ++k) f.v[k] = _mm256_loadu_ps(reinterpret_cast<const float*>(x) + 8 * k);
}
HOP_INLINE void load(const uint16_t* x, Four& f, BF16) {
    for (int k = 0; k < 4; ++k) {
        const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + 8 * k)));
        f.v[k] = _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
    }
}
HOP_INLINE void load(const uint16_t* x, Four& f, F16) {
    for (int k = 0; k < 4; ++k) f.v[k] = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + 8 * k)));
}

// Prefetches the cache lines of 32 elements.
template <class Word>
HOP_INLINE void fetch(const Word* x) {
    for (size_t at = 0; at < 32 * sizeof(Word); at += 64) _mm_prefetch(reinterpret_cast<const char*>(x) + at, _MM_HINT_T0);
}

// Widens n elements to float32, times one factor each unless `factor` is nullptr; prefetches the next strip.
template <class T>
static HOP_ALONE void widen_line(const typename T::Word* x, int64_t n, const float* factor, float* out) {
    typename T::Word rest[32] = {};
    float made[32], of_rest[32] = {};
    for (int64_t i = 0; i < n; i += 32) {
        const bool whole = n - i >= 32;
        const int64_t count = whole ? 32 : n - i;
        if (!whole) __builtin_memcpy(rest, x + i, size_t(count) * sizeof(rest[0]));
        if (!whole && factor) __builtin_memcpy(of_rest, factor + i, size_t(count) * sizeof(float));
        Four f;
        load(whole ? x + i : rest, f, T{});
        fetch(x + i + kColumns);
        const float* by = whole ? factor + i : of_rest;
        float* to = whole ? out + i : made;
        for (int k = 0; factor && k < 4; ++k) f.v[k] = _mm256_mul_ps(f.v[k], _mm256_loadu_ps(by + 8 * k));
        for (int k = 0; k < 4; ++k) _mm256_storeu_ps(to + 8 * k, f.v[k]);
        if (!whole) __builtin_memcpy(out + i, made, size_t(count) * sizeof(float));
    }
}

// The entry for the block of elements 8 k to 8 k + 7 of 32; with `halves`, 16 elements are a block.
template <bool halves>
HOP_INLINE __m256 of_block(const float* by, int k) { return _mm256_set1_ps(by[halves ? k / 2 : 0]); }

// Restores the order of groups of eight bytes after two 128-bit packs.
HOP_INLINE __m256i in_order(__m256i packed) {
    return _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

HOP_INLINE __m256i magnitude_of(__m256 x) {
    return _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(int32_t(kMagnitude)));
}

// Stores 32 codes, two per byte if they have 4 bits.
HOP_INLINE void store_codes(__m256i codes, int32_t bits, uint8_t* out) {
    if (bits == 8) return _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), codes);
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_and_si256(codes, _mm256_set1_epi8(15)), _mm256_set1_epi16(0x1001));
    const __m128i low = _mm256_castsi256_si128(pairs), high = _mm256_extracti128_si256(pairs, 1);
    const __m128i byte = _mm_set1_epi16(0xff);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_packus_epi16(_mm_and_si128(low, byte), _mm_and_si128(high, byte)));
}

// ---- integers (encode.h): from products with values a little above and below 1 / scale

template <class T, bool halves, bool affine>
struct IntegerCodes {
    const hop_quantizer& q;
    const Factors& f;
    const float *above, *below;  // inverse scales

    HOP_MEMBER __m256i operator()(const typename T::Word* x, int64_t block) const {
        Four v;
        load(x, v, T{});
        __m256i n[4], differ = _mm256_setzero_si256();
        for (int k = 0; k < 4; ++k) {
            const int64_t own = affine ? block + (halves ? k / 2 : 0) : 0;
            const __m256 from = _mm256_set1_ps(kWhole + float(affine ? code_of_zero(q, f.zero[own]) : q.zero));
            const __m256i a = _mm256_castps_si256(_mm256_fmadd_ps(v.v[k], of_block<halves>(above + block, k), from));
            const __m256i b = _mm256_castps_si256(_mm256_fmadd_ps(v.v[k], of_block<halves>(below + block, k), from));
            differ = _mm256_or_si256(differ, _mm256_xor_si256(a, b));
            n[k] = _mm256_sub_epi32(a, _mm256_set1_epi32(int32_t(bits_of(kWhole))));
        }
        if (__builtin_expect(!_mm256_testz_si256(differ, differ), 0)) return exactly(x, block);
        const __m256i low = _mm256_set1_epi16(int16_t(q.low)), high = _mm256_set1_epi16(int16_t(q.high));
        const __m256i a = _mm256_packs_epi32(n[0], n[1]), b = _mm256_packs_epi32(n[2], n[3]);
        const __m256i first = _mm256_min_epi16(_mm256_max_epi16(a, low), high);
        const __m256i second = _mm256_min_epi16(_mm256_max_epi16(b, low), high);
        return in_order(q.low < 0 ? _mm256_packs_epi16(first, second) : _mm256_packus_epi16(first, second));
    }
    HOP_ALONE __m256i exactly(const typename T::Word* x, int64_t block) const {
        uint8_t codes[32];
        for (int k = 0; k < 32; ++k) {
            const int64_t own = block + (halves ? k / 16 : 0);
            const int32_t zero = affine ? code_of_zero(q, f.zero[own]) : q.zero;
            codes[k] = uint8_t(encode_integer(T::widen(x[k]) / f.by[own], Bounds(q, zero), uint32_t(zero)));
        }
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
    }
};

// y, raised to at least `lowest` where x is above 0.
HOP_INLINE __m256 raised_to(__m256 y, __m256 x, float lowest) {
    const __m256 above = _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_GT_OQ);
    return _mm256_max_ps(y, _mm256_and_ps(above, _mm256_set1_ps(lowest)));
}
HOP_INLINE float raised_above(float x, float lowest) { return x > 0 && x < lowest ? lowest : x; }

// ---- floats (numbers.h); with `divides`, by products like integers

template <class T, bool halves, bool divides, bool raises = false>
struct FloatCodes {
    FloatFormat f;
    const Factors& given;
    const float* by;  // factors; with `divides`, inverse scales
    float raised;

    HOP_MEMBER __m256i operator()(const typename T::Word* x, int64_t block) const {
        const uint32_t shift = 23 - f.mantissa, half = 1u << f.sign;
        // The constant that encode_float subtracts from the code is added to the unit here, whose low bits are free.
        const __m256i unit_of = _mm256_set1_epi32(int32_t((shift << 23) + ((0u - f.base) & (2 * half - 1))));
        const __m256i least = _mm256_set1_epi32(int32_t(f.least)), infinity = _mm256_set1_epi32(int32_t(kInfinity));
        const __m256 largest = _mm256_castsi256_ps(_mm256_set1_epi32(int32_t(f.largest)));
        const __m128i by_unit = _mm_cvtsi32_si128(int32_t(shift));
        Four v;
        load(x, v, T{});
        __m256i n[4], differ = _mm256_setzero_si256();
        for (int k = 0; k < 4; ++k) {
            const __m256 y = _mm256_mul_ps(v.v[k], of_block<halves>(by + block, k));
            __m256 m = _mm256_min_ps(_mm256_castsi256_ps(magnitude_of(y)), largest);
            if (raises) m = raised_to(m, v.v[k], raised);
            const __m256i e = _mm256_max_epi32(_mm256_and_si256(_mm256_castps_si256(m), infinity), least);
            const __m256i unit = _mm256_add_epi32(e, unit_of);
            __m256i sum;
            if (divides) {
                sum = _mm256_castps_si256(_mm256_fmadd_ps(m, _mm256_set1_ps(kAbove), _mm256_castsi256_ps(unit)));
                const __m256i other = _mm256_castps_si256(_mm256_fmadd_ps(m, _mm256_set1_ps(kBelow), _mm256_castsi256_ps(unit)));
                differ = _mm256_or_si256(differ, _mm256_xor_si256(sum, other));
            } else {
                sum = _mm256_castps_si256(_mm256_add_ps(m, _mm256_castsi256_ps(unit)));
            }
            n[k] = _mm256_and_si256(_mm256_add_epi32(sum, _mm256_srl_epi32(unit, by_unit)), _mm256_set1_epi32(int32_t(half - 1)));
        }
        if (divides && __builtin_expect(!_mm256_testz_si256(differ, differ), 0)) return exactly(x, block);
        const auto packed = [](__m256i a, __m256i b, __m256i c, __m256i d) HOP_INLINED {
            return _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
        };
        const auto word = [&](int k) HOP_INLINED { return _mm256_castps_si256(v.v[k]); };
        const __m256i codes = _mm256_packus_epi16(_mm256_packs_epi32(n[0], n[1]), _mm256_packs_epi32(n[2], n[3]));
        const __m128i by_sign = _mm_cvtsi32_si128(int32_t(7 - f.sign));
        const __m256i signs = _mm256_srl_epi16(packed(word(0), word(1), word(2), word(3)), by_sign);
        return in_order(_mm256_or_si256(codes, _mm256_and_si256(signs, _mm256_set1_epi8(char(half)))));
    }
    HOP_ALONE __m256i exactly(const typename T::Word* x, int64_t block) const {
        uint8_t codes[32];
        for (int k = 0; k < 32; ++k) {
            const float scale = given.by[block + (halves ? k / 16 : 0)];
            const float own = T::widen(x[k]), above = raises ? raised_above(own, scale * raised) : own;
            codes[k] = uint8_t(encode_float<false>(above / scale, f));
        }
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
    }
};

// ---- codebooks: by bins (quantize.h)

// Looks up eight entries of 32 bits.
HOP_INLINE __m256i entries(const uint8_t* table, __m256i index) {
    alignas(32) uint32_t at[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(at), index);
    const auto entry = [&](int k) HOP_INLINED {
        int32_t found;
        __builtin_memcpy(&found, table + 4 * size_t(at[k]), 4);
        return found;
    };
    __m128i half[2];
    for (int k = 0; k < 2; ++k) {
        half[k] = _mm_cvtsi32_si128(entry(4 * k));
        half[k] = _mm_insert_epi32(half[k], entry(4 * k + 1), 1);
        half[k] = _mm_insert_epi32(half[k], entry(4 * k + 2), 2);
        half[k] = _mm_insert_epi32(half[k], entry(4 * k + 3), 3);
    }
    return _mm256_inserti128_si256(_mm256_castsi128_si256(half[0]), half[1], 1);
}

template <class T, bool halves, bool is_signed, bool raises = false>
struct BinCodes {
    const hop_quantizer& q;
    const Factors& f;
    const float* inverse;
    float raised;

    HOP_MEMBER __m256i operator()(const typename T::Word* x, int64_t block) const {
        const __m256 tiny = _mm256_set1_ps(kBinLeast);
        const __m256i rest = _mm256_set1_epi32(0x7fff);
        Four v;
        load(x, v, T{});
        __m256i n[4];
        for (int k = 0; k < 4; ++k) {
            const __m256 y = _mm256_mul_ps(v.v[k], of_block<halves>(inverse + block, k));
            __m256 m = _mm256_max_ps(is_signed ? _mm256_castsi256_ps(magnitude_of(y)) : y, tiny);
            if (raises) m = raised_to(m, v.v[k], raised);
            __m256i bits = _mm256_castps_si256(m), bin = _mm256_srli_epi32(bits, 16);
            if (is_signed) {
                const __m256i negative = _mm256_srai_epi32(_mm256_castps_si256(y), 31);
                bits = _mm256_xor_si256(bits, negative);
                bin = _mm256_add_epi32(bin, _mm256_and_si256(negative, _mm256_set1_epi32(int32_t(kBinsOfSign))));
            }
            const __m256i entry = entries(q.tables + kBins - 4 * int64_t(kFirstBin), bin);
            n[k] = _mm256_add_epi32(entry, _mm256_and_si256(_mm256_srli_epi32(bits, 1), rest));
        }
        const __m256i low = _mm256_packus_epi32(_mm256_srli_epi32(n[0], 16), _mm256_srli_epi32(n[1], 16));
        const __m256i high = _mm256_packus_epi32(_mm256_srli_epi32(n[2], 16), _mm256_srli_epi32(n[3], 16));
        const __m256i a = _mm256_min_epu16(_mm256_blend_epi16(n[0], _mm256_slli_epi32(n[1], 16), 0xaa),
                                           _mm256_blend_epi16(n[2], _mm256_slli_epi32(n[3], 16), 0xaa));
        const __m256i margin = _mm256_set1_epi16(2 * kBinMargin), near = _mm256_cmpeq_epi16(_mm256_min_epu16(a, margin), a);
        if (__builtin_expect(!_mm256_testz_si256(near, near), 0)) return exactly(x, block);
        return in_order(_mm256_packus_epi16(low, high));
    }
    HOP_ALONE __m256i exactly(const typename T::Word* x, int64_t block) const {
        uint8_t codes[32];
        for (int k = 0; k < 32; k += 16) {
            const Run run{f.by[block + (halves ? k / 16 : 0)], true, true, 0};
            typename T::Word own[16];
            for (int i = 0; i < 16; ++i)
                own[i] = raises ? T::narrow(raised_above(T::widen(x[k + i]), run.by * raised)) : x[k + i];
            encode_by_book<T>(q, own, 16, run, codes + k);
        }
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
    }
};

// ---- rows of blocks

template <class T>
struct RowOfBlocks {
    const hop_quantizer& q;
    const FloatFormat& f;
    const typename T::Word* x;
    int64_t n, size;
    const Factors& by;
    int32_t bits;  // of a stored code
    bool fetches;
    uint8_t* out;
};

constexpr int kMostBlocks = kColumns / 16 + 16;

// Computes 1 / scale of each block, times `by`; returns false if the product with it may be too far from the quotient.
HOP_INLINE bool invert(const float* __restrict__ scale, int64_t blocks, float by, float* __restrict__ inverse) {
    bool even = true;
    for (int64_t i = 0; i < blocks; ++i) {
        const float magnitude = float_of(bits_of(scale[i]) & kMagnitude);
        even = even & (magnitude > 0x1p-100f) & (magnitude < 0x1p100f);
        inverse[i] = 1.0f / scale[i] * by;
    }
    return even;
}

// Encodes all elements, 32 at a time, in blocks of 16 or of a multiple of 32.
template <class T, bool halves, class Codes>
static HOP_ALONE bool encode_all(const RowOfBlocks<T>& r, const Codes& given) {
    const Codes codes = given;
    const int64_t blocks = r.size / 32;
    int64_t i = 0, block = 0, left = blocks;
    const auto next = [&]() HOP_INLINED {
        if (halves) block += 2;
        else if (--left == 0) left = blocks, ++block;
    };
    uint8_t* out = r.out;
    for (; i + 32 <= r.n; i += 32, out += 4 * r.bits) {
        if (r.fetches) fetch(r.x + i + kColumns);  // of the next strip
        store_codes(codes(r.x + i, block), r.bits, out);
        next();
    }
    if (i == r.n) return true;
    typename T::Word rest[32] = {};
    uint8_t made[32];
    __builtin_memcpy(rest, r.x + i, size_t(r.n - i) * sizeof(rest[0]));
    store_codes(codes(rest, block), r.bits, made);
    const int64_t left_bits = (r.n - i) * r.bits;
    __builtin_memcpy(out, made, size_t((left_bits + 7) / 8));
    if (left_bits % 8) out[left_bits / 8] &= 15;
    return true;
}

template <class T, bool halves>
static bool encode_integer_row(const RowOfBlocks<T>& r) {
    float above[kMostBlocks], below[kMostBlocks];
    const int64_t blocks = divide_up(r.n, r.size);
    if (!invert(r.by.by, blocks, kAbove, above) || !invert(r.by.by, blocks, kBelow, below)) return false;
    if (r.by.zero) return encode_all<T, halves>(r, IntegerCodes<T, halves, true>{r.q, r.by, above, below});
    return encode_all<T, halves>(r, IntegerCodes<T, halves, false>{r.q, r.by, above, below});
}

template <class T, bool halves>
static bool encode_float_row(const RowOfBlocks<T>& r) {
    if (!r.by.divides) return encode_all<T, halves>(r, FloatCodes<T, halves, false>{r.f, r.by, r.by.by, 0});
    float inverse[kMostBlocks];
    if (!invert(r.by.by, divide_up(r.n, r.size), 1, inverse)) return false;
    return encode_all<T, halves>(r, FloatCodes<T, halves, true>{r.f, r.by, inverse, 0});
}

template <class T, bool halves>
static bool encode_book_row(const RowOfBlocks<T>& r) {
    float inverse[kMostBlocks];
    if (!r.q.tables || !r.q.tables[kHasBins] || r.q.rule != HOP_AMAX) return false;
    if (!invert(r.by.by, divide_up(r.n, r.size), 1, inverse)) return false;
    if (r.q.numbers[0] < 0) return encode_all<T, halves>(r, BinCodes<T, halves, true>{r.q, r.by, inverse, 0});
    return encode_all<T, halves>(r, BinCodes<T, halves, false>{r.q, r.by, inverse, 0});
}

template <class T, bool halves>
static HOP_ALONE bool encode_row(const RowOfBlocks<T>& r) {
    if (r.q.format == HOP_FLOAT) return encode_float_row<T, halves>(r);
    if (r.q.format == HOP_CODEBOOK) return encode_book_row<T, halves>(r);
    return encode_integer_row<T, halves>(r);
}

// Packed codes of a row of blocks; returns false if the plain loops must encode it.
template <class T>
static bool encode_quickly(const hop_quantizer& q, const FloatFormat& f, const typename T::Word* x, int64_t n, int64_t size,
                           const Factors& by, bool known, bool fetches, uint8_t* out) {
    const int32_t bits = 8 / codes_per_byte(q);
    // Quotients are no larger than codes for these.
    const bool bounded = q.format != HOP_INTEGER || q.rule == HOP_AMAX || q.rule == HOP_MINMAX;
    if (!known || !bounded || (bits != 8 && bits != 4)) return false;
    if (q.format == HOP_FLOAT && !(f.sign == 7 || f.sign == 3)) return false;
    if (size == 16) return encode_row<T, true>({q, f, x, n, size, by, bits, fetches, out});
    if (size % 32 == 0) return encode_row<T, false>({q, f, x, n, size, by, bits, fetches, out});
    if (size < 32 || (size % 2 != 0 && bits == 4 && size < n)) return false;
    for (int64_t at = 0, i = 0; at < n; at += size, ++i) {
        const Factors own{by.divides, by.by + i, by.zero ? by.zero + i : nullptr};
        const int64_t count = least(size, n - at), blocks = divide_up(count, 32) * 32;
        if (!encode_row<T, false>({q, f, x + at, count, blocks, own, bits, fetches, out + at * bits / 8})) return false;
    }
    return true;
}

template <class T, class Noise>
static bool encode_with_noise(const hop_quantizer&, const typename T::Word*, int64_t, int64_t, const Factors&, bool,
                              const Noise*, uint8_t*) {
    return false;
}

// ---- statistics of blocks for scale rules

// Whether elements are 16-bit words, not 32-bit lanes.
template <class T>
constexpr bool kHalf = sizeof(typename T::Word) == 2;
template <class T>
HOP_INLINE __m256i all_of(typename T::Word x) {
    return kHalf<T> ? _mm256_set1_epi16(int16_t(x)) : _mm256_set1_epi32(int32_t(x));
}

// Passes the vectors of a run to take(vector, 0 or 1), padded with zeros at the end.
template <class T, class Take>
HOP_INLINE void each_vector(const typename T::Word* x, int64_t n, const Take& take) {
    constexpr int64_t words = 32 / int64_t(sizeof(typename T::Word));
    int64_t i = 0;
    for (; i + 4 * words <= n; i += 4 * words)
        for (int k = 0; k < 4; ++k) take(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i + k * words)), k % 2);
    if (i == n) return;
    alignas(32) typename T::Word rest[4 * words] = {};
    __builtin_memcpy(rest, x + i, size_t(n - i) * sizeof(rest[0]));
    for (int k = 0; k < 4; ++k) take(_mm256_load_si256(reinterpret_cast<const __m256i*>(rest + k * words)), k % 2);
}

// Reduces a vector to one element with `keep`; zeros may take part in the reduction.
template <class T, class Keep>
HOP_INLINE uint32_t across(__m256i v, const Keep& keep) {
    __m128i x = keep(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    x = keep(x, _mm_srli_si128(x, 8));
    x = keep(x, _mm_srli_si128(x, 4));
    if (kHalf<T>) x = keep(x, _mm_srli_si128(x, 2));
    return uint32_t(_mm_cvtsi128_si32(x));
}

template <class T>
static HOP_ALONE float amax_of_run(const typename T::Word* x, int64_t n, bool& known) {
    using Word = typename T::Word;
    const __m256i mask = all_of<T>(T::magnitude);
    __m256i top[2] = {};
    each_vector<T>(x, n, [&](__m256i v, int k) HOP_INLINED {
        const __m256i m = _mm256_and_si256(v, mask);
        top[k] = kHalf<T> ? _mm256_max_epu16(top[k], m) : _mm256_max_epu32(top[k], m);
    });
    const __m256i both = kHalf<T> ? _mm256_max_epu16(top[0], top[1]) : _mm256_max_epu32(top[0], top[1]);
    const auto larger = [](__m128i a, __m128i b) HOP_INLINED { return kHalf<T> ? _mm_max_epu16(a, b) : _mm_max_epu32(a, b); };
    Word most = Word(across<T>(both, larger));
    if (most >= T::infinity) known = false, most = top_of_known<T>(x, n);
    return T::widen(most);
}

template <class T>
static HOP_ALONE void range_of_run(const typename T::Word* x, int64_t n, float& low, float& high, bool& known) {
    using S = typename T::Signed;
    const __m256i magnitude = all_of<T>(T::magnitude);
    __m256i least[2] = {}, most[2] = {};
    each_vector<T>(x, n, [&](__m256i own, int k) HOP_INLINED {
        const __m256i negative = kHalf<T> ? _mm256_srai_epi16(own, 15) : _mm256_srai_epi32(own, 31);
        const __m256i order = _mm256_xor_si256(own, _mm256_and_si256(negative, magnitude));
        least[k] = kHalf<T> ? _mm256_min_epi16(least[k], order) : _mm256_min_epi32(least[k], order);
        most[k] = kHalf<T> ? _mm256_max_epi16(most[k], order) : _mm256_max_epi32(most[k], order);
    });
    const auto lesser = [](__m128i a, __m128i b) HOP_INLINED { return kHalf<T> ? _mm_min_epi16(a, b) : _mm_min_epi32(a, b); };
    const auto larger = [](__m128i a, __m128i b) HOP_INLINED { return kHalf<T> ? _mm_max_epi16(a, b) : _mm_max_epi32(a, b); };
    const __m256i lows = kHalf<T> ? _mm256_min_epi16(least[0], least[1]) : _mm256_min_epi32(least[0], least[1]);
    const __m256i highs = kHalf<T> ? _mm256_max_epi16(most[0], most[1]) : _mm256_max_epi32(most[0], most[1]);
    const S bottom = S(across<T>(lows, lesser)), top = S(across<T>(highs, larger));
    if (top >= S(T::infinity) || bottom <= S(~T::infinity)) {
        known = false;
        return range_of_any<T>(x, n, low, high);
    }
    const float lowest = bottom < 0 ? T::widen(typename T::Word(S(bottom ^ S(T::magnitude)))) : 0.0f;
    const float highest = T::widen(typename T::Word(top));
    low = lowest < low ? lowest : low;
    high = highest > high ? highest : high;
}

template <class T, int size>
HOP_INLINE void range_of_groups(const typename T::Word* x, int64_t groups, float* low, float* high, bool& known) {
    if (size <= 32) return range_of_groups_plainly<T, size>(x, groups, low, high, known);
    for (int64_t i = 0; i < groups; ++i) range_of_run<T>(x + i * size, size, low[i], high[i], known);
}

template <class T, int size>
static HOP_ALONE void amax_of_few_groups(const typename T::Word* x, int64_t groups, float* high, bool& known) {
    amax_of_groups_plainly<T, size>(x, groups, high, known);
}

// high[i] = max(high[i], amax of group i) for 8 groups of `size`; returns false if there is a NaN or an infinity.
// Magnitudes compare like their bits as integers, so a tree of shuffles keeps the larger integers.
template <int size>
HOP_INLINE bool amax_of_8_groups(const uint32_t* x, float* high) {
    __m256i v[8];
    for (int i = 0; i < 8; ++i) {
        const auto* at = reinterpret_cast<const float*>(x) + size * i;
        v[i] = magnitude_of(_mm256_loadu_ps(at));
        for (int k = 8; k < size; k += 8) v[i] = _mm256_max_epu32(v[i], magnitude_of(_mm256_loadu_ps(at + k)));
    }
    for (int i = 0; i < 4; ++i) {
        const __m256i a = v[2 * i], b = v[2 * i + 1];
        v[i] = _mm256_max_epu32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
    }
    for (int i = 0; i < 2; ++i) {
        const __m256i a = v[2 * i], b = v[2 * i + 1];
        v[i] = _mm256_max_epu32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
    }
    const __m256i low = _mm256_permute2x128_si256(v[0], v[1], 0x20), rest = _mm256_permute2x128_si256(v[0], v[1], 0x31);
    const __m256i found = _mm256_max_epu32(low, rest);
    const __m256i infinite = _mm256_cmpgt_epi32(found, _mm256_set1_epi32(int32_t(kInfinity) - 1));
    if (!_mm256_testz_si256(infinite, infinite)) return false;
    _mm256_storeu_ps(high, _mm256_max_ps(_mm256_castsi256_ps(found), _mm256_loadu_ps(high)));
    return true;
}

template <class T, int size>
HOP_INLINE void amax_of_groups(const typename T::Word* x, int64_t groups, float* high, bool& known) {
    int64_t i = 0;
    if constexpr (std::is_same<T, F32>::value && size <= 64) {
        for (; i + 8 <= groups; i += 8)
            if (!amax_of_8_groups<size>(x + i * size, high + i)) amax_of_few_groups<T, size>(x + i * size, 8, high + i, known);
    }
    amax_of_few_groups<T, size>(x + i * size, groups - i, high + i, known);
}
