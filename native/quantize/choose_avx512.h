// Chooses the loops that encode a row of blocks. Included in a namespace (isa.h), after codes_avx512.h and
// words_avx512.h.

template <class T>
struct RowOfBlocks {
    const hop_quantizer& q;
    const FloatFormat& f;
    const typename T::Word* x;
    int64_t n, size;
    const Factors& by;
    bool known;
    int32_t bits;  // of a stored code
    uint8_t* out;
    float raised = 0;  // lower bound of elements above 0, in units of codes; only for finite x
};

template <class T, int size, class Codes>
HOP_INLINE bool encode_all(const RowOfBlocks<T>& r, const Codes& codes) {
    each_64<T, size>(r.x, r.n, r.size / 64, r.bits, r.out, codes);
    return true;
}

// Computes 1 / scale of each block; returns false if the product with it may be too far from the quotient.
static HOP_ALONE bool invert(const float* __restrict__ scale, int64_t blocks, float* __restrict__ inverse) {
    bool even = true;
    for (int64_t i = 0; i < blocks; ++i) {
        const float magnitude = float_of(bits_of(scale[i]) & kMagnitude);
        even = even & (magnitude > 0x1p-100f) & (magnitude < 0x1p100f);
        inverse[i] = 1.0f / scale[i];
    }
    return even;
}

constexpr int kMostBlocks = kColumns / 16 + 16;

// Parameters of integer codes for each block.
struct IntegerBlocks {
    float inverse[kMostBlocks], above[kMostBlocks], below[kMostBlocks], low[kMostBlocks], high[kMostBlocks];
    int32_t zero[kMostBlocks];

    // For FixedCodes: inverse, low (the offset of products) and high (the code of 0).
    HOP_ALONE void fix(const hop_quantizer& q, const Factors& by, int64_t blocks) {
        for (int64_t i = 0; i < blocks; ++i) inverse[i] *= 0x1p16f;
        for (int64_t i = 0; i < (by.zero ? blocks : 1); ++i) {
            high[i] = float(by.zero ? code_of_zero(q, by.zero[i]) : q.zero);
            low[i] = high[i] * 0x1p16f + (0x1p15f + kMargin);
        }
    }
    // For IntegerCodes.
    HOP_ALONE void bound(const hop_quantizer& q, const Factors& by, int64_t blocks) {
        for (int64_t i = 0; i < blocks; ++i) {
            above[i] = inverse[i] * kAbove;
            below[i] = inverse[i] * kBelow;
        }
        for (int64_t i = 0; i < (by.zero ? blocks : 1); ++i) {
            zero[i] = by.zero ? code_of_zero(q, by.zero[i]) : q.zero;
            low[i] = float(q.low - zero[i]);
            high[i] = float(q.high - zero[i]);
        }
    }
};

template <class T, int size, bool affine>
static bool encode_integer_row(const RowOfBlocks<T>& r) {
    IntegerBlocks b;
    const int64_t blocks = divide_up(r.n, r.size);
    if (!invert(r.by.by, blocks, b.inverse)) return false;
    const bool bounded = r.q.rule == HOP_AMAX || r.q.rule == HOP_MINMAX;  // quotients are no larger than codes
    if (r.known && bounded) {
        b.fix(r.q, r.by, blocks);
        const __m512i low = _mm512_set1_epi16(int16_t(r.q.low)), high = _mm512_set1_epi16(int16_t(r.q.high));
        return encode_all<T, size>(r, FixedCodes<T, size, affine>{r.by.by, b.inverse, b.low, b.high, low, high});
    }
    b.bound(r.q, r.by, blocks);
    return encode_all<T, size>(r, IntegerCodes<T, size, affine>{r.by.by, b.above, b.below, b.low, b.high, b.zero});
}

template <class T, int size, int mantissa>
static bool encode_byte_floats(const RowOfBlocks<T>& r) {
    const float* by = r.by.by;
    if (!r.by.divides) return encode_all<T, size>(r, ByteFloats<T, size, mantissa, false>{by, by, r.f, 0});
    float inverse[kMostBlocks];
    if (!invert(by, divide_up(r.n, r.size), inverse)) return false;
    return encode_all<T, size>(r, ByteFloats<T, size, mantissa, true>{inverse, by, r.f, r.raised});
}

