// Converts codes of weights to unsigned bytes, and multiplies them by int8 codes, with AVX2; at level avx_vnni with dot
// products of four bytes. Included in a namespace (isa.h), after the lanes.

struct Bytes {  // 64 bytes, 16 of each of four chunks
    __m256i lo, hi;
};
struct Ints {  // 16 int32
    __m256i lo, hi;
};
constexpr int kIntegerFew = 2, kIntegerRows = 6;  // rows of x in a product from registers, and from a strip

struct Block {
    Bytes first, second;
};

HOP_INLINE __m256i load_half(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
HOP_INLINE void store_half(void* p, __m256i x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
HOP_INLINE Bytes load_bytes(const uint8_t* p) { return {load_half(p), load_half(p + 32)}; }
HOP_INLINE void store_bytes(uint8_t* p, Bytes x) { store_half(p, x.lo), store_half(p + 32, x.hi); }
HOP_INLINE Ints load_ints(const int32_t* p) { return {load_half(p), load_half(p + 8)}; }
HOP_INLINE void store_ints(int32_t* p, Ints x) { store_half(p, x.lo), store_half(p + 8, x.hi); }
HOP_INLINE Ints all_ints(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
HOP_INLINE Ints plus_ints(Ints a, Ints b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
HOP_INLINE Lanes to_floats(Ints x) { return {_mm256_cvtepi32_ps(x.lo), _mm256_cvtepi32_ps(x.hi)}; }
HOP_INLINE Lanes plus(Lanes a, Lanes b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }

// For each 128 bits of the four e: the sums of e[j], for chunks 4 j to 4 j + 3, in chunk order.
HOP_INLINE Ints sums_of_chunks(const Ints (&e)[4]) {
    const auto added = [](__m256i a, __m256i b, __m256i c, __m256i d) {
        const __m256i low = _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
        const __m256i high = _mm256_add_epi32(_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
        return _mm256_add_epi32(_mm256_unpacklo_epi64(low, high), _mm256_unpackhi_epi64(low, high));
    };
    const __m256i a = added(e[0].lo, e[1].lo, e[2].lo, e[3].lo), b = added(e[0].hi, e[1].hi, e[2].hi, e[3].hi);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    return {_mm256_permutevar8x32_epi32(_mm256_unpacklo_epi32(a, b), order),
            _mm256_permutevar8x32_epi32(_mm256_unpackhi_epi32(a, b), order)};
}

// The same per half chunk, for two e.
HOP_INLINE Ints sums_of_halves(const Ints (&e)[2]) {
    const auto added = [](__m256i a, __m256i b) {
        const __m256 x = _mm256_castsi256_ps(a), y = _mm256_castsi256_ps(b);
        return _mm256_add_epi32(_mm256_castps_si256(_mm256_shuffle_ps(x, y, 0x88)), _mm256_castps_si256(_mm256_shuffle_ps(x, y, 0xdd)));
    };
    const __m256i a = added(e[0].lo, e[1].lo), b = added(e[0].hi, e[1].hi);
    return {_mm256_permute4x64_epi64(_mm256_unpacklo_epi64(a, b), 0xd8), _mm256_permute4x64_epi64(_mm256_unpackhi_epi64(a, b), 0xd8)};
}

// Transposes 16 lines of 64 bytes, `stride` bytes apart, in 4-byte units.
static HOP_ALONE inline void turn(const void* from, int64_t stride, void* to) {
    for (int row = 0; row < 16; row += 8)
        for (int column = 0; column < 16; column += 8) {
            __m256i a[8], b[8];
            for (int i = 0; i < 8; ++i) a[i] = load_half(static_cast<const char*>(from) + (row + i) * stride + column * 4);
            for (int i = 0; i < 8; i += 2)
                b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]), b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
            for (int i = 0; i < 8; i += 4) {
                a[i] = _mm256_unpacklo_epi64(b[i], b[i + 2]), a[i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 2]);
                a[i + 2] = _mm256_unpacklo_epi64(b[i + 1], b[i + 3]), a[i + 3] = _mm256_unpackhi_epi64(b[i + 1], b[i + 3]);
            }
            char* at = static_cast<char*>(to) + column * 64 + row * 4;
            for (int j = 0; j < 4; ++j) {
                store_half(at + j * 64, _mm256_permute2x128_si256(a[j], a[4 + j], 0x20));
                store_half(at + (4 + j) * 64, _mm256_permute2x128_si256(a[j], a[4 + j], 0x31));
            }
        }
}

// sum + products of unsigned and signed bytes, with AVX-VNNI, in code compiled for AVX2.
HOP_INLINE __m256i dots_of_bytes(__m256i sum, __m256i w, __m256i x) {
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(w), "x"(x));
    return sum;
}

class Codes {
public:
    HOP_ALONE explicit Codes(const hop_group_product& p) : zero_(zero_of(p)), dots_(level() == Level::avx_vnni) {
        const int bits = p.bits;
        int most = bits == 2 || bits == 4 ? 0 : (1 << bits) - 1;
        alignas(32) uint8_t table[32], place[64], first[32], second[32];
        for (int i = 0; i < 64; ++i) {
            const int element = element_of(bits, i % 16, 0);
            place[i] = static_cast<uint8_t>(4 * (i / 16) + element / 8);
            if (i >= 32) continue;
            const int number = number_of(p, i % 16 % (1 << (bits == 2 ? 2 : 4))) + zero_;
            table[i] = static_cast<uint8_t>(number);
            if ((bits == 2 || bits == 4) && number > most) most = number;
            first[i] = static_cast<uint8_t>(1 << element % 8), second[i] = static_cast<uint8_t>(1 << element_of(bits, i % 16, 1) % 8);
        }
        halves_ = most > 63, words_ = most < 16 || halves_ ? 8 : most < 32 ? 4 : 2;
        table_ = load_half(table), place_ = load_bytes(place), first_ = load_half(first), second_ = load_half(second);
        turned_ = _mm256_set1_epi8(static_cast<char>(!p.is_signed ? 0 : bits == 6 ? 0x0a : 0xff));
    }
    int zero() const { return zero_; }

    template <int Bits>
    HOP_INLINED Block block(const uint8_t* codes, const uint8_t* high) const {
        Block b;
        constexpr int bytes = Bits == 8 ? 64 : Bits < 4 ? 16 : 32, more = Bits == 6 ? 16 : 0;  // for two chunks
        two<Bits>(codes, high, place_.lo, b.first.lo, b.second.lo);
        two<Bits>(codes + bytes, high + more, place_.hi, b.first.hi, b.second.hi);
        return b;
    }

    // Adds the products of a block to the sum.
    HOP_INLINED Ints dot(Ints sum, const Block& w, const int8_t* x) const {
        sum.lo = added(sum.lo, w.first.lo, load_half(x), w.second.lo, load_half(x + 64));
        sum.hi = added(sum.hi, w.first.hi, load_half(x + 32), w.second.hi, load_half(x + 96));
        return sum;
    }
    // Adds the products of a unit of 16 rows of the weight, 2 * Quads times four codes at `at` of a strip, and M rows of x.
    template <int Quads, int M>
    HOP_INLINED void unit(const uint8_t* w, const int8_t* const (&x)[M], int64_t at, Ints (&sums)[M]) const {
        w += at * kColumns;
        if (dots_) return dots<Quads>(w, x, at, sums);
        constexpr int all = 2 * Quads;  // at most 8
        if (halves_) return words<Quads, all, 0>(w, x, at, sums), words<Quads, all, 4>(w, x, at, sums);
        words_ == 8 ? words<Quads, all>(w, x, at, sums) : words_ == 4 ? words<Quads, 4>(w, x, at, sums) : words<Quads, 2>(w, x, at, sums);
    }

private:
    template <int Quads, int M>
    HOP_ALONE static void dots(const uint8_t* w, const int8_t* const (&x)[M], int64_t at, Ints (&sums)[M]) {
        HOP_UNROLL
        for (int q = 0; q < 2 * Quads; ++q) {
            const int place = place_of_quad<Quads>(q);
            const Bytes own = load_bytes(w + place * kColumns);
            HOP_UNROLL
            for (int i = 0; i < M; ++i) {
                const __m256i four = four_codes(x[i] + at + place);
                sums[i] = {dots_of_bytes(sums[i].lo, own.lo, four), dots_of_bytes(sums[i].hi, own.hi, four)};
            }
        }
    }

    // The same without AVX-VNNI: products are added in int16 for Most quads. With a Shift, only the four bits from there
    // on of each byte of the weight count. Inlined functions would share registers, and GCC would move sums to memory.
    template <int Quads, int Most, int Shift = -1, int M>
    HOP_ALONE static void words(const uint8_t* w, const int8_t* const (&x)[M], int64_t at, Ints (&sums)[M]) {
        const __m256i factor = _mm256_set1_epi16(Shift == 4 ? 16 : 1), low = _mm256_set1_epi8(15);
        const auto taken = [&](__m256i a) HOP_INLINED {
            return Shift < 0 ? a : _mm256_and_si256(Shift ? _mm256_srli_epi16(a, Shift) : a, low);
        };
        HOP_UNROLL
        for (int first = 0; first < 2 * Quads; first += Most) {
            __m256i own[M][2];
            each<M>([&](auto i) HOP_INLINED { own[i][0] = own[i][1] = _mm256_setzero_si256(); });
            HOP_UNROLL
            for (int q = first; q < first + Most; ++q) {
                const int place = place_of_quad<Quads>(q);
                const Bytes bytes = load_bytes(w + place * kColumns);
                const __m256i lo = taken(bytes.lo), hi = taken(bytes.hi);
                each<M>([&](auto i) HOP_INLINED {
                    const __m256i four = four_codes(x[i] + at + place);
                    add_words(own[i][0], lo, four), add_words(own[i][1], hi, four);
                });
            }
            each<M>([&](auto i) HOP_INLINED {
                sums[i] = plus_ints(sums[i], {_mm256_madd_epi16(own[i][0], factor), _mm256_madd_epi16(own[i][1], factor)});
            });
        }
    }

    HOP_INLINED static inline __m256i four_codes(const int8_t* x) {
        int32_t four;
        std::memcpy(&four, x, 4);
        return _mm256_set1_epi32(four);
    }

    // sum + products, in the register of the sum: otherwise GCC moves sums to memory.
    HOP_INLINED static inline void add_words(__m256i& sum, __m256i w, __m256i x) {
        __asm__("vpaddw %1, %0, %0" : "+x"(sum) : "x"(_mm256_maddubs_epi16(w, x)));
    }

    HOP_INLINED __m256i added(__m256i sum, __m256i w, __m256i x, __m256i v, __m256i y) const {
        const __m256i one = _mm256_set1_epi16(1);
        const auto products = [&](__m256i a, __m256i b) { return _mm256_add_epi16(_mm256_maddubs_epi16(a, x), _mm256_maddubs_epi16(b, y)); };
        if (dots_) return dots_of_bytes(dots_of_bytes(sum, w, x), v, y);
        if (!halves_) return _mm256_add_epi32(sum, _mm256_madd_epi16(products(w, v), one));
        const __m256i low = _mm256_set1_epi8(15), sixteen = _mm256_set1_epi16(16);
        const auto upper = [&](__m256i a) { return _mm256_and_si256(_mm256_srli_epi16(a, 4), low); };
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(products(_mm256_and_si256(w, low), _mm256_and_si256(v, low)), one));
        return _mm256_add_epi32(sum, _mm256_madd_epi16(products(upper(w), upper(v)), sixteen));
    }

    // Unpacks two chunks.
    template <int Bits>
    HOP_INLINED void two(const uint8_t* codes, const uint8_t* high, __m256i place, __m256i& a, __m256i& b) const {
        const __m256i low = _mm256_set1_epi8(15), pair = _mm256_set1_epi8(3);
        if constexpr (Bits == 8) {
            const __m256i x = load_half(codes), y = load_half(codes + 32), half = _mm256_set1_epi8(-128);
            a = _mm256_xor_si256(_mm256_permute4x64_epi64(_mm256_unpacklo_epi64(x, y), 0xd8), half);
            b = _mm256_xor_si256(_mm256_permute4x64_epi64(_mm256_unpackhi_epi64(x, y), 0xd8), half);
        } else if constexpr (Bits < 4) {
            const __m256i words = _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
            const __m256i spread = _mm256_permutevar8x32_epi32(words, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3));
            const __m256i fields = _mm256_srlv_epi32(spread, _mm256_setr_epi32(0, 2, 0, 2, 0, 2, 0, 2));
            a = _mm256_and_si256(fields, pair), b = _mm256_and_si256(_mm256_srli_epi32(fields, 4), pair);
        } else {
            const __m256i bytes = load_half(codes);
            a = _mm256_and_si256(bytes, low), b = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), low);
        }
        if constexpr (Bits == 2 || Bits == 4) {
            a = _mm256_shuffle_epi8(table_, a), b = _mm256_shuffle_epi8(table_, b);
        } else if constexpr (Bits == 6) {
            const __m256i words = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(high)));
            const __m256i upper = _mm256_and_si256(_mm256_slli_epi16(words, 4), _mm256_set1_epi16(-256));
            const __m256i fields = _mm256_xor_si256(_mm256_or_si256(words, upper), turned_), field = _mm256_set1_epi8(0x30);
            a = _mm256_or_si256(a, _mm256_and_si256(_mm256_slli_epi16(fields, 4), field));
            b = _mm256_or_si256(b, _mm256_and_si256(_mm256_slli_epi16(fields, 2), field));
        } else if constexpr (Bits != 8) {
            const __m256i own = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(high)));
            const __m256i bits = _mm256_shuffle_epi8(_mm256_xor_si256(own, turned_), place), more = _mm256_set1_epi8(Bits == 5 ? 16 : 4);
            const auto set = [&](__m256i bit) { return _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(bits, bit), bit), more); };
            a = _mm256_or_si256(a, set(first_)), b = _mm256_or_si256(b, set(second_));
        }
    }

    int zero_;
    bool dots_;
    // Bytes above 63 are multiplied in halves of four bits. The sum of two products of a byte and int8 fits in int16
    // words_ times.
    bool halves_;
    int words_;
    __m256i table_, first_, second_, turned_;
    Bytes place_;
};

using Order = PlainOrder;
