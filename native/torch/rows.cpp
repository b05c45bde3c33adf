// hop_native::rows.
#include <algorithm>
#include <cstring>
#include <iterator>
#include <memory>

#include "functions/functions.h"
#include "torch/factor.h"
#include "torch/operators.h"
#include "torch/quantizer.h"

namespace hop::torch {
namespace {

constexpr std::string_view kOperations[] = {"function", "gated", "layer_norm", "rms_norm", "softmax",
                                            "log_softmax", "hadamard"};
constexpr std::string_view kPiecewise[] = {"hardsigmoid", "hardswish", "leaky_relu"};

// An operation; then, in any order, function=gelu, number=.. (the bits of a float64: eps, a slope, or a size), sums=1
// (the number of last dimensions that make up a row), result=bfloat16; then, for a result in codes, `quantizer` and its
// words. floats=bfloat16, before these, requests floats as well, as the first result.
struct RowsDescription {
    hop_rows rows{};
    int64_t sums = 0;
    bool floats = false;  // in addition to codes
    std::unique_ptr<QuantizerDescription> quantizer;

    explicit RowsDescription(const std::string& text) {
        Words words(text);
        if (!words.next()) fail("the description ends before the operation");
        rows.operation = words.one_of(words.word, kOperations, 7);
        int result = HOP_FLOAT32;
        while (words.next()) {
            if (words.name == "function") rows.function = function_of(words);
            else if (words.name == "number") {
                const int64_t bits = words.integer();
                std::memcpy(&rows.number, &bits, sizeof(bits));
            } else if (words.name == "sums") sums = words.integer(1, HOP_DIMS);
            else if (words.name == "result" || words.name == "floats") {
                result = words.one_of(words.value, kFormats, kFormatCount);
                floats = words.name == "floats";
            } else if (words.word == "quantizer") {
                quantizer = std::make_unique<QuantizerDescription>(words);
                break;
            } else words.refuse();
        }
        rows.result_dtype = dtype_of_floats("the result", result);
        if ((rows.operation >= HOP_LAYER_NORM) != (sums > 0)) fail("sums= is for norms and softmax only, which need it");
    }

