// Products in portable C++. Integers are multiplied as float32, in which sums over a slice are exact. Included by each
// file that uses this engine, in the namespace of its instructions.
#include "common/rounding.h"
#include "gemm/decode_plainly.h"
#include "gemm/columns_plain.h"
#include "gemm/tiles_plain.h"
#include "gemm/words_plain.h"
#include "gemm/scales.h"
#include "gemm/pack_lhs.h"
#include "gemm/pack_rhs.h"
#include "gemm/epilogue.h"
#include "gemm/groups_plain.h"
#include "gemm/finish_plain.h"
#include "gemm/requantize.h"
#include "gemm/gemm.h"
#include "gemm/lhs_floats.h"

// Whether a word's first byte is its lowest.
constexpr bool kLittle = __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__;

struct Int8 {
    using Sum = int32_t;
    static constexpr int kBytes = 1;

    static void lhs_tile(const uint8_t* tile, uint8_t* out) {
        float floats[kSlice];
        for (int row = 0; row < kRows; ++row, tile += kSlice, out += sizeof(floats)) {
            for (int i = 0; i < kSlice; ++i) floats[i % 4 * kQuads + i / 4] = static_cast<int8_t>(tile[i]);
            std::memcpy(out, floats, sizeof(floats));
        }
    }
    static void rhs_tile(const uint8_t* tile, int quad, int quads, float (*out)[kQuads][kRows]) {
        for (int q = quad; q < quad + quads; ++q) {
            uint32_t codes[kRows];
            std::memcpy(codes, tile + q * 64, sizeof(codes));
            for (int part = 0; part < 4; ++part) {
                const int above = 8 * (kLittle ? 3 - part : part);  // bits
                for (int i = 0; i < kRows; ++i)
                    out[part][q][i] = static_cast<float>(static_cast<int32_t>(codes[i] << above) >> 24);
            }
        }
    }
};

struct Bfloat16 {
    using Sum = float;
    static constexpr int kBytes = 2;

    static void lhs_tile(const uint8_t* tile, uint8_t* out) { lhs_floats(tile, out); }
    static void rhs_tile(const uint8_t* tile, int quad, int quads, float (*out)[kQuads][kRows]) {
        for (int e = 0; e < 2; ++e)
            for (int q = quad; q < quad + quads; ++q) {
                uint32_t pairs[kRows], bits[2][kRows];
                std::memcpy(pairs, tile + e * kTile + q * 64, sizeof(pairs));
                for (int i = 0; i < kRows; ++i) {
                    bits[!kLittle][i] = pairs[i] << 16;
                    bits[kLittle][i] = pairs[i] & 0xffff0000;
                }
                for (int part = 0; part < 2; ++part) std::memcpy(out[2 * e + part][q], bits[part], sizeof(bits[part]));
            }
    }
};

template <class Numbers>
class Portable {
public:
    using Sum = typename Numbers::Sum;
    static constexpr int kBytes = Numbers::kBytes, kLhsBytes = 4;
    static constexpr bool kFewRows = false, kKept = false;
    static void lhs_tile(const uint8_t* tile, uint8_t* out) { Numbers::lhs_tile(tile, out); }

    Portable(int, int quads) : quads_(quads) {}

    template <int R, class Between>
    void multiply(const uint8_t* a, const uint8_t* b, int rows, int64_t slices, Sum* sums, bool add, Between& between) {
        for (; slices > 0; --slices, add = true, a += R * kLhsBytes * kTile, b += 2 * kBytes * kTile) {
            slice(a, b, rows, 0, kQuads, sums, add);
            between();
        }
    }

    template <int R, class Between>
    void step(const uint8_t* a, const uint8_t* b, int rows, int quad, Sum* sums, Between&) {
        slice(a, b, rows, quad, quads_, sums, false);
    }

private:
    static void slice(const uint8_t* a, const uint8_t* b, int rows, int quad, int quads, Sum* sums, bool add) {
        alignas(64) float floats[4][kQuads][kRows];
        for (int tile = 0; tile < 2; ++tile, sums += kRows) {
            Numbers::rhs_tile(b + tile * kBytes * kTile, quad, quads, floats);
            const auto* left = reinterpret_cast<const float*>(a);
            int row = 0;
            for (; row + 2 <= rows; row += 2)
                block<2>(left + row * kSlice, floats, quad, quads, sums + row * kBlock, add);
            if (row < rows) block<1>(left + row * kSlice, floats, quad, quads, sums + row * kBlock, add);
        }
    }

    using Vector = float __attribute__((vector_size(16)));  // works on any CPU: compilers split vectors that are wider
                                                            // than registers
    static constexpr int kVectors = kRows / 4;

    template <int N>
    static void block(const float* a, const float (*b)[kQuads][kRows], int quad, int quads, Sum* sums, bool add) {
        Vector c[N][kVectors] = {};
        for (int part = 0; part < 4; ++part)
            for (int q = quad; q < quad + quads; ++q) {
                Vector right[kVectors];
                std::memcpy(right, b[part][q], sizeof(right));
                for (int i = 0; i < N; ++i)
                    for (int j = 0; j < kVectors; ++j) c[i][j] += right[j] * a[i * kSlice + part * kQuads + q];
            }
        for (int i = 0; i < N; ++i)
            for (int j = 0; j < kRows; ++j) {
                Sum& sum = sums[i * kBlock + j];
                const Sum found = static_cast<Sum>(c[i][j / 4][j % 4]);
                sum = add ? plus(sum, found) : found;
            }
    }

    static float plus(float a, float b) { return a + b; }
    static int32_t plus(int32_t a, int32_t b) {
        return static_cast<int32_t>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
    }

    int quads_;
};
