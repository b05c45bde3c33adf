// Codes of 64 elements at a time. Included in a namespace (isa.h), after quantize_avx512.h.

// ---- integers

// By products with numbers above and below 1 / scale (quantize_encode.h). `low` and `high` bound codes less the code of
// 0; they and `zero` are those of each block, or, unless `affine`, of all.
template <class T, int size, bool bounded, bool affine>
struct IntegerCodes {
    const float *scale, *above, *below, *low, *high;
    const int32_t* zero;

    HOP_MEMBER __m512i operator()(const Four& x, int64_t block) const {
        constexpr bool interleaved = T::infinity == 0x7f80;
        const __m512 whole = _mm512_set1_ps(kWhole);
        Four p, q;
        spread<size>(above + block, p, interleaved);
        spread<size>(below + block, q, interleaved);
        __m512i n[4];
        __m512i differ = _mm512_setzero_si512();
        for (int k = 0; k < 4; ++k) {
            const __m512 v = bounded ? known(x.v[k]) : x.v[k];
            p.v[k] = _mm512_fmadd_ps(v, p.v[k], whole);
            q.v[k] = _mm512_fmadd_ps(v, q.v[k], whole);
            const __m512i a = _mm512_castps_si512(p.v[k]), b = _mm512_castps_si512(q.v[k]);
            differ = _mm512_ternarylogic_epi32(differ, a, b, 0xf6);  // differ | (a ^ b)
        }
        if (__builtin_expect(_mm512_test_epi32_mask(differ, differ) != 0, 0)) divide(x, block, p);
        if (bounded) {
            clamp(low + (affine ? block : 0), high + (affine ? block : 0), p);
        }
        if (affine) spread<size>(reinterpret_cast<const float*>(zero + block), q, interleaved);
        for (int k = 0; k < 4; ++k) {
            const __m512i code = _mm512_castps_si512(p.v[k]);
            n[k] = affine ? _mm512_add_epi32(code, _mm512_castps_si512(q.v[k])) : code;
        }
        if (!affine) return _mm512_add_epi8(bytes_of<T>(n), _mm512_set1_epi8(char(*zero)));
        return bytes_of<T>(n);
    }
    HOP_MEMBER __m512 known(__m512 v) const { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(v, v, _CMP_ORD_Q), v); }
    HOP_MEMBER void clamp(const float* least, const float* most, Four& p) const {
        constexpr bool interleaved = T::infinity == 0x7f80;
        const __m512 whole = _mm512_set1_ps(kWhole);
        Four a, b;
        spread<affine ? size : 64>(least, a, interleaved);
        spread<affine ? size : 64>(most, b, interleaved);
        for (int k = 0; k < 4; ++k) {
            const __m512 raised = _mm512_max_ps(p.v[k], _mm512_add_ps(a.v[k], whole));
            p.v[k] = _mm512_min_ps(raised, _mm512_add_ps(b.v[k], whole));
        }
    }
    // Bounds are far inside those of kWhole, and so may be those of any block.
    HOP_MEMBER void divide(const Four& x, int64_t block, Four& p) const {
        const __m512 most = _mm512_set1_ps(1024.0f), least = _mm512_set1_ps(-1024.0f);
        Four s;
        spread<size>(scale + block, s, T::infinity == 0x7f80);
        for (int k = 0; k < 4; ++k) {
            const __m512 y = _mm512_div_ps(bounded ? known(x.v[k]) : x.v[k], s.v[k]);
            p.v[k] = _mm512_add_ps(_mm512_min_ps(_mm512_max_ps(y, least), most), _mm512_set1_ps(kWhole));
        }
    }
};

// ---- floats

template <class T, int size, bool known, bool divides>
struct FloatCodes {
    const float* by;
    FloatFormat f;

