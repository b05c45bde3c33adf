// Tiles with AVX-512 (F, BW, DQ, VL, VBMI, VNNI). Included in a namespace (isa.h); see tiles_portable.h for what each does.

inline __m512i load512(const void* p) { return _mm512_loadu_si512(p); }
inline void store512(void* p, __m512i x) { _mm512_storeu_si512(p, x); }

inline void widen(const uint8_t* narrow, uint8_t* codes) {
    const __m512i pairs = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(narrow)));
    const __m512i nibble = _mm512_set1_epi16(0x0f0f);
    store512(codes, _mm512_and_si512(_mm512_or_si512(pairs, _mm512_slli_epi16(pairs, 4)), nibble));
}

inline void widen_tile(const uint8_t* narrow, uint8_t* tile) {
    const __m512i nibble = _mm512_set1_epi8(15);
    for (int pair = 0; pair < kQuads / 2; ++pair) {
        const __m512i x = load512(narrow + pair * 64);
        store512(tile + pair * 128, _mm512_and_si512(x, nibble));
        store512(tile + pair * 128 + 64, _mm512_and_si512(_mm512_srli_epi16(x, 4), nibble));
    }
}

// The transpose of 16 x 16 elements of 4 bytes.
inline void transpose(__m512i* r) {
    __m512i t[16];
    for (int i = 0; i < 8; ++i) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; ++i) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; ++i) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

inline void tile_from_rows(const uint8_t* src, int64_t stride, uint8_t* tile) {
    __m512i r[16];
    for (int i = 0; i < 16; ++i) r[i] = load512(src + i * stride);
    transpose(r);
    for (int i = 0; i < 16; ++i) store512(tile + i * 64, r[i]);
}

inline void tile_from_columns(const uint8_t* src, int64_t stride, uint8_t* tile) {
    for (int quad = 0; quad < kQuads; ++quad, src += 4 * stride) {
        __m128i x[4];
        for (int i = 0; i < 4; ++i) x[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i * stride));
        const __m128i low01 = _mm_unpacklo_epi8(x[0], x[1]), high01 = _mm_unpackhi_epi8(x[0], x[1]);
        const __m128i low23 = _mm_unpacklo_epi8(x[2], x[3]), high23 = _mm_unpackhi_epi8(x[2], x[3]);
        auto* out = reinterpret_cast<__m128i*>(tile + quad * 64);
        _mm_storeu_si128(out, _mm_unpacklo_epi16(low01, low23));
        _mm_storeu_si128(out + 1, _mm_unpackhi_epi16(low01, low23));
        _mm_storeu_si128(out + 2, _mm_unpacklo_epi16(high01, high23));
        _mm_storeu_si128(out + 3, _mm_unpackhi_epi16(high01, high23));
    }
}

inline void to_int8(int format, const uint8_t* codes, uint8_t* out) {
    __m512i x = load512(codes);
    if (format == HOP_UINT8) x = _mm512_xor_si512(x, _mm512_set1_epi8(static_cast<char>(0x80)));
    if (format == HOP_INT4) {
        const __m512i sign = _mm512_set1_epi8(8);
        x = _mm512_sub_epi8(_mm512_xor_si512(x, sign), sign);
    }
    store512(out, x);
}

inline void add_quads(const uint8_t* tile, int quads, int32_t* sums) {
    __m512i even = load512(sums), odd = _mm512_setzero_si512();
    const __m512i ones = _mm512_set1_epi8(1);
    for (int i = 0; i < quads; i += 2) {
        even = _mm512_dpbusd_epi32(even, ones, load512(tile + i * 64));
        odd = _mm512_dpbusd_epi32(odd, ones, load512(tile + i * 64 + 64));
    }
    store512(sums, _mm512_add_epi32(even, odd));
}

inline int32_t sum_of(const int8_t* codes, int count) {
    const __mmask64 used = count >= 64 ? ~__mmask64(0) : (__mmask64(1) << count) - 1;
    const __m512i x = _mm512_maskz_loadu_epi8(used, codes);
    return _mm512_reduce_add_epi32(_mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), x));
}

