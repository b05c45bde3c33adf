// The C interface of hop's native kernels. It uses only plain C types, so that one binary works with every version of
// PyTorch. Strides and offsets are in elements. Unless stated otherwise, functions return a Result.
#pragma once
#include <stdint.h>

#if defined(_WIN32)
#define HOP_API extern "C" __declspec(dllexport)
#else
#define HOP_API extern "C" __attribute__((visibility("default")))
#endif

enum Result { HOP_OK = 0, HOP_NO_MEMORY = 1, HOP_UNSUPPORTED = 2 };

// The version of this interface; Python rejects libraries with another version.
HOP_API int hop_version();

// Instruction levels, as in common/cpu.h. hop_use_level returns the previous level.
HOP_API int hop_best_level();
HOP_API int hop_has_level(int level);  // a level below the best may be missing: AVX-VNNI
HOP_API int hop_lacks_avx512();  // whether the CPU has AVX-512 but this build has no code for it
HOP_API int hop_use_level(int level);

// Whether one or two rows of floats may be summed in a different order than more rows where that is faster: on CPUs
// with matrix tiles, for a packed weight. Off by default. Returns the previous setting.
HOP_API int hop_reorder_few_rows(int yes);

// Operations per second of the matrix unit with int8, 0 if there is none; and bytes per second read from memory.
HOP_API double hop_peak(int threads);
HOP_API double hop_bandwidth(int threads, const void* data, int64_t bytes);

// Sets the host's function that runs body(context, index, count) on at most `count` threads, all at the same time, with
// index 0..count-1, and returns when all have returned. If there are fewer threads, the count passed to body is their
// number, the same for all. Without such a function, each call runs on the caller's thread.
typedef void (*hop_threads)(int count, void (*body)(void*, int, int), void* context);
HOP_API void hop_use_threads(hop_threads run);

// ---- products

// The encoding of an element.
enum Format {
    HOP_NONE = 0,
    HOP_INT8, HOP_UINT8,                // a byte each
    HOP_INT4, HOP_UINT4, HOP_E2M1,      // two in a byte, the first in the low bits
    HOP_E4M3, HOP_E5M2,                 // a byte each
    HOP_E8M0,                           // for scales: 2^(code - 127)
    HOP_FLOAT32, HOP_BFLOAT16, HOP_FLOAT16, HOP_INT32,
};

// The memory layout of codes.
enum Layout {
    HOP_STRIDED = 0,
    // A matrix whose last dimension is summed, as [rows / 32][k / 64][2][16 quads][16 rows][4] codes: the tile
    // instructions of CPUs read this layout directly. Rows and k are padded with zero bytes. 4-bit codes: quads 2i and
    // 2i + 1 share their bytes, the first in the low bits.
    HOP_TILED = 1,
};

// One value for each block of `rows` x `ks` elements: data[row / rows * row_stride + k / ks * k_stride] * factor.
struct hop_scale {
    int32_t format;  // HOP_NONE: 1
    float factor;
    int64_t rows, ks;
    int64_t row_stride, k_stride;
};

// An operand of a product, as a matrix (rows, k): (code - zero) * scale * fold.
struct hop_operand {
    int32_t format, layout;
    int64_t row_stride, k_stride;
    int32_t zero;         // for all elements
    int32_t zero_format;  // zero points per block of scale, instead of `zero`: HOP_INT8, HOP_UINT8 or HOP_NONE
    hop_scale scale;      // float32
    hop_scale fold;       // block scales of few enough bits that decode(code) * fold is a bfloat16 number
};

// How codes are computed from a sum, as in hop.requantization.
enum Requantize { HOP_DIVISION = 0, HOP_MULTIPLIER, HOP_GEMMLOWP, HOP_TFLITE, HOP_AWAY, HOP_EVEN, HOP_RECIPROCAL };

struct hop_output {
    int32_t format;       // HOP_FLOAT32, HOP_BFLOAT16, HOP_FLOAT16, HOP_INT32 (the sum itself), HOP_INT8 or HOP_UINT8
    int32_t bias_format;  // HOP_NONE, a float format, or HOP_INT32: multiples of the product of the scales
    int64_t row_stride;
    // for codes
    int32_t requantize, low, high, zero, zero_format;
    int32_t bounded;         // 1: the activation has a lower bound, 2: an upper bound, 3: both
    float bounds[2];
    int64_t scale_row_stride, scale_column_stride;  // of scale and zero point: 0 if all share one value
};