template <class T, int size>
static bool encode_float_row(const RowOfBlocks<T>& r) {
    const bool bytes = r.known && r.bits == 8 && r.f.sign == 7;
    if (bytes && r.f.mantissa == 3) return encode_byte_floats<T, size, 3>(r);
    if (bytes && r.f.mantissa == 2) return encode_byte_floats<T, size, 2>(r);
    const bool e2m1 = r.f.mantissa == 1 && r.f.largest == bits_of(6.0f) && r.f.least == bits_of(1.0f);
    if (r.known && r.bits == 4 && e2m1 && !r.by.divides) return encode_all<T, size>(r, E2m1Codes<T, size>{r.by.by});
    if (r.by.divides) return encode_all<T, size>(r, FloatCodes<T, size, true>{r.by.by, r.f});
    return encode_all<T, size>(r, FloatCodes<T, size, false>{r.by.by, r.f});
}

// Codebooks on lines; only for large blocks, as in optimizer states.
template <class T, int size, bool few>
static bool encode_pieces([[maybe_unused]] const RowOfBlocks<T>& r, [[maybe_unused]] const float* inverse,
                          [[maybe_unused]] const ByteTables* next) {
    if constexpr (size == 64) {
        const float* by = r.by.by;
        const int pieces = r.q.tables[2049];
        if (pieces == 1) return encode_all<T, size>(r, PieceCodes<T, size, few, false>(r.q, by, inverse, next, r.raised));
        if (pieces == 2) return encode_all<T, size>(r, PieceCodes<T, size, few, true>(r.q, by, inverse, next, r.raised));
    }
    return false;
}

template <class T, int size>
static bool encode_book_row(const RowOfBlocks<T>& r) {
    if (!r.q.tables || (r.q.size > 16 && !r.q.index)) return false;
    const float* by = r.by.by;
    float inverse[kMostBlocks];
    const bool inverts = invert(by, divide_up(r.n, r.size), inverse), even = inverts && r.q.tables[2048];
    const float* products = even ? inverse : nullptr;
    const bool few = r.q.size <= 16, pieces = r.known && inverts && r.q.rule == HOP_AMAX && few == (r.bits <= 4);
    if (few && pieces && encode_pieces<T, size, true>(r, inverse, nullptr)) return true;
    if (few) return encode_all<T, size>(r, BookCodes<T, size, true>{by, products, r.q, nullptr});
    const ByteTables next(r.q.tables + 1024);
    if (pieces && encode_pieces<T, size, false>(r, inverse, &next)) return true;
    return encode_all<T, size>(r, BookCodes<T, size, false>{by, products, r.q, &next});
}

template <class T, int size>
static bool encode_row(const RowOfBlocks<T>& r) {
    if (r.q.format == HOP_FLOAT) return encode_float_row<T, size>(r);
    if (r.q.format == HOP_CODEBOOK) return encode_book_row<T, size>(r);
    return r.by.zero ? encode_integer_row<T, size, true>(r) : encode_integer_row<T, size, false>(r);
}

// Packed codes of a row of blocks; returns false if the plain loops must encode it.
template <class T>
static bool encode_quickly(const hop_quantizer& q, const FloatFormat& f, const typename T::Word* x, int64_t n,
                           int64_t size, const Factors& by, bool known, bool, uint8_t* out) {
    if (q.bits == 1) return false;
    const int32_t per_byte = codes_per_byte(q), bits = 8 / per_byte;
    if (size == 16) return encode_row<T, 16>({q, f, x, n, size, by, known, bits, out});
    if (size == 32) return encode_row<T, 32>({q, f, x, n, size, by, known, bits, out});
    if (size % 64 == 0) return encode_row<T, 64>({q, f, x, n, size, by, known, bits, out});
    if (size < 24 || (size % per_byte != 0 && size < n)) return false;
    for (int64_t at = 0, i = 0; at < n; at += size, ++i) {
        const Factors own{by.divides, by.by + i, by.zero ? by.zero + i : nullptr};
        const int64_t count = least(size, n - at), blocks = divide_up(count, 64) * 64;
        if (!encode_row<T, 64>({q, f, x + at, count, blocks, own, known, bits, out + at / per_byte})) return false;
    }
    return true;
}
