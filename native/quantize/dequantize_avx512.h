// Hand-written loops of dequantize_decode.h, 64 codes at a time. Included in a namespace (isa.h).
//
// Values are in four vectors of float32: for bfloat16, even and odd elements separately, as each pair becomes one lane
// of words; otherwise in memory order. Few-bit floats are bfloat16 numbers, whose bytes are looked up.

struct Numbers {
    __m512 v[4];
};

// Loads 64 codes of 8, 4 or 2 bits, one per byte.
HOP_INLINE __m512i load_codes(const uint8_t* p, int32_t bits) {
    if (bits == 8) return _mm512_loadu_si512(p);
    if (bits == 4) {
        const __m512i w = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
        return _mm512_and_si512(_mm512_or_si512(w, _mm512_slli_epi16(w, 4)), _mm512_set1_epi8(15));
    }
    const __m512i d = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m512i low = _mm512_or_si512(d, _mm512_slli_epi32(d, 6)), high = _mm512_slli_epi32(low, 12);
    return _mm512_and_si512(_mm512_or_si512(low, high), _mm512_set1_epi8(3));
}

// Converts words, the first 32 in a and the others in b, to integers in lanes.
template <class T>
HOP_INLINE void lanes_of(__m512i a, __m512i b, __m512i n[4]) {
    if (T::infinity == 0x7f80) {
        n[0] = _mm512_srai_epi32(_mm512_slli_epi32(a, 16), 16);
        n[1] = _mm512_srai_epi32(a, 16);
        n[2] = _mm512_srai_epi32(_mm512_slli_epi32(b, 16), 16);
        n[3] = _mm512_srai_epi32(b, 16);
    } else {
        n[0] = _mm512_cvtepi16_epi32(_mm512_castsi512_si256(a));
        n[1] = _mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64(a, 1));
        n[2] = _mm512_cvtepi16_epi32(_mm512_castsi512_si256(b));
        n[3] = _mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64(b, 1));
    }
}

struct IntegerNumbers {
    int32_t zero;
    uint32_t sign;
    template <class T>
    HOP_MEMBER void of(__m512i codes, Numbers& f) const {
        const __m512i flip = _mm512_set1_epi16(int16_t(sign)), less = _mm512_set1_epi16(int16_t(int32_t(sign) + zero));
        const __m512i a = _mm512_cvtepu8_epi16(_mm512_castsi512_si256(codes));
        const __m512i b = _mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64(codes, 1));
        __m512i n[4];
        lanes_of<T>(_mm512_sub_epi16(_mm512_xor_si512(a, flip), less),
                    _mm512_sub_epi16(_mm512_xor_si512(b, flip), less), n);
        for (int k = 0; k < 4; ++k) f.v[k] = _mm512_cvtepi32_ps(n[k]);
    }
};

// The bytes of bfloat16 numbers, indexed by codes without the sign.
struct FloatNumbers {
    __m512i low[2], high[2];
    uint32_t half;  // the sign bit

    FloatNumbers(const hop_quantizer& q) : half(1u << (q.bits - 1)) {
        const FloatFormat f = float_format(q);
        alignas(64) uint8_t bytes[2][128];
        for (uint32_t code = 0; code < 128; ++code) {
            const uint32_t bits = bits_of(decode_float(code & (half - 1), f));
            bytes[0][code] = uint8_t(bits >> 16);
            bytes[1][code] = uint8_t(bits >> 24);
        }
        for (int k = 0; k < 2; ++k) {
            low[k] = _mm512_load_si512(bytes[0] + 64 * k);
            high[k] = _mm512_load_si512(bytes[1] + 64 * k);
        }
    }
    template <class T>
    HOP_MEMBER void of(__m512i codes, Numbers& f) const {
        const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);  // unpacking works within 16 bytes
        const __m512i c = _mm512_permutexvar_epi64(order, codes);
        const __m512i bottom = _mm512_permutex2var_epi8(low[0], c, low[1]);
        const __m512i magnitude = _mm512_permutex2var_epi8(high[0], c, high[1]);
        const __m512i sign =
            _mm512_sll_epi16(_mm512_and_si512(c, _mm512_set1_epi8(char(half))), _mm_cvtsi32_si128(shift()));
        const __m512i top = _mm512_or_si512(magnitude, sign);
        const __m512i a = _mm512_unpacklo_epi8(bottom, top), b = _mm512_unpackhi_epi8(bottom, top);
        if (T::infinity == 0x7f80) {
            const __m512i odd = _mm512_set1_epi32(int32_t(0xffff0000));
            f.v[0] = _mm512_castsi512_ps(_mm512_slli_epi32(a, 16));
            f.v[1] = _mm512_castsi512_ps(_mm512_and_si512(a, odd));
            f.v[2] = _mm512_castsi512_ps(_mm512_slli_epi32(b, 16));
            f.v[3] = _mm512_castsi512_ps(_mm512_and_si512(b, odd));
        } else {
            __m512i n[4];
            lanes_of<T>(a, b, n);
            for (int k = 0; k < 4; ++k) f.v[k] = _mm512_castsi512_ps(_mm512_slli_epi32(n[k], 16));
        }
    }
    HOP_MEMBER int shift() const { return half == 128 ? 0 : half == 8 ? 4 : __builtin_clz(half) - 24; }
};