    HOP_MEMBER __m512i operator()(const Four& x, int64_t block) const {
        const __m512i magnitude = _mm512_set1_epi32(int32_t(kMagnitude)),
                      infinity = _mm512_set1_epi32(int32_t(kInfinity));
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
            const __m512i y =
                _mm512_castps_si512(divides ? _mm512_div_ps(x.v[k], s.v[k]) : _mm512_mul_ps(x.v[k], s.v[k]));
            const __m512i own = _mm512_and_si512(y, magnitude), m = _mm512_min_epu32(own, largest);
            const __m512i e = _mm512_max_epu32(_mm512_and_si512(m, infinity), least),
                          unit = _mm512_add_epi32(e, unit_of);
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

// Products with 1 / scale find the codes of quotients, unless a threshold is close: three roundings move one by 3 units
// of its last place at most. The index is asked for a number that is smaller by kLower, so that the threshold that it
// leaves to compare with is the close one, though it may be where the index goes on.
constexpr int32_t kClose = 4;

// Of at most 16 codes, or, with tables of the thresholds after the first, of more by an index.
template <class T, int size, bool few>
struct BookCodes {
    const float *scale, *inverse;  // inverse is nullptr where quotients are needed
    const hop_quantizer& q;
    const ByteTables* next;

    HOP_MEMBER __m512i operator()(const Four& x, int64_t block) const {
        constexpr bool interleaved = T::infinity == 0x7f80;
        Four by;
        __m512i n[4];
        if (inverse) {
            spread<size>(inverse + block, by, interleaved);
            uint32_t close = 0;
            for (int k = 0; k < 4; ++k) by.v[k] = _mm512_mul_ps(x.v[k], by.v[k]);
            codes_of(by, n, close);
            if (__builtin_expect(!close, 1)) return bytes_of<T>(n);
        }
        uint32_t any = 0;
        spread<size>(scale + block, by, interleaved);
        for (int k = 0; k < 4; ++k) by.v[k] = _mm512_div_ps(x.v[k], by.v[k]);
        codes_of(by, n, any);
        return bytes_of<T>(n);
    }
    HOP_MEMBER void codes_of(const Four& y, __m512i n[4], uint32_t& close) const {
        if (few) {
            for (int k = 0; k < 4; ++k) n[k] = search(y.v[k], close);
        } else {
            __m512 threshold[4];
            for (int k = 0; k < 4; ++k) n[k] = look_up(y.v[k]);
            next->of_lanes(n, threshold);
            for (int k = 0; k < 4; ++k) {
                const __mmask16 reached = _mm512_cmp_ps_mask(y.v[k], threshold[k], _CMP_GE_OQ);
                close |= near(y.v[k], threshold[k]);
                n[k] = _mm512_mask_add_epi32(n[k], reached, n[k], _mm512_set1_epi32(1));
            }
        }
        for (int k = 0; k < 4; ++k) {
            const __mmask16 known = _mm512_cmp_ps_mask(y.v[k], y.v[k], _CMP_ORD_Q);
            n[k] = _mm512_mask_mov_epi32(_mm512_set1_epi32(q.zero_code), known, n[k]);
        }
    }
    HOP_MEMBER static uint32_t near(__m512 y, __m512 threshold) {
        const __m512i gap = _mm512_sub_epi32(_mm512_castps_si512(y), _mm512_castps_si512(threshold));
        return _mm512_cmple_epu32_mask(_mm512_add_epi32(gap, _mm512_set1_epi32(kClose)), _mm512_set1_epi32(2 * kClose));
    }
    HOP_MEMBER __m512i search(__m512 y, uint32_t& close) const {
        const __m512 table = _mm512_loadu_ps(q.thresholds), above = _mm512_loadu_ps(q.thresholds + 1);
        __m512i code = _mm512_setzero_si512();
        for (int step = 8; step; step /= 2) {
            const __m512i next = _mm512_add_epi32(code, _mm512_set1_epi32(step));
            const __mmask16 reached = _mm512_cmp_ps_mask(y, _mm512_permutexvar_ps(next, table), _CMP_GE_OQ);
            code = _mm512_mask_mov_epi32(code, reached, next);
        }
        close |= near(y, _mm512_permutexvar_ps(code, table)) | near(y, _mm512_permutexvar_ps(code, above));
        return code;
    }
    // The least code of numbers that share the upper half of y, lowered.
    HOP_MEMBER __m512i look_up(__m512 y) const {
        const __mmask16 negative = _mm512_movepi32_mask(_mm512_castps_si512(y));
        const float by = inverse ? kLower : 0;
        const __m512 factor = _mm512_mask_mov_ps(_mm512_set1_ps(1 - by), negative, _mm512_set1_ps(1 + by));
        const __m512i high = _mm512_srli_epi32(_mm512_castps_si512(_mm512_mul_ps(y, factor)), 16);
        return _mm512_and_si512(_mm512_i32gather_epi32(high, q.index, 1), _mm512_set1_epi32(0xff));
    }
};

// ---- which codes

// A row of blocks.
template <class T>
struct RowOfBlocks {
    const hop_quantizer& q;
    const FloatFormat& f;
    const typename T::Word* x;
    int64_t n, size;
    const Factors& by;
    bool known;
    uint8_t* out;
};

template <class T, int size, int bits, bool affine>
static bool encode_integer_row(const RowOfBlocks<T>& r) {
    constexpr int most = kColumns / 16 + 16;
    float above[most], below[most], low[most], high[most];
    int32_t zero[most];
    const int64_t blocks = divide_up(r.n, r.size);
    bool even = true;
    for (int64_t i = 0; i < blocks; ++i) {
        const float by = r.by.by[i], magnitude = float_of(bits_of(by) & kMagnitude), inverse = 1.0f / by;
        even = even & (magnitude > 0x1p-100f) & (magnitude < 0x1p100f);
        above[i] = inverse * kAbove;
        below[i] = inverse * kBelow;
    }
    if (!even) return false;
    for (int64_t i = 0; i < (affine ? blocks : 1); ++i) {
        zero[i] = affine ? code_of_zero(r.q, r.by.zero[i]) : r.q.zero;
        low[i] = float(r.q.low - zero[i]);
        high[i] = float(r.q.high - zero[i]);
    }
    if (!affine && r.known && r.q.rule == HOP_AMAX) {
        const IntegerCodes<T, size, false, false> codes{r.by.by, above, below, low, high, zero};
        each_64<T, size, bits>(r.x, r.n, r.size / 64, r.out, codes);
    } else {
        const IntegerCodes<T, size, true, affine> codes{r.by.by, above, below, low, high, zero};
        each_64<T, size, bits>(r.x, r.n, r.size / 64, r.out, codes);
    }
    return true;
}

template <class T, int size, int bits>
static bool encode_row(const RowOfBlocks<T>& r) {
    const float* by = r.by.by;
    const auto all = [&](const auto& codes) {
        each_64<T, size, bits>(r.x, r.n, r.size / 64, r.out, codes);
        return true;
    };
    if (r.q.format == HOP_INTEGER) {
        return r.by.zero ? encode_integer_row<T, size, bits, true>(r) : encode_integer_row<T, size, bits, false>(r);
    }
    if (r.q.format == HOP_FLOAT) {
        if (r.by.divides) return all(FloatCodes<T, size, false, true>{by, r.f});
        if (r.known) return all(FloatCodes<T, size, true, false>{by, r.f});
        return all(FloatCodes<T, size, false, false>{by, r.f});
    }
    if (!r.q.tables || (r.q.size > 16 && !r.q.index)) return false;
    float inverse[kColumns / 16 + 16];
    bool even = r.q.tables[2048];
    for (int64_t i = 0; i < divide_up(r.n, r.size); ++i) {
        const float magnitude = float_of(bits_of(by[i]) & kMagnitude);
        even = even & (magnitude > 0x1p-100f) & (magnitude < 0x1p100f);
        inverse[i] = 1.0f / by[i];
    }
    const float* products = even ? inverse : nullptr;
    if (r.q.size <= 16) return all(BookCodes<T, size, true>{by, products, r.q, nullptr});
    const ByteTables next(r.q.tables + 1024);
    return all(BookCodes<T, size, false>{by, products, r.q, &next});
}

template <class T, int size>
static bool encode_row(const RowOfBlocks<T>& r) {
    switch (r.q.bits) {
        case 1: return false;
        case 2: return encode_row<T, size, 2>(r);
        case 4: return encode_row<T, size, 4>(r);
        default: return encode_row<T, size, 8>(r);
    }
}

// Packed codes of a row of blocks; false where the plain loops must make them.
template <class T>
static bool encode_quickly(const hop_quantizer& q, const FloatFormat& f, const typename T::Word* x, int64_t n,
                           int64_t size, const Factors& by, bool known, uint8_t* out) {
    if (size == 16) return encode_row<T, 16>({q, f, x, n, size, by, known, out});
    if (size == 32) return encode_row<T, 32>({q, f, x, n, size, by, known, out});
    if (size % 64 == 0) return encode_row<T, 64>({q, f, x, n, size, by, known, out});
    const int32_t per_byte = codes_per_byte(q);
    if (size < 24 || (size % per_byte != 0 && size < n)) return false;
    for (int64_t at = 0, i = 0; at < n; at += size, ++i) {
        const Factors own{by.divides, by.by + i, by.zero ? by.zero + i : nullptr};
        const int64_t count = least(size, n - at), blocks = divide_up(count, 64) * 64;
        if (!encode_row<T, 64>({q, f, x + at, count, blocks, own, known, out + at / per_byte})) return false;
    }
    return true;
}

// ---- integers with noise

// As encode_integer_with, by a product with 1 / scale: three roundings move a quotient of 512 or less by 2^-13 at most,
// so that only within kNear of an integer it is divided after all; what is larger has the code of the bound anyway.
// With `bounded` elements may be infinite or NaN, and codes out of bounds.
template <bool bounded>
struct NoisyCodes {
    static constexpr float kNear = 0x1p-12f;
    __m512 scale, inverse;
    __m512i low, high;

    HOP_MEMBER __m512 raised(__m512 y, __m512 noise) const {
        __m512 magnitude = _mm512_abs_ps(y);
        if (bounded)
            magnitude = _mm512_maskz_min_ps(_mm512_cmp_ps_mask(y, y, _CMP_ORD_Q), magnitude, _mm512_set1_ps(0x1p20f));
        return _mm512_fmadd_ps(noise, _mm512_set1_ps(1.0f / 256), magnitude);  // noise / 256 is exact
    }
    HOP_MEMBER __m512i code_of(__m512 y, __m512 raised) const {
        const __m512i steps = _mm512_cvttps_epi32(raised);
        const __mmask16 negative = _mm512_movepi32_mask(_mm512_castps_si512(y));
        const __m512i code = _mm512_mask_sub_epi32(steps, negative, _mm512_setzero_si512(), steps);
        return bounded ? _mm512_min_epi32(_mm512_max_epi32(code, low), high) : code;
    }
    template <class T>
    HOP_MEMBER __m512i of_64(const Four& x, __m512i bytes) const {
        bytes = _mm512_permutexvar_epi8(noise_order<T>(), bytes);
        __m512 noise[4];
        __m512i code[4];
        uint32_t near = 0;
        for (int k = 0; k < 4; ++k) {
            const __m512i byte = _mm512_and_si512(_mm512_srli_epi32(bytes, 8 * k), _mm512_set1_epi32(255));
            noise[k] = _mm512_cvtepi32_ps(byte);
            const __m512 y = _mm512_mul_ps(x.v[k], inverse), up = raised(y, noise[k]);
            const __m512 rest = _mm512_sub_ps(up, _mm512_roundscale_ps(up, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
            near |= _mm512_cmp_ps_mask(_mm512_abs_ps(rest), _mm512_set1_ps(kNear), _CMP_LT_OQ);
            code[k] = code_of(y, up);
        }
        if (__builtin_expect(near != 0, 0)) {
            for (int k = 0; k < 4; ++k) {
                const __m512 y = _mm512_div_ps(x.v[k], scale);
                code[k] = code_of(y, raised(y, noise[k]));
            }
        }
        return bytes_of<T>(code);
    }
    // The place of each lane's four bytes in memory: the inverse of byte_order.
    template <class T>
    static __m512i noise_order() {
        alignas(64) static constexpr struct Order {
            uint8_t at[64];
            constexpr Order() : at() {
                for (int lane = 0; lane < 16; ++lane)
                    for (int k = 0; k < 4; ++k)
                        at[lane * 4 + k] = uint8_t(sizeof(typename T::Word) == 2 && T::infinity == 0x7f80
                                                       ? k / 2 * 32 + lane * 2 + k % 2
                                                       : k * 16 + lane);
            }
        } order;
        return _mm512_load_si512(order.at);
    }
};

template <class T, bool bounded>
static bool encode_integers_with_noise(const hop_quantizer& q, const typename T::Word* x, int64_t n, int64_t size,
                                       const Factors& by, const uint8_t* noise, uint8_t* out) {
    Four f;
    for (int64_t at = 0, i = 0; at < n; at += size, ++i) {
        const float scale = by.by[i], magnitude = float_of(bits_of(scale) & kMagnitude);
        if (!(magnitude > 0x1p-100f && magnitude < 0x1p100f)) return false;
        const int32_t zero = by.zero ? code_of_zero(q, by.zero[i]) : q.zero;
        const NoisyCodes<bounded> codes{_mm512_set1_ps(scale), _mm512_set1_ps(1.0f / scale),
                                        _mm512_set1_epi32(q.low - zero), _mm512_set1_epi32(q.high - zero)};
        const __m512i shift = _mm512_set1_epi8(char(zero));
        const int64_t end = least(at + size, n);
        int64_t k = at;
        for (; k + 64 <= end; k += 64) {
            load(x + k, f, T{});
            const __m512i made = codes.template of_64<T>(f, _mm512_loadu_si512(noise + k));
            _mm512_storeu_si512(out + k, _mm512_add_epi8(made, shift));
        }
        if (k == end) continue;
        typename T::Word rest[64] = {};
        const __mmask64 used = (__mmask64(1) << (end - k)) - 1;
        __builtin_memcpy(rest, x + k, size_t(end - k) * sizeof(rest[0]));
        load(rest, f, T{});
        const __m512i made = codes.template of_64<T>(f, _mm512_maskz_loadu_epi8(used, noise + k));
        _mm512_mask_storeu_epi8(out + k, used, _mm512_add_epi8(made, shift));
    }
    return true;
}

// Codes, a byte each, of a row of blocks of integers; false where the plain loops must make them.
template <class T>
static bool encode_with_noise(const hop_quantizer& q, const typename T::Word* x, int64_t n, int64_t size,
                              const Factors& by, bool known, const uint8_t* noise, uint8_t* out) {
    if (q.format != HOP_INTEGER || size < 64) return false;
    const bool symmetric = float(q.high - q.zero) >= q.range && float(q.zero - q.low) >= q.range;
    if (known && q.rule == HOP_AMAX && symmetric)
        return encode_integers_with_noise<T, false>(q, x, n, size, by, noise, out);
    return encode_integers_with_noise<T, true>(q, x, n, size, by, noise, out);
}
