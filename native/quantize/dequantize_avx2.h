// Hand-written loops of dequantize_decode.h, 32 codes at a time, to float32. Included in a namespace (isa.h).

struct Numbers {
    __m256 v[4];
};

// Codebooks of up to 256 values: looks up one by one.
struct BookNumbers {
    static constexpr int bits = 8;
    const float* numbers;
    HOP_MEMBER __m128 four(const uint8_t* codes) const {
        const auto* table = reinterpret_cast<const int32_t*>(numbers);
        __m128i v = _mm_cvtsi32_si128(table[codes[0]]);
        v = _mm_insert_epi32(v, table[codes[1]], 1);
        v = _mm_insert_epi32(v, table[codes[2]], 2);
        return _mm_castsi128_ps(_mm_insert_epi32(v, table[codes[3]], 3));
    }
    HOP_MEMBER void of(const uint8_t* codes, Numbers& f) const {
        for (int k = 0; k < 4; ++k)
            f.v[k] = _mm256_insertf128_ps(_mm256_castps128_ps256(four(codes + 8 * k)), four(codes + 8 * k + 4), 1);
    }
};

// Codebooks of 16 values, two codes per byte: looks up the bytes of the floats by permutations.
struct FewNumbers {
    static constexpr int bits = 4;
    __m256i bytes[4];

    explicit FewNumbers(const float* numbers) {
        for (int byte = 0; byte < 4; ++byte) {
            alignas(16) uint8_t own[16];
            for (int i = 0; i < 16; ++i) own[i] = uint8_t(bits_of(numbers[i]) >> (8 * byte));
            bytes[byte] = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(own)));
        }
    }
    HOP_MEMBER void of(const uint8_t* codes, Numbers& f) const {
        const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)), nibble = _mm_set1_epi8(15);
        const __m128i even = _mm_and_si128(x, nibble), odd = _mm_and_si128(_mm_srli_epi16(x, 4), nibble);
        const __m128i first = _mm_unpacklo_epi8(even, odd), second = _mm_unpackhi_epi8(even, odd);
        const __m256i all = _mm256_inserti128_si256(_mm256_castsi128_si256(first), second, 1);
        const __m256i c = _mm256_permutevar8x32_epi32(all, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));  // for unpacking
        __m256i b[4];
        for (int k = 0; k < 4; ++k) b[k] = _mm256_shuffle_epi8(bytes[k], c);
        const __m256i low[2] = {_mm256_unpacklo_epi8(b[0], b[1]), _mm256_unpackhi_epi8(b[0], b[1])};
        const __m256i high[2] = {_mm256_unpacklo_epi8(b[2], b[3]), _mm256_unpackhi_epi8(b[2], b[3])};
        for (int k = 0; k < 2; ++k) {
            f.v[2 * k] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(low[k], high[k]));
            f.v[2 * k + 1] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(low[k], high[k]));
        }
    }
};

// e4m3 and e5m2, which have the bits of float16 except for the exponent.
template <bool e4m3>
struct ByteFloatNumbers {
    static constexpr int bits = 8;
    HOP_MEMBER void of(const uint8_t* codes, Numbers& f) const {
        const __m256 unit = _mm256_set1_ps(256);
        for (int k = 0; k < 2; ++k) {
            const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + 16 * k));
            __m256i words = _mm256_slli_epi16(_mm256_cvtepu8_epi16(x), 8);
            if (e4m3) {
                // The one NaN of each sign would be 1.875 · 2^8: make it a float16 NaN.
                const __m256i largest = _mm256_set1_epi16(0x7f00);
                const __m256i special = _mm256_cmpeq_epi16(_mm256_and_si256(words, largest), largest);
                words = _mm256_and_si256(_mm256_srai_epi16(words, 1), _mm256_set1_epi16(int16_t(0xbf80)));
                words = _mm256_xor_si256(words, _mm256_and_si256(special, _mm256_set1_epi16(0x4180)));
            }
            f.v[2 * k] = _mm256_cvtph_ps(_mm256_castsi256_si128(words));
            f.v[2 * k + 1] = _mm256_cvtph_ps(_mm256_extracti128_si256(words, 1));
            for (int i = 0; e4m3 && i < 2; ++i) f.v[2 * k + i] = _mm256_mul_ps(f.v[2 * k + i], unit);
        }
    }
};

// Decodes blocks of a multiple of 32 elements, or of 16: two in each vector group of 32.
template <class Decode>
static HOP_ALONE void decode_32s(const uint8_t* codes, int64_t n, int64_t size, const float* steps, const Decode& given,
                                 uint32_t* out) {
    const Decode decode = given;
    const int64_t second = size == 16 ? 1 : 0, each = size == 16 ? 32 : size;
    Numbers f;
    for (int64_t at = 0; at < n; at += each, steps += 1 + second) {
        const __m256 step[2] = {_mm256_set1_ps(steps[0]), _mm256_set1_ps(steps[second])};
        const int64_t end = least(at + each, n);
        for (int64_t j = at; j + 32 <= end; j += 32) {
            decode.of(codes + j * Decode::bits / 8, f);
            for (int k = 0; k < 4; ++k)
                _mm256_storeu_ps(reinterpret_cast<float*>(out) + j + 8 * k, _mm256_mul_ps(f.v[k], step[k / 2]));
        }
        if (end % 32 == 0) continue;
        const int64_t j = end / 32 * 32;
        uint8_t rest[32] = {};
        float made[32];
        __builtin_memcpy(rest, codes + j * Decode::bits / 8, size_t(divide_up((end - j) * Decode::bits, 8)));
        decode.of(rest, f);
        for (int k = 0; k < 4; ++k) _mm256_storeu_ps(made + 8 * k, _mm256_mul_ps(f.v[k], step[k / 2]));
        __builtin_memcpy(out + j, made, size_t(end - j) * sizeof(float));
    }
}

// Decodes a row of blocks; returns false if the plain loops must do it.
template <class T>
static bool decode_quickly(const DequantizeCall& c, const uint8_t*, const uint8_t* codes, int64_t n, const float* steps,
                           typename T::Word* out) {
    if constexpr (std::is_same<T, F32>::value) {
        const hop_quantizer& q = c.q;
        const int64_t size = c.blocks.tile_cols >= n ? divide_up(n, 32) * 32 : c.blocks.tile_cols;
        if (size % 32 != 0 && size != 16) return false;
        if (q.format == HOP_CODEBOOK && q.bits == 8) return decode_32s(codes, n, size, steps, BookNumbers{q.numbers}, out), true;
        if (q.format == HOP_CODEBOOK && q.bits == 4) return decode_32s(codes, n, size, steps, FewNumbers(q.numbers), out), true;
        if (q.format == HOP_FLOAT && q.bits == 4) {
            const FloatFormat f = float_format(q);
            float numbers[16];
            for (uint32_t code = 0; code < 16; ++code) numbers[code] = decode_float(code, f);
            return decode_32s(codes, n, size, steps, FewNumbers(numbers), out), true;
        }
        if (q.format == HOP_FLOAT && q.bits == 8 && q.keeps_nan && q.mantissa_bits == 3 && q.bias == 7 && q.largest == 0x7e)
            return decode_32s(codes, n, size, steps, ByteFloatNumbers<true>(), out), true;
        if (q.format == HOP_FLOAT && q.bits == 8 && q.keeps_nan && q.mantissa_bits == 2 && q.bias == 15 && q.largest == 0x7b)
            return decode_32s(codes, n, size, steps, ByteFloatNumbers<false>(), out), true;
    }
    return false;
}
