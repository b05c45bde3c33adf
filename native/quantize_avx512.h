// Loops of quantize_encode.h and quantize_stats.h by hand, 64 elements at a time. Included in a namespace (isa.h).
//
// Elements are held in four vectors of float32, in an order that is cheap to make: of bfloat16, even and odd ones. Their
// codes are the low bytes of four vectors; one permutation brings them in order.

struct Four {
    __m512 v[4];
};

// The four bytes of each lane, in the order of memory.
template <class T>
HOP_INLINE __m512i byte_order() {
    alignas(64) static constexpr struct Order {
        uint8_t at[64];
        constexpr Order() : at() {
            for (int p = 0; p < 64; ++p) {
                const int half = p / 32, within = p % 32;
                at[p] = uint8_t(sizeof(typename T::Word) == 2 && T::infinity == 0x7f80
                                    ? within / 2 * 4 + half * 2 + within % 2
                                    : p % 16 * 4 + p / 16);
            }
        }
    } order;
    return _mm512_load_si512(order.at);
}

HOP_INLINE void load(const uint32_t* x, Four& f, F32) {
    for (int k = 0; k < 4; ++k) f.v[k] = _mm512_loadu_ps(reinterpret_cast<const float*>(x) + 16 * k);
}

HOP_INLINE void load(const uint16_t* x, Four& f, BF16) {
    const __m512i high = _mm512_set1_epi32(int32_t(0xffff0000));
    for (int k = 0; k < 2; ++k) {
        const __m512i words = _mm512_loadu_si512(x + 32 * k);
        f.v[2 * k] = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
        f.v[2 * k + 1] = _mm512_castsi512_ps(_mm512_and_si512(words, high));
    }
}

HOP_INLINE void load(const uint16_t* x, Four& f, F16) {
    for (int k = 0; k < 4; ++k) {
        f.v[k] = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + 16 * k)));
    }
}

// The number of each element's block: blocks of `size` elements, or one for all 64 where size is 0.
template <int size>
HOP_INLINE void spread(const float* by, Four& f, bool interleaved) {
    for (int k = 0; k < 4; ++k) {
        if (size == 0) {
            f.v[k] = _mm512_set1_ps(by[0]);
        } else if (size == 32) {
            f.v[k] = _mm512_set1_ps(by[k / 2]);
        } else if (!interleaved) {
            f.v[k] = _mm512_set1_ps(by[k]);
        } else {
            f.v[k] = _mm512_mask_mov_ps(_mm512_set1_ps(by[k / 2 * 2]), 0xff00, _mm512_set1_ps(by[k / 2 * 2 + 1]));
        }
    }
}

// `low` where the mask has ones, `high` elsewhere.
HOP_INLINE __m512i select(__m512i mask, __m512i low, __m512i high) {
    return _mm512_ternarylogic_epi32(mask, low, high, 0xca);
}

// The low bytes of four vectors, in the order of memory.
template <class T>
HOP_INLINE __m512i bytes_of(const __m512i n[4]) {
    const __m512i byte = _mm512_set1_epi32(0xff), word = _mm512_set1_epi32(0xffff);
    const __m512i a = select(byte, n[0], _mm512_slli_epi32(n[1], 8)), b = select(byte, n[2], _mm512_slli_epi32(n[3], 8));
    return _mm512_permutexvar_epi8(byte_order<T>(), select(word, a, _mm512_slli_epi32(b, 16)));
}

// 64 codes, several to a byte.
template <int bits>
HOP_INLINE void store_codes(__m512i codes, uint8_t* out) {
    if (bits == 8) {
        _mm512_storeu_si512(out, codes);
    } else if (bits == 4) {
        const __m512i low = _mm512_and_si512(codes, _mm512_set1_epi8(15));
        const __m512i pairs = _mm512_maddubs_epi16(low, _mm512_set1_epi16(0x1001));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtepi16_epi8(pairs));
    } else {
        const __m512i low = _mm512_and_si512(codes, _mm512_set1_epi8(3));
        const __m512i pairs = _mm512_maddubs_epi16(low, _mm512_set1_epi16(0x0401));
        const __m512i quads = _mm512_madd_epi16(pairs, _mm512_set1_epi32(0x00100001));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8(quads));
    }
}

