// An int8 encoder layer at each instruction level. The bytes after each step must equal those of the Python reference:
// tests/nn/test_stack.py computes the same checksums from plain ATen. Takes no arguments.
#include <cmath>
#include <cstdio>
#include <vector>

#include "hop.h"
#include "threads.h"

namespace {

constexpr int64_t kRows = 7, kWidth = 64, kInner = 160, kHeads = 4;
using Floats = std::vector<float>;

// CHECKSUMS: after quantize, linear, GELU, linear and residual, layer_norm, attention, softmax, log_softmax.
constexpr uint64_t kWanted[] = {
    3472910481478551350u,  954374908919914262u,  9048993865923600984u, 10294157243901628277u,
    10336449930831379359u, 4627058875120107007u, 9829491737603123890u, 17710396871651126646u,
};

// Numbers from -2 to 2 of 24 bits, from a generator that the Python test implements too.
struct Numbers {
    uint64_t state;
    float next() {
        state = state * 6364136223846793005u + 1442695040888963407u;
        return static_cast<float>(static_cast<int32_t>(state >> 40) - (1 << 23)) / static_cast<float>(1 << 22);
    }
    Floats many(int64_t count) {
        Floats made(static_cast<size_t>(count));
        for (float& x : made) x = next();
        return made;
    }
};

// FNV-1a.
uint64_t checksum(const void* data, size_t bytes) {
    uint64_t sum = 14695981039346656037u;
    for (size_t i = 0; i < bytes; ++i) sum = (sum ^ static_cast<const uint8_t*>(data)[i]) * 1099511628211u;
    return sum;
}
template <class T>
uint64_t checksum(const std::vector<T>& data) {
    return checksum(data.data(), data.size() * sizeof(T));
}

// hop.presets.INT8_ROW
hop_quantizer int8_row() {
    hop_quantizer q{};
    q.format = HOP_INTEGER, q.bits = 8, q.rule = HOP_AMAX, q.low = -128, q.high = 127;
    q.range = 127;
    return q;
}

// Rows of codes, with one scale each.
struct Codes {
    int64_t rows, cols;
    std::vector<int8_t> codes;
    Floats scale;

