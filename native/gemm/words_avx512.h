// Decodes codes to bfloat16 with AVX-512. Included in a namespace (isa.h), after decode_plainly.h and tiles_avx512.h.

// Each of these classes decodes 64 codes to words: bytes 0 and 2 of each quad (even), and bytes 1 and 3 (odd).

// 4-bit codes, by one table of words. An index has 5 bits, and the fifth may be a bit of another code.
struct NarrowWords {
    static constexpr bool kHalves = true;  // numbers are 2^i and 1.5 · 2^i
    __m512i table;

    explicit NarrowWords(const Decoder& d) {
        uint16_t words[32];
        for (int i = 0; i < 32; ++i) words[i] = static_cast<uint16_t>(d.high[i % 16] << 8 | d.low[i % 16]);
        table = load512(words);
    }
    void operator()(__m512i code, __m512i& even, __m512i& odd) const {
        even = _mm512_permutexvar_epi16(code, table);
        odd = _mm512_permutexvar_epi16(_mm512_srli_epi16(code, 8), table);
    }
};

// 8-bit codes, by tables of the low and high bytes of their words: for all 256 codes, or for 128 magnitudes.
template <int Codes>
struct ByteWords {
    static constexpr bool kHalves = false;
    __m512i low[Codes / 64], high[Codes / 64];

    explicit ByteWords(const Decoder& d) {
        for (int i = 0; i < Codes / 64; ++i) low[i] = load512(d.low + 64 * i), high[i] = load512(d.high + 64 * i);
    }
    void operator()(__m512i code, __m512i& even, __m512i& odd) const {
        __m512i l = _mm512_permutex2var_epi8(low[0], code, low[1]);
        __m512i h = _mm512_permutex2var_epi8(high[0], code, high[1]);
        if constexpr (Codes == 128) {
            h = _mm512_ternarylogic_epi32(h, code, _mm512_set1_epi8(static_cast<char>(0x80)), 0xf8);  // h | code & 0x80
        } else {
            const __mmask64 above = _mm512_movepi8_mask(code);
            l = _mm512_mask_mov_epi8(l, above, _mm512_permutex2var_epi8(low[2], code, low[3]));
            h = _mm512_mask_mov_epi8(h, above, _mm512_permutex2var_epi8(high[2], code, high[3]));
        }
        const __m512i lower = _mm512_set1_epi16(0x00ff);
        even = _mm512_ternarylogic_epi32(lower, l, _mm512_slli_epi16(h, 8), 0xca);  // lower ? l : h << 8
        odd = _mm512_ternarylogic_epi32(lower, _mm512_srli_epi16(l, 8), h, 0xca);
    }
};

// A fold of 16 quads as words: the increments for numbers 2^i, and for numbers 1.5 · 2^i. Both are bits(fold · m) -
// bits(m).
struct Fold {
    __m512i one, half;
    __mmask32 nonzero;  // words that must not be 0
    __mmask16 unsafe;   // quads whose nonzero numbers would leave the range of normal exponents
    __mmask16 special;  // unsafe quads whose fold is infinite or NaN: 0 does not stay 0
};

// Formats whose numbers are 2^i and 1.5 · 2^i (Halves) support any bfloat16 fold; others only powers of two.
template <bool Halves>
inline Fold fold_of(const float* numbers) {
    constexpr int least = 17, most = 239;  // bounds of exponents: numbers of all formats are between 2^-16 and 2^15
    const __m512 fold = _mm512_loadu_ps(numbers);
    const auto words = [](__m512 x, int unit) {
        const __m512i bits = _mm512_castps_si512(x);
        return _mm512_sub_epi16(_mm512_or_si512(bits, _mm512_srli_epi32(bits, 16)), _mm512_set1_epi16(static_cast<short>(unit)));
    };
    const __m512i bits = _mm512_castps_si512(fold);
    const __mmask16 nonzero = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x7fffffff));
    const __m512i above = _mm512_sub_epi32(bits, _mm512_set1_epi32(least << 23));
    Fold f;
    f.unsafe = _mm512_mask_cmpge_epu32_mask(nonzero, above, _mm512_set1_epi32((most + 1 - least) << 23));
    f.special = _mm512_mask_cmpge_epi32_mask(f.unsafe, _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)), _mm512_set1_epi32(0x7f800000));
    f.one = words(fold, 0x3f80);
    f.half = Halves ? words(_mm512_mul_ps(fold, _mm512_set1_ps(1.5f)), 0x3fc0) : f.one;
    const __m512i both = _mm512_or_si512(bits, _mm512_srli_epi32(bits, 16));
    f.nonzero = _mm512_test_epi16_mask(both, _mm512_set1_epi16(0x7fff));
    return f;
}

template <bool Halves>
inline __m512i folded(__m512i words, const Fold& f) {
    const __mmask32 known = _mm512_mask_test_epi16_mask(f.nonzero, words, _mm512_set1_epi16(0x7fff));
    const __m512i x = _mm512_maskz_add_epi16(known, words, f.one);
    if (!Halves) return x;
    return _mm512_mask_add_epi16(x, _mm512_mask_test_epi16_mask(known, words, _mm512_set1_epi16(0x40)), words, f.half);
}

class Words {
public:
    static constexpr bool kPacked = true;

    explicit Words(int format) : format_(format), decoder_(*decoder(format)) {}

