// Converts codes of weights to unsigned bytes, and multiplies them by int8 codes, in plain loops. Included in a
// namespace (isa.h), after the lanes.

struct Bytes {  // 64 bytes, 16 of each of four chunks
    uint8_t of[64];
};
struct Ints {  // 16 integers modulo 2^32
    uint32_t of[16];
};
constexpr int kIntegerFew = 2, kIntegerRows = 2;  // rows of x in a product from registers, and from a strip

struct Block {
    Bytes first, second;
};

HOP_INLINE Bytes load_bytes(const uint8_t* p) {
    Bytes x;
    std::memcpy(x.of, p, 64);
    return x;
}
HOP_INLINE void store_bytes(uint8_t* p, const Bytes& x) { std::memcpy(p, x.of, 64); }
HOP_INLINE Ints load_ints(const int32_t* p) {
    Ints x;
    std::memcpy(x.of, p, 64);
    return x;
}
HOP_INLINE void store_ints(int32_t* p, const Ints& x) { std::memcpy(p, x.of, 64); }
HOP_INLINE Ints all_ints(int32_t x) {
    Ints made;
    for (uint32_t& own : made.of) own = static_cast<uint32_t>(x);
    return made;
}
HOP_INLINE Ints plus_ints(Ints a, const Ints& b) {
    for (int i = 0; i < 16; ++i) a.of[i] += b.of[i];
    return a;
}
HOP_INLINE Lanes to_floats(const Ints& x) {
    float made[16];
    for (int i = 0; i < 16; ++i) made[i] = static_cast<float>(static_cast<int32_t>(x.of[i]));
    return load(made);
}
HOP_INLINE Lanes plus(Lanes a, Lanes b) { return a + b; }

// For each four elements of the four e: the sums of e[j], for chunks 4 j to 4 j + 3, in chunk order.
static HOP_ALONE inline Ints sums_of_chunks(const Ints (&e)[4]) {
    Ints made;
    for (int j = 0; j < 4; ++j)
        for (int i = 0; i < 4; ++i)
            made.of[4 * j + i] = e[j].of[4 * i] + e[j].of[4 * i + 1] + e[j].of[4 * i + 2] + e[j].of[4 * i + 3];
    return made;
}

// The same per half chunk, for two e.
static HOP_ALONE inline Ints sums_of_halves(const Ints (&e)[2]) {
    Ints made;
    for (int j = 0; j < 2; ++j)
        for (int i = 0; i < 8; ++i) made.of[8 * j + i] = e[j].of[2 * i] + e[j].of[2 * i + 1];
    return made;
}

// Transposes 16 lines of 64 bytes, `stride` bytes apart, in 4-byte units.
static HOP_ALONE inline void turn(const void* from, int64_t stride, void* to) {
    for (int i = 0; i < 16; ++i)
        for (int j = 0; j < 16; ++j)
            std::memcpy(static_cast<char*>(to) + j * 64 + i * 4, static_cast<const char*>(from) + i * stride + j * 4, 4);
}

class Codes {
public:
    explicit Codes(const hop_group_product& p) : p_(p), zero_(zero_of(p)) {}
    int zero() const { return zero_; }

    template <int Bits>
    HOP_ALONE Block block(const uint8_t* codes, const uint8_t* high) const {
        Block b;
        for (int i = 0; i < 64; ++i) {
            b.first.of[i] = code<Bits>(codes, high, i / 16 * 32 + element_of(Bits, i % 16, 0));
            b.second.of[i] = code<Bits>(codes, high, i / 16 * 32 + element_of(Bits, i % 16, 1));
        }
        return b;
    }

    // Adds the products of a block to the sum.
    HOP_ALONE Ints dot(Ints sum, const Block& w, const int8_t* x) const {
        for (int i = 0; i < 64; ++i) sum.of[i / 4] += static_cast<uint32_t>(w.first.of[i] * x[i] + w.second.of[i] * x[64 + i]);
        return sum;
    }
    // Adds the products of a unit of 16 rows of the weight, 2 * Quads times four codes at `at` of a strip, and M rows of x.
    template <int Quads, int M>
    HOP_ALONE void unit(const uint8_t* w, const int8_t* const (&x)[M], int64_t at, Ints (&sums)[M]) const {
        for (int q = 0; q < 2 * Quads; ++q)
            for (int i = 0; i < M; ++i) {
                const uint8_t* own = w + (at + place_of_quad<Quads>(q)) * kColumns;
                const int8_t* four = x[i] + at + place_of_quad<Quads>(q);
                for (int j = 0; j < 64; ++j) sums[i].of[j / 4] += static_cast<uint32_t>(own[j] * four[j % 4]);
            }
    }

private:
    template <int Bits>
    uint8_t code(const uint8_t* codes, const uint8_t* high, int at) const {
        constexpr int low = Bits == 8 ? 8 : Bits < 4 ? 2 : 4, width = Bits - low;
        const int own = codes[at * low / 8] >> (at * low % 8) & ((1 << low) - 1);
        if (Bits == 2 || Bits == 4) return static_cast<uint8_t>(number_of(p_, own) + zero_);
        const int whole = width ? own | (high[at * width / 8] >> (at * width % 8) & ((1 << width) - 1)) << low : own;
        return static_cast<uint8_t>(whole ^ zero_);  // from two's complement to unsigned
    }
    const hop_group_product& p_;
    int zero_;
};

using Order = PlainOrder;