template <bool few>
struct BookNumbers {
    const float* numbers;
    template <class T>
    HOP_MEMBER void of(__m512i codes, Numbers& f) const {
        __m512i n[4];
        lanes_of<T>(_mm512_cvtepu8_epi16(_mm512_castsi512_si256(codes)),
                    _mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64(codes, 1)), n);
        const __m512 table = _mm512_loadu_ps(numbers);
        for (int k = 0; k < 4; ++k) {
            f.v[k] = few ? _mm512_permutexvar_ps(n[k], table) : _mm512_i32gather_ps(n[k], numbers, 4);
        }
    }
};

// Codebooks of up to 256 values.
struct BookBytes {
    const ByteTables tables;
    explicit BookBytes(const uint8_t* bytes) : tables(bytes) {}

    // The order of codes that ByteTables requires.
    template <class T>
    static __m512i order() {
        alignas(64) static constexpr struct Order {
            uint8_t at[64];
            constexpr Order() : at() {
                for (int p = 0; p < 64; ++p) {
                    const int k = p % 16 / 4, lane = p / 16 * 4 + p % 4;
                    at[p] = uint8_t(T::infinity == 0x7f80 ? k / 2 * 32 + lane * 2 + k % 2 : k * 16 + lane);
                }
            }
        } order;
        return _mm512_load_si512(order.at);
    }

    template <class T>
    HOP_MEMBER void of(__m512i codes, Numbers& f) const {
        tables.of(_mm512_permutexvar_epi8(order<T>(), codes), f.v);
    }
};

// Rounds to bfloat16 in the upper halves. NaNs come from the hardware, and stay NaN when rounded.
HOP_INLINE __m512i rounded(__m512 x) {
    const __m512i b = _mm512_castps_si512(x), up = _mm512_add_epi32(b, _mm512_set1_epi32(0x7fff));
    return _mm512_mask_add_epi32(up, _mm512_test_epi32_mask(b, _mm512_set1_epi32(0x10000)), up, _mm512_set1_epi32(1));
}

HOP_INLINE void store(const Numbers& f, uint32_t* out, F32) {
    for (int k = 0; k < 4; ++k) _mm512_storeu_ps(out + 16 * k, f.v[k]);
}

HOP_INLINE void store(const Numbers& f, uint16_t* out, BF16) {
    const __m512i odd = _mm512_set1_epi32(int32_t(0xffff0000));
    for (int k = 0; k < 2; ++k) {
        const __m512i low = _mm512_srli_epi32(rounded(f.v[2 * k]), 16), high = rounded(f.v[2 * k + 1]);
        _mm512_storeu_si512(out + 32 * k, _mm512_ternarylogic_epi32(odd, high, low, 0xca));
    }
}

HOP_INLINE void store(const Numbers& f, uint16_t* out, F16) {
    for (int k = 0; k < 4; ++k) {
        const __m256i h = _mm512_cvtps_ph(f.v[k], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 16 * k), h);
    }
}

// The value of each element's block: for blocks of 16 or 32, or for one block if size is 0.
template <class T, int size>
HOP_INLINE __m512 of_block(const float* by, int k) {
    constexpr bool interleaved = T::infinity == 0x7f80;
    const __m512 first = _mm512_set1_ps(by[size == 32 ? k / 2 : size == 16 ? (interleaved ? k / 2 * 2 : k) : 0]);
    return size == 16 && interleaved ? _mm512_mask_mov_ps(first, 0xff00, _mm512_set1_ps(by[k / 2 * 2 + 1])) : first;
}

