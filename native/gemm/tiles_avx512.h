// Tiles with AVX-512 (F, BW, DQ, VL, VBMI, VNNI). Included in a namespace (isa.h); tiles_plain.h describes the
// functions.

constexpr uint16_t kCounting[32] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                    16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31};

inline __m512i load512(const void* p) { return _mm512_loadu_si512(p); }
inline void store512(void* p, __m512i x) { _mm512_storeu_si512(p, x); }

inline void widen(const uint8_t* narrow, uint8_t* codes) {
    const __m512i pairs = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(narrow)));
    const __m512i nibble = _mm512_set1_epi16(0x0f0f);
    store512(codes, _mm512_and_si512(_mm512_or_si512(pairs, _mm512_slli_epi16(pairs, 4)), nibble));
}

inline void widen_tile(const uint8_t* narrow, uint8_t sign, uint8_t* tile) {
    const __m512i nibble = _mm512_set1_epi8(15), signs = _mm512_set1_epi8(static_cast<char>(sign));
    const auto store = [&](uint8_t* out, __m512i x) {
        store512(out, _mm512_sub_epi8(_mm512_xor_si512(_mm512_and_si512(x, nibble), signs), signs));
    };
    for (int pair = 0; pair < kQuads / 2; ++pair) {
        const __m512i x = load512(narrow + pair * 64);
        store(tile + pair * 128, x);
        store(tile + pair * 128 + 64, _mm512_srli_epi16(x, 4));
    }
}

