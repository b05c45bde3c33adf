// Decodes codes to float32 with AVX2, tiles with the vectors of V. Included in a namespace (isa.h), after pack_rhs.h,
// loads_avx2.h and vectors_avx2.h or _avx512.h.

// How bytes are decoded. 4-bit codes are first looked up as 8-bit integers, which for e2m1 are twice the value.
enum class Bytes { signed_integers, unsigned_integers, e4m3, e5m2 };

constexpr bool are_floats(Bytes b) { return b == Bytes::e4m3 || b == Bytes::e5m2; }

// Calls body with a constant: the Bytes value of a format.
template <class Body>
inline void by_bytes(int format, Body body) {
    switch (format) {
        case HOP_UINT8: return body(std::integral_constant<Bytes, Bytes::unsigned_integers>());
        case HOP_E4M3: return body(std::integral_constant<Bytes, Bytes::e4m3>());
        case HOP_E5M2: return body(std::integral_constant<Bytes, Bytes::e5m2>());
        default: return body(std::integral_constant<Bytes, Bytes::signed_integers>());
    }
}

// The 4-bit codes as bytes.
inline const int8_t* bytes_of_codes(int format) {
    static constexpr int8_t tables[3][16] = {{0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1},
                                             {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
                                             {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}};
    return tables[format == HOP_INT4 ? 0 : format == HOP_UINT4 ? 1 : 2];
}
inline __m256i table_of(int format) { return _mm256_broadcastsi128_si256(load128(bytes_of_codes(format))); }

inline float unit_of(int format) { return format == HOP_E2M1 ? 0.5f : 1.f; }

// Decodes 16 bytes. 8-bit floats have the bits of float16 except for the exponent: e4m3 equals 2^8 times that float16.
template <Bytes B>
HOP_INLINE void to_numbers(const uint8_t* bytes, __m256& low, __m256& high) {
    const __m128i x = load128(bytes), after = _mm_srli_si128(x, 8);
    if constexpr (are_floats(B)) {
        __m256i words = _mm256_slli_epi16(_mm256_cvtepu8_epi16(x), 8);
        if constexpr (B == Bytes::e4m3) {
            // NaN would become 1.875 · 2^8: set its exponent to all ones.
            const __m256i largest = _mm256_set1_epi16(0x7f00);
            const __m256i special = _mm256_cmpeq_epi16(_mm256_and_si256(words, largest), largest);
            words = _mm256_and_si256(_mm256_srai_epi16(words, 1), _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));
            words = _mm256_or_si256(words, _mm256_and_si256(special, _mm256_set1_epi16(0x7c00)));
        }
        const __m256 unit = _mm256_set1_ps(B == Bytes::e4m3 ? 256.f : 1.f);
        low = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(words)), unit);
        high = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(words, 1)), unit);
    } else if constexpr (B == Bytes::unsigned_integers) {
        low = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(x));
        high = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(after));
    } else {
        low = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x));
        high = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(after));
    }
}

// Whether the CPU currently processes subnormal numbers, instead of treating them as zeros.
inline bool has_subnormals() {
    constexpr unsigned subnormals_are_zeros = 0x40;
    return !(_mm_getcsr() & subnormals_are_zeros);
}

// The values of V::kLanes columns from four bytes of each, or (Packed) from eight 4-bit codes: int4, or table entries
// minus a zero point.
template <Bytes B, bool Packed, bool Table>
struct Columns {
    static constexpr int kCodes = Packed ? 8 : 4;  // codes of a column
    static constexpr bool kFloats = are_floats(B), kTable = Table;
    V::Words bytes[2];

    HOP_INLINED Columns() {}
    HOP_INLINED Columns(const uint8_t* from, V::Words table, V::Words less) {
        bytes[0] = V::words(from);
        if (!Table) return;
        const V::Words nibble = V::each_byte(15), high = V::right(bytes[0], 4) & nibble;
        bytes[1] = V::minus_bytes(V::looked_up(table, high), less);
        bytes[0] = V::minus_bytes(V::looked_up(table, bytes[0] & nibble), less);
    }

    // 8-bit floats become float32 numbers with too small exponents, which are multiplied by 2^120 or 2^112. Those with
    // the smallest exponent are temporarily subnormal, so the CPU must process subnormals; NaN and infinities
    // become ordinary numbers.
    HOP_INLINED V::Reals number(int k) const {
        constexpr bool narrow = Packed && !Table;
        const int up = narrow ? 28 - 8 * (k % 4) - 4 * (k / 4) : 24 - 8 * (k % 4);
        const V::Words x = bytes[Table ? k / 4 : 0], top = up ? V::left(x, up) : x;
        if constexpr (B == Bytes::e4m3) {
            const V::Words bits = V::signed_right(top, 4) & V::each_word(static_cast<int>(0x87f00000));
            return V::bits(bits) * V::all(0x1p120f);
        } else if constexpr (B == Bytes::e5m2) {
            const V::Words bits = V::signed_right(top, 3) & V::each_word(static_cast<int>(0x8fe00000));
            return V::bits(bits) * V::all(0x1p112f);
        } else if constexpr (B == Bytes::unsigned_integers) {
            return V::numbers(V::right(top, 24));
        } else {
            return V::numbers(V::signed_right(top, narrow ? 28 : 24));
        }
    }
};

