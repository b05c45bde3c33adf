// Data structures of quantize and dequantize: calls, and how tensors are split among threads.
#pragma once
#include <cstddef>
#include <cstdint>

#include "common/cpu.h"
#include "hop.h"

namespace hop {

constexpr int64_t kColumns = 4096;     // columns of a row at a time: as float32 they fit in the first-level cache
constexpr int64_t kLarge = 64 * 1024;  // elements above which threads share a block

// In the tables of hop_codebook_tables: the offset of the lines; the magnitude to which smaller ones are raised; the
// error of a position, in units of 2^-16.
constexpr int64_t kPieces = 2064;
constexpr float kPieceLeast = 0x1p-24f;
constexpr int32_t kPieceMargin = 16;
constexpr uint32_t kBeginNear = 48;  // a line begins within so many units in the last place
void find_pieces(const float* thresholds, const float* numbers, int32_t size, uint8_t* tables);

// In the tables of hop_codebook_tables: whether there are bins, and their offset. There is one bin for each upper half
// of floats from kPieceLeast up to 2, first for positive and then for negative floats. Half of a float's lower half,
// which increases with the float, is added to the bin: the upper half of the sum is the code, the lower half the
// distance above a threshold plus kBinMargin.
constexpr int64_t kHasBins = 2051, kBins = 2384, kBinsOfSign = 3200;
constexpr uint32_t kFirstBin = 103 << 7, kBinMargin = 4;
constexpr float kBinLeast = 0x1.4p-24f;  // smaller magnitudes are raised to it
void find_bins(const float* thresholds, int32_t size, uint8_t* tables);

constexpr float kLower = 0x1p-20f;  // at least 8 units in the last place: see codes_avx512.h

struct QuantizeCall {
    const hop_quantizer& q;
    const hop_blocks& blocks;
    const void* x;
    const void* given_scale;          // nullptr: computed by the rule
    bool given_codes;                 // given_scale has codes, not float32
    const uint8_t* given_zero_point;  // codes
    const void* noise;                // nullptr: round to nearest
    int32_t noise_bits;               // 8, in bytes, or 24, in words
    uint8_t* codes;
    void* scale;
    void* second;  // zero points, or global_amax
    int threads;
    bool of_state;  // an optimizer state: NaN counts as 0, infinities count as the largest floats
};

// The factors that x is multiplied by first, and the source of noise.
struct Product {
    const float* factor;  // one per column
    bool turned;          // x has the layout (batch, cols, rows)
    const int64_t* seed;  // nullptr: noise is passed, or there is none
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
// Items of `size` elements that a thread takes at a time: adjacent ones, because it prefetches the next during each.
inline int64_t grain_of(int64_t items, int64_t size, int threads) {
    const int64_t fair = items / (8 * threads), most = kLarge / size;
    return 1 + (fair < most ? fair : most);
}
inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A row of blocks, or a part of it processed at a time: blocks `first` to `first + count - 1`, over all of their rows.
struct Strip {
    int64_t row, rows;  // row of the tensor, batches included
    int64_t col, cols;
    int64_t first, count;
};

// The strips of a tensor: kColumns wide, or one block if that is wider.
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
    int64_t row, rows, col, cols;  // row and col are relative to the strip
};

// The units of a strip. They depend only on the shape, not on the number of threads, because sums depend on them.
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

// Statistics of adjacent blocks.
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

// The factors of adjacent blocks: elements are divided or multiplied by them.
struct Factors {
    bool divides;
    float* by;
    uint8_t* zero;  // the code of 0, if each block has a zero point
};

// S of HOP_TWO_LEVEL, and values that all blocks under one global_amax share.
struct TwoLevel {
    float scaled;        // times the amax of a block, it gives the block's scale
    float inverse[256];  // for each code of a scale
};

// A float format in terms of float32 bits; exponents count from that of the least normal number.
struct FloatFormat {
    uint32_t mantissa;  // number of bits
    uint32_t largest;   // float32 bits of the largest number
    uint32_t least;     // float32 bits of the least normal number
    uint32_t base;      // added by rounding, and subtracted from codes
    uint32_t sign;      // index of the sign bit
    uint32_t nan;       // code without the sign
    uint32_t infinity;  // code, if the format has infinities
    bool keeps_nan;     // else NaN becomes the largest number
};

// Functions compiled for each dtype of x. All other code is compiled for float32, and gets lines of x widened to
// float32.
struct Loops {
    int64_t bytes;  // bytes of an element
    float largest;
    void (*measure)(const QuantizeCall& c, const Strip& strip, const Unit& u, Stats& s);
    void (*mark_nan)(const QuantizeCall& c, const Strip& s, float* high);
    float (*amax)(const void* x, int64_t n);
    // Encodes a row of blocks from x directly; nullptr, or returns false, if x must be widened to float32 first.
    bool (*encode)(const hop_quantizer& q, const FloatFormat& f, const void* x, int64_t n, int64_t size, const Factors& by,
                   bool known, bool fetches, uint8_t* out);
    void (*widen)(const void* x, int64_t n, const float* factor, float* out);  // factor: one per element, or nullptr
};

// Statistics and factors of a strip's blocks.
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
    // Quantizes a float32 strip in one thread; and its steps: encoding part of a strip, and finding scales of blocks.
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