// The transpose of 16 x 16 elements of 4 bytes.
__attribute__((always_inline)) inline void transpose(__m512i (&r)[16]) {
    __m512i t[16];
    HOP_UNROLL
    for (int i = 0; i < 8; ++i) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    HOP_UNROLL
    for (int i = 0; i < 4; ++i) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    HOP_UNROLL
    for (int i = 0; i < 4; ++i) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    HOP_UNROLL
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

inline void numbers_from_rows(const uint8_t* src, int64_t stride, float factor, float* out, int64_t out_stride) {
    __m512i r[16];
    HOP_UNROLL
    for (int i = 0; i < 16; ++i) r[i] = load512(src + i * stride);
    transpose(r);
    HOP_UNROLL
    for (int i = 0; i < 16; ++i)
        _mm512_storeu_ps(out + i * out_stride, _mm512_mul_ps(_mm512_castsi512_ps(r[i]), _mm512_set1_ps(factor)));
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

// Reads each cache line once; the 128 bits of 16 columns stay separate until quads are complete.
inline void tiles_from_columns(const uint8_t* src, int64_t stride, uint8_t* const tiles[4]) {
    for (int quad = 0; quad < kQuads; ++quad, src += 4 * stride) {
        const __m512i x0 = load512(src), x1 = load512(src + stride), x2 = load512(src + 2 * stride), x3 = load512(src + 3 * stride);
        const __m512i low01 = _mm512_unpacklo_epi8(x0, x1), high01 = _mm512_unpackhi_epi8(x0, x1);
        const __m512i low23 = _mm512_unpacklo_epi8(x2, x3), high23 = _mm512_unpackhi_epi8(x2, x3);
        const __m512i a = _mm512_unpacklo_epi16(low01, low23), b = _mm512_unpackhi_epi16(low01, low23);
        const __m512i c = _mm512_unpacklo_epi16(high01, high23), d = _mm512_unpackhi_epi16(high01, high23);
        const __m512i ab02 = _mm512_shuffle_i32x4(a, b, 0x88), ab13 = _mm512_shuffle_i32x4(a, b, 0xdd);
        const __m512i cd02 = _mm512_shuffle_i32x4(c, d, 0x88), cd13 = _mm512_shuffle_i32x4(c, d, 0xdd);
        // 16 columns each of a, b, c and d
        const __m512i order = _mm512_setr_epi64(0, 1, 4, 5, 8, 9, 12, 13), next = _mm512_setr_epi64(2, 3, 6, 7, 10, 11, 14, 15);
        store512(tiles[0] + quad * 64, _mm512_permutex2var_epi64(ab02, order, cd02));
        store512(tiles[1] + quad * 64, _mm512_permutex2var_epi64(ab13, order, cd13));
        store512(tiles[2] + quad * 64, _mm512_permutex2var_epi64(ab02, next, cd02));
        store512(tiles[3] + quad * 64, _mm512_permutex2var_epi64(ab13, next, cd13));
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

inline void add_quads(const uint8_t* tile, int quads, int64_t steps, int64_t step, int32_t* sums) {
    __m512i sum[4] = {load512(sums), _mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
    const __m512i ones = _mm512_set1_epi8(1);
    for (; steps > 0; --steps, tile += step)
        for (int i = 0; i < quads; i += 4)
            for (int j = 0; j < 4; ++j) sum[j] = _mm512_dpbusd_epi32(sum[j], ones, load512(tile + (i + j) * 64));
    store512(sums, _mm512_add_epi32(_mm512_add_epi32(sum[0], sum[1]), _mm512_add_epi32(sum[2], sum[3])));
}

inline int32_t sum_of(const int8_t* codes, int count) {
    const __mmask64 used = count >= 64 ? ~__mmask64(0) : (__mmask64(1) << count) - 1;
    const __m512i x = _mm512_maskz_loadu_epi8(used, codes);
    return _mm512_reduce_add_epi32(_mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), x));
}

inline void scales_of_quads(int format, const uint8_t* quads, int at, float* scales) {
    const __m512i code = _mm512_and_si512(_mm512_srlv_epi32(load512(quads), _mm512_set1_epi32(8 * at)), _mm512_set1_epi32(255));
    __m512i bits;
    __mmask16 nan;
    if (format == HOP_E8M0) {
        bits = _mm512_slli_epi32(code, 23);
        bits = _mm512_mask_mov_epi32(bits, _mm512_testn_epi32_mask(code, code), _mm512_set1_epi32(1 << 22));  // 2^-127
        nan = _mm512_cmpeq_epi32_mask(code, _mm512_set1_epi32(255));
    } else {
        const __m512i magnitude = _mm512_and_si512(code, _mm512_set1_epi32(127));
        const __m512 small = _mm512_mul_ps(_mm512_cvtepi32_ps(magnitude), _mm512_set1_ps(0x1p-9f));
        bits = _mm512_add_epi32(_mm512_slli_epi32(magnitude, 20), _mm512_set1_epi32(120 << 23));
        bits = _mm512_mask_mov_epi32(bits, _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(8)), _mm512_castps_si512(small));
        bits = _mm512_or_si512(bits, _mm512_slli_epi32(_mm512_sub_epi32(code, magnitude), 24));
        nan = _mm512_cmpeq_epi32_mask(magnitude, _mm512_set1_epi32(127));
    }
    store512(scales, _mm512_mask_mov_epi32(bits, nan, _mm512_set1_epi32(0x7fc00000)));
}

inline void split_words(const uint16_t* words, uint16_t* even, uint16_t* odd) {
    const __m512i a = load512(words), b = load512(words + 32);
    const __m512i evens = _mm512_slli_epi16(load512(kCounting), 1);
    store512(even, _mm512_permutex2var_epi16(a, evens, b));
    store512(odd, _mm512_permutex2var_epi16(a, _mm512_add_epi16(evens, _mm512_set1_epi16(1)), b));
}

// Makes lines that bypassed the cache visible before subsequent stores.
inline void fence() { _mm_sfence(); }

// Stores whole cache lines past the cache: they are not read soon, and the cache need not fetch them first.
inline void store_lines(void* out, const void* data, size_t bytes) {
    if (reinterpret_cast<uintptr_t>(out) % 64 || bytes % 64) {
        std::memcpy(out, data, bytes);
        return;
    }
    for (size_t i = 0; i < bytes; i += 64)
        _mm512_stream_si512(reinterpret_cast<__m512i*>(static_cast<char*>(out) + i), load512(static_cast<const char*>(data) + i));
}