// Words from their low and high bytes: of bytes 0 and 2 of each quad, and of bytes 1 and 3.
inline void join(__m512i low, __m512i high, __m512i& even, __m512i& odd) {
    const __m512i lower = _mm512_set1_epi16(0x00ff);
    even = _mm512_ternarylogic_epi32(lower, low, _mm512_slli_epi16(high, 8), 0xca);  // lower ? low : high
    odd = _mm512_ternarylogic_epi32(lower, _mm512_srli_epi16(low, 8), high, 0xca);
}

// A decoder's tables in registers.
struct Tables {
    __m512i low[4], high[4];
    int codes, special;

    explicit Tables(const Decoder& d) : codes(d.codes), special(d.special) {
        for (int i = 0; i < 4; ++i) low[i] = load512(d.low + 64 * i), high[i] = load512(d.high + 64 * i);
    }

    void words(__m512i code, __m512i& even, __m512i& odd) const {
        __m512i l, h;
        if (codes == 64) {
            l = _mm512_permutexvar_epi8(code, low[0]);
            h = _mm512_permutexvar_epi8(code, high[0]);
        } else {
            l = _mm512_permutex2var_epi8(low[0], code, low[1]);
            h = _mm512_permutex2var_epi8(high[0], code, high[1]);
            if (codes == 128) {
                h = _mm512_ternarylogic_epi32(h, code, _mm512_set1_epi8(static_cast<char>(0x80)), 0xf8);
            } else {
                const __mmask64 above = _mm512_movepi8_mask(code);
                l = _mm512_mask_mov_epi8(l, above, _mm512_permutex2var_epi8(low[2], code, low[3]));
                h = _mm512_mask_mov_epi8(h, above, _mm512_permutex2var_epi8(high[2], code, high[3]));
            }
        }
        join(l, h, even, odd);
    }
};

// A fold of 16 quads as words: what is added to those of a number 2^i, and to those of 1.5 · 2^i; both of the form
// bits(fold · m) - bits(m).
struct Fold {
    __m512i one, half;
    __mmask32 nonzero;
    bool safe;  // no sum leaves the exponents of normal numbers
};

// Numbers of at most one bit after the first (E2M1) take a fold of any bfloat16 numbers; others, of powers of two.
inline Fold fold_of(__m512 fold, bool narrow) {
    constexpr int least = 17, most = 239;  // every format's numbers lie between 2^-16 and 2^15
    const __m512i bits = _mm512_castps_si512(fold);
    const __m512i exponent = _mm512_and_si512(_mm512_srli_epi32(bits, 23), _mm512_set1_epi32(255));
    const __mmask16 zero = _mm512_cmp_ps_mask(fold, _mm512_setzero_ps(), _CMP_EQ_OQ);
    const __mmask16 bad = _mm512_cmplt_epi32_mask(exponent, _mm512_set1_epi32(least)) |
                          _mm512_cmpgt_epi32_mask(exponent, _mm512_set1_epi32(most)) |
                          _mm512_cmplt_epi32_mask(bits, _mm512_setzero_si512());
    const auto words = [](__m512 x, int unit) {
        const __m512i high = _mm512_srli_epi32(_mm512_castps_si512(x), 16);
        const __m512i both = _mm512_or_si512(high, _mm512_slli_epi32(high, 16));
        return _mm512_sub_epi16(both, _mm512_set1_epi16(static_cast<short>(unit)));
    };
    Fold f;
    f.one = words(fold, 0x3f80);
    f.half = narrow ? words(_mm512_mul_ps(fold, _mm512_set1_ps(1.5f)), 0x3fc0) : f.one;
    const __mmask16 kept = static_cast<__mmask16>(~zero);
    f.nonzero = static_cast<__mmask32>(_pdep_u32(kept, 0x55555555u) | _pdep_u32(kept, 0xaaaaaaaau));
    f.safe = (bad & kept) == 0;
    return f;
}