// codes(first of 64 elements, number of their first block) for all x; blocks of `size`, or one for all.
template <class T, int size, int bits, class Codes>
HOP_INLINE void each_64(const typename T::Word* x, int64_t n, uint8_t* out, const Codes codes) {
    int64_t i = 0;
    for (; i + 64 <= n; i += 64) {
        Four f;
        load(x + i, f, T{});
        for (size_t k = 0; k < sizeof(typename T::Word); ++k)
            _mm_prefetch(reinterpret_cast<const char*>(x + i + kColumns) + 64 * k, _MM_HINT_T0);
        store_codes<bits>(codes(f, size ? i / (size ? size : 1) : 0), out + i * bits / 8);
    }
    if (i == n) return;
    typename T::Word rest[64] = {};
    uint8_t made[64];
    __builtin_memcpy(rest, x + i, size_t(n - i) * sizeof(rest[0]));
    Four f;
    load(rest, f, T{});
    store_codes<bits>(codes(f, size ? i / (size ? size : 1) : 0), made);
    __builtin_memcpy(out + i * bits / 8, made, size_t(((n - i) * bits + 7) / 8));
    if (bits < 8 && (n - i) * bits % 8) out[n * bits / 8] &= uint8_t((1 << (n - i) * bits % 8) - 1);
}

// ---- integers

// By products with numbers above and below 1 / scale (quantize_encode.h).
template <class T, int size, bool bounded>
struct IntegerCodes {
    const float *scale, *above, *below;
    Bounds b;
    int32_t zero;

    HOP_MEMBER __m512i operator()(const Four& x, int64_t block) const {
        constexpr bool interleaved = T::infinity == 0x7f80;
        const __m512 whole = _mm512_set1_ps(kWhole);
        Four p, q;
        spread<size>(above + block, p, interleaved);
        spread<size>(below + block, q, interleaved);
        __m512i n[4];
        __mmask16 differ = 0;
        for (int k = 0; k < 4; ++k) {
            const __m512 v = bounded ? known(x.v[k]) : x.v[k];
            p.v[k] = _mm512_fmadd_ps(v, p.v[k], whole);
            q.v[k] = _mm512_fmadd_ps(v, q.v[k], whole);
            differ |= _mm512_cmpneq_epi32_mask(_mm512_castps_si512(p.v[k]), _mm512_castps_si512(q.v[k]));
        }
        if (__builtin_expect(differ != 0, 0)) divide(x, block, p);
        for (int k = 0; k < 4; ++k) n[k] = _mm512_castps_si512(bounded ? clamp(p.v[k]) : p.v[k]);
        return _mm512_add_epi8(bytes_of<T>(n), _mm512_set1_epi8(char(zero)));
    }
    HOP_MEMBER __m512 known(__m512 v) const {
        return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(v, v, _CMP_ORD_Q), v);
    }
    HOP_MEMBER __m512 clamp(__m512 p) const {
        return _mm512_min_ps(_mm512_max_ps(p, _mm512_set1_ps(b.low + kWhole)), _mm512_set1_ps(b.high + kWhole));
    }
    HOP_MEMBER void divide(const Four& x, int64_t block, Four& p) const {
        Four s;
        spread<size>(scale + block, s, T::infinity == 0x7f80);
        for (int k = 0; k < 4; ++k) {
            const __m512 y = _mm512_div_ps(bounded ? known(x.v[k]) : x.v[k], s.v[k]);
            const __m512 low = _mm512_set1_ps(b.low), high = _mm512_set1_ps(b.high);
            p.v[k] = _mm512_add_ps(_mm512_min_ps(_mm512_max_ps(y, low), high), _mm512_set1_ps(kWhole));
        }
    }
};

