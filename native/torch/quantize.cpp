// hop_native::quantize, quantize_product and dequantize.
#include <optional>

#include "torch/factor.h"
#include "torch/operators.h"
#include "torch/quantizer.h"

namespace hop::torch {
namespace {

std::shared_ptr<const QuantizerDescription> parse_quantizer(const std::string& text) {
    static Parsed<QuantizerDescription> known;
    return known(text);
}

int32_t float_dtype(const char* name, int format) {
    if (format == HOP_FLOAT32) return HOP_F32;
    if (format == HOP_BFLOAT16) return HOP_BF16;
    if (format == HOP_FLOAT16) return HOP_F16;
    fail(std::string(name) + " must be float32, bfloat16 or float16");
}

Sizes shape_of(const View& x) { return Sizes(x.sizes, x.sizes + x.dim); }

// The distance of rows in a non-contiguous tensor, if they are evenly spaced; else 0.
int64_t row_stride(const View& x) {
    if (x.dim < 2 || (x.stride(-1) != 1 && x.size(-1) != 1)) return 0;
    int64_t found = 0, extent = 1;
    for (int64_t d = x.dim - 2; d >= 0; --d) {
        if (x.size(d) == 1) continue;
        if (!found) found = x.stride(d);
        else if (x.stride(d) != found * extent) return 0;
        extent *= x.size(d);
    }
    return found > 0 ? found : 0;
}

// Whether each matrix of x is stored as its transpose.
bool is_transposed(const View& x) {
    if (x.dim < 2 || x.is_contiguous()) return false;
    int64_t next = x.size(-1) * x.size(-2);
    if ((x.size(-2) != 1 && x.stride(-2) != 1) || (x.size(-1) != 1 && x.stride(-1) != x.size(-2))) return false;
    for (int64_t d = x.dim - 3; d >= 0; --d) {
        if (x.size(d) != 1 && x.stride(d) != next) return false;
        next *= x.size(d);
    }
    return true;
}

// x in contiguous memory. Transposed matrices are copied in whole cache lines, in about half the time of PyTorch's
// copy.
Tensor laid_out(const char* name, Tensor x) {
    const View v = view(name, x);
    if (!is_transposed(v)) return contiguous(std::move(x));
    const int64_t rows = v.size(-1), cols = v.size(-2);  // as stored
    Tensor made = empty(shape_of(v), v.dtype);
    const auto bytes = static_cast<int32_t>(item_bytes(v.format()));
    if (hop_transpose(v.numel() / (rows * cols), rows, cols, bytes, v.data, data_of(made), threads())) fail("a copy failed");
    return made;
}

struct Results {
    std::vector<Tensor> tensors;
    void* at(size_t i) const { return i < tensors.size() ? data_of(tensors[i]) : nullptr; }
};

Results allocate(const QuantizerDescription& d, const Sizes& shape) {
    Results made;
    made.tensors.push_back(empty(d.codes_shape(shape), dtype_of(d.stored_codes())));
    made.tensors.push_back(empty(d.scale_shape(shape), dtype_of(d.scale)));
    if (d.has_second()) made.tensors.push_back(empty(d.second_shape(shape), dtype_of(d.second())));
    return made;
}

void finish(int result) {
    if (result == HOP_NO_MEMORY) fail("no memory to quantize");
    if (result) fail("the kernels do not support these blocks with this rule");
}

View plain(const char* name, Tensor& x) {
    View v = view(name, x);
    if (!v || v.is_contiguous()) return v;
    x = contiguous(std::move(x));
    return view(name, x);
}

void expect_noise(const View& noise, const Sizes& shape) {
    if (noise && noise.format() != HOP_UINT8 && noise.format() != HOP_INT32) fail("noise must be uint8 or int32");
    if (noise) expect(noise, shape, noise.format());
}

int32_t noise_bits(const View& noise) { return noise && noise.format() == HOP_INT32 ? 24 : 8; }

}  // namespace

void quantize(StableIValue* values, uint64_t count) {
    Stack stack(values, count);
    Tensor x = stack.tensor(), scale = stack.optional(), zero_point = stack.optional(), noise = stack.optional();
    const auto description = parse_quantizer(stack.text());
    const QuantizerDescription& d = *description;

    View v = view("x", x);
    const int32_t dtype = float_dtype("x", v.format());
    if (!v.numel()) fail("x must not be empty, got shape " + v.shape());
    int64_t stride = 0;
    if (!v.is_contiguous()) {
        stride = d.flat ? 0 : row_stride(v);
        if (!stride) {
            x = laid_out("x", std::move(x));
            v = view("x", x);
        }
    }
    const Sizes shape = shape_of(v);
    hop_blocks blocks;
    if (const char* reason = d.cut(shape, stride, blocks)) fail(reason);
    const View given = plain("scale", scale), zero = plain("zero_point", zero_point), bits = plain("noise", noise);
    expect_noise(bits, shape);
    const bool two = d.q.rule == HOP_TWO_LEVEL;
    if (!given && d.q.rule == HOP_GIVEN) fail("the quantizer needs scale");
    if (given) {
        const bool numbers = given.format() == HOP_FLOAT32 || two;
        expect(given, two ? d.second_shape(shape) : d.scale_shape(shape), numbers ? int(HOP_FLOAT32) : d.scale);
    }
    if (bool(zero) != (d.q.affine && given)) fail("zero_point must be given exactly if scale is given and the quantizer has zero points");
    if (zero) expect(zero, d.scale_shape(shape), d.codes);

    Results made = allocate(d, shape);
    finish(hop_quantize(
        &d.q, &blocks, dtype, v.data, given.data, given && given.format() != HOP_FLOAT32,
        static_cast<const uint8_t*>(zero.data), bits.data, noise_bits(bits), static_cast<uint8_t*>(made.at(0)), made.at(1),
        made.at(2), threads()));
    stack.give(std::move(made.tensors));
}

void quantize_product(StableIValue* values, uint64_t count) {
    // Maximum columns: for longer transposed rows, a thread's cache holds too few rows.
    constexpr int64_t gathered = int64_t(1) << 14;
    Stack stack(values, count);
    Tensor x = stack.tensor(), factor = stack.tensor(), noise = stack.optional();
    const int64_t stream = stack.integer();  // below 0: noise contains the bits, not their seed
    const auto description = parse_quantizer(stack.text());
    const QuantizerDescription& d = *description;

    View v = view("x", x);
    const int32_t dtype = float_dtype("x", v.format());
    if (!v.numel() || v.dim < 2) fail("x must have at least two dimensions, none empty, got shape " + v.shape());
    if (d.flat) fail("a factor per column needs blocks that are not flat");
    const bool transposed = v.dim == 2 && v.size(1) <= gathered && is_transposed(v);
    if (!transposed && !v.is_contiguous()) {
        x = laid_out("x", std::move(x));
        v = view("x", x);
    }
    const Sizes shape = shape_of(v);
    hop_blocks blocks;
    if (const char* reason = d.cut(shape, shape.back(), blocks)) fail(reason);
    const View own = plain("factor", factor), bits = plain("noise", noise);
    if (own.numel() != shape.back() || own.dim < 1 || own.size(-1) != shape.back() || own.format() != HOP_FLOAT32)
        fail("factor must be float32 with one element per column of x, got shape " + own.shape());
    const bool seeded = stream >= 0;
    if (seeded && (!bits || bits.numel() != 1 || bits.dtype != aoti_torch_dtype_int64())) fail("noise must be a seed: one int64");
    if (seeded && stream > UINT32_MAX) fail("stream must be below 2^32");
    if (!seeded) expect_noise(bits, shape);

    Results made = allocate(d, shape);
    finish(hop_quantize_product(
        &d.q, &blocks, dtype, v.data, transposed, static_cast<const float*>(own.data),
        seeded ? static_cast<const int64_t*>(bits.data) : nullptr, static_cast<uint32_t>(seeded ? stream : 0),
        seeded ? nullptr : bits.data, seeded ? 0 : noise_bits(bits), static_cast<uint8_t*>(made.at(0)), made.at(1),
        made.at(2), threads()));
    stack.give(std::move(made.tensors));
}

void dequantize(StableIValue* values, uint64_t count) {
    Stack stack(values, count);
    Tensor codes = stack.tensor(), scale = stack.tensor(), second = stack.optional();
    const Sizes shape = stack.sizes();
    const auto description = parse_quantizer(stack.text());
    const QuantizerDescription& d = *description;

    const int32_t kind = float_dtype("the result", d.result);
    if (!elements(shape)) fail("shape must not be empty, got " + to_string(shape));
    hop_blocks blocks;
    const View c = plain("codes", codes), s = plain("scale", scale), t = plain("second", second);
    expect(c, d.codes_shape(shape), d.stored_codes());
    expect(s, d.scale_shape(shape), d.scale);
    if (bool(t) != d.has_second()) fail("second must be the quantizer's zero points or amax, and omitted if it has neither");
    if (t) expect(t, d.second_shape(shape), d.second());
    if (const char* reason = d.cut(shape, 0, blocks)) fail(reason);
    Tensor made = empty(shape, dtype_of(d.result));
    finish(hop_dequantize(&d.q, &blocks, kind, static_cast<const uint8_t*>(c.data), s.data, t.data, data_of(made), threads()));
    stack.give(std::move(made));
}

}  // namespace hop::torch

// Returns the reason why the kernels do not support a tensor of this shape; a null pointer if they do. row_stride is
// the distance of rows, 0 for a contiguous tensor.
HOP_API const char* hop_described_blocks_decline(const char* description, int32_t dim, const int64_t* shape, int64_t row_stride) {
    using namespace hop::torch;
    static thread_local std::string declined;
    try {
        hop_blocks made;
        return parse_quantizer(description)->cut(Sizes(shape, shape + dim), row_stride, made);
    } catch (const std::exception& e) {
        declined = e.what();
        return declined.c_str();
    }
}
