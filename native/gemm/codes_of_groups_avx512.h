// Sums of a group for few rows, from packed codes of 4 or 8 bits, in the order of k. Included in a namespace (isa.h),
// after few_groups_avx512.h.

inline __m512i four_codes(const uint8_t* at) {
    int32_t four;
    std::memcpy(&four, at, 4);
    return _mm512_set1_epi32(four);
}

// Sums of int8 codes, minus 128, times 4-bit codes: vpdpbusd. The contribution of zero points is computed with pair_row
// and pair_column, from sums of columns that are computed here.
template <int N, bool Zero>
struct NarrowInt8 {
    static constexpr bool kZero = Zero;
    static constexpr int kTileBytes = kTile / 2;
    __m512i sign;  // converts signed codes to unsigned, and is subtracted again afterwards

    explicit NarrowInt8(int format) : sign(_mm512_set1_epi8(format == HOP_INT4 ? 8 : 0)) {}

    HOP_INLINED void sums(const GroupCodes& g, __m512i (&c)[N][2]) const {
        const __m512i nibble = _mm512_set1_epi8(15), minus = _mm512_set1_epi8(-1);
        __m512i pair[2], zero[2];
        HOP_UNROLL
        for (int half = 0; half < 2; ++half) {
            HOP_UNROLL
            for (int i = 0; i < N; ++i) c[i][half] = _mm512_setzero_si512();
            pair[half] = zero[half] = _mm512_setzero_si512();
            if (Zero) {
                zero[half] = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(g.zero + half * kRows)));
                pair[half] = _mm512_mullo_epi32(zero[half], _mm512_set1_epi32(g.terms));
            }
        }
        const uint8_t *a = g.a, *b = g.b;
        for (int64_t slice = 0; slice < g.slices; ++slice, a += g.stride, b += kTile) {
            __m512i bytes[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};  // sums of 16 quads of codes <= 15
            HOP_UNROLL_BY_TWO
            for (int quad = g.quad; quad < g.end; quad += 2) {
                HOP_UNROLL
                for (int half = 0; half < 2; ++half) {
                    fetch_in_order(b + quad * 64 + half * 64);
                    const __m512i x = load512(b + half * (kTile / 2) + quad * 32);
                    const __m512i low = _mm512_ternarylogic_epi32(x, nibble, sign, 0x6a);  // (x & nibble) ^ sign
                    const __m512i high = _mm512_ternarylogic_epi32(_mm512_srli_epi16(x, 4), nibble, sign, 0x6a);
                    bytes[half] = _mm512_add_epi8(bytes[half], _mm512_add_epi8(low, high));
                    const __m512i even = _mm512_sub_epi8(low, sign), odd = _mm512_sub_epi8(high, sign);
                    HOP_UNROLL
                    for (int i = 0; i < N; ++i) {
                        c[i][half] = _mm512_dpbusd_epi32(c[i][half], four_codes(a + i * kSlice + quad * 4), even);
                        c[i][half] = _mm512_dpbusd_epi32(c[i][half], four_codes(a + i * kSlice + quad * 4 + 4), odd);
                    }
                }
            }
            // terms · zero - Σ codes, including the offset by `sign`
            const __m512i added = _mm512_dpbusd_epi32(_mm512_setzero_si512(), sign, _mm512_set1_epi8(static_cast<char>(g.end - g.quad)));
            HOP_UNROLL
            for (int half = 0; half < 2; ++half)
                pair[half] = _mm512_dpbusd_epi32(_mm512_add_epi32(pair[half], added), bytes[half], minus);
        }
        HOP_UNROLL
        for (int half = 0; half < 2; ++half) {
            const __m512i upper = _mm512_slli_epi32(_mm512_sub_epi32(_mm512_setzero_si512(), zero[half]), 16);
            pair[half] = _mm512_ternarylogic_epi32(pair[half], _mm512_set1_epi32(0xffff), upper, 0xea);  // (pair & 0xffff) | upper
            HOP_UNROLL
            for (int i = 0; i < N; ++i)
                c[i][half] = _mm512_add_epi32(c[i][half], _mm512_madd_epi16(_mm512_set1_epi32(g.pair[i]), pair[half]));
        }
    }
};

// Sums of words times 4-bit codes: floats are looked up in a table of words, as in Words.
template <int N, bool Zero, class Products>
struct NarrowWordsOfGroups {
    static constexpr bool kZero = Zero;
    static constexpr int kTileBytes = kTile / 2;
    __m512i table;

    explicit NarrowWordsOfGroups(int format) {
        const Decoder& d = Zero ? *shifted_decoder() : *decoder(format);
        uint16_t words[32];
        for (int i = 0; i < 32; ++i) {
            const int code = Zero ? i : i % 16;
            words[i] = static_cast<uint16_t>(d.high[code] << 8 | d.low[code]);
        }
        table = load512(words);
    }

