#include "convolution/convolution.h"

#include <numeric>

#include "common/cpu.h"
#include "common/isa.h"

namespace hop {
namespace {

constexpr int64_t kWeightBytes = 256 << 10;  // size of a weight up to which every thread reads all of it
constexpr int64_t kImageBytes = 512 << 10;   // size of an image, or of gathered rows, that stays in the cache
constexpr int64_t kMostBlocks = 64;          // maximum number of row blocks at a time; a quarter of it if sums are kept in memory

int64_t product_of(const int64_t* sizes) { return sizes[0] * sizes[1] * sizes[2]; }

hop_product product_of(const hop_convolution& c) {
    hop_product p{};
    p.m = c.batch * product_of(c.output_size), p.n = c.outputs;
    p.k = product_of(c.kernel) * (c.channels / c.groups);
    p.lhs = c.lhs, p.rhs = c.rhs, p.output = c.output;
    return p;
}

bool by_example(const hop_operand& o) {
    return (o.scale.format != HOP_NONE || o.zero_format != HOP_NONE) && o.scale.row_stride != 0;
}

}  // namespace

void Dimension::split(bool into_phases) {
    every = into_phases ? stride : 1;
    period = into_phases ? stride / std::gcd(stride, dilation) : 1;
    phases = kernel < period ? kernel : period;
    step = into_phases ? 1 : stride;
    span = (kernel - 1) * dilation / every;
}

Convolution::Convolution(const hop_convolution& convolution, int threads)
    : c(convolution), job(product_of(convolution), threads), batch(c.batch), pixels(product_of(c.output_size)) {
    for (int i = 0; i < 3; ++i) {
        const int64_t stride = c.output_size[i] > 1 ? c.stride[i] : 1, dilation = c.kernel[i] > 1 ? c.dilation[i] : 1;
        dims[i] = {c.size[i], c.output_size[i], c.kernel[i], stride, c.padding[i], dilation};
    }
    for (int i = 0; i < 5; ++i) strides[i] = c.input_strides[i];
    const int64_t channels = c.channels / c.groups, of_group = c.outputs / c.groups;
    merged = 1;
    depthwise = c.groups > 1 && channels == 1 && of_group == 1;
    for (int64_t m = 2; m <= c.groups && m * channels <= kSlice && m * of_group <= kBlock; ++m)
        if (c.groups % m == 0) merged = m;
    if (depthwise) merged = c.groups;
    units = c.groups / merged, inputs = merged * channels, outputs = merged * of_group;
    taps = product_of(c.kernel);
    panels = ceil_div(outputs, kBlock), slices = depthwise ? ceil_div(taps, 4) : ceil_div(taps * inputs, kSlice);
}

// Merges all pixels of a 1x1 convolution without strides and borders into one line.
void Convolution::flatten() {
    for (const Dimension& d : dims)
        if (d.kernel != 1 || d.stride != 1 || d.padding != 0 || d.size != d.outputs) return;
    if (strides[3] != dims[2].size * strides[4] && dims[1].size > 1) return;
    if (strides[2] != dims[1].size * dims[2].size * strides[4] && dims[0].size > 1) return;
    int64_t all = pixels;
    if (c.channels_last && !by_example(c.lhs) && (batch == 1 || strides[0] == pixels * strides[4])) {
        all *= batch;
        pixels = all, batch = 1;
    }
    dims[0].size = dims[0].outputs = dims[1].size = dims[1].outputs = 1;
    dims[2].size = dims[2].outputs = all;
}

// Computes the layout of an image of `band` outputs.
void Convolution::lay_out() {
    if (borrowed) {
        for (int i = 0; i < 3; ++i) at[i] = strides[2 + i], phase_at[i] = 0;
        example_at = strides[0];
        row_at = at[inner];
        return;
    }
    int64_t next = c.channels;
    for (int i = 2; i >= 0; --i) {
        at[i] = next;
        next *= dims[i].extent(i == outer ? band : dims[i].outputs);
    }
    for (int i = 2; i >= 0; --i) {
        phase_at[i] = next;
        next *= dims[i].phases;
    }
    example_at = next;
    row_at = at[inner];
    image_bytes = examples * example_at + kBlock * row_at + kSlice;
}

void Convolution::plan(Windows allowed) {
    flatten();
    outer = dims[0].outputs > 1 ? 0 : dims[1].outputs > 1 ? 1 : 2;
    inner = dims[2].outputs > 1 ? 2 : dims[1].outputs > 1 ? 1 : dims[0].outputs > 1 ? 0 : 2;
    const bool flat = allowed == Windows::flat;
    windows = (allowed == Windows::all || (flat && c.lhs.format == HOP_UINT8)) && inputs % kSlice == 0 && !depthwise;
    for (;;) {
        bool inside = strides[1] == 1 || c.channels == 1, lined = true;
        for (Dimension& d : dims) {
            d.split(windows);
            inside = inside && d.inside();
            lined = lined && d.stride == 1;
        }
        borrowed = inside && (lined || !windows) && (!depthwise || c.channels % kBlock == 0);
        band = dims[outer].outputs, examples = 1;
        lay_out();
        if (!windows) break;
        if (borrowed) {
            for (int i = outer; i < inner; ++i) borrowed = borrowed && at[i] % row_at == 0;
            const int64_t rows = borrowed ? rows_of(band) : 0;
            borrowed = rows >= kRows && rows <= pixels + pixels / 4 + kRows;
            lay_out();
        }
        if (flat ? borrowed && rows_of(band) == pixels : borrowed || rows_of(band) <= pixels + pixels / 2 + kBlock) break;
        windows = false;
    }
    cut(job.threads);
}

// Chooses how much work is done at a time, and how threads share it.
void Convolution::cut(int threads) {
    const int64_t all = dims[outer].outputs, whole = ceil_div(rows_of(all), kBlock), total = batch * whole;
    const int64_t columns = units * panels, weight = depthwise ? 0 : columns * slices * 2 * kTile;
    const int64_t row = windows     ? row_at * dims[0].phases * dims[1].phases * dims[2].phases
                        : depthwise ? 2 * c.channels
                                    : row_stride();
    int64_t most = kImageBytes / (kBlock * row);
    most = most < 2 ? 2 : most > kMostBlocks ? kMostBlocks : most;
    int64_t pieces = ceil_div(total, most);
    const int64_t wanted = threads > 1 ? 4 * threads : 1;
    shares = 1;
    if (pieces < wanted) {
        if (weight <= kWeightBytes) pieces = ceil_div(total, 4) < wanted ? ceil_div(total, 4) : wanted;
        if (pieces < wanted) shares = ceil_div(wanted, pieces);
        if (shares > columns) shares = columns;
    }
    const int64_t of_piece = ceil_div(total, pieces < 1 ? 1 : pieces);
    band = all, examples = 1;
    if (whole <= of_piece) {
        examples = of_piece / (whole > 0 ? whole : 1);
        if (examples > batch) examples = batch;
    } else {
        band = ceil_div(all, ceil_div(whole, of_piece));
        while (windows && borrowed && band < all && rows_of(band) < kRows) ++band;
    }
    bands = ceil_div(all, band);
    row_groups = bands * ceil_div(batch, examples);
    lay_out();
    band_rows = rows_of(band);
    blocks = examples * (ceil_div(band_rows, kBlock) + 1);
}

}  // namespace hop