// ---- floats

template <class T, int size, bool known, bool divides>
struct FloatCodes {
    const float* by;
    FloatFormat f;

    HOP_MEMBER __m512i operator()(const Four& x, int64_t block) const {
        const __m512i magnitude = _mm512_set1_epi32(int32_t(kMagnitude)), infinity = _mm512_set1_epi32(int32_t(kInfinity));
        const uint32_t shift = 23 - f.mantissa, half = 1u << f.sign;
        // What encode_float subtracts from the code is added to the unit here, whose low bits are free.
        const __m512i unit_of = _mm512_set1_epi32(int32_t((shift << 23) + ((0u - f.base) & (2 * half - 1))));
        const __m512i least = _mm512_set1_epi32(int32_t(f.least)), largest = _mm512_set1_epi32(int32_t(f.largest));
        const __m512i digits = _mm512_set1_epi32(int32_t(half - 1));
        const __m128i by_unit = _mm_cvtsi32_si128(int32_t(shift)), by_sign = _mm_cvtsi32_si128(int32_t(31 - f.sign));
        Four s;
        spread<size>(by + block, s, T::infinity == 0x7f80);
        __m512i n[4];
        for (int k = 0; k < 4; ++k) {
            const __m512i y = _mm512_castps_si512(divides ? _mm512_div_ps(x.v[k], s.v[k]) : _mm512_mul_ps(x.v[k], s.v[k]));
            const __m512i own = _mm512_and_si512(y, magnitude), m = _mm512_min_epu32(own, largest);
            const __m512i e = _mm512_max_epu32(_mm512_and_si512(m, infinity), least), unit = _mm512_add_epi32(e, unit_of);
            const __m512 sum = _mm512_add_ps(_mm512_castsi512_ps(m), _mm512_castsi512_ps(unit));
            const __m512i code = _mm512_add_epi32(_mm512_castps_si512(sum), _mm512_srl_epi32(unit, by_unit));
            n[k] = select(digits, code, _mm512_srl_epi32(y, by_sign));
            if (!known) {
                const __mmask16 nan = _mm512_cmpgt_epu32_mask(own, infinity);
                const __m512i sign = f.keeps_nan ? _mm512_srl_epi32(y, by_sign) : _mm512_setzero_si512();
                n[k] = _mm512_mask_mov_epi32(n[k], nan, select(digits, _mm512_set1_epi32(int32_t(f.nan)), sign));
            }
        }
        return bytes_of<T>(n);
    }
};

// ---- codebooks

template <class T, int size, bool few>
struct BookCodes {
    const float* scale;
    const hop_quantizer& q;

    HOP_MEMBER __m512i operator()(const Four& x, int64_t block) const {
        Four s;
        spread<size>(scale + block, s, T::infinity == 0x7f80);
        __m512i n[4];
        for (int k = 0; k < 4; ++k) {
            const __m512 y = _mm512_div_ps(x.v[k], s.v[k]);
            const __mmask16 known = _mm512_cmp_ps_mask(y, y, _CMP_ORD_Q);
            n[k] = _mm512_mask_mov_epi32(_mm512_set1_epi32(q.zero_code), known, few ? search(y) : look_up(y));
        }
        return bytes_of<T>(n);
    }
    HOP_MEMBER __m512i search(__m512 y) const {
        const __m512 table = _mm512_loadu_ps(q.thresholds);
        __m512i code = _mm512_setzero_si512();
        for (int step = 8; step; step /= 2) {
            const __m512i next = _mm512_add_epi32(code, _mm512_set1_epi32(step));
            const __mmask16 reached = _mm512_cmp_ps_mask(y, _mm512_permutexvar_ps(next, table), _CMP_GE_OQ);
            code = _mm512_mask_mov_epi32(code, reached, next);
        }
        return code;
    }
    HOP_MEMBER __m512i look_up(__m512 y) const {
        const __m512i high = _mm512_srli_epi32(_mm512_castps_si512(y), 16);
        const __m512i found = _mm512_and_si512(_mm512_i32gather_epi32(high, q.index, 1), _mm512_set1_epi32(0xff));
        const __m512 next = _mm512_i32gather_ps(found, q.thresholds + 1, 4);
        const __mmask16 reached = _mm512_cmp_ps_mask(y, next, _CMP_GE_OQ);
        return _mm512_mask_add_epi32(found, reached, found, _mm512_set1_epi32(1));
    }
};