    HOP_INLINED void sums(const GroupCodes& g, __m512 (&c)[N][2]) const {
        __m512i up[2] = {};
        HOP_UNROLL
        for (int half = 0; half < 2; ++half) {
            HOP_UNROLL
            for (int i = 0; i < N; ++i) c[i][half] = _mm512_setzero_ps();
            if (!Zero) continue;
            const __m512i z = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(g.zero + half * kRows)));
            up[half] = _mm512_sub_epi16(_mm512_set1_epi16(16), _mm512_or_si512(z, _mm512_slli_epi32(z, 16)));
        }
        const auto words = [&](__m512i code, int half, bool clean) {
            if (Zero) code = _mm512_add_epi16(clean ? code : _mm512_and_si512(code, _mm512_set1_epi16(15)), up[half]);
            return _mm512_permutexvar_epi16(code, table);
        };
        const uint8_t *a = g.a, *b = g.b;
        for (int64_t slice = 0; slice < g.slices; ++slice, a += g.stride, b += kTile) {
            HOP_UNROLL_BY_TWO
            for (int quad = g.quad; quad < g.end; quad += 2) {
                __m512i found[2][4];
                HOP_UNROLL
                for (int half = 0; half < 2; ++half) {
                    fetch_in_order(b + quad * 64 + half * 64);
                    const __m512i x = load512(b + half * (kTile / 2) + quad * 32);
                    found[half][0] = words(x, half, false);
                    found[half][1] = words(_mm512_srli_epi16(x, 8), half, false);
                    found[half][2] = words(_mm512_srli_epi16(x, 4), half, false);
                    found[half][3] = words(_mm512_srli_epi16(x, 12), half, true);
                }
                HOP_UNROLL
                for (int at = 0; at < 4; ++at) Products::template add<N>(a, found[0][at], found[1][at], quad + at / 2, at % 2, c);
            }
        }
    }
};

// Sums of int8 codes, minus 128, times int8 codes.
template <int N>
struct BytesInt8 {
    static constexpr bool kZero = false;
    static constexpr int kTileBytes = kTile;

    explicit BytesInt8(int) {}

    HOP_INLINED void sums(const GroupCodes& g, __m512i (&c)[N][2]) const {
        const __m512i ones = _mm512_set1_epi8(1);
        __m512i column[2];
        HOP_UNROLL
        for (int half = 0; half < 2; ++half) {
            column[half] = _mm512_setzero_si512();
            HOP_UNROLL
            for (int i = 0; i < N; ++i) c[i][half] = _mm512_setzero_si512();
        }
        const uint8_t *a = g.a, *b = g.b;
        for (int64_t slice = 0; slice < g.slices; ++slice, a += g.stride, b += 2 * kTile) {
            HOP_UNROLL_BY_TWO
            for (int quad = g.quad; quad < g.end; ++quad) {
                HOP_UNROLL
                for (int half = 0; half < 2; ++half) {
                    fetch_in_order(b + quad * 128 + half * 64);
                    const __m512i x = load512(b + half * kTile + quad * 64);
                    column[half] = _mm512_dpbusd_epi32(column[half], ones, x);
                    HOP_UNROLL
                    for (int i = 0; i < N; ++i) c[i][half] = _mm512_dpbusd_epi32(c[i][half], four_codes(a + i * kSlice + quad * 4), x);
                }
            }
        }
        HOP_UNROLL
        for (int half = 0; half < 2; ++half) {
            const __m512i minus = _mm512_sub_epi32(_mm512_setzero_si512(), column[half]);
            const __m512i pair = _mm512_and_si512(minus, _mm512_set1_epi32(0xffff));
            HOP_UNROLL
            for (int i = 0; i < N; ++i) c[i][half] = _mm512_add_epi32(c[i][half], _mm512_madd_epi16(_mm512_set1_epi32(g.pair[i]), pair));
        }
    }
};

// Sums of words times 8-bit codes, which are looked up in tables.
template <int N, int Codes, class Products>
struct BytesWordsOfGroups {
    static constexpr bool kZero = false;
    static constexpr int kTileBytes = kTile;
    ByteWords<Codes> words;

    explicit BytesWordsOfGroups(int format) : words(*decoder(format)) {}

    HOP_INLINED void sums(const GroupCodes& g, __m512 (&c)[N][2]) const {
        HOP_UNROLL
        for (int i = 0; i < N; ++i) c[i][0] = c[i][1] = _mm512_setzero_ps();
        const uint8_t *a = g.a, *b = g.b;
        for (int64_t slice = 0; slice < g.slices; ++slice, a += g.stride, b += 2 * kTile) {
            HOP_UNROLL_BY_TWO
            for (int quad = g.quad; quad < g.end; ++quad) {
                __m512i found[2][2];
                HOP_UNROLL
                for (int half = 0; half < 2; ++half) {
                    fetch_in_order(b + quad * 128 + half * 64);
                    words(load512(b + half * kTile + quad * 64), found[half][0], found[half][1]);
                }
                HOP_UNROLL
                for (int e = 0; e < 2; ++e) Products::template add<N>(a, found[0][e], found[1][e], quad, e, c);
            }
        }
    }
};