// Eight bytes, each repeated four times.
inline __m256i repeated(const uint8_t* bytes) {
    const __m256i words = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)));
    return _mm256_mullo_epi32(words, _mm256_set1_epi32(0x01010101));
}

// Decodes a tile of packed codes to [64][16 rows] floats.
template <Bytes B, bool Packed, bool Table, bool Folded>
inline void packed_tile(int format, const uint8_t* codes, const PerQuads<uint8_t>& zeros, const PerQuads<float>& folds, float* out) {
    using Codes = Columns<B, Packed, Table>;
    const V::Words table = V::table(bytes_of_codes(format));
    const V::Reals unit = V::all(unit_of(format));
    for (int quad = 0; quad < kQuads; quad += Codes::kCodes / 4, codes += 64, out += Codes::kCodes * kRows) {
        HOP_UNROLL
        for (int row = 0; row < kRows; row += V::kLanes) {
            const V::Words less = Table && zeros.numbers ? V::four_times(V::words_of_bytes(zeros.at(quad) + row)) : V::no_bits();
            V::Reals fold = unit;
            if (Folded && folds.numbers) fold = unit * V::load(folds.at(quad) + row);
            const Codes columns(codes + row * 4, table, less);
            HOP_UNROLL
            for (int k = 0; k < Codes::kCodes; ++k) {
                const V::Reals x = columns.number(k);
                V::store(out + k * kRows + row, Folded ? x * fold : x);
            }
        }
    }
}

// The same for 8-bit codes of any format.
HOP_ALONE inline void any_tile(int format, const uint8_t* codes, const PerQuads<uint8_t>& zeros, const PerQuads<float>& folds, float* out) {
    const int8_t* table = nullptr;
    alignas(32) int8_t own[32];
    if (is_narrow(format)) _mm256_store_si256(reinterpret_cast<__m256i*>(own), table_of(format)), table = own;
    by_bytes(format, [&](auto form) {
        for (int quad = 0; quad < kQuads; ++quad, codes += 64) {
            const uint8_t* zero = zeros.at(quad);
            const float* fold = folds.at(quad);
            for (int k = 0; k < 4; ++k, out += kRows) {
                uint8_t bytes[kRows];
                for (int i = 0; i < kRows; ++i) bytes[i] = table ? static_cast<uint8_t>(table[codes[4 * i + k]]) : codes[4 * i + k];
                __m256 low, high;
                to_numbers<form.value>(bytes, low, high);
                _mm256_store_ps(out, low), _mm256_store_ps(out + 8, high);
                for (int i = 0; zero && i < kRows; ++i) out[i] = out[i] - static_cast<float>(zero[i]);
                for (int i = 0; i < kRows; ++i) out[i] = out[i] * (unit_of(format) * (fold ? fold[i] : 1.f));
            }
        }
    });
}

// Whether bytes of a tile are infinite or NaN.
inline bool has_special(int format, const uint8_t* codes) {
    const __m256i magnitude = _mm256_set1_epi8(127), special = _mm256_set1_epi8(static_cast<char>(decoder(format)->special));
    __m256i most = _mm256_setzero_si256();
    for (int i = 0; i < kTile; i += 32) most = _mm256_max_epu8(most, _mm256_and_si256(load256(codes + i), magnitude));
    return _mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_max_epu8(most, special), most)) != 0;
}

// For uint4: whether codes minus their zero points fit in int8.
inline bool are_near(const PerQuads<uint8_t>& zeros) {
    __m128i any = _mm_setzero_si128();
    for (int quad = 0; zeros.numbers && quad < kQuads; ++quad) any = _mm_or_si128(any, load128(zeros.at(quad)));
    return _mm_movemask_epi8(any) == 0;
}