// The factor of each block, and the value subtracted before, or nullptr.
struct Steps {
    const float *by, *zero;
};

// Decodes whole groups of 64 codes.
template <class T, int size, bool affine, class Decode>
static HOP_ALONE void decode_whole_64(const uint8_t* codes, int64_t n, int32_t bits, Steps steps, const Decode& given, typename T::Word* out) {
    const Decode decode = given;
    for (int64_t i = 0, block = 0; i + 64 <= n; i += 64, codes += 8 * bits, block += size ? 64 / (size ? size : 1) : 0) {
        Numbers f;
        decode.template of<T>(load_codes(codes, bits), f);
        for (int k = 0; k < 4; ++k) {
            if (affine) f.v[k] = _mm512_sub_ps(f.v[k], of_block<T, size>(steps.zero + block, k));
            f.v[k] = _mm512_mul_ps(f.v[k], of_block<T, size>(steps.by + block, k));
        }
        store(f, out + i, T{});
    }
}

template <class T, int size, bool affine, class Decode>
HOP_INLINE void decode_64s(const uint8_t* codes, int64_t n, int32_t bits, Steps steps, const Decode& decode, typename T::Word* out) {
    decode_whole_64<T, size, affine>(codes, n, bits, steps, decode, out);
    const int64_t i = n / 64 * 64;
    if (i == n) return;
    uint8_t rest[64] = {};
    typename T::Word made[64];
    __builtin_memcpy(rest, codes + i * bits / 8, size_t(((n - i) * bits + 7) / 8));
    if (size) steps.by += i / (size ? size : 1), steps.zero += i / (size ? size : 1);
    decode_whole_64<T, size, affine>(rest, 64, bits, steps, decode, made);
    __builtin_memcpy(out + i, made, size_t(n - i) * sizeof(made[0]));
}

template <class T, bool affine, class Decode>
static HOP_ALONE bool decode_blocks(const uint8_t* codes, int64_t n, int64_t size, int32_t bits, Steps steps, const Decode& decode,
                                    typename T::Word* out) {
    if (size == 16) {
        decode_64s<T, 16, affine>(codes, n, bits, steps, decode, out);
    } else if (size == 32) {
        decode_64s<T, 32, affine>(codes, n, bits, steps, decode, out);
    } else {
        if ((size * bits % 8 != 0 && size < n) || size < 24) return false;
        for (int64_t at = 0; at < n; at += size, ++steps.by, ++steps.zero)
            decode_64s<T, 0, affine>(codes + at * bits / 8, least(size, n - at), bits, steps, decode, out + at);
    }
    return true;
}

// Decodes a row of blocks; returns false if the plain loops must do it.
template <class T>
static bool decode_quickly(const DequantizeCall& c, const uint8_t* zeros, const uint8_t* codes, int64_t n,
                           const float* by, typename T::Word* out) {
    const hop_quantizer& q = c.q;
    if (q.bits == 1) return false;
    const int32_t bits = 8 / codes_per_byte(q);
    const int64_t size = c.blocks.tile_cols;
    float zero[kColumns / 16 + 16];
    const Steps steps{by, zero};
    if (q.format == HOP_FLOAT) return decode_blocks<T, false>(codes, n, size, bits, steps, FloatNumbers(q), out);
    if (q.format == HOP_CODEBOOK) {
        const bool few = q.size <= 16 && q.bits <= 4;
        if (few) return decode_blocks<T, false>(codes, n, size, bits, steps, BookNumbers<true>{q.numbers}, out);
        if (q.tables) return decode_blocks<T, false>(codes, n, size, bits, steps, BookBytes(q.tables), out);
        return decode_blocks<T, false>(codes, n, size, bits, steps, BookNumbers<false>{q.numbers}, out);
    }
    const IntegerNumbers integers{zeros ? 0 : q.zero, sign_of(q)};
    if (!zeros) return decode_blocks<T, false>(codes, n, size, bits, steps, integers, out);
    if (size < 16) return false;
    const int64_t blocks = divide_up(n, size);
    for (int64_t i = 0; i < blocks + 4; ++i) {  // loads may read a little past the row's blocks
        const uint8_t code = i < blocks ? zeros[i] : 0;
        zero[i] = float(q.low < 0 ? int32_t(int8_t(code)) : int32_t(code));
    }
    return decode_blocks<T, true>(codes, n, size, bits, steps, integers, out);
}