inline __m512i folded(__m512i words, const Fold& f, bool narrow) {
    const __mmask32 known = _mm512_mask_test_epi16_mask(f.nonzero, words, _mm512_set1_epi16(0x7fff));
    __m512i x = _mm512_maskz_add_epi16(known, words, f.one);
    if (narrow) x = _mm512_mask_add_epi16(x, _mm512_mask_test_epi16_mask(known, words, _mm512_set1_epi16(0x40)), words, f.half);
    return x;
}

inline void split_words(const uint16_t* words, uint16_t* even, uint16_t* odd) {
    const __m512i a = load512(words), b = load512(words + 32);
    const __m512i evens = _mm512_set_epi16(
        62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40, 38, 36, 34, 32, 30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    store512(even, _mm512_permutex2var_epi16(a, evens, b));
    store512(odd, _mm512_permutex2var_epi16(a, _mm512_add_epi16(evens, _mm512_set1_epi16(1)), b));
}

// Numbers from codes, with the decoder in registers.
class Words {
public:
    explicit Words(int format) : decoder_(decoder(format)), tables_(*decoder_), shifted_(*shifted_decoder()), narrow_(format == HOP_E2M1) {}

    void decode(const uint8_t* codes, int quads, const uint8_t* zero, const float* fold, uint16_t* even, uint16_t* odd) const {
        __m512i e, o;
        if (!zero && !fold) {
            for (int i = 0; i < quads; ++i) {
                tables_.words(load512(codes + i * 64), e, o);
                store512(even + i * 32, e);
                store512(odd + i * 32, o);
            }
            return;
        }
        const bool small = zero && _mm_cmpgt_epu8_mask(_mm_loadu_si128(reinterpret_cast<const __m128i*>(zero)), _mm_set1_epi8(16)) == 0;
        if (small && !fold) {
            const __m128i zeros = _mm_loadu_si128(reinterpret_cast<const __m128i*>(zero));
            const __m512i z = _mm512_cvtepu8_epi32(zeros);
            const __m512i of_quads = _mm512_mullo_epi32(z, _mm512_set1_epi32(0x01010101));
            const __m512i by = _mm512_sub_epi8(_mm512_set1_epi8(16), of_quads);
            for (int i = 0; i < quads; ++i) {
                shifted_.words(_mm512_add_epi8(load512(codes + i * 64), by), e, o);
                store512(even + i * 32, e);
                store512(odd + i * 32, o);
            }
            return;
        }
        Fold f{};
        if (!zero) f = fold_of(_mm512_loadu_ps(fold), narrow_);
        for (int i = 0; i < quads; ++i) {
            const __m512i code = load512(codes + i * 64);
            if (zero || !f.safe || special(code)) {
                decode_plainly(*decoder_, codes + i * 64, zero, fold, even + i * 32, odd + i * 32);
                continue;
            }
            tables_.words(code, e, o);
            store512(even + i * 32, folded(e, f, narrow_));
            store512(odd + i * 32, folded(o, f, narrow_));
        }
    }

    // Whether a code stands for an infinity or NaN.
    bool special(__m512i codes) const {
        if (tables_.special == 256) return false;
        const __m512i magnitude = _mm512_and_si512(codes, _mm512_set1_epi8(127));
        return _mm512_cmpge_epu8_mask(magnitude, _mm512_set1_epi8(static_cast<char>(tables_.special))) != 0;
    }

private:
    const Decoder* decoder_;
    Tables tables_, shifted_;
    bool narrow_;
};

// Makes lines that went past the cache visible before what follows.
inline void fence() { _mm_sfence(); }

// Whole lines of the cache past it: they are not read again soon, and need not be fetched first.
inline void store_lines(void* out, const void* data, size_t bytes) {
    if (reinterpret_cast<uintptr_t>(out) % 64 || bytes % 64) {
        std::memcpy(out, data, bytes);
        return;
    }
    for (size_t i = 0; i < bytes; i += 64)
        _mm512_stream_si512(reinterpret_cast<__m512i*>(static_cast<char*>(out) + i), load512(static_cast<const char*>(data) + i));
}