// Makes a tile of rhs, rows first..first + 15 of a slice.
inline void tile_of_numbers(const Job& job, BlockScales& folds, int64_t first, int64_t slice, float* out) {
    const hop_operand& o = job.p.rhs;
    with_quads(job, folds, first, slice, [&](const PerQuads<uint8_t>& zero, const PerQuads<float>& fold) {
        if (o.layout == HOP_TILED && is_narrow(o.format) && are_near(zero)) {
            const uint8_t* codes = tile_in_panel(o, job.rhs.codes, job.p.k, first, slice);
            if (fold.stride && fold.vectors == 1) {  // two quads of a vector must have the same fold
            } else if (o.format == HOP_INT4 && !fold.numbers) {
                return packed_tile<Bytes::signed_integers, true, false, false>(o.format, codes, zero, fold, out);
            } else if (o.format == HOP_UINT4 && !fold.numbers) {
                return packed_tile<Bytes::signed_integers, true, true, false>(o.format, codes, zero, fold, out);
            } else {
                return packed_tile<Bytes::signed_integers, true, true, true>(o.format, codes, zero, fold, out);
            }
        }
        uint8_t buffer[kTile];
        const uint8_t* codes = tile_of_codes(o, job.rhs.codes, job.p.n, job.p.k, first, slice, buffer);
        if (is_narrow(o.format)) {
            if (!are_near(zero)) return any_tile(o.format, codes, zero, fold, out);
            alignas(32) uint8_t bytes[kTile];
            const __m256i table = table_of(o.format);
            for (int i = 0; i < kTile; i += 32) {
                const __m256i own = _mm256_shuffle_epi8(table, load256(codes + i));
                const __m256i less = zero.numbers ? repeated(zero.at(i / 64) + i % 64 / 4) : _mm256_setzero_si256();
                _mm256_store_si256(reinterpret_cast<__m256i*>(bytes + i), _mm256_sub_epi8(own, less));
            }
            return packed_tile<Bytes::signed_integers, false, false, true>(o.format, bytes, zero, fold, out);
        }
        by_bytes(o.format, [&](auto form) {
            if (are_floats(form.value) && (!has_subnormals() || has_special(o.format, codes))) return any_tile(o.format, codes, zero, fold, out);
            if (fold.numbers) packed_tile<form.value, false, false, true>(o.format, codes, zero, fold, out);
            else packed_tile<form.value, false, false, false>(o.format, codes, zero, fold, out);
        });
    });
}

// Decodes 64 values of a row of lhs, from k on; those beyond the first `count` are 0.
inline void row_of_numbers(const Job& job, int64_t row, int64_t k, int count, float* out) {
    const hop_operand& o = job.p.lhs;
    if (o.format == HOP_FLOAT32 || o.format == HOP_FLOAT16 || o.format == HOP_BFLOAT16) {
        const int64_t at = row * o.row_stride + k * o.k_stride;
        if (count < kSlice) std::memset(out, 0, sizeof(float) * kSlice);
        if (o.format == HOP_FLOAT32) {
            const float* from = static_cast<const float*>(job.lhs.codes) + at;
            if (o.k_stride == 1) std::memcpy(out, from, sizeof(float) * static_cast<size_t>(count));
            else
                for (int i = 0; i < count; ++i) out[i] = from[i * o.k_stride];
            return;
        }
        const uint16_t* from = static_cast<const uint16_t*>(job.lhs.codes) + at;
        if (o.format == HOP_FLOAT16 && o.k_stride == 1 && count == kSlice) {
            for (int i = 0; i < kSlice; i += 8) _mm256_storeu_ps(out + i, _mm256_cvtph_ps(load128(from + i)));
        } else if (o.format == HOP_FLOAT16) {
            for (int i = 0; i < count; ++i) out[i] = _cvtsh_ss(from[i * o.k_stride]);
        } else if (o.k_stride == 1) {
            for (int i = 0; i < count; ++i) out[i] = from_bfloat16(from[i]);
        } else {
            for (int i = 0; i < count; ++i) out[i] = from_bfloat16(from[i * o.k_stride]);
        }
        return;
    }
    uint8_t own[kSlice], bytes[kSlice];
    const uint8_t* codes = codes_of_row(o, job.lhs.codes, row, k, count, own);
    if (is_narrow(o.format))
        for (int i = 0; i < kSlice; i += 32)
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(bytes + i), _mm256_shuffle_epi8(table_of(o.format), load256(codes + i)));
    else
        std::memcpy(bytes, codes, kSlice);
    by_bytes(o.format, [&](auto form) {
        for (int i = 0; i < kSlice; i += 16) {
            __m256 low, high;
            to_numbers<form.value>(bytes + i, low, high);
            const __m256 unit = _mm256_set1_ps(unit_of(o.format));
            _mm256_storeu_ps(out + i, _mm256_mul_ps(low, unit)), _mm256_storeu_ps(out + i + 8, _mm256_mul_ps(high, unit));
        }
    });
    if (o.fold.format == HOP_NONE) return;
    const int64_t of_row = row / o.fold.rows * o.fold.row_stride;
    for (int i = 0; i < kSlice;) {
        const int64_t block = (k + i) / o.fold.ks, end = (block + 1) * o.fold.ks - k;
        const float f = i < count ? scale_at(o.fold.format, job.lhs.fold, of_row + block * o.fold.k_stride) : 0.f;
        do out[i++] *= f;
        while (i < kSlice && i < end);
    }
}
