// Vectors of 512 bits, for float products. Included in a namespace (isa.h).
struct V {
    using Reals = __m512;
    using Words = __m512i;  // 16 times 32 bits, or 64 bytes
    using Ints = int32_t __attribute__((vector_size(sizeof(Words))));
    using Unsigned = uint32_t __attribute__((vector_size(sizeof(Words))));
    static constexpr int kLanes = 16;
    static constexpr int kMost = 12, kBoth = 12;  // rows multiplied at a time (24 accumulators), and by both tiles of a panel
    static constexpr int kFew = 16, kDecoded = 8;  // rows for which codes are decoded in registers, and rows at a time

    HOP_INLINED static Reals zero() { return _mm512_setzero_ps(); }
    HOP_INLINED static Reals all(float x) { return _mm512_set1_ps(x); }
    HOP_INLINED static Reals load(const float* p) { return _mm512_loadu_ps(p); }
    HOP_INLINED static void store(float* p, Reals x) { _mm512_storeu_ps(p, x); }
    HOP_INLINED static Reals plus_product(Reals sum, Reals x, Reals y) { return _mm512_fmadd_ps(x, y, sum); }

    HOP_INLINED static Words no_bits() { return _mm512_setzero_si512(); }
    HOP_INLINED static Words each_word(int x) { return _mm512_set1_epi32(x); }
    HOP_INLINED static Words each_byte(int x) { return _mm512_set1_epi8(static_cast<char>(x)); }
    HOP_INLINED static Words words(const void* p) { return _mm512_loadu_si512(p); }
    HOP_INLINED static Words words_of_bytes(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
    HOP_INLINED static Words table(const void* p) { return _mm512_broadcast_i32x4(_mm_loadu_si128(static_cast<const __m128i*>(p))); }
    HOP_INLINED static Words left(Words x, int bits) { return Words(Ints(x) << bits); }
    HOP_INLINED static Words right(Words x, int bits) { return Words(Unsigned(x) >> bits); }
    HOP_INLINED static Words signed_right(Words x, int bits) { return Words(Ints(x) >> bits); }
    HOP_INLINED static Words four_times(Words x) { return _mm512_mullo_epi32(x, each_word(0x01010101)); }  // a byte, in each byte
    HOP_INLINED static Words minus_bytes(Words x, Words y) { return _mm512_sub_epi8(x, y); }
    HOP_INLINED static Words larger_bytes(Words x, Words y) { return _mm512_max_epu8(x, y); }
    HOP_INLINED static Words looked_up(Words table, Words x) { return _mm512_shuffle_epi8(table, x); }
    HOP_INLINED static Reals numbers(Words x) { return _mm512_cvtepi32_ps(x); }
    HOP_INLINED static Reals bits(Words x) { return _mm512_castsi512_ps(x); }
    static bool any_bits(Words x) { return _mm512_test_epi32_mask(x, x) != 0; }
    static bool any_byte_from(Words x, int least) {
        return _mm512_cmpge_epu8_mask(x, each_byte(least)) != 0;
    }
};
