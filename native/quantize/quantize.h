// What quantize and dequantize share: a call, and how its tensor is cut into pieces for threads.
#pragma once
#include <cstddef>
#include <cstdint>

#include "common/cpu.h"
#include "hop.h"

namespace hop {

constexpr int64_t kColumns = 4096;     // of a row at a time: as float32 they stay in the first cache
constexpr int64_t kLarge = 64 * 1024;  // elements above which threads share a block

// Of hop_codebook_tables: where the lines are; magnitudes below count as this one; what codes in units of 2^-16 are off by.
constexpr int64_t kPieces = 2064;
constexpr float kPieceLeast = 0x1p-24f;
constexpr int32_t kPieceMargin = 16;
constexpr uint32_t kBeginNear = 48;  // units of the last place after which a line begins for certain
void find_pieces(const float* thresholds, const float* numbers, int32_t size, uint8_t* tables);

// Of hop_codebook_tables: whether there are bins, and where: one for each upper half of numbers from kPieceLeast up to 2,
// first of positive and then of negative ones. Added to half the lower half of a number, which counts up with numbers, a bin
// has the code in its upper half, and in its lower one how far the number is above a threshold, and kBinMargin.
constexpr int64_t kHasBins = 2051, kBins = 2384, kBinsOfSign = 3200;
constexpr uint32_t kFirstBin = 103 << 7, kBinMargin = 4;
constexpr float kBinLeast = 0x1.4p-24f;  // as which magnitudes below count
void find_bins(const float* thresholds, int32_t size, uint8_t* tables);

constexpr float kLower = 0x1p-20f;  // 8 units of the last place at least: see codes_avx512.h

struct QuantizeCall {
    const hop_quantizer& q;
    const hop_blocks& blocks;
    const void* x;
    const void* given_scale;          // nullptr: the rule finds it
    bool given_codes;                 // rather than float32
    const uint8_t* given_zero_point;  // codes
    const void* noise;                // nullptr: to the nearest
    int32_t noise_bits;               // 8, in bytes, or 24, in words
    uint8_t* codes;
    void* scale;
    void* second;  // zero points, or global_amax
    int threads;
    bool of_state;  // of an optimizer: NaN counts as 0, and infinities as the largest floats
};

// What x is multiplied by first, and whence noise comes.
struct Product {
    const float* factor;  // of each column
    bool turned;          // x lies as (batch, cols, rows)
    const int64_t* seed;  // nullptr: noise is given, or there is none
    uint32_t stream;
};

struct DequantizeCall {
    const hop_quantizer& q;
    const hop_blocks& blocks;
    const uint8_t* codes;
    const void* scale;
    const void* second;
    void* out;
    int threads;
};

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int32_t codes_per_byte(const hop_quantizer& q) {
    return q.bits == 1 || q.bits == 2 || q.bits == 4 ? 8 / q.bits : 1;
}
// Items of `size` elements that a thread takes at a time: in a row, as it fetches the next while it is at one.
inline int64_t grain_of(int64_t items, int64_t size, int threads) {
    const int64_t fair = items / (8 * threads), most = kLarge / size;
    return 1 + (fair < most ? fair : most);
}
inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A row of blocks, or what of it is done at a time: blocks `first` to `first + count`, over all of their rows.
struct Strip {
    int64_t row, rows;  // of the tensor, batches included
    int64_t col, cols;
    int64_t first, count;
};

// The strips of a tensor. One is as wide as kColumns, or one block if that is wider.
struct Strips {
    const hop_blocks& g;
    int64_t down, across;  // blocks
    int64_t width;         // of a strip, in blocks
    int64_t per_row;       // strips

    explicit Strips(const hop_blocks& blocks) : g(blocks) {
        down = divide_up(g.rows, g.tile_rows);
        across = divide_up(g.cols, g.tile_cols);
        width = g.tile_cols >= kColumns ? 1 : kColumns / g.tile_cols;
        if (width >= 8) width &= ~int64_t(7);  // strips start at whole bytes
        width = least(width, across);
        per_row = divide_up(across, width);
    }
    int64_t size() const { return g.batch * down * per_row; }
    Strip operator[](int64_t i) const {
        const int64_t block_row = i / per_row, begin = i % per_row * width, in_batch = block_row % down;
        Strip s;
        s.row = block_row / down * g.rows + in_batch * g.tile_rows;
        s.rows = least(g.tile_rows, g.rows - in_batch * g.tile_rows);
        s.count = least(width, across - begin);
        s.first = block_row * across + begin;
        s.col = begin * g.tile_cols;
        s.cols = least(s.count * g.tile_cols, g.cols - s.col);
        return s;
    }
};

// Part of a strip: one thread's work.
struct Unit {
    int64_t row, rows, col, cols;  // row and col from the strip's
};

// The units of a strip: by the shape alone, never by the number of threads, as sums depend on them.
struct Units {
    const Strip& s;
    int64_t cols, rows;  // of a unit
    int64_t across;

