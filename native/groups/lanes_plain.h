// Sixteen float32 values as compilers' vector types, and decoding of codes to them. Multiplications and additions are
// not fused. Included in a namespace (isa.h).

using Lanes = float __attribute__((vector_size(64)));
#if defined(__x86_64__)
// Before AVX2 (2013), few rows use strips too: a third slower, with a fifth of the code.
constexpr bool kFromRegisters = false;
#else
constexpr bool kFromRegisters = true;
#endif
constexpr int kFewRows = 2, kFewColumns = 2;
constexpr int kTileRows = 2, kTileColumns = 2;

HOP_INLINE Lanes load(const float* p) {
    Lanes x;
    std::memcpy(&x, p, sizeof(x));
    return x;
}
HOP_INLINE void store(float* p, Lanes x) { std::memcpy(p, &x, sizeof(x)); }
HOP_INLINE Lanes all(float x) { return Lanes{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
HOP_INLINE Lanes times(Lanes a, Lanes b) { return a * b; }
HOP_INLINE Lanes minus(Lanes a, Lanes b) { return a - b; }
HOP_INLINE Lanes add_product(Lanes a, Lanes b, Lanes sum) { return sum + a * b; }
HOP_INLINE Lanes two(const float* p) {
    const float x = p[0], y = p[1];
    return Lanes{x, x, x, x, x, x, x, x, y, y, y, y, y, y, y, y};
}

HOP_INLINE Lanes halves(float a, float b) {
    const float both[2] = {a, b};
    return two(both);
}

HOP_INLINE Lanes from_bytes(const uint8_t* p, bool is_signed) {
    float x[16];
    for (int i = 0; i < 16; ++i) x[i] = is_signed ? static_cast<float>(static_cast<int8_t>(p[i])) : static_cast<float>(p[i]);
    return load(x);
}

HOP_INLINE float total(Lanes x) {
    float lanes[16];
    store(lanes, x);
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    return lanes[0];
}

struct Table {
    Lanes numbers;
    static HOP_INLINED inline Table of(const float* p) { return {load(p)}; }
};

template <bool Offset>
HOP_INLINE Table scaled(const Table& t, float s, float m) {
    const Lanes product = t.numbers * all(s);
    return {Offset ? product - all(m) : product};
}

HOP_INLINE void look_up(const Table& t, const uint8_t* low, Lanes& a, Lanes& b) {
    float numbers[16], even[16], odd[16];
    store(numbers, t.numbers);
    for (int i = 0; i < 16; ++i) even[i] = numbers[low[i] & 15], odd[i] = numbers[low[i] >> 4];
    a = load(even), b = load(odd);
}

HOP_INLINE void look_up_pairs(const Table& first, const Table& second, const uint8_t* codes, Lanes& a, Lanes& b) {
    float of_first[16], of_second[16], even[16], odd[16];
    store(of_first, first.numbers), store(of_second, second.numbers);
    for (int i = 0; i < 16; ++i) {
        const int pair = codes[i / 2] >> (i % 2 * 4) & 15;
        even[i] = of_first[pair], odd[i] = of_second[pair];
    }
    a = load(even), b = load(odd);
}

template <int Bits>
struct Decoder {
    static constexpr bool kScales = false;
    int half;  // subtracted from a signed code after flipping its highest bit

    explicit Decoder(bool is_signed) : half(is_signed ? 1 << (Bits - 1) : 0) {}

    HOP_INLINED void operator()(const uint8_t* codes, const uint8_t* high, Lanes& a, Lanes& b) const {
        float first[16], second[16];
        for (int i = 0; i < 16; ++i) {
            if (Bits == 8) {
                first[i] = static_cast<float>(static_cast<int8_t>(codes[i]));
                second[i] = static_cast<float>(static_cast<int8_t>(codes[i + 16]));
            } else {
                constexpr int low_bits = Bits == 3 ? 2 : 4, low = (1 << low_bits) - 1;
                constexpr int width = Bits == 6 ? 2 : 1, per_byte = 4 / width, mask = (1 << width) - 1;
                const int fields = high[i / per_byte] >> (i % per_byte * 2 * width);
                const int pair = Bits == 3 ? codes[i / 2] >> (i % 2 * 4) : codes[i];
                first[i] = number((pair & low) | (fields & mask) << low_bits);
                second[i] = number((pair >> low_bits & low) | (fields >> width & mask) << low_bits);
            }
        }
        a = load(first), b = load(second);
    }

private:
    HOP_INLINED float number(int code) const { return static_cast<float>((code ^ half) - half); }
};

HOP_INLINE void from_halves(const uint16_t* p, int64_t count, float* to) {
    for (int64_t i = 0; i < count; ++i) to[i] = from_float16(p[i]);
}

HOP_INLINE void apart(const float* p, float* to) {
    for (int i = 0; i < 16; ++i) to[i] = p[2 * i], to[16 + i] = p[2 * i + 1];
}
