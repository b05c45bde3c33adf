// hop_native::product and hop_native::pack.
#include <cstring>

#include "common/parallel.h"
#include "torch/operators.h"
#include "torch/output.h"

namespace hop::torch {
namespace {

// "1 lhs int8 zero=stored scale=1,-1 rhs int4 tiled scale=1,32 output float32": see factor.h and output.h.
struct ProductDescription {
    FactorDescription lhs, rhs;
    OutputDescription output;

    explicit ProductDescription(const std::string& text) {
        Words words(text);
        FactorDescription* factor = nullptr;
        bool of_output = false;
        while (words.next()) {
            if (words.word == "lhs" || words.word == "rhs") {
                factor = words.word == "lhs" ? &lhs : &rhs;
                if (factor->format != HOP_NONE) words.refuse();  // already read
                if (!words.next()) fail("the description ends before the format of a factor");
                factor->format = words.one_of(words.word, kFormats, kFormatCount);
            } else if (words.word == "output") {
                if (of_output) words.refuse();
                of_output = true;
                output.begin(words);
            } else if (of_output ? !output.read(words) : !factor || !factor->read(words)) {
                words.refuse();
            }
        }
        if (lhs.format == HOP_NONE || rhs.format == HOP_NONE) fail("a product needs lhs and rhs, got '" + text + "'");
        if (lhs.columns || lhs.tiled) fail("lhs must be neither tiled nor in columns, got '" + text + "'");
        if (lhs.format >= HOP_FLOAT32 && !lhs.is_plain()) fail("a float lhs cannot have scales or zero points, got '" + text + "'");
    }
};

std::shared_ptr<const ProductDescription> parse_product(const std::string& text) {
    static Parsed<ProductDescription> known;
    return known(text);
}

Sizes shape_of(const View& codes, const FactorDescription& d) {
    Sizes shape(codes.sizes, codes.sizes + codes.dim);
    if (is_narrow(d.format) && !shape.empty()) shape.back() *= 2;
    return shape;
}

bool is_float(int format) { return format == HOP_FLOAT32 || format == HOP_FLOAT16; }

const char* assemble(hop_product& p, const Factor& lhs, const Factor& rhs) {
    p.m = lhs.rows, p.n = rhs.rows, p.k = lhs.k;
    p.lhs = lhs.operand, p.rhs = rhs.operand;
    p.batch = lhs.batch, p.lhs_step = lhs.steps, p.rhs_step = rhs.steps;
    p.output_step = p.m * p.n * item_bytes(p.output.format);
    hop_product asked = p;
    if (is_float(lhs.operand.format)) {
        asked.lhs.format = HOP_BFLOAT16;  // the format it is converted to
        if (p.output.format != HOP_FLOAT32 || p.output.bias_format != HOP_NONE)
            return "a float32 or float16 lhs gives a float32 result without bias";
    }
    if (lhs.declined) return lhs.declined;
    if (rhs.declined) return rhs.declined;
    return hop_product_declines(&asked);
}

// Checks the scales of codes and gets their strides: one scale for all, for each row or for each column.
void set_scales(hop_output& output, const Sizes& shape, const Sizes& block, const View& scale, const View& zero, int64_t m, bool batched) {
    const Sizes found = counts(shape, block);
    if (batched && found[0] != 1 && found.back() == 1) fail("the matrices of a batch must share the scales of the result, whose block is " + to_string(block));
    int64_t rows = 1;
    for (size_t d = 0; d + 1 < found.size(); ++d) rows *= found[d];
    const int64_t columns = found.back();
    if ((rows != 1 && rows != m) || (columns != 1 && columns != shape.back()) || (rows > 1 && columns > 1))
        fail("output_scale must be one scale, or one per row or per column, but the block is " + to_string(block));
    expect(scale, found, HOP_FLOAT32);
    if (output.zero_format != HOP_NONE) expect(zero, found, output.zero_format);
    else if (zero) fail("output_zero_point must be omitted, as the description has none");
    output.scale_row_stride = rows > 1, output.scale_column_stride = columns > 1;
}

thread_local std::string declined;

}  // namespace

void product(StableIValue* values, uint64_t count) {
    Stack stack(values, count);
    constexpr int sums = 11, all = 12;
    Tensor tensors[all];
    static const char* const names[all] = {
        "lhs", "lhs_scale", "lhs_zero_point", "lhs_block_scale", "rhs", "rhs_scale", "rhs_zero_point", "rhs_block_scale",
        "bias", "output_scale", "output_zero_point", "rhs_code_sums"};
    for (int i = 0; i < sums; ++i) tensors[i] = i == 0 || i == 4 ? stack.tensor() : stack.optional();
    const int64_t n = stack.integer();
    const std::string text = stack.text();
    tensors[sums] = stack.optional();
    const auto description = parse_product(text);
    const ProductDescription& d = *description;

    View v[all];
    for (int i = 0; i < all; ++i) {
        v[i] = view(names[i], tensors[i]);
        if (v[i] && i != 0 && i != 4 && !v[i].is_contiguous()) {
            tensors[i] = contiguous(std::move(tensors[i]));
            v[i] = view(names[i], tensors[i]);
        }
    }
    const auto factor = [&](int first, const FactorDescription& own, const Sizes& shape, bool batched) {
        const auto made = [&] {
            return make(own, names[first], shape, batched, first == 0, {v[first], v[first + 1], v[first + 2], v[first + 3], first == 0 ? View{} : v[sums]});
        };
        Factor f = made();
        if (!f.needs_copy) return f;
        tensors[first] = contiguous(std::move(tensors[first]));
        v[first] = view(names[first], tensors[first]);
        return made();
    };
    const Sizes left = shape_of(v[0], d.lhs);
    if (n < 0 || n > kMostElements) fail("n must not be negative or too large, got " + std::to_string(n));
    if (left.size() < 2) fail("lhs must have at least two dimensions, got shape " + v[0].shape());
    const bool batched = !d.rhs.tiled && v[4].dim == 3;
    const Sizes right = d.rhs.tiled ? d.rhs.columns ? Sizes{left.back(), n} : Sizes{n, left.back()} : shape_of(v[4], d.rhs);
    const Factor lhs = factor(0, d.lhs, left, batched), rhs = factor(4, d.rhs, right, batched);
    if (lhs.k != rhs.k || rhs.rows != n || lhs.batch != rhs.batch)
        fail("lhs " + to_string(left) + " and rhs " + to_string(right) + " do not match, with n = " + std::to_string(n));
    hop_product p{};
    set(p.output, d.output, v[8], n);
    Sizes shape(left.begin(), left.end() - 1);
    shape.push_back(n);
    if (d.output.codes) set_scales(p.output, shape, d.output.block, v[9], v[10], lhs.rows, batched);
    else if (v[9] || v[10]) fail("output_scale and output_zero_point must be omitted, as the result is not quantized");
    if (const char* reason = assemble(p, lhs, rhs)) fail(reason);

    Tensor made = empty(shape, dtype_of(p.output.format));
    bool is_empty = false;
    for (const int64_t size : shape) is_empty |= size == 0;
    if (!is_empty) {
        const hop_data &a = lhs.data, &b = rhs.data;
        if (d.rhs.tiled) gather_pages(b.codes, static_cast<size_t>(v[4].numel()));
        const int result = is_float(p.lhs.format) ? hop_multiply_floats(&p, threads(), a.codes, b.codes, b.scale, b.zero, b.fold, static_cast<float*>(data_of(made))) : hop_multiply(
            &p, threads(), &a, &b, v[8].data, v[9].data, v[10].data, data_of(made));
        if (result) fail(result == HOP_NO_MEMORY ? "no memory for the tiles of a product" : "a product failed");
    }
    stack.give(std::move(made));
}

void pack(StableIValue* values, uint64_t count) {
    Stack stack(values, count);
    Tensor codes = stack.tensor();
    const auto description = parse_product(stack.text());
    const FactorDescription& d = description->rhs;
    View v = view("codes", codes);
    const Sizes shape = shape_of(v, d);
    if (d.format > HOP_E5M2) fail("tiles are for codes of 8 or 4 bits, not " + std::string(kFormats[d.format]));
    if (d.tiled || shape.size() != 2) fail("codes must be a matrix that is not tiled, got shape " + v.shape());
    FactorDescription own = d;  // for codes only
    own.scale = own.block_scale = {}, own.stores_zero = own.stores_sums = false;
    Factor f = make(own, "codes", shape, false, false, {v, {}, {}, {}, {}});
    if (f.needs_copy) {
        codes = contiguous(std::move(codes));
        v = view("codes", codes);
        f = make(own, "codes", shape, false, false, {v, {}, {}, {}, {}});
    }
    if (f.declined) fail(f.declined);
    const int64_t rows = (f.rows + 31) / 32, slices = (f.k + 63) / 64;
    Tensor made = empty({rows, slices, 2, is_narrow(d.format) ? 8 : 16, 64}, v.dtype);
    if (rows && slices) hop_pack(&f.operand, f.rows, f.k, threads(), v.data, data_of(made));
    stack.give(std::move(made));
}

}  // namespace hop::torch

// Returns the reason why no kernel supports a product; a null pointer if one does. Shapes are those of the dequantized
// tensors.
HOP_API const char* hop_described_product_declines(
    const char* description, int32_t lhs_dim, const int64_t* lhs, int32_t rhs_dim, const int64_t* rhs,
    int32_t bias_dtype, int32_t has_bias) {
    using namespace hop::torch;
    try {
        const auto parsed = parse_product(description);
        const bool batched = rhs_dim == 3;
        const Factor a = make(parsed->lhs, "lhs", Sizes(lhs, lhs + lhs_dim), batched, true, {});
        const Factor b = make(parsed->rhs, "rhs", Sizes(rhs, rhs + rhs_dim), batched, false, {});
        hop_product p{};
        set(p.output, parsed->output, {}, b.rows);
        if (has_bias) p.output.bias_format = format_of(bias_dtype);
        return assemble(p, a, b);
    } catch (const std::exception& e) {
        declined = e.what();
        return declined.c_str();
    }
}
