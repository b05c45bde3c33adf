// Converts codes of weights to unsigned bytes, and multiplies them by int8 codes, with AVX-512 VNNI. Included in a
// namespace (isa.h), after the lanes.

using Bytes = __m512i;  // 64 bytes, 16 of each of four chunks
using Ints = __m512i;   // 16 int32
constexpr int kIntegerFew = 4, kIntegerRows = 8;  // rows of x in a product from registers, and from a strip

struct Block {
    Bytes first, second;
};

HOP_INLINE Bytes load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
HOP_INLINE void store_bytes(uint8_t* p, Bytes x) { _mm512_storeu_si512(p, x); }
HOP_INLINE Ints load_ints(const int32_t* p) { return _mm512_loadu_si512(p); }
HOP_INLINE void store_ints(int32_t* p, Ints x) { _mm512_storeu_si512(p, x); }
HOP_INLINE Ints all_ints(int32_t x) { return _mm512_set1_epi32(x); }
HOP_INLINE Ints plus_ints(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
HOP_INLINE Lanes to_floats(Ints x) { return _mm512_cvtepi32_ps(x); }
HOP_INLINE Lanes plus(Lanes a, Lanes b) { return _mm512_add_ps(a, b); }

// For each 128 bits of the four e, two at a time: the sums of e[j], for chunks 4 j to 4 j + 3, in chunk order.
HOP_INLINE Ints sums_of_chunks(const Ints (&e)[4]) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const Ints low = _mm512_add_epi32(_mm512_unpacklo_epi32(e[0], e[1]), _mm512_unpackhi_epi32(e[0], e[1]));
    const Ints high = _mm512_add_epi32(_mm512_unpacklo_epi32(e[2], e[3]), _mm512_unpackhi_epi32(e[2], e[3]));
    const Ints both = _mm512_add_epi32(_mm512_unpacklo_epi64(low, high), _mm512_unpackhi_epi64(low, high));
    return _mm512_permutexvar_epi32(order, both);
}

// The same per half chunk, for two e.
HOP_INLINE Ints sums_of_halves(const Ints (&e)[2]) {
    const __m512i order = _mm512_setr_epi32(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    const __m512 a = _mm512_castsi512_ps(e[0]), b = _mm512_castsi512_ps(e[1]);
    const Ints even = _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0x88)), odd = _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0xdd));
    return _mm512_permutexvar_epi32(order, _mm512_add_epi32(even, odd));
}

// Transposes 16 lines of 64 bytes, `stride` bytes apart, in 4-byte units.
static HOP_ALONE inline void turn(const void* from, int64_t stride, void* to) {
    __m512i a[16], b[16];
    HOP_UNROLL
    for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(static_cast<const char*>(from) + i * stride);
    HOP_UNROLL
    for (int i = 0; i < 16; i += 2)
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]), b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    HOP_UNROLL
    for (int i = 0; i < 16; i += 4) {  // a[i + j]: word j of each 128 bits, of lines i to i + 3
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]), a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]), a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    HOP_UNROLL
    for (int j = 0; j < 4; ++j) {
        const __m512i low = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x44), high = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xee);
        const __m512i lower = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x44), upper = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xee);
        b[j] = _mm512_shuffle_i32x4(low, lower, 0x88), b[4 + j] = _mm512_shuffle_i32x4(low, lower, 0xdd);
        b[8 + j] = _mm512_shuffle_i32x4(high, upper, 0x88), b[12 + j] = _mm512_shuffle_i32x4(high, upper, 0xdd);
    }
    HOP_UNROLL
    for (int i = 0; i < 16; ++i) _mm512_storeu_si512(static_cast<char*>(to) + i * 64, b[i]);
}

class Codes {
public:
    HOP_ALONE explicit Codes(const hop_group_product& p) : zero_(zero_of(p)) {
        const int bits = p.bits;
        alignas(64) uint8_t table[64], place[64], first[64], second[64];
        for (int i = 0; i < 64; ++i) {
            const int chunk = i / 16, at = i % 16, element = element_of(bits, at, 0);
            table[i] = static_cast<uint8_t>(number_of(p, at % (1 << (bits == 2 ? 2 : 4))) + zero_);
            place[i] = static_cast<uint8_t>(4 * chunk + element / 8);
            first[i] = static_cast<uint8_t>(1 << element % 8), second[i] = static_cast<uint8_t>(1 << element_of(bits, at, 1) % 8);
        }
        table_ = load_bytes(table), place_ = load_bytes(place), first_ = load_bytes(first), second_ = load_bytes(second);
        turned_ = _mm512_set1_epi8(static_cast<char>(!p.is_signed ? 0 : bits == 6 ? 0x0a : 0xff));
    }
    int zero() const { return zero_; }

