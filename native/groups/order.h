// The order of codes for integer products. Included in a namespace (isa.h).
//
// A block consists of four chunks of 32 elements: 64 bytes with the first elements of each chunk, then 64 with the
// second ones. Each chunk has 16 of these bytes, 8 from either half. The position of codes in their bytes determines
// which are first and second elements, so that codes are unpacked by shifts only.

constexpr int64_t kBlock = 128;   // elements
constexpr int64_t kColumns = 16;  // rows of the weight at a time

// The element of a chunk at byte `at` of 16, for the first or the second elements.
constexpr int element_of(int bits, int at, int second) {
    if (bits == 8) return (at / 8 * 2 + second) * 8 + at % 8;
    if (bits < 4) return at / 8 * 16 + at % 4 * 4 + at / 4 % 2 + 2 * second;
    return 2 * at + second;
}

// The place in a block of quad q (four bytes) of a unit, which has 2 * Quads: half of them are second elements.
template <int Quads>
constexpr int place_of_quad(int q) {
    return q / Quads * 64 + q % Quads * 4;
}

inline int number_of(const hop_group_product& p, int code) { return static_cast<int>(p.numbers[code]); }

// The constant that makes codes nonnegative.
inline int zero_of(const hop_group_product& p) {
    if (p.bits == 8) return 128;
    if (p.bits != 2 && p.bits != 4) return p.is_signed ? 1 << (p.bits - 1) : 0;
    int least = 0;
    for (int i = 0; i < 1 << p.bits; ++i)
        if (number_of(p, i) < least) least = number_of(p, i);
    return -least;
}

// Permutes a block of codes of x to this order with plain loops.
class PlainOrder {
public:
    explicit PlainOrder(int bits) {
        for (int i = 0; i < kBlock; ++i) from_[i] = static_cast<uint8_t>(i % 64 / 16 * 32 + element_of(bits, i % 16, i / 64));
    }
    void operator()(const int8_t* from, int8_t* to) const {
        for (int i = 0; i < kBlock; ++i) to[i] = from[from_[i]];
    }

private:
    uint8_t from_[kBlock];
};