// Distances in bytes between the members of a batch, for codes, scale, zero point and fold.
struct hop_steps {
    int64_t codes, scale, zero, fold;
};

struct hop_product {
    int64_t m, n, k;
    hop_operand lhs, rhs;
    hop_output output;
    int64_t batch;  // number of products, which share bias and output scale; 1 without a batch
    hop_steps lhs_step, rhs_step;
    int64_t output_step;
};

// The data of an operand: codes, scale, zero point and fold. For rhs also, if known, the sums of the codes of each row
// over all k, one batch member after the other; they are multiplied by the zero points of lhs.
struct hop_data {
    const void *codes, *scale, *zero, *fold;
    const int32_t* sums;
};

// Returns the reason why no kernel supports the product; a null pointer if one does.
HOP_API const char* hop_product_declines(const hop_product* product);

// Computes output (m, n) = lhs (m, k) times the transpose of rhs (n, k), for each member of the batch.
HOP_API int hop_multiply(const hop_product* product, int threads, const hop_data* lhs, const hop_data* rhs, const void* bias,
                         const void* output_scale, const void* output_zero, void* output);

// The same for an lhs in HOP_FLOAT32 or HOP_FLOAT16, contiguous along k, without scales, and a float32 output.
HOP_API int hop_multiply_floats(
    const hop_product* product, int threads, const void* lhs, const void* rhs_codes, const void* rhs_scale,
    const void* rhs_zero, const void* rhs_fold, float* output);

// Converts rhs codes from HOP_STRIDED to HOP_TILED.
HOP_API int hop_pack(const hop_operand* operand, int64_t rows, int64_t k, int threads, const void* codes, void* tiled);

// ---- products with weights in the formats of quantized model files: codes of 2 to 8 bits in rows, with a scale, and
// optionally an offset, for each group of a row

// Scales, one for each `group` elements of a row: floats of `format`, or codes HOP_INT8, HOP_UINT8 and HOP_E4M3, which
// represent numbers[code] if `numbers` is given, and integers otherwise. They are multiplied, or divided if `divided`,
// by outer values of outer_format (HOP_NONE: 1), one for each `outer` elements, or one for the whole weight if that is
// 0.
struct hop_group_scales {
    int32_t format, outer_format, divided;
    int64_t group, outer;
    const float* numbers;  // 256
};

// y (m, n) = x (m, k) times the transpose of ŵ (n, k), ŵ = fl(fl(s * code) - offset), with float32 rounding fl; then a
// bias is added, and the result is cast. All memory is contiguous; k is a multiple of 32, and of group; group is 16 or
// a multiple of 32.
//
//     bits  codes of a row                 code
//     8     one per byte                   int8, without offsets
//     4     two per byte                   numbers[code]
//     2     four per byte                  numbers[code]
//     5     two per byte, of the low 4     the low bits + 16 · high bit, of which 8 share a byte of `high`
//     6     the same                       likewise, with two high bits, of which 4 share a byte
//     3     four per byte, of the low 2    the low bits + 4 · high bit, of which 8 share a byte
//
// Codes of 3, 5 and 6 bits are two's complement if is_signed.
//
// Results are summed in the same order for all m and n: each of 16 lanes adds elements of one block of 32 after the
// other, lane j the elements j and j + 16 of each block for 8 bits, 2 j and 2 j + 1 for other formats. The lanes are
// then added up in halves.
//
// For x in HOP_INT8, x̂ = x_scale * code. Sums of integers are exact, modulo 2^32, within each step in which no scale
// changes, and the weight's codes must represent integers. Each other operation is rounded to float32, and steps are
// added in order:
//
//     y = Σ (float(Σ x code · code) * x_scale) * s - (float(Σ x code) * x_scale) * offset
struct hop_group_product {
    int64_t m, n, k;
    int32_t bits, is_signed, has_offset;
    int32_t x_format, bias_format, output_format;  // HOP_FLOAT32, HOP_BFLOAT16 or HOP_FLOAT16; bias also HOP_NONE, x HOP_INT8
    int64_t x_group;                               // for x in HOP_INT8: elements that share a scale, a multiple of 32; 0 for a whole row
    float numbers[16];                             // for 4 and 2 bits
    struct hop_group_scales scales;                // also of offsets
};

struct hop_group_data {
    const void *codes, *high, *scale, *offset, *outer_scale, *outer_offset;
};

// Returns the reason why no kernel supports the product; a null pointer if one does.
HOP_API const char* hop_group_product_declines(const struct hop_group_product* product);

