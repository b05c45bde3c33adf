// Decodes codes to bfloat16 with AVX2. Included in a namespace (isa.h), after decode_plainly.h.

class Words {
public:
    static constexpr bool kPacked = false;

    explicit Words(int format) : decoder_(decoder(format)), format_(format), shift_(format == HOP_E5M2 ? 5 : 4) {
        const Decoder& d = *decoder_;
        const auto word = [&](int code) { return static_cast<uint16_t>(d.high[code] << 8 | d.low[code]); };
        if (is_narrow(format)) {
            ends_[0] = both_halves(d.low), ends_[1] = both_halves(d.high);
            return;
        }
        uint16_t ends[2][8];
        for (int i = 0; i < 8; ++i) ends[0][i] = word(i), ends[1][i] = word(120 + i);
        for (int i = 0; i < 2; ++i) ends_[i] = both_halves(ends[i]);
        offset_ = static_cast<int16_t>(word(8) - (8 << shift_));
    }

    // Like decode_plainly, bit for bit, for several vectors of 16 quads.
    void decode(const uint8_t* codes, int vectors, const PerQuads<uint8_t>& zero, const PerQuads<float>& fold,
                uint16_t* even, uint16_t* odd) const {
        for (int i = 0; i < vectors; ++i) decode(codes + i * 64, zero.at(i), fold.at(i), even + i * 32, odd + i * 32);
    }

    void decode(const uint8_t* codes, const uint8_t* zero, const float* fold, uint16_t* even, uint16_t* odd) const {
        if (zero && (fold || _mm_movemask_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(zero))) !=
                                 0))  // differences fit in int8
            return decode_plainly(*decoder_, codes, zero, fold, even, odd);
        __m256i inexact = _mm256_setzero_si256();
        for (int half = 0; half < 2; ++half) {
            __m256i code = load(codes + half * 32), e, o;
            if (zero) {
                const __m256i z =
                    _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(zero + half * 8)));
                code = _mm256_sub_epi8(code, _mm256_mullo_epi32(z, _mm256_set1_epi32(0x01010101)));
                integers<true>(code, e, o);
            } else if (format_ == HOP_INT8) {
                integers<true>(code, e, o);
            } else if (format_ == HOP_UINT8) {
                integers<false>(code, e, o);
            } else if (is_narrow(format_)) {
                narrow(code, e, o);
            } else {
                const __m256i lower = _mm256_set1_epi16(0x00ff);
                e = bytes(_mm256_and_si256(code, lower)), o = bytes(_mm256_srli_epi16(code, 8));
            }
            if (fold) {
                const __m256 f = _mm256_loadu_ps(fold + half * 8);
                e = folded(e, f, inexact), o = folded(o, f, inexact);
            }
            store(even + half * 16, e), store(odd + half * 16, o);
        }
        if (fold && !_mm256_testz_si256(inexact, inexact)) decode_plainly(*decoder_, codes, zero, fold, even, odd);
    }

private:
    static __m256i load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
    static void store(void* p, __m256i x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
    static __m256i both_halves(const void* p) {
        return _mm256_broadcastsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(p)));
    }
    static __m256i upper() { return _mm256_set1_epi32(static_cast<int>(0xffff0000)); }

    // Looks up 4-bit codes in tables of low and of high bytes.
    void narrow(__m256i code, __m256i& even, __m256i& odd) const {
        const __m256i lower = _mm256_set1_epi16(0x00ff);
        const __m256i low = _mm256_shuffle_epi8(ends_[0], code), high = _mm256_shuffle_epi8(ends_[1], code);
        even = _mm256_or_si256(_mm256_and_si256(low, lower), _mm256_slli_epi16(high, 8));
        odd = _mm256_or_si256(_mm256_srli_epi16(low, 8), _mm256_andnot_si256(lower, high));
    }

    // E4M3 and E5M2, in 16 bits each: magnitudes 8 to 119 are shifted and offset, others are looked up.
    __m256i bytes(__m256i code) const {
        const __m256i magnitude = _mm256_and_si256(code, _mm256_set1_epi16(127));
        const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(code, _mm256_set1_epi16(128)), 8);
        const __m256i eighth = _mm256_and_si256(code, _mm256_set1_epi16(7));
        const __m256i at =
            _mm256_add_epi16(_mm256_mullo_epi16(eighth, _mm256_set1_epi16(0x0202)), _mm256_set1_epi16(0x0100));
        const __m256i middle =
            _mm256_add_epi16(_mm256_sll_epi16(magnitude, _mm_cvtsi32_si128(shift_)), _mm256_set1_epi16(offset_));
        const __m256i below = _mm256_cmpgt_epi16(_mm256_set1_epi16(8), magnitude);
        const __m256i above = _mm256_cmpgt_epi16(magnitude, _mm256_set1_epi16(119));
        __m256i x = _mm256_blendv_epi8(middle, _mm256_shuffle_epi8(ends_[0], at), below);
        x = _mm256_blendv_epi8(x, _mm256_shuffle_epi8(ends_[1], at), above);
        return _mm256_or_si256(x, sign);
    }

    template <bool Signed>
    static void integers(__m256i code, __m256i& even, __m256i& odd) {
        const auto number = [](__m256i x) {  // for the highest byte of each 32 bits
            return _mm256_castps_si256(
                _mm256_cvtepi32_ps(Signed ? _mm256_srai_epi32(x, 24) : _mm256_srli_epi32(x, 24)));
        };
        const auto pair = [](__m256i first, __m256i second) {
            return _mm256_or_si256(_mm256_srli_epi32(first, 16), _mm256_and_si256(second, upper()));
        };
        even = pair(number(_mm256_slli_epi32(code, 24)), number(_mm256_slli_epi32(code, 8)));
        odd = pair(number(_mm256_slli_epi32(code, 16)), number(code));
    }

    // Multiplies words by the fold of their quad; `inexact` becomes nonzero if a product is not a bfloat16 number.
    static __m256i folded(__m256i words, __m256 fold, __m256i& inexact) {
        const __m256i first =
            _mm256_castps_si256(_mm256_mul_ps(_mm256_castsi256_ps(_mm256_slli_epi32(words, 16)), fold));
        const __m256i second =
            _mm256_castps_si256(_mm256_mul_ps(_mm256_castsi256_ps(_mm256_and_si256(words, upper())), fold));
        inexact = _mm256_or_si256(inexact, _mm256_andnot_si256(upper(), _mm256_or_si256(first, second)));
        return _mm256_or_si256(_mm256_srli_epi32(first, 16), _mm256_and_si256(second, upper()));
    }

    const Decoder* decoder_;
    int format_, shift_;
    int16_t offset_ = 0;
    __m256i ends_[2];  // for 4-bit codes the bytes of all words; else the words of magnitudes 0 to 7, and of 120 to 127
};