    // Decodes `vectors` of 64 codes, 16 quads of 4 each; vectors that share zero points or folds are adjacent. Packed
    // codes have 4 bits: one vector's in the low halves of 64 bytes, the next one's in the high halves.
    template <bool Packed = false>
    void decode(const uint8_t* codes, int vectors, const PerQuads<uint8_t>& zero, const PerQuads<float>& fold,
                uint16_t* even, uint16_t* odd) const {
        if (zero.numbers) return shifted<Packed>(codes, vectors, zero, fold, even, odd);
        if (is_narrow(format_)) return numbers<Packed>(NarrowWords(decoder_), codes, vectors, fold, even, odd);
        if (decoder_.codes == 128) return numbers<Packed>(ByteWords<128>(decoder_), codes, vectors, fold, even, odd);
        numbers<Packed>(ByteWords<256>(decoder_), codes, vectors, fold, even, odd);
    }

private:
    template <bool Packed>
    static __m512i codes_of(const uint8_t* codes, int vector) {
        if (!Packed) return load512(codes + vector * 64);
        const __m512i x = load512(codes + vector / 2 * 64);
        return vector % 2 ? _mm512_srli_epi16(x, 4) : x;
    }

    template <bool Packed, class Numbers>
    void numbers(const Numbers words, const uint8_t* codes, int vectors, const PerQuads<float>& fold, uint16_t* even,
                 uint16_t* odd) const {
        __m512i e, o;
        if (!fold.numbers) {
            for (int i = 0; i < vectors; ++i) {
                words(codes_of<Packed>(codes, i), e, o);
                store512(even + i * 32, e);
                store512(odd + i * 32, o);
            }
            return;
        }
        __m512i most = _mm512_setzero_si512();  // largest magnitudes
        __mmask16 unsafe = 0;
        const __m512i magnitude = _mm512_set1_epi8(Numbers::kHalves ? 7 : 127);
        for (int first = 0; first < vectors; first += fold.vectors) {
            const Fold f = fold_of<Numbers::kHalves>(fold.at(first));
            for (int i = first; i < first + fold.vectors; ++i) {
                const __m512i code = codes_of<Packed>(codes, i);
                if (f.unsafe) unsafe |= f.special | _mm512_mask_test_epi32_mask(f.unsafe, code, magnitude);
                if (!Numbers::kHalves) most = _mm512_max_epu8(most, _mm512_and_si512(code, magnitude));
                words(code, e, o);
                store512(even + i * 32, folded<Numbers::kHalves>(e, f));
                store512(odd + i * 32, folded<Numbers::kHalves>(o, f));
            }
        }
        // infinities, NaN and subnormal numbers
        const bool special = !Numbers::kHalves && decoder_.special < 256 &&
                             _mm512_cmpge_epu8_mask(most, _mm512_set1_epi8(static_cast<char>(decoder_.special))) != 0;
        if (special || unsafe) plainly<Packed>(codes, vectors, {}, fold, even, odd);
    }

    // 4-bit codes minus 4-bit zero points: the differences of -15 to 15 are looked up in a table of words.
    template <bool Packed>
    void shifted(const uint8_t* codes, int vectors, const PerQuads<uint8_t>& zero, const PerQuads<float>& fold,
                 uint16_t* even, uint16_t* odd) const {
        bool small = !fold.numbers;
        for (int i = 0; small && i < vectors; i += zero.vectors)
            small = _mm_cmpgt_epu8_mask(_mm_loadu_si128(reinterpret_cast<const __m128i*>(zero.at(i))), _mm_set1_epi8(15)) == 0;
        if (!small) return plainly<Packed>(codes, vectors, zero, fold, even, odd);
        const Decoder& d = *shifted_decoder();
        uint16_t words[32];
        for (int i = 0; i < 32; ++i) words[i] = static_cast<uint16_t>(d.high[i] << 8 | d.low[i]);
        const __m512i table = load512(words), nibble = _mm512_set1_epi16(15);
        for (int first = 0; first < vectors; first += zero.vectors) {
            const __m512i z = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(zero.at(first))));
            const __m512i up = _mm512_sub_epi16(_mm512_set1_epi16(16), _mm512_or_si512(z, _mm512_slli_epi32(z, 16)));
            for (int i = first; i < first + zero.vectors; ++i) {
                const __m512i code = codes_of<Packed>(codes, i);
                const __m512i e = _mm512_and_si512(code, nibble), o = _mm512_and_si512(_mm512_srli_epi16(code, 8), nibble);
                store512(even + i * 32, _mm512_permutexvar_epi16(_mm512_add_epi16(e, up), table));
                store512(odd + i * 32, _mm512_permutexvar_epi16(_mm512_add_epi16(o, up), table));
            }
        }
    }

    template <bool Packed>
    void plainly(const uint8_t* codes, int vectors, const PerQuads<uint8_t>& zero, const PerQuads<float>& fold,
                 uint16_t* even, uint16_t* odd) const {
        for (int i = 0; i < vectors; ++i) {
            uint8_t own[64];
            store512(own, _mm512_and_si512(codes_of<Packed>(codes, i), _mm512_set1_epi8(Packed ? 15 : -1)));
            decode_plainly(decoder_, own, zero.at(i), fold.at(i), even + i * 32, odd + i * 32);
        }
    }

    int format_;
    const Decoder& decoder_;
};
