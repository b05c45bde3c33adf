// hop_native::convolution.
#include "torch/operators.h"
#include "torch/output.h"

namespace hop::torch {
namespace {

// "1 x uint8 zero=stored weight int8 tiled kernel=3,3 stride=1,1 before=1,1 after=1,1 dilation=1,1 groups=1
// channels_last output float32": `before` and `after` are the padding; channels_last is the output's layout; codes are
// described as in output.h. Scales: one for all elements, or one per example or per output.
struct ConvolutionDescription {
    FactorDescription x, weight;
    OutputDescription output;
    Sizes kernel, stride, before, after, dilation;
    int64_t groups = 1;
    bool channels_last = false;

    explicit ConvolutionDescription(const std::string& text) {
        Words words(text);
        FactorDescription* factor = nullptr;
        bool of_output = false;
        while (words.next()) {
            if (words.word == "x" || words.word == "weight") {
                factor = words.word == "x" ? &x : &weight;
                if (factor->format != HOP_NONE) words.refuse();  // already read
                if (!words.next()) fail("the description ends before the format of a factor");
                factor->format = words.one_of(words.word, kFormats, kFormatCount);
            } else if (words.word == "output") {
                if (of_output) words.refuse();
                of_output = true;
                output.begin(words);
            } else if (of_output ? !output.read(words) : !read(words) && (!factor || !factor->read(words))) {
                words.refuse();
            }
        }
        const size_t dim = kernel.size();
        bool fits = dim >= 1 && dim <= 3 && groups >= 1;
        for (const Sizes* list : {&kernel, &stride, &before, &after, &dilation}) {
            fits = fits && list->size() == dim;
            for (const int64_t n : *list) fits = fits && n >= (list == &before || list == &after ? 0 : 1);
        }
        if (weight.has_zero()) fail("the weight of a convolution cannot have a zero point, got '" + text + "'");
        if (!fits) fail("kernel, stride, before, after and dilation must have the same one, two or three dimensions, got '" + text + "'");
    }

private:
    bool read(Words& words) {
        const std::pair<std::string_view, Sizes*> lists[] = {
            {"kernel", &kernel}, {"stride", &stride}, {"before", &before}, {"after", &after}, {"dilation", &dilation}};
        for (const auto& [name, list] : lists)
            if (words.name == name) {
                *list = words.list();
                return true;
            }
        if (words.name == "groups") groups = words.integer();
        else if (words.word == "channels_last") channels_last = true;
        else return false;
        return true;
    }
};

// Whether x has one value for each of `count` entries of the first of `dim` dimensions, not one for all.
bool by_each(const View& x, int64_t count, int64_t dim, int format) {
    Sizes shape(static_cast<size_t>(dim), 1);
    if (x.dim == dim && x.size(0) != 1) shape[0] = count;
    expect(x, shape, format);
    return shape[0] != 1;
}

hop_scale scale_of(bool each) {
    constexpr int64_t whole = int64_t(1) << 62;
    return {HOP_FLOAT32, 1, each ? 1 : whole, whole, each, 0};
}

}  // namespace

void convolution(StableIValue* values, uint64_t count) {
    Stack stack(values, count);
    Tensor tensors[8];
    static const char* const names[8] = {
        "x", "x_scale", "x_zero_point", "weight", "weight_scale", "bias", "output_scale", "output_zero_point"};
    for (int i = 0; i < 8; ++i) tensors[i] = i == 2 || i > 4 ? stack.optional() : stack.tensor();
    const int64_t n = stack.integer();
    static Parsed<ConvolutionDescription> known;
    const auto description = known(stack.text());
    const ConvolutionDescription& d = *description;

    View v[8];
    for (int i = 0; i < 8; ++i) {
        v[i] = view(names[i], tensors[i]);
        if (v[i] && i != 0 && i != 3 && !v[i].is_contiguous()) {
            tensors[i] = contiguous(std::move(tensors[i]));
            v[i] = view(names[i], tensors[i]);
        }
    }
    const View &x = v[0], &weight = v[3];
    const auto dim = static_cast<int64_t>(d.kernel.size());
    const bool tiled = d.weight.tiled;
    if (x.dim != dim + 2) fail("x must have " + std::to_string(dim + 2) + " dimensions, got shape " + x.shape());
    if (x.format() != d.x.format) fail("x must be " + std::string(kFormats[d.x.format]));
    hop_convolution c{};
    c.batch = x.size(0), c.channels = x.size(1), c.outputs = n, c.groups = d.groups;
    if (c.channels % c.groups || n % c.groups || n < 0 || n > kMostElements || c.channels == 0)
        fail(std::to_string(c.channels) + " channels and " + std::to_string(n) + " outputs are not divisible into " +
             std::to_string(c.groups) + " groups");
    Sizes weight_shape{n, c.channels / c.groups};
    weight_shape.insert(weight_shape.end(), d.kernel.begin(), d.kernel.end());
    for (int64_t i = 0; i < 3; ++i) {
        const int64_t at = i - (3 - dim);
        const bool is = at >= 0;
        const auto own = [&](const Sizes& list, int64_t otherwise) { return is ? list[static_cast<size_t>(at)] : otherwise; };
        c.size[i] = is ? x.size(2 + at) : 1;
        c.kernel[i] = own(d.kernel, 1), c.stride[i] = own(d.stride, 1), c.padding[i] = own(d.before, 0);
        c.dilation[i] = own(d.dilation, 1);
        const int64_t room = c.size[i] + c.padding[i] + own(d.after, 0) - c.dilation[i] * (c.kernel[i] - 1) - 1;
        if (room < 0) fail("the kernel, of size " + to_string(d.kernel) + ", is larger than the padded x, of shape " + x.shape());
        c.output_size[i] = room / c.stride[i] + 1;
        c.input_strides[2 + i] = is ? x.stride(2 + at) : 0;
        c.weight_strides[2 + i] = is && !tiled ? weight.dim == dim + 2 ? weight.stride(2 + at) : 0 : 0;
    }
    c.input_strides[0] = x.stride(0), c.input_strides[1] = x.stride(1);
    if (tiled) {
        const FactorDescription& w = d.weight;
        int64_t k = weight_shape[1];
        for (const int64_t size : d.kernel)
            if (__builtin_mul_overflow(k, size, &k) || k > kMostElements) fail("the kernel is too large, of size " + to_string(d.kernel));
        const Buffers buffers{weight, {}, {}, {}, {}};
        FactorDescription codes = w;
        codes.scale = codes.block_scale = {};
        if (make(codes, "weight", {n, k}, false, false, buffers).needs_copy) fail("the tiles of weight must be contiguous");
    } else {
        expect(weight, weight_shape, d.weight.format);
        c.weight_strides[0] = weight.stride(0), c.weight_strides[1] = weight.stride(1);
    }
    c.channels_last = d.channels_last;
    c.lhs.format = d.x.format, c.lhs.layout = HOP_STRIDED, c.lhs.zero = d.x.zero;
    const bool of_example = by_each(v[1], c.batch, x.dim, HOP_FLOAT32);
    c.lhs.scale = scale_of(of_example), c.lhs.fold = {HOP_NONE, 1, int64_t(1) << 62, int64_t(1) << 62, 0, 0};
    if (d.x.stores_zero) {
        if (!v[2]) fail("the description needs x_zero_point");
        if (by_each(v[2], c.batch, x.dim, d.x.format) != of_example) fail("x_zero_point must have the shape of x_scale");
        c.lhs.zero_format = d.x.format;
    } else if (v[2]) {
        fail("x_zero_point must be omitted, as the description has no zero point of x");
    }
    c.rhs.format = d.weight.format, c.rhs.layout = tiled ? HOP_TILED : HOP_STRIDED, c.rhs.fold = c.lhs.fold;
    c.rhs.scale = scale_of(by_each(v[4], n, x.dim, HOP_FLOAT32));
    set(c.output, d.output, v[5], n);

    Sizes shape{c.batch, n};
    for (int64_t i = 3 - dim; i < 3; ++i) shape.push_back(c.output_size[i]);
    if (is_too_large(shape.data(), static_cast<int64_t>(shape.size()))) fail("the result is too large, of shape " + to_string(shape));
    if (d.output.codes) {
        if (!v[6]) fail("the description needs output_scale");
        Sizes own = shape, found;
        if (v[6].dim < static_cast<int64_t>(shape.size())) own.erase(own.begin());  // shared by all examples
        found = counts(own, d.output.block);
        expect(v[6], found, HOP_FLOAT32);
        if (c.output.zero_format != HOP_NONE) expect(v[7], found, c.output.zero_format);
        else if (v[7]) fail("output_zero_point must be omitted, as the description has none");
        const bool batched = own.size() == shape.size();
        const int64_t channels = found[batched ? 1 : 0], examples = batched ? found[0] : 1;
        if (v[6].numel() != examples * channels || (examples != 1 && examples != c.batch) ||
            (channels != 1 && channels != n) || (examples > 1 && channels > 1))
            fail("output_scale must be one scale, or one per example or per channel of the result");
        c.output.scale_row_stride = examples > 1, c.output.scale_column_stride = channels > 1;
    } else if (v[6] || v[7]) {
        fail("output_scale and output_zero_point must be omitted, as the result is not quantized");
    }
    if (const char* reason = hop_convolution_declines(&c)) fail(reason);

    Sizes strides(shape.size());
    int64_t next = d.channels_last ? n : 1;
    for (size_t i = shape.size(); i-- > 2;) strides[i] = next, next *= shape[i];
    strides[1] = d.channels_last ? 1 : next, strides[0] = d.channels_last ? next : next * n;
    Tensor made = empty(shape.data(), strides.data(), static_cast<int64_t>(shape.size()), dtype_of(c.output.format));
    if (c.batch && n) {
        const int result = hop_convolve(
            &c, threads(), x.data, v[1].data, v[2].data, weight.data, v[4].data, v[5].data, v[6].data, v[7].data, data_of(made));
        if (result) fail(result == HOP_NO_MEMORY ? "no memory for the tiles of a convolution" : "a convolution failed");
    }
    stack.give(std::move(made));
}

}  // namespace hop::torch
