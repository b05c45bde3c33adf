// From codes and scales to values. Included in a namespace (isa.h), after numbers.h.

// ---- several codes per byte

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

// ---- the value of a code

HOP_INLINE uint32_t sign_of(const hop_quantizer& q) {
    return q.low >= 0 ? 0 : codes_per_byte(q) > 1 ? 1u << (q.bits - 1) : 128u;
}

struct DecodeInteger {
    int32_t zero;   // subtracted
    uint32_t sign;  // the bit with negative weight, or 0
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

// The tail of a run, in a small loop.
template <class Decode>
static HOP_SELDOM void decode_rest(const uint8_t* codes, int64_t n, const float* steps, int64_t each, const Decode decode, float* out) {
    for (int64_t i = 0; i < n; ++i) out[i] = decode(codes[i]) * steps[each * i];
}

// out[i] = value of the code times its step, or times the only step if `each` is 0.
template <int each, class Decode>
HOP_INLINE void decode_run(const uint8_t* __restrict__ codes, int64_t n, const float* __restrict__ steps, const Decode decode,
                           float* __restrict__ out) {
    int64_t i = 0;
    const float step = *steps;
    for (; i + 16 <= n; i += 16) {
        if constexpr (!std::is_same<Decode, DecodeInteger>::value) HOP_ONE_TURN;  // these widen in longer vectors
        for (int j = 0; j < 16; ++j) out[i + j] = decode(codes[i + j]) * (each ? steps[i + j] : step);
    }
    if (i < n) decode_rest(codes + i, n - i, steps + each * i, each, decode, out + i);
}