    template <int Bits>
    HOP_INLINED Block block(const uint8_t* codes, const uint8_t* high) const {
        const __m512i low = _mm512_set1_epi8(15), pair = _mm512_set1_epi8(3);
        if constexpr (Bits == 8) {
            const __m512i even = _mm512_setr_epi64(0, 2, 4, 6, 8, 10, 12, 14), odd = _mm512_setr_epi64(1, 3, 5, 7, 9, 11, 13, 15);
            const __m512i a = load_bytes(codes), b = load_bytes(codes + 64), half = _mm512_set1_epi8(-128);
            return {_mm512_xor_si512(_mm512_permutex2var_epi64(a, even, b), half),
                    _mm512_xor_si512(_mm512_permutex2var_epi64(a, odd, b), half)};
        } else if constexpr (Bits < 4) {
            const __m512i order = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
            const __m512i shifts = _mm512_set1_epi64(int64_t(2) << 32);
            const __m512i words = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
            const __m512i fields = _mm512_srlv_epi32(_mm512_permutexvar_epi32(order, words), shifts);
            const Block b{_mm512_and_si512(fields, pair), _mm512_and_si512(_mm512_srli_epi32(fields, 4), pair)};
            if constexpr (Bits == 3) return with_bits<Bits>(b, high);
            return {_mm512_shuffle_epi8(table_, b.first), _mm512_shuffle_epi8(table_, b.second)};
        } else {
            const __m512i bytes = load_bytes(codes);
            const Block b{_mm512_and_si512(bytes, low), _mm512_and_si512(_mm512_srli_epi16(bytes, 4), low)};
            if constexpr (Bits == 4) return {_mm512_shuffle_epi8(table_, b.first), _mm512_shuffle_epi8(table_, b.second)};
            else if constexpr (Bits == 5) return with_bits<Bits>(b, high);
            // The high bits of the first and second codes, in the lowest four bits of each byte.
            const __m512i words = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(high)));
            const __m512i upper = _mm512_set1_epi16(-256), field = _mm512_set1_epi8(0x30);
            __m512i fields = _mm512_ternarylogic_epi32(words, _mm512_slli_epi16(words, 4), upper, 0xf8);  // a | (b & c)
            fields = _mm512_xor_si512(fields, turned_);
            return {_mm512_ternarylogic_epi32(b.first, _mm512_slli_epi16(fields, 4), field, 0xf8),
                    _mm512_ternarylogic_epi32(b.second, _mm512_slli_epi16(fields, 2), field, 0xf8)};
        }
    }

    // Adds the products of a block to the sum.
    HOP_INLINED Ints dot(Ints sum, const Block& w, const int8_t* x) const {
        sum = _mm512_dpbusd_epi32(sum, w.first, _mm512_loadu_si512(x));
        return _mm512_dpbusd_epi32(sum, w.second, _mm512_loadu_si512(x + 64));
    }
    // Adds the products of a unit of 16 rows of the weight, 2 * Quads times four codes at `at` of a strip, and M rows of x.
    template <int Quads, int M>
    HOP_INLINED void unit(const uint8_t* w, const int8_t* const (&x)[M], int64_t at, Ints (&sums)[M]) const {
        HOP_UNROLL
        for (int q = 0; q < 2 * Quads; ++q) {
            const int place = place_of_quad<Quads>(q);
            const Bytes own = load_bytes(w + (at + place) * kColumns);
            HOP_UNROLL
            for (int i = 0; i < M; ++i) {
                int32_t four;
                std::memcpy(&four, x[i] + at + place, 4);
                sums[i] = _mm512_dpbusd_epi32(sums[i], own, _mm512_set1_epi32(four));
            }
        }
    }

private:
    template <int Bits>
    HOP_INLINED Block with_bits(const Block& b, const uint8_t* high) const {
        const __m128i own = _mm_loadu_si128(reinterpret_cast<const __m128i*>(high));
        const __m512i bits = _mm512_shuffle_epi8(_mm512_xor_si512(_mm512_broadcast_i32x4(own), turned_), place_);
        const __m512i more = _mm512_set1_epi8(Bits == 5 ? 16 : 4);
        return {_mm512_mask_add_epi8(b.first, _mm512_test_epi8_mask(bits, first_), b.first, more),
                _mm512_mask_add_epi8(b.second, _mm512_test_epi8_mask(bits, second_), b.second, more)};
    }
    int zero_;
    __m512i table_, place_, first_, second_, turned_;
};

// Permutes 128 codes of x to the order of a weight's codes.
class Order {
public:
    explicit Order(int bits) {
        alignas(64) uint8_t first[64], second[64];
        for (int i = 0; i < 64; ++i) {
            first[i] = static_cast<uint8_t>(i / 16 * 32 + element_of(bits, i % 16, 0));
            second[i] = static_cast<uint8_t>(i / 16 * 32 + element_of(bits, i % 16, 1));
        }
        first_ = load_bytes(first), second_ = load_bytes(second);
    }
    HOP_INLINED void operator()(const int8_t* from, int8_t* to) const {
        const __m512i a = _mm512_loadu_si512(from), b = _mm512_loadu_si512(from + 64);
        _mm512_storeu_si512(to, _mm512_permutex2var_epi8(a, first_, b));
        _mm512_storeu_si512(to + 64, _mm512_permutex2var_epi8(a, second_, b));
    }

private:
    __m512i first_, second_;
};
