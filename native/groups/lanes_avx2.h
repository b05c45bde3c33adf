// Sixteen float32 values, and decoding of codes to them, with AVX2. Included in a namespace (isa.h).

struct Lanes {
    __m256 lo, hi;
};
constexpr bool kFromRegisters = true;
constexpr int kFewRows = 2, kFewColumns = 2;
constexpr int kTileRows = 2, kTileColumns = 3;

HOP_INLINE Lanes load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
HOP_INLINE void store(float* p, Lanes x) { _mm256_storeu_ps(p, x.lo), _mm256_storeu_ps(p + 8, x.hi); }
HOP_INLINE Lanes all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
HOP_INLINE Lanes times(Lanes a, Lanes b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
HOP_INLINE Lanes minus(Lanes a, Lanes b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
HOP_INLINE Lanes add_product(Lanes a, Lanes b, Lanes sum) {
    return {_mm256_fmadd_ps(a.lo, b.lo, sum.lo), _mm256_fmadd_ps(a.hi, b.hi, sum.hi)};
}
HOP_INLINE Lanes two(const float* p) { return {_mm256_set1_ps(p[0]), _mm256_set1_ps(p[1])}; }

HOP_INLINE float total(Lanes x) {
    const __m256 eight = _mm256_add_ps(x.lo, x.hi);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 pair = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
}

HOP_INLINE Lanes halves(float a, float b) { return {_mm256_set1_ps(a), _mm256_set1_ps(b)}; }

HOP_INLINE Lanes from_bytes(const uint8_t* p, bool is_signed) {
    const __m128i first = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    const __m128i second = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8));
    const auto number = [is_signed](__m128i x) {
        return _mm256_cvtepi32_ps(is_signed ? _mm256_cvtepi8_epi32(x) : _mm256_cvtepu8_epi32(x));
    };
    return {number(first), number(second)};
}

struct Table {
    __m256 first, second;
    static HOP_INLINED inline Table of(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
};

template <bool Offset>
HOP_INLINE Table scaled(const Table& t, float s, float m) {
    const __m256 scale = _mm256_set1_ps(s), offset = _mm256_set1_ps(m);
    Table made{_mm256_mul_ps(t.first, scale), _mm256_mul_ps(t.second, scale)};
    if (Offset) made.first = _mm256_sub_ps(made.first, offset), made.second = _mm256_sub_ps(made.second, offset);
    return made;
}

HOP_INLINE __m256i eight_bytes(const uint8_t* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}

// Looks up by the low four bits of each lane.
HOP_INLINE __m256 looked_up(const Table& t, __m256i at) {
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(t.first, at), _mm256_permutevar8x32_ps(t.second, at),
                            _mm256_castsi256_ps(_mm256_slli_epi32(at, 28)));
}

HOP_INLINE void look_up(const Table& t, const uint8_t* low, Lanes& a, Lanes& b) {
    const __m256i first = eight_bytes(low), second = eight_bytes(low + 8);
    a = {looked_up(t, first), looked_up(t, second)};
    b = {looked_up(t, _mm256_srli_epi32(first, 4)), looked_up(t, _mm256_srli_epi32(second, 4))};
}

// The 4-bit fields of 32 bits, one per lane of eight.
HOP_INLINE __m256i fields_of_four(const uint8_t* p) {
    int32_t word;
    std::memcpy(&word, p, 4);
    return _mm256_srlv_epi32(_mm256_set1_epi32(word), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
}
HOP_INLINE void look_up_pairs(const Table& first, const Table& second, const uint8_t* codes, Lanes& a, Lanes& b) {
    const __m256i low = fields_of_four(codes), high = fields_of_four(codes + 4);
    a = {looked_up(first, low), looked_up(first, high)}, b = {looked_up(second, low), looked_up(second, high)};
}

template <int Bits>
struct Decoder {
    static constexpr bool kScales = false;
    __m256i shifts, half;  // subtracted from a signed code after flipping its highest bit

    explicit Decoder(bool is_signed)
        : shifts(_mm256_slli_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), Bits == 6 ? 2 : 1)),
          half(_mm256_set1_epi32(is_signed ? 1 << (Bits - 1) : 0)) {}

    HOP_INLINED void operator()(const uint8_t* codes, const uint8_t* high, Lanes& a, Lanes& b) const {
        if constexpr (Bits == 8) {
            a = {signed_bytes(codes), signed_bytes(codes + 8)};
            b = {signed_bytes(codes + 16), signed_bytes(codes + 24)};
            return;
        }
        uint32_t word[2];  // the high bits of codes 2 j and 2 j + 1, for 8 lanes each
        std::memcpy(word, high, Bits == 6 ? 8 : 4);
        if (Bits != 6) word[1] = word[0] >> 16;
        decode(Bits == 3 ? fields_of_four(codes) : eight_bytes(codes), word[0], a.lo, b.lo);
        decode(Bits == 3 ? fields_of_four(codes + 4) : eight_bytes(codes + 8), word[1], a.hi, b.hi);
    }

private:
    static HOP_INLINED inline __m256 signed_bytes(const uint8_t* p) {
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
    }
    HOP_INLINED void decode(__m256i bytes, uint32_t word, __m256& even, __m256& odd) const {
        constexpr int width = Bits == 6 ? 2 : 1, low_bits = Bits == 3 ? 2 : 4;
        const __m256i low = _mm256_set1_epi32((1 << low_bits) - 1), field = _mm256_set1_epi32(((1 << width) - 1) << low_bits);
        const __m256i fields = _mm256_srlv_epi32(_mm256_set1_epi32(static_cast<int>(word)), shifts);
        const __m256i of_even = _mm256_and_si256(_mm256_slli_epi32(fields, low_bits), field);
        const __m256i of_odd = _mm256_and_si256(_mm256_slli_epi32(fields, low_bits - width), field);
        even = number(_mm256_or_si256(_mm256_and_si256(bytes, low), of_even));
        odd = number(_mm256_or_si256(_mm256_and_si256(_mm256_srli_epi32(bytes, low_bits), low), of_odd));
    }
    HOP_INLINED __m256 number(__m256i code) const {
        return _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_xor_si256(code, half), half));
    }
};

HOP_INLINE void from_halves(const uint16_t* p, int64_t count, float* to) {
    int64_t i = 0;
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i))));
    for (; i < count; ++i) to[i] = _cvtsh_ss(p[i]);
}

HOP_INLINE void apart(const float* p, float* to) {
    for (int half = 0; half < 2; ++half) {
        const __m256 first = _mm256_loadu_ps(p + 16 * half), second = _mm256_loadu_ps(p + 16 * half + 8);
        const auto joined = [](__m256 x) { return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(x), 0xd8)); };
        _mm256_storeu_ps(to + 8 * half, joined(_mm256_shuffle_ps(first, second, 0x88)));
        _mm256_storeu_ps(to + 16 + 8 * half, joined(_mm256_shuffle_ps(first, second, 0xdd)));
    }
}
