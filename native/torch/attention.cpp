// hop_native::attention.
#include "torch/factor.h"
#include "torch/operators.h"

namespace hop::torch {
namespace {

// result=bfloat16 per=token, or per=channel: the granularity of v_scale.
struct AttentionDescription {
    int result = HOP_FLOAT32;
    bool per_token = false;

    explicit AttentionDescription(const std::string& text) {
        constexpr std::string_view kinds[] = {"channel", "token"};
        Words words(text);
        while (words.next()) {
            if (words.name == "result") result = words.one_of(words.value, kFormats, kFormatCount);
            else if (words.name == "per") per_token = words.one_of(words.value, kinds, 2) == 1;
            else words.refuse();
        }
    }
    int32_t dtype() const {
        if (result == HOP_FLOAT32) return HOP_F32;
        if (result == HOP_BFLOAT16) return HOP_BF16;
        if (result == HOP_FLOAT16) return HOP_F16;
        fail("the result must be float32, bfloat16 or float16");
    }
};

// Views x, whose last dimension must be contiguous.
View in_rows(const char* name, Tensor& x) {
    View v = view(name, x);
    if (v && v.dim > 0 && v.size(-1) > 1 && v.stride(-1) != 1) {
        x = contiguous(std::move(x));
        v = view(name, x);
    }
    return v;
}

// Gets the strides of batches, heads and elements of dimension `dim`.
void set_strides(const View& v, int64_t dim, int64_t (&stride)[3]) {
    const int64_t dims[] = {0, 1, dim};
    for (int i = 0; i < 3; ++i) stride[i] = v.stride(dims[i]);
}

}  // namespace

void attention(StableIValue* values, uint64_t count) {
    static Parsed<AttentionDescription> known;
    Stack stack(values, count);
    Tensor q = stack.tensor(), q_scale = stack.tensor(), k = stack.tensor(), k_scale = stack.tensor();
    Tensor v = stack.tensor(), v_scale = stack.tensor(), mask = stack.optional();
    const double scale = stack.real();
    const bool is_causal = stack.flag();
    const auto d = known(stack.text());

    const View queries = in_rows("q", q), keys = in_rows("k", k), of_values = in_rows("v", v), hidden = in_rows("mask", mask);
    const View of_q = view("q_scale", q_scale), of_k = view("k_scale", k_scale), of_v = view("v_scale", v_scale);
    for (const View* x : {&queries, &keys, &of_values})
        if (x->dim != 4 || !x->numel()) fail(std::string(x->name) + " must have four dimensions, none empty, got shape " + x->shape());
    hop_attention a{};
    a.batch = queries.size(0), a.heads = queries.size(1), a.queries = queries.size(2), a.width = queries.size(3);
    a.key_heads = keys.size(1), a.keys = keys.size(2), a.value_width = of_values.size(3);
    expect(queries, {a.batch, a.heads, a.queries, a.width}, HOP_INT8);
    expect(keys, {a.batch, a.key_heads, a.keys, a.width}, HOP_INT8);
    expect(of_values, {a.batch, a.key_heads, a.keys, a.value_width}, HOP_INT8);
    if (a.heads % a.key_heads) fail("the heads of k must divide those of q, got shapes " + queries.shape() + " and " + keys.shape());
    constexpr int64_t most = 65793;  // 255 * 128 times this is below 2^31
    if (a.keys > most || a.width > most) fail("k may have at most 65793 tokens and elements per token, got shape " + keys.shape());
    expect(of_q, {a.batch, a.heads, a.queries, 1}, HOP_FLOAT32);
    expect(of_k, {a.batch, a.key_heads, a.keys, 1}, HOP_FLOAT32);
    a.per_token = d->per_token;
    expect(of_v, {a.batch, a.key_heads, d->per_token ? a.keys : 1, d->per_token ? 1 : a.value_width}, HOP_FLOAT32);
    if (hidden) {
        a.mask = hidden.format() == HOP_UINT8 ? HOP_MASK_BOOL : HOP_MASK_FLOAT;
        expect(hidden, {a.batch, a.heads, a.queries, a.keys}, a.mask == HOP_MASK_BOOL ? HOP_UINT8 : HOP_FLOAT32);
        set_strides(hidden, 2, a.mask_stride);
    }
    set_strides(queries, 2, a.q_stride), set_strides(keys, 2, a.k_stride), set_strides(of_values, 2, a.v_stride);
    set_strides(of_q, 2, a.q_scale_stride), set_strides(of_k, 2, a.k_scale_stride), set_strides(of_v, d->per_token ? 2 : 3, a.v_scale_stride);
    a.scale = static_cast<float>(scale), a.is_causal = is_causal, a.result_dtype = d->dtype();

    Tensor made = empty({a.batch, a.heads, a.queries, a.value_width}, dtype_of(d->result));
    const auto codes = [](const View& x) { return static_cast<const int8_t*>(x.data); };
    const auto numbers = [](const View& x) { return static_cast<const float*>(x.data); };
    if (hop_attend(&a, codes(queries), numbers(of_q), codes(keys), numbers(of_k), codes(of_values), numbers(of_v), hidden.data,
                   data_of(made), threads()))
        fail("no memory");
    stack.give(std::move(made));
}

}  // namespace hop::torch
