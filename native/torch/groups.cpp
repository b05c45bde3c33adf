// hop_native::group_product.
#include "common/parallel.h"
#include "torch/factor.h"
#include "torch/operators.h"

namespace hop::torch {
namespace {

// codes=int5 scale=float16:32 result=bfloat16, and optionally
//
//     x=32                  x is int8, with a float32 scale for this many elements of a row; 0 for a whole row
//     outer=float16:256     the format of outer scales, and their number of elements; 0 for the whole weight
//     divided               scales are divided by the outer scales instead of multiplied
//     offset                there are offsets, one for each scale
//     numbers=0,1065353216  the values of codes of 4 or 2 bits, as the bits of 16 float32 numbers
//     scale_numbers=0,...   the values of codes of scales, likewise for 256
struct GroupDescription {
    static constexpr std::string_view kCodes[] = {"int8", "bits4", "int5", "uint5", "int6", "uint6", "bits2", "int3", "uint3"};
    hop_group_product p{};
    std::vector<float> scale_numbers;
    int result = HOP_FLOAT32;
    bool has_codes_of_x = false;

    explicit GroupDescription(const std::string& text) {
        Words words(text);
        p.x_format = HOP_FLOAT32;
        while (words.next()) {
            if (words.name == "codes") set_codes(words.one_of(words.value, kCodes, 9));
            else if (words.name == "scale") each(words, p.scales.format, p.scales.group);
            else if (words.name == "outer") each(words, p.scales.outer_format, p.scales.outer);
            else if (words.name == "x") set_codes_of_x(words);
            else if (words.word == "divided") p.scales.divided = 1;
            else if (words.word == "offset") p.has_offset = 1;
            else if (words.name == "result") result = words.one_of(words.value, kFormats, kFormatCount);
            else if (words.name == "numbers") {
                const auto numbers = read_numbers(words, 16);
                for (size_t i = 0; i < 16; ++i) p.numbers[i] = numbers[i];
            } else if (words.name == "scale_numbers") {
                scale_numbers = read_numbers(words, 256);
                p.scales.numbers = scale_numbers.data();
            } else {
                words.refuse();
            }
        }
        p.output_format = result;
        p.k = p.scales.group % 32 ? 32 : p.scales.group;  // any valid value
        if (const char* reason = hop_group_product_declines(&p)) fail(reason + (", not '" + text + "'"));
    }

    GroupDescription(const GroupDescription&) = delete;  // p contains the address of its numbers

    int low_bits() const { return p.bits == 8 ? 8 : p.bits < 4 ? 2 : 4; }
    int high_bits() const { return p.bits - low_bits(); }

private:
    void set_codes(int which) {
        constexpr int32_t bits[] = {8, 4, 5, 5, 6, 6, 2, 3, 3};
        p.bits = bits[which], p.is_signed = kCodes[which].substr(0, 3) == "int";
    }
    void set_codes_of_x(Words& words) {
        const Sizes sizes = words.list();
        if (sizes.size() != 1 || sizes[0] < 0) words.refuse();
        has_codes_of_x = true, p.x_format = HOP_INT8, p.x_group = sizes[0];
    }
    static std::vector<float> read_numbers(const Words& words, size_t count) {
        auto numbers = words.reals(count);
        if (numbers.size() != count) words.refuse();
        return numbers;
    }
    static void each(Words& words, int32_t& format, int64_t& size) {
        const size_t colon = words.value.find(':');
        if (colon == words.value.npos) words.refuse();
        format = words.one_of(words.value.substr(0, colon), kFormats, kFormatCount);
        const Sizes sizes = words.list(static_cast<int64_t>(colon) + 1);
        if (sizes.size() != 1 || sizes[0] < 0) words.refuse();
        size = sizes[0];
    }
};

}  // namespace

void group_product(StableIValue* values, uint64_t count) {
    static Parsed<GroupDescription> known;
    Stack stack(values, count);
    constexpr int all = 8;  // arguments before the description
    static const char* const names[] = {"x", "codes", "high_codes", "scale", "offset", "outer_scale", "outer_offset", "bias", "x_scale"};
    Tensor tensors[all + 1];
    for (int i = 0; i < all; ++i) tensors[i] = i == 0 || i == 1 || i == 3 ? stack.tensor() : stack.optional();
    const auto d = known(stack.text());
    tensors[all] = stack.optional();

    View v[all + 1];
    for (int i = 0; i <= all; ++i) {
        v[i] = view(names[i], tensors[i]);
        if (v[i] && !v[i].is_contiguous()) {
            tensors[i] = contiguous(std::move(tensors[i]));
            v[i] = view(names[i], tensors[i]);
        }
    }
    const View &x = v[0], &codes = v[1], &bias = v[7], &x_scale = v[all];
    hop_group_product p = d->p;  // scales.numbers points into *d, which outlives the call
    if (x.dim < 1) fail("x must have at least one dimension, got shape " + x.shape());
    if (codes.dim != 2) fail("codes must have two dimensions, got shape " + codes.shape());
    Sizes shape(x.sizes, x.sizes + x.dim);
    p.k = shape.back(), p.n = codes.size(0), p.m = 1;
    shape.back() = p.n;
    for (size_t i = 0; i + 1 < shape.size(); ++i) p.m *= shape[i];
    const int format = x.format();
    if (d->has_codes_of_x) {
        if (format != HOP_INT8) fail("x must be int8, as in the description");
        Sizes scales(x.sizes, x.sizes + x.dim);
        scales.back() = p.x_group ? (p.k + p.x_group - 1) / p.x_group : 1;
        expect(x_scale, scales, HOP_FLOAT32);
    } else {
        if (format != HOP_FLOAT32 && format != HOP_BFLOAT16 && format != HOP_FLOAT16) fail("x must be float32, bfloat16 or float16");
        if (x_scale) fail("x_scale must be omitted, as the description has no quantizer of x");
        p.x_format = format;
    }
    if (bias) {
        p.bias_format = bias.format();
        expect(bias, {p.n}, p.bias_format);
    }
    if (const char* reason = hop_group_product_declines(&p)) fail(std::string(reason) + "; x has shape " + x.shape());
    const auto hold = [&](const View& of, bool is_there, int64_t each, int format) {
        if (is_there) expect(of, each ? Sizes{p.n, (p.k + each - 1) / each} : Sizes{1, 1}, format);
        else if (of) fail(std::string(of.name) + " must be omitted, as the description has none");
    };
    hold(codes, true, 8 / d->low_bits(), p.bits == 8 ? HOP_INT8 : HOP_UINT8);
    hold(v[2], d->high_bits() > 0, d->high_bits() > 0 ? 8 / d->high_bits() : 1, HOP_UINT8);
    const bool has_outer = p.scales.outer_format != HOP_NONE;
    hold(v[3], true, p.scales.group, p.scales.format);
    hold(v[4], p.has_offset, p.scales.group, p.scales.format);
    hold(v[5], has_outer, p.scales.outer, p.scales.outer_format);
    hold(v[6], has_outer && p.has_offset, p.scales.outer, p.scales.outer_format);

    Tensor made = empty(shape, dtype_of(d->result));
    const hop_group_data weight{codes.data, v[2].data, v[3].data, v[4].data, v[5].data, v[6].data};
    gather_pages(codes.data, static_cast<size_t>(codes.numel()));
    if (hop_multiply_groups(&p, threads(), x.data, static_cast<const float*>(x_scale.data), &weight, bias.data, data_of(made))) fail("no memory for decoded rows of the weight");
    stack.give(std::move(made));
}

}  // namespace hop::torch