// x_scale: for x in HOP_INT8, float32 (m, k / x_group), rounded up; else null.
HOP_API int hop_multiply_groups(const struct hop_group_product* product, int threads, const void* x, const float* x_scale,
                                const struct hop_group_data* weight, const void* bias, void* y);

// ---- convolutions

// Sizes have three dimensions: depth, height, width; 1 for missing dimensions.
struct hop_convolution {
    int64_t batch, channels, outputs, groups;
    int64_t size[3], kernel[3], stride[3], padding[3], dilation[3], output_size[3];
    int64_t input_strides[5];   // example, channel, depth, height, width
    int64_t weight_strides[5];  // output, channel of its group, depth, height, width
    int32_t channels_last;      // layout of the output: (batch, *output_size, outputs), or (batch, outputs, *output_size)
    // int8 or uint8, with scales and zero points for all elements, or one for each example, as for a row. The input is
    // padded with 0.
    hop_operand lhs;
    // int8, or int4 if tiled; with one scale for all elements, or one for each output. If tiled, its shape is (outputs,
    // k), where k has the kernel elements and, last, the channels of a group.
    hop_operand rhs;
    hop_output output;  // row_stride is ignored
};

// Returns the reason why no kernel supports the convolution; a null pointer if one does.
HOP_API const char* hop_convolution_declines(const hop_convolution* convolution);

HOP_API int hop_convolve(
    const hop_convolution* convolution, int threads, const void* input, const void* input_scale, const void* input_zero,
    const void* weight, const void* weight_scale, const void* bias, const void* output_scale, const void* output_zero,
    void* output);

// ---- checks of PyTorch tensors before they are read

// The expected form of a tensor: its bytes in the storage range from its offset up to `extent`. An item size of 0: no
// tensor.
enum { HOP_DIMS = 8 };
struct hop_form {
    int32_t dtype, device;  // in PyTorch's numbering
    int64_t item, extent, dim;
    int64_t sizes[HOP_DIMS], strides[HOP_DIMS];
};

// Whether the storage of each tensor, given by its implementation pointer, is known to contain all of its elements.
// With forms, also whether the tensor has the form's shape, dtype and device; strides may differ.
HOP_API int hop_all_fit(int count, const hop_form* forms, const void* const* implementations);

// ---- quantize: codes and scales of a tensor, and back, bit for bit equal to hop.numerics.quantizer

enum FloatDtype { HOP_F32 = 0, HOP_BF16 = 1, HOP_F16 = 2 };
enum FormatKind { HOP_INTEGER = 0, HOP_FLOAT = 1, HOP_CODEBOOK = 2 };
enum ScaleRule {
    HOP_GIVEN = 0,
    HOP_AMAX = 1,
    HOP_MINMAX = 2,
    HOP_ABSMEAN = 3,
    HOP_CURRENT_SCALING = 4,
    HOP_MICROSCALING = 5,
    HOP_TWO_LEVEL = 6
};

// How HOP_MICROSCALING finds the power of two: amax / max rounded up; or amax over the largest power of two of the
// format, rounded down, rounded up, or rounded as the format rounds its mantissa, and then down.
enum PowerRounding { HOP_MX_RCEIL = 0, HOP_MX_FLOOR = 1, HOP_MX_CEIL = 2, HOP_MX_EVEN = 3 };

struct hop_quantizer {
    int32_t format, bits, rule;
    int32_t low, high, zero;                          // integers: the codes, and the code of 0 without a zero point
    int32_t mantissa_bits, bias, largest, keeps_nan;  // floats
    int32_t size, zero_code;                          // codebooks
    int32_t affine;                                   // whether zero points are stored
    int32_t power_of_two, most_of_dtype;              // HOP_CURRENT_SCALING
    int32_t outer_rows;                               // HOP_TWO_LEVEL: one global_amax per row
    int32_t rounding, largest_power;                  // HOP_MICROSCALING: PowerRounding; exponent of the largest value
    float floor;                                      // lower bound of amax
    float range;                                      // of the codes: amax, or max - min, is mapped to it
    float inverse;                                    // float32(1 / max)
    float top, inverse_top;                           // HOP_TWO_LEVEL: 448 * max, float32(1 / that)
    const float* thresholds;                          // codebooks: the least value with each code, NaN after the last
    const float* numbers;                             // codebooks
    const uint8_t* index;                             // from hop_codebook_index, or nullptr
    const uint8_t* tables;                            // from hop_codebook_tables, or nullptr
};