    Codes(const Floats& x, int64_t cols_)
        : rows(static_cast<int64_t>(x.size()) / cols_), cols(cols_), codes(x.size()), scale(static_cast<size_t>(rows)) {
        const hop_quantizer q = int8_row();
        const hop_blocks blocks{1, rows, cols, 1, cols, cols};
        hop_quantize(&q, &blocks, HOP_F32, x.data(), nullptr, 0, nullptr, nullptr, 0,
                     reinterpret_cast<uint8_t*>(codes.data()), scale.data(), nullptr, 2);
    }
    hop_operand operand() const {
        hop_operand o{};
        o.format = HOP_INT8, o.layout = HOP_STRIDED, o.row_stride = cols, o.k_stride = 1;
        o.scale = {HOP_FLOAT32, 1, 1, cols, 1, 0};
        o.fold = {HOP_NONE, 1, 1, 1, 0, 0};
        return o;
    }
    hop_data data() const { return {codes.data(), scale.data(), nullptr, nullptr, nullptr}; }
};

Floats linear(const Codes& x, const Codes& weight, const Floats& bias) {
    hop_product p{};
    p.m = x.rows, p.n = weight.rows, p.k = x.cols, p.batch = 1;
    p.lhs = x.operand(), p.rhs = weight.operand();
    p.output.format = p.output.bias_format = HOP_FLOAT32, p.output.row_stride = p.n;
    const hop_data lhs = x.data(), rhs = weight.data();
    Floats y(static_cast<size_t>(p.m * p.n));
    if (const char* reason = hop_product_declines(&p)) std::printf("linear: %s\n", reason);
    hop_multiply(&p, 2, &lhs, &rhs, bias.data(), nullptr, nullptr, y.data());
    return y;
}

Floats rows(int32_t operation, int32_t function, const Floats& x, const Floats* weight = nullptr, const Floats* bias = nullptr) {
    hop_rows r{};
    r.operation = operation, r.function = function, r.number = 1e-5;
    r.length = kWidth, r.count = static_cast<int64_t>(x.size()) / kWidth;
    r.blocks = {1, r.count, r.length, 1, r.length, r.length};
    Floats y(x.size());
    hop_compute_rows(&r, x.data(), nullptr, weight ? weight->data() : nullptr, bias ? bias->data() : nullptr, nullptr, 0,
                     nullptr, y.data(), nullptr, nullptr, 2);
    return y;
}

// Causal self-attention of rows of heads (rows, heads, head width).
Floats attend(const Floats& x) {
    constexpr int64_t width = kWidth / kHeads;
    const Codes c(x, width);
    hop_attention a{};
    a.batch = 1, a.heads = a.key_heads = kHeads, a.queries = a.keys = kRows, a.width = a.value_width = width;
    for (auto* stride : {a.q_stride, a.k_stride, a.v_stride}) stride[0] = kRows * kWidth, stride[1] = width, stride[2] = kWidth;
    for (auto* stride : {a.q_scale_stride, a.k_scale_stride, a.v_scale_stride})
        stride[0] = kRows * kHeads, stride[1] = 1, stride[2] = kHeads;
    a.scale = 0.25f, a.is_causal = 1, a.per_token = 1;
    Floats y(x.size());
    const int8_t* codes = c.codes.data();
    const float* scale = c.scale.data();
    hop_attend(&a, codes, scale, codes, scale, codes, scale, nullptr, y.data(), 2);
    return y;
}

// The checksums at the level in use.
std::vector<uint64_t> stack() {
    Numbers numbers{2024};
    const Floats x = numbers.many(kRows * kWidth);
    const Codes first(numbers.many(kInner * kWidth), kWidth), second(numbers.many(kWidth * kInner), kInner);
    const Floats bias = numbers.many(kInner), gain = numbers.many(kWidth), shift = numbers.many(kWidth);
    std::vector<uint64_t> found;
    const Codes codes(x, kWidth);
    found.push_back(checksum(codes.codes) ^ checksum(codes.scale));
    Floats y = linear(codes, first, bias);
    for (float& v : y) v = v / 4;
    found.push_back(checksum(y));
    Floats inner(y.size());
    {
        hop_rows r{};
        r.operation = HOP_FUNCTION, r.function = HOP_GELU, r.count = kRows, r.length = kInner;
        r.blocks = {1, kRows, kInner, 1, kInner, kInner};
        hop_compute_rows(&r, y.data(), nullptr, nullptr, nullptr, nullptr, 0, nullptr, inner.data(), nullptr, nullptr, 2);
    }
    found.push_back(checksum(inner));
    y = linear(Codes(inner, kInner), second, shift);
    for (size_t i = 0; i < y.size(); ++i) y[i] = y[i] + x[i];
    found.push_back(checksum(y));
    y = rows(HOP_LAYER_NORM, 0, y, &gain, &shift);
    found.push_back(checksum(y));
    y = attend(y);
    found.push_back(checksum(y));
    found.push_back(checksum(rows(HOP_SOFTMAX, 0, y)));
    found.push_back(checksum(rows(HOP_LOG_SOFTMAX, 0, y)));
    return found;
}

}  // namespace

int main() {
    const size_t count = sizeof kWanted / sizeof *kWanted;
    int wrong = 0;
    for (int level = 0; level <= hop_best_level(); ++level) {
        if (!hop_has_level(level)) continue;
        hop_use_level(level);
        const std::vector<uint64_t> found = stack();
        for (size_t i = 0; i < count; ++i)
            if (found[i] != kWanted[i])
                std::printf("level %d, step %zu: %llu, not %llu\n", level, i, static_cast<unsigned long long>(found[i]),
                            static_cast<unsigned long long>(kWanted[i])),
                    ++wrong;
    }
    std::printf("%s, levels 0 to %d\n", wrong ? "wrong" : "the bytes of the reference", hop_best_level());
    return wrong != 0;
}