// ---- which codes

// Of blocks side by side, of `size` elements, or of one block.
template <class T, int size, int bits>
static bool encode_row(const hop_quantizer& q, const FloatFormat& f, const typename T::Word* x, int64_t n, const float* by,
                       bool divides, int32_t zero, bool known, uint8_t* out) {
    if (q.format == HOP_FLOAT) {
        if (divides) {
            each_64<T, size, bits>(x, n, out, FloatCodes<T, size, false, true>{by, f});
        } else if (known) {
            each_64<T, size, bits>(x, n, out, FloatCodes<T, size, true, false>{by, f});
        } else {
            each_64<T, size, bits>(x, n, out, FloatCodes<T, size, false, false>{by, f});
        }
        return true;
    }
    if (q.format == HOP_CODEBOOK) {
        if (q.size <= 16) {
            each_64<T, size, bits>(x, n, out, BookCodes<T, size, true>{by, q});
        } else if (q.index) {
            each_64<T, size, bits>(x, n, out, BookCodes<T, size, false>{by, q});
        } else {
            return false;
        }
        return true;
    }
    float above[kColumns / 16 + 16], below[kColumns / 16 + 16];
    const int64_t blocks = size ? divide_up(n, size ? size : 1) : 1;
    bool even = true;
    for (int64_t i = 0; i < blocks; ++i) {
        const float magnitude = by[i] < 0 ? -by[i] : by[i], inverse = 1.0f / by[i];
        even = even & (magnitude > 0x1p-100f) & (magnitude < 0x1p100f);
        above[i] = inverse * kAbove;
        below[i] = inverse * kBelow;
    }
    if (!even) return false;
    const Bounds b(q, zero);
    if (known && q.rule == HOP_AMAX) {
        each_64<T, size, bits>(x, n, out, IntegerCodes<T, size, false>{by, above, below, b, zero});
    } else {
        each_64<T, size, bits>(x, n, out, IntegerCodes<T, size, true>{by, above, below, b, zero});
    }
    return true;
}

template <class T, int size>
static bool encode_row(const hop_quantizer& q, const FloatFormat& f, const typename T::Word* x, int64_t n, const float* by,
                       bool divides, int32_t zero, bool known, uint8_t* out) {
    switch (q.bits) {
        case 4: return encode_row<T, size, 4>(q, f, x, n, by, divides, zero, known, out);
        case 2: return encode_row<T, size, 2>(q, f, x, n, by, divides, zero, known, out);
        case 1: return false;
        default: return encode_row<T, size, 8>(q, f, x, n, by, divides, zero, known, out);
    }
}

// A row of blocks of `size` elements, packed; false where the plain loops must do it.
template <class T>
static bool encode_quickly(const hop_quantizer& q, const FloatFormat& f, const typename T::Word* x, int64_t n, int64_t size,
                           const Factors& by, bool known, uint8_t* out) {
    const int32_t per_byte = codes_per_byte(q);
    if (!by.zero && size == 16) return encode_row<T, 16>(q, f, x, n, by.by, by.divides, q.zero, known, out);
    if (!by.zero && size == 32) return encode_row<T, 32>(q, f, x, n, by.by, by.divides, q.zero, known, out);
    if (size % per_byte != 0 && size < n) return false;
    if (size < 24) return false;
    for (int64_t at = 0, i = 0; at < n; at += size, ++i) {
        const int32_t zero = !by.zero ? q.zero : q.low < 0 ? int32_t(int8_t(by.zero[i])) : int32_t(by.zero[i]);
        if (!encode_row<T, 0>(q, f, x + at, least(size, n - at), by.by + i, by.divides, zero, known, out + at / per_byte))
            return false;
    }
    return true;
}