using namespace hop;

const char* hop_convolution_declines(const hop_convolution* c) {
    if (c->lhs.format != HOP_INT8 && c->lhs.format != HOP_UINT8) return "the input is neither int8 nor uint8";
    const bool tiled = c->rhs.layout == HOP_TILED;
    if (c->rhs.format != HOP_INT8 && !(tiled && c->rhs.format == HOP_INT4)) return "the weight is neither int8 nor int4";
    if (c->rhs.zero_format != HOP_NONE || c->rhs.zero != 0) return "the weight has a zero point";
    if (c->channels == 0) return "there are no channels";
    return nullptr;
}

int hop_convolve(
    const hop_convolution* convolution, int threads, const void* input, const void* input_scale, const void* input_zero,
    const void* weight, const void* weight_scale, const void* bias, const void* output_scale, const void* output_zero,
    void* output) {
    Convolution c(*convolution, threads);
    c.job.lhs = {input, input_scale, input_zero, nullptr, nullptr};
    c.job.rhs = {weight, weight_scale, nullptr, nullptr, nullptr};
    c.job.bias = bias, c.job.output_scale = output_scale, c.job.output_zero = output_zero, c.job.output = output;
    if (c.batch == 0 || c.pixels == 0 || c.c.outputs == 0) return HOP_OK;
    const bool vnni = level() == Level::avx512 || level() == Level::avx512_bf16;
    c.plan(level() == Level::amx ? Windows::all : vnni ? Windows::flat : Windows::none);
    switch (level()) {
#if HOP_HAS_AVX512
        case Level::amx: return amx::convolution(c);
        case Level::avx512_bf16:
        case Level::avx512: return avx512::convolution(c);
        case Level::avx512_plain: return avx512_plain::convolution(c);
#endif
#if defined(__x86_64__)
        case Level::avx_vnni: return avx_vnni::convolution(c);
        case Level::avx2: return avx2::convolution(c);
#elif defined(__AARCH64EL__)
#if HOP_NEON_TARGETS
        case Level::neon_bf16:
        case Level::neon_i8mm: return neon_i8mm::convolution(c);
        case Level::neon_dotprod: return neon_dotprod::convolution(c);
#endif
        case Level::neon: return neon::convolution(c);
#endif
        default: return portable::convolution(c);
    }
}
