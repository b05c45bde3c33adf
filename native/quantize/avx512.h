// Hand-written loops of encode.h and stats.h, 64 elements at a time. Included in a namespace (isa.h).
//
// Elements are in four vectors of float32, in an order that is cheap to produce: for bfloat16, even and odd elements
// separately. Codes are the low bytes of four vectors; one permutation restores their order.

// Whether even and odd elements are in separate vectors.
template <class T>
constexpr bool kPairs = sizeof(typename T::Word) == 2 && T::infinity == 0x7f80;

struct Four {
    __m512 v[4];
    __m512i words[2];  // the raw bfloat16 words
};

// The four bytes of each lane, in memory order.
template <class T>
HOP_INLINE __m512i byte_order() {
    alignas(64) static constexpr struct Order {
        uint8_t at[64];
        constexpr Order() : at() {
            for (int p = 0; p < 64; ++p) {
                const int half = p / 32, within = p % 32;
                at[p] = uint8_t(kPairs<T> ? within / 2 * 4 + half * 2 + within % 2
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
        f.words[k] = _mm512_loadu_si512(x + 32 * k);
        f.v[2 * k] = _mm512_castsi512_ps(_mm512_slli_epi32(f.words[k], 16));
        f.v[2 * k + 1] = _mm512_castsi512_ps(_mm512_and_si512(f.words[k], high));
    }
}

HOP_INLINE void load(const uint16_t* x, Four& f, F16) {
    for (int k = 0; k < 4; ++k) {
        f.v[k] = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + 16 * k)));
    }
}

// Loads each element's block value: for blocks of 16 or 32, or one block for all 64.
template <int size>
HOP_INLINE void spread(const float* by, Four& f, bool interleaved) {
    for (int k = 0; k < 4; ++k) {
        if (size >= 64) {
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

// The low bytes of four vectors, in memory order.
template <class T>
HOP_INLINE __m512i bytes_of(const __m512i n[4]) {
    const __m512i byte = _mm512_set1_epi32(0xff), word = _mm512_set1_epi32(0xffff);
    const __m512i a = select(byte, n[0], _mm512_slli_epi32(n[1], 8)),
                  b = select(byte, n[2], _mm512_slli_epi32(n[3], 8));
    return _mm512_permutexvar_epi8(byte_order<T>(), select(word, a, _mm512_slli_epi32(b, 16)));
}

// Stores 64 codes, several per byte if they have 4 or 2 bits.
HOP_INLINE void store_codes(__m512i codes, int32_t bits, uint8_t* out) {
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

// Position in blocks of `size` elements; 64 means `blocks` times 64.
template <int size>
struct At {
    int64_t block, left, blocks;

    HOP_MEMBER void next() {
        if (size < 64) {
            block += 64 / size;
        } else if (--left == 0) {
            left = blocks, ++block;
        }
    }
};

// Stores codes(64 elements, index of their first block) for each whole 64 elements; returns the position after them.
template <class T, int size, class Codes>
static HOP_ALONE At<size> each_whole_64(const typename T::Word* x, int64_t n, At<size> at, int32_t bits, uint8_t* out, const Codes& given) {
    const Codes codes = given;
    Four f;
    for (int64_t i = 0; i + 64 <= n; i += 64, out += 8 * bits) {
        load(x + i, f, T{});
        for (size_t k = 0; k < sizeof(typename T::Word); ++k)
            _mm_prefetch(reinterpret_cast<const char*>(x + i + kColumns) + 64 * k, _MM_HINT_T0);
        store_codes(codes(f, at.block), bits, out);
        at.next();
    }
    return at;
}

// The same for all elements, including the tail.
template <class T, int size, class Codes>
HOP_INLINE void each_64(const typename T::Word* x, int64_t n, int64_t blocks, int32_t bits, uint8_t* out, const Codes& codes) {
    const At<size> at = each_whole_64<T, size>(x, n, At<size>{0, blocks, blocks}, bits, out, codes);
    const int64_t i = n / 64 * 64;
    if (i == n) return;
    typename T::Word rest[64] = {};
    uint8_t made[64];
    __builtin_memcpy(rest, x + i, size_t(n - i) * sizeof(rest[0]));
    each_whole_64<T, size>(rest, 64, at, bits, made, codes);
    __builtin_memcpy(out + i * bits / 8, made, size_t(((n - i) * bits + 7) / 8));
    if (bits < 8 && (n - i) * bits % 8) out[n * bits / 8] &= uint8_t((1 << (n - i) * bits % 8) - 1);
}