    explicit Units(const Strip& strip) : s(strip) {
        cols = s.count > 1 ? s.cols : least(s.cols, kLarge);
        across = divide_up(s.cols, cols);
        rows = least(s.rows, divide_up(kLarge, cols));
    }
    int64_t size() const { return across * divide_up(s.rows, rows); }
    Unit operator[](int64_t i) const {
        const int64_t r = i / across * rows, c = i % across * cols;
        return {r, least(rows, s.rows - r), c, least(cols, s.cols - c)};
    }
};

// What is known of blocks side by side.
struct Stats {
    float* high;     // amax, or the largest number
    float* low;      // HOP_MINMAX: the smallest
    double* sum;     // HOP_ABSMEAN
    int64_t* count;  // HOP_ABSMEAN: elements that are not NaN
    bool known;      // no NaN and no infinity was seen

    static size_t bytes(int64_t blocks) { return size_t(blocks) * 24; }
    static Stats at(char* memory, int64_t blocks) {
        Stats s;
        s.sum = reinterpret_cast<double*>(memory);
        s.count = reinterpret_cast<int64_t*>(memory + 8 * blocks);
        s.high = reinterpret_cast<float*>(memory + 16 * blocks);
        s.low = s.high + blocks;
        return s;
    }
    void clear(int64_t blocks, int rule) {
        known = true;
        __builtin_memset(high, 0, size_t(blocks) * 4);
        if (rule == HOP_MINMAX) __builtin_memset(low, 0, size_t(blocks) * 4);
        if (rule == HOP_ABSMEAN) {
            __builtin_memset(sum, 0, size_t(blocks) * 8);
            __builtin_memset(count, 0, size_t(blocks) * 8);
        }
    }
};

// How elements of blocks side by side are encoded: divided by, or multiplied with, a factor each.
struct Factors {
    bool divides;
    float* by;
    uint8_t* zero;  // the code of 0, where each block has its own
};

// S of HOP_TWO_LEVEL, and what all blocks under one global_amax share.
struct TwoLevel {
    float scaled;        // amax of a block times this is its scale
    float inverse[256];  // of the code of a scale
};

// A float format as its bits are in float32: exponents count up from that of its least normal number.
struct FloatFormat {
    uint32_t mantissa;  // bits
    uint32_t largest;   // float32's bits of the largest number
    uint32_t least;     // float32's bits of the least normal number
    uint32_t base;      // of codes: what rounding adds
    uint32_t sign;      // which bit
    uint32_t nan;       // its code, without the sign
    uint32_t infinity;  // its code, where it has one
    bool keeps_nan;     // or NaN becomes the largest number
};

// What is compiled for each dtype of x. All else is compiled for float32, to which lines of x are widened.
struct Loops {
    int64_t bytes;  // of an element
    float largest;
    void (*measure)(const QuantizeCall& c, const Strip& strip, const Unit& u, Stats& s);
    void (*mark_nan)(const QuantizeCall& c, const Strip& s, float* high);
    float (*amax)(const void* x, int64_t n);
    // The codes of a row of blocks from x as it is; nullptr, or false, where lines of float32 must do it.
    bool (*encode)(const hop_quantizer& q, const FloatFormat& f, const void* x, int64_t n, int64_t size, const Factors& by,
                   bool known, bool fetches, uint8_t* out);
    void (*widen)(const void* x, int64_t n, const float* factor, float* out);  // factor: of each element, or nullptr
};

// What is known of a strip's blocks, and what follows.
struct Room {
    Stats stats, part;
    Factors factors;

    static size_t bytes(int64_t blocks) { return size_t(padded(blocks)) * 53; }
    static int64_t padded(int64_t blocks) { return divide_up(blocks, 16) * 16; }
    Room(char* memory, int64_t blocks, bool affine) {
        const int64_t n = padded(blocks);
        stats = Stats::at(memory, n);
        part = Stats::at(memory + 24 * n, n);
        factors.by = reinterpret_cast<float*>(memory + 48 * n);
        factors.zero = affine ? reinterpret_cast<uint8_t*>(memory + 52 * n) : nullptr;
        factors.divides = true;
    }
};

// ---- at each level

HOP_AT_EACH_LEVEL(
    int quantize(const QuantizeCall& c, int32_t dtype);
    int quantize_product(const QuantizeCall& c, const Product& p, int32_t dtype);
    const Loops* loops_of_words(int32_t dtype);  // of bfloat16 and float16; nullptr for others
    // A strip of float32, by one thread; and parts of that: a part of a strip's codes, and the scales of blocks.
    void quantize_f32(const QuantizeCall& c, const Strip& s, const TwoLevel* outer, Room& room);
    void encode_f32(const QuantizeCall& c, const Strip& s, const Unit& u, const Factors& f, bool known);
    void find_scales_f32(const QuantizeCall& c, const Stats& s, int64_t first, int64_t count, Factors& f);
)
HOP_AT_EACH_LEVEL_OR_NEON(
    int dequantize(const DequantizeCall& c, int32_t dtype);
    void decode_f32(const DequantizeCall& c, const Strip& s, const Unit& u);  // to float32
)
#if defined(__AARCH64EL__)
namespace neon { using portable::quantize_f32; }
#endif

}  // namespace hop