// A tensor (batch, rows, cols) in blocks of (tile_rows, tile_cols), the last ones cut off; row_stride is the distance
// of rows of x.
struct hop_blocks {
    int64_t batch, rows, cols, tile_rows, tile_cols, row_stride;
};

enum { HOP_INDEX_SIZE = 65536, HOP_TABLES_SIZE = 2384 + 4 * 6400 };

// Fills HOP_INDEX_SIZE bytes: for the upper 16 bits of each float, the least code of the floats with these bits.
// Returns HOP_UNSUPPORTED if any such floats have more than two codes.
HOP_API int hop_codebook_index(const float* thresholds, int32_t size, uint8_t* index);

// Fills HOP_TABLES_SIZE bytes: the first, second, third and fourth bytes of 256 numbers; the same for the thresholds
// after the first; whether products with 1 / scale may find codes; the lines that the magnitudes of thresholds are on,
// if there are few (quantize/pieces.cpp); and, if thresholds are far enough apart, codes by the upper half of a float
// (quantize/bins.cpp). `numbers` and `thresholds` have at least 257 floats.
HOP_API void hop_codebook_tables(const float* thresholds, const float* numbers, int32_t size, uint8_t* tables);

// x -> codes, several per byte below 8 bits; scale and second (zero points, or global_amax) as the rule stores them.
// given_scale replaces the rule: float32, or codes if given_codes. `noise`, as hop_noise makes it with noise_bits of 8
// or 24, makes rounding stochastic.
HOP_API int hop_quantize(const hop_quantizer* q, const hop_blocks* blocks, int32_t dtype, const void* x,
                         const void* given_scale, int32_t given_codes, const uint8_t* given_zero_point,
                         const void* noise, int32_t noise_bits, uint8_t* codes, void* scale, void* second, int32_t threads);

// The same for x times one factor per column, in float32, with scales computed by the rule. Returns HOP_UNSUPPORTED for
// blocks of several rows, HOP_TWO_LEVEL and HOP_GIVEN. If `turned`, the layout of x is (batch, cols, rows). With a
// seed, noise comes from hop_noise in 24 bits, with elements counted row by row.
HOP_API int hop_quantize_product(const hop_quantizer* q, const hop_blocks* blocks, int32_t dtype, const void* x,
                                 int32_t turned, const float* factor, const int64_t* seed, uint32_t stream,
                                 const void* noise, int32_t noise_bits, uint8_t* codes, void* scale, void* second,
                                 int32_t threads);

// codes -> values, computed in float32 and cast to dtype once; out is contiguous.
HOP_API int hop_dequantize(const hop_quantizer* q, const hop_blocks* blocks, int32_t dtype, const uint8_t* codes,
                           const void* scale, const void* second, void* out, int32_t threads);

// (batch, rows, cols) -> (batch, cols, rows), for elements of 1, 2 or 4 bytes; HOP_UNSUPPORTED for others.
HOP_API int hop_transpose(int64_t batch, int64_t rows, int64_t cols, int32_t bytes, const void* in, void* out,
                          int32_t threads);

// Writes `count` random integers, of 8 bits as bytes, or of 24 bits as uint32: stream number `stream` of the seed,
// which is read from memory.
HOP_API void hop_noise(const int64_t* seed, uint32_t stream, int64_t count, int32_t bits, void* out, int32_t threads);

// ---- elementary functions of float32, correctly rounded, numbered as in functions/functions.h. x is float32, bfloat16
// or float16 (FloatDtype), and may alias y.
HOP_API int hop_function(int32_t function, int32_t dtype, const void* x, float* y, int64_t n, int32_t threads);

// ---- rows: operations between products, computed in float32, and cast or quantized while the row is in cache; bit for
// bit as defined in hop/impls/scaled/families

enum RowOperation { HOP_FUNCTION = 0, HOP_GATED, HOP_LAYER_NORM, HOP_RMS_NORM, HOP_SOFTMAX, HOP_LOG_SOFTMAX, HOP_HADAMARD };

// For HOP_FUNCTION and HOP_GATED. The first ones, up to HOP_SILU, are numbered as in functions/functions.h.
enum RowFunction {
    HOP_EXP = 0, HOP_EXP2, HOP_LOG, HOP_TANH, HOP_ERF, HOP_SIGMOID, HOP_RSQRT, HOP_GELU, HOP_GELU_TANH, HOP_SILU,
    HOP_HARDSIGMOID, HOP_HARDSWISH, HOP_LEAKY_RELU
};