// ---- amax of groups: magnitudes as integers, of which a tree of shuffles keeps the larger

template <class T>
HOP_INLINE __m512i larger(__m512i a, __m512i b) {
    return sizeof(typename T::Word) == 2 ? _mm512_max_epu16(a, b) : _mm512_max_epu32(a, b);
}

template <class T>
HOP_INLINE __m512i magnitudes(const typename T::Word* x) {
    const __m512i mask = _mm512_set1_epi32(T::magnitude == 0x7fff ? 0x7fff7fff : 0x7fffffff);
    return _mm512_and_si512(_mm512_loadu_si512(x), mask);
}

// The groups a and b in the halves of one vector.
template <class T>
HOP_INLINE __m512i halves(__m512i a, __m512i b) {
    return larger<T>(_mm512_shuffle_i32x4(a, b, 0x44), _mm512_shuffle_i32x4(a, b, 0xee));
}

// 16 groups, two in each vector -> the largest of each, as float32.
template <class T>
HOP_INLINE __m512 largest_of_16(const __m512i v[8]) {
    __m512i quarter[4], eighth[2];
    for (int i = 0; i < 4; ++i) {
        const __m512i a = v[2 * i], b = v[2 * i + 1];
        quarter[i] = larger<T>(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
    }
    for (int i = 0; i < 2; ++i) {
        const __m512i a = quarter[2 * i], b = quarter[2 * i + 1];
        eighth[i] = larger<T>(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    }
    const __m512 a = _mm512_castsi512_ps(eighth[0]), b = _mm512_castsi512_ps(eighth[1]);
    const __m512i low = _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0x88));
    const __m512i high = _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0xdd));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i found = _mm512_permutexvar_epi32(order, larger<T>(low, high));
    if (sizeof(typename T::Word) == 4) return _mm512_castsi512_ps(found);
    const __m512i word = _mm512_and_si512(larger<T>(found, _mm512_srli_epi32(found, 16)), _mm512_set1_epi32(0xffff));
    if (T::infinity == 0x7f80) return _mm512_castsi512_ps(_mm512_slli_epi32(word, 16));
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(word));
}

// high[i] = max(high[i], amax of group i) for a multiple of 16 groups of `size`, unless there is a NaN or an infinity.
template <class T, int size>
HOP_INLINE bool amax_of_16_groups(const typename T::Word* x, float* high) {
    constexpr int words = 64 / sizeof(typename T::Word);
    __m512i v[8];
    for (int i = 0; i < 8; ++i) {
        const auto* at = x + 2 * size * i;
        if (words == 2 * size) {
            v[i] = magnitudes<T>(at);
        } else if (words == size) {
            v[i] = halves<T>(magnitudes<T>(at), magnitudes<T>(at + words));
        } else {
            v[i] = halves<T>(larger<T>(magnitudes<T>(at), magnitudes<T>(at + words)),
                             larger<T>(magnitudes<T>(at + 2 * words), magnitudes<T>(at + 3 * words)));
        }
    }
    const __m512 found = largest_of_16<T>(v);
    const __m512i limit = _mm512_set1_epi32(int32_t(kInfinity));
    if (_mm512_cmpge_epu32_mask(_mm512_castps_si512(found), limit)) return false;
    _mm512_storeu_ps(high, _mm512_max_ps(found, _mm512_loadu_ps(high)));
    return true;
}

template <class T, int size>
HOP_INLINE void amax_of_groups(const typename T::Word* x, int64_t groups, float* high, bool& known) {
    int64_t i = 0;
    for (; i + 16 <= groups; i += 16)
        if (!amax_of_16_groups<T, size>(x + i * size, high + i)) amax_of_groups_plainly<T, size>(x + i * size, 16, high + i, known);
    amax_of_groups_plainly<T, size>(x + i * size, groups - i, high + i, known);
}
