// From codes and scales to numbers. Included in a namespace (isa.h), after numbers.h.

// ---- several codes to a byte

static HOP_ALONE void unpack(const uint8_t* __restrict__ bytes, int64_t n, int32_t bits, uint8_t* __restrict__ codes) {
    const uint8_t mask = uint8_t((1 << bits) - 1);
    const int64_t whole = n * bits / 8, per_byte = 8 / bits;
    if (bits == 4) {
        for (int64_t i = 0; i < whole; ++i) {
            codes[2 * i] = bytes[i] & 15;
            codes[2 * i + 1] = uint8_t(bytes[i] >> 4);
        }
    } else if (bits == 2) {
        for (int64_t i = 0; i < whole; ++i)
            for (int64_t j = 0; j < 4; ++j) codes[4 * i + j] = uint8_t(bytes[i] >> (2 * j) & 3);
    } else {
        for (int64_t i = 0; i < whole; ++i)
            for (int64_t j = 0; j < per_byte; ++j) codes[i * per_byte + j] = uint8_t(bytes[i] >> (j * bits) & mask);
    }
    for (int64_t i = whole * per_byte; i < n; ++i)
        codes[i] = uint8_t(bytes[whole] >> ((i - whole * per_byte) * bits) & mask);
}

// ---- the number of a code

HOP_INLINE uint32_t sign_of(const hop_quantizer& q) {
    return q.low >= 0 ? 0 : codes_per_byte(q) > 1 ? 1u << (q.bits - 1) : 128u;
}

struct DecodeInteger {
    int32_t zero;   // which is subtracted
    uint32_t sign;  // the bit that counts negatively, or 0
    HOP_MEMBER float operator()(uint8_t code) const { return float(int32_t((code ^ sign) - sign) - zero); }
};

struct DecodeFloat {
    FloatFormat f;
    HOP_MEMBER float operator()(uint8_t code) const { return decode_float(code, f); }
};

struct DecodeByBook {
    const float* numbers;
    HOP_MEMBER float operator()(uint8_t code) const { return numbers[code]; }
};

template <class T, class Decode>
HOP_INLINE void decode_run(const uint8_t* __restrict__ codes, int64_t n, float step, const Decode decode,
                           typename T::Word* __restrict__ out) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (int j = 0; j < 16; ++j) out[i + j] = T::narrow(decode(codes[i + j]) * step);
    for (; i < n; ++i) out[i] = T::narrow(decode(codes[i]) * step);
}