    static int32_t function_of(Words& words) {
        for (int32_t i = 0; i < kFunctions; ++i)
            if (words.value == kFunctionNames[i]) return i;
        return HOP_HARDSIGMOID + words.one_of(words.value, kPiecewise, 3);
    }
    static int32_t dtype_of_floats(const char* name, int format) {
        if (format == HOP_FLOAT32) return HOP_F32;
        if (format == HOP_BFLOAT16) return HOP_BF16;
        if (format == HOP_FLOAT16) return HOP_F16;
        fail(std::string(name) + " must be float32, bfloat16 or float16");
    }
};

View dense(const char* name, Tensor& x) {
    const View v = view(name, x);
    if (!v || v.is_contiguous()) return v;
    x = contiguous(std::move(x));
    return view(name, x);
}

}  // namespace

void rows(StableIValue* values, uint64_t count) {
    static Parsed<RowsDescription> known;
    Stack stack(values, count);
    Tensor x = stack.tensor(), other = stack.optional(), weight = stack.optional(), bias = stack.optional();
    Tensor scale = stack.optional(), zero_point = stack.optional();
    const auto description = known(stack.text());
    const QuantizerDescription* d = description->quantizer.get();
    hop_rows r = description->rows;

    const View v = dense("x", x), factor = dense("other", other), w = dense("weight", weight), b = dense("bias", bias);
    const View given = dense("scale", scale), zero = dense("zero_point", zero_point);
    if (!v.numel()) fail("x must not be empty, got shape " + v.shape());
    const Sizes shape(v.sizes, v.sizes + v.dim);
    r.dtype = RowsDescription::dtype_of_floats("x", v.format());
    if (bool(factor) != (r.operation == HOP_GATED)) fail("a gated product needs other, other operations take none");
    if (factor) {
        r.other_dtype = RowsDescription::dtype_of_floats("other", factor.format());
        expect(factor, shape, factor.format());
    }
    if (description->sums > v.dim) fail("x has fewer dimensions than sums= counts, got shape " + v.shape());
    r.length = 1;
    for (int64_t i = v.dim - description->sums; i < v.dim; ++i) r.length *= shape[static_cast<size_t>(i)];
    r.count = v.numel() / r.length;
    if (r.length > int64_t(1) << 22) fail("rows must have at most 2^22 elements, got shape " + v.shape());
    if (r.operation == HOP_HADAMARD) {
        const int64_t sizes[] = {4, 8, 16, 32, 64, 128, 256};
        const auto* size = std::find(std::begin(sizes), std::end(sizes), r.number);
        if (size == std::end(sizes) || r.length % *size) fail("number must be a power of two from 4 to 256 that divides the row's length, got shape " + v.shape());
    }
    const bool norm = r.operation == HOP_LAYER_NORM || r.operation == HOP_RMS_NORM;
    for (const auto& [t, dtype] : {std::pair(&w, &r.weight_dtype), std::pair(&b, &r.bias_dtype)}) {
        if (!*t) continue;
        if (!norm || (t == &b && r.operation == HOP_RMS_NORM)) fail("only norms take weight, and only layer_norm takes bias");
        *dtype = RowsDescription::dtype_of_floats(t->name, t->format());
        if (t->numel() != r.length) fail(std::string(t->name) + " must have as many elements as a row, got shape " + t->shape());
    }

    if (!d) {
        if (given || zero) fail("scale and zero_point must be omitted, as the description has no quantizer");
        const int formats[] = {HOP_FLOAT32, HOP_BFLOAT16, HOP_FLOAT16};
        std::vector<Tensor> made;
        made.push_back(empty(shape, dtype_of(formats[r.result_dtype])));
        if (hop_compute_rows(&r, v.data, factor.data, w.data, b.data, nullptr, 0, nullptr, data_of(made[0]), nullptr, nullptr, threads()))
            fail("no memory");
        stack.give(std::move(made));
        return;
    }
    r.quantizer = &d->q;
    const bool two = d->q.rule == HOP_TWO_LEVEL;
    if (d->flat) fail("blocks must not be flat");
    if (const char* reason = d->cut(shape, description->sums ? (shape.empty() ? 1 : shape.back()) : 0, r.blocks)) fail(reason);
    if (r.blocks.tile_rows != 1 && d->q.rule != HOP_GIVEN) fail("blocks must be within a row unless scale is given");
    if (!given && d->q.rule == HOP_GIVEN) fail("the quantizer needs scale");
    if (given) {
        const bool numbers = given.format() == HOP_FLOAT32 || two;
        expect(given, two ? d->second_shape(shape) : d->scale_shape(shape), numbers ? int(HOP_FLOAT32) : d->scale);
    }
    if (bool(zero) != (d->q.affine && given)) fail("zero_point must be given exactly if scale is given and the quantizer has zero points");
    if (zero) expect(zero, d->scale_shape(shape), d->codes);

    std::vector<Tensor> made;
    const int formats[] = {HOP_FLOAT32, HOP_BFLOAT16, HOP_FLOAT16};
    const size_t first = description->floats ? 1 : 0;
    if (first) {
        made.push_back(empty(shape, dtype_of(formats[r.result_dtype])));
        r.floats = data_of(made[0]);
    }
    made.push_back(empty(d->codes_shape(shape), dtype_of(d->stored_codes())));
    made.push_back(empty(d->scale_shape(shape), dtype_of(d->scale)));
    if (d->has_second()) made.push_back(empty(d->second_shape(shape), dtype_of(d->second())));
    const int result = hop_compute_rows(
        &r, v.data, factor.data, w.data, b.data, given.data, given && given.format() != HOP_FLOAT32,
        static_cast<const uint8_t*>(zero.data), data_of(made[first]), data_of(made[first + 1]),
        made.size() > first + 2 ? data_of(made[first + 2]) : nullptr, threads());
    if (result == HOP_NO_MEMORY) fail("no memory to quantize");
    if (result) fail("the kernels do not support these blocks with this rule");
    stack.give(std::move(made));
}

}  // namespace hop::torch