struct hop_rows {
    int32_t operation, function;
    double number;          // eps of norms, the slope of HOP_LEAKY_RELU, the block size of HOP_HADAMARD (divides a row)
    int64_t count, length;  // rows, and elements of each: the reduced or transformed dimension
    // FloatDtype values; result_dtype is that of `result` without a quantizer, else of `floats`
    int32_t dtype, other_dtype, weight_dtype, bias_dtype, result_dtype;
    const hop_quantizer* quantizer;  // nullptr: the result is floats
    hop_blocks blocks;               // of all elements; tile_rows is 1 unless scales are given
    void* floats;                    // with a quantizer: the rounded elements before quantization, or nullptr
};

// x, the other operand of HOP_GATED and the result are contiguous. The result is floats, or codes with scale and second
// as in hop_quantize. weight and bias of norms have `length` elements, or are null pointers. Returns HOP_UNSUPPORTED
// for HOP_TWO_LEVEL without a given scale, if one amax covers the tensor.
HOP_API int hop_compute_rows(const struct hop_rows* rows, const void* x, const void* other, const void* weight,
                             const void* bias, const void* given_scale, int32_t given_codes,
                             const uint8_t* given_zero_point, void* result, void* scale, void* second, int32_t threads);

// ---- attention of int8, in two passes over each row of scores, bit for bit as defined in
// hop/impls/scaled/families/attention.py

enum MaskKind { HOP_MASK_NONE = 0, HOP_MASK_BOOL, HOP_MASK_FLOAT };

// q is (batch, heads, queries, width), k (batch, key_heads, keys, width), v (batch, key_heads, keys, value_width), with
// a contiguous last dimension and strides of the others in elements. q_scale has one value for each (batch, head,
// query), k_scale for each (batch, key head, key), v_scale for each (batch, key head, channel), or key if it is
// per_token. The mask is (batch, heads, queries, keys), with elements of one byte or float32. The result, of
// FloatDtype, is contiguous. `heads` is a multiple of key_heads; sizes are at least 1, keys and width at most 65,793.
struct hop_attention {
    int64_t batch, heads, key_heads, queries, keys, width, value_width;
    int64_t q_stride[3], k_stride[3], v_stride[3], mask_stride[3];
    int64_t q_scale_stride[3], k_scale_stride[3], v_scale_stride[3];
    float scale;
    int32_t is_causal, mask, per_token, result_dtype;
};

HOP_API int hop_attend(const struct hop_attention* attention, const int8_t* q, const float* q_scale, const int8_t* k,
                       const float* k_scale, const int8_t* v, const float* v_scale, const void* mask, void* result,
                       int32_t threads);

// ---- optimizer steps in float32, bit for bit as in hop/optim/updates.py

enum UpdateRule { HOP_ADAM = 0, HOP_SGD = 1, HOP_LION = 2 };
enum UpdateFlag {
    HOP_COUPLED = 1,    // weight decay is added to the gradient
    HOP_NESTEROV = 2,   // HOP_SGD
    HOP_MAXIMIZE = 4,   // the gradient is negated
    HOP_STOCHASTIC = 8  // p is bfloat16, rounded with noise from `seed` and `stream`, two bytes per element
};
enum { HOP_STATES = 3, HOP_NUMBERS = 9, HOP_LEAST_BLOCK = 16, HOP_MOST_BLOCK = 2048 };

// An optimizer state: floats, or codes with one scale per block. Blocks have at least HOP_LEAST_BLOCK elements and
// divide HOP_MOST_BLOCK.
struct hop_state {
    const hop_quantizer* quantizer;  // nullptr: floats of `dtype`
    int64_t block;
    int32_t dtype;
    float least;  // HOP_AMAX: positive values are raised to at least this fraction of their block's amax; 0: they are
                  // not
    void* data;
    float* scale;
};

struct hop_update {
    int32_t rule, flags, states;
    int32_t p_dtype, grad_dtype;
    uint32_t stream;
    uint64_t seed;
    int64_t count;
    float numbers[HOP_NUMBERS];  // in the order of hop/optim/updates.py
    void* p;
    const void* grad;
    struct hop_state state[HOP_STATES];
};

// Updates p and the states. Returns HOP_UNSUPPORTED, before anything has changed, for other blocks or scale rules.
HOP_API int hop_step(const struct hop_update* update, int32_t threads);
