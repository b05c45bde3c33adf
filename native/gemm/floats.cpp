// Products of float32 and float16 with quantized operands. Levels avx2 to avx512_bf16 multiply in float32 and take them
// like any other operand; other levels compute the product with bfloat16.
//
// A float32 number is exactly the sum of three bfloat16 numbers: its upper 8 bits, the next 8 and the last 8; a float16
// number is the sum of two. The parts become additional rows of lhs, so that rhs is read once, and their results are
// added, starting with the least significant.
#include <atomic>
#include <cmath>
#include <cstring>

#include "common/cpu.h"
#include "gemm/product.h"

namespace hop {
namespace {

constexpr int64_t kFew = 16;                        // rows up to which reading the weight dominates
constexpr int64_t kElements = int64_t(1) << 19;     // elements of lhs, and of the result, processed at a time
constexpr int64_t kRowsOfThread = int64_t(1) << 14;  // least number of elements that is worth a thread

uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

float of_bits(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

float half(uint16_t code) {
    const uint32_t sign = uint32_t(code & 0x8000) << 16, magnitude = code & 0x7fff;
    if (magnitude >= 0x7c00) return of_bits(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
    if (magnitude < 0x400) return (sign ? -1.f : 1.f) * static_cast<float>(magnitude) * 0x1p-24f;
    return of_bits(sign | (magnitude + ((127 - 15) << 10)) << 13);
}

uint16_t nearest(float x) {  // bfloat16, ties to even
    const uint32_t bits = bits_of(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 0x40);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// The upper 16 bits; with `rounded`, infinities and NaNs are unchanged.
float upper(float x, bool rounded) {
    const uint32_t bits = bits_of(x);
    if (rounded && (bits & 0x7f800000) == 0x7f800000) return x;
    return of_bits(bits & 0xffff0000);
}

template <class Read>
void split(const Read& read, int64_t k, int count, bool rounded, uint16_t* parts, int64_t stride) {
    for (int64_t i = 0; i < k; ++i) {
        float rest = read(i);
        for (int part = 0; part < count; ++part) {
            const float own = part == count - 1 ? rest : upper(rest, rounded);
            parts[part * stride + i] = nearest(own);
            rest -= own;
        }
    }
}

}  // namespace
}  // namespace hop

using namespace hop;

int hop_multiply_floats(
    const hop_product* product, int threads, const void* lhs, const void* rhs_codes, const void* rhs_scale,
    const void* rhs_zero, const void* rhs_fold, float* output) {
    const hop_product& p = *product;
    const hop_scale none{HOP_NONE, 1, int64_t(1) << 62, int64_t(1) << 62, 0, 0};
    if (level() >= Level::avx2 && level() <= Level::avx512_bf16) {
        hop_product whole = p;
        whole.lhs.scale = whole.lhs.fold = none;
        const hop_data left{lhs, nullptr, nullptr, nullptr, nullptr}, right{rhs_codes, rhs_scale, rhs_zero, rhs_fold, nullptr};
        return hop_multiply(&whole, threads, &left, &right, nullptr, nullptr, nullptr, output);
    }
    const bool single = p.lhs.format == HOP_FLOAT32;
    const int count = single ? 3 : 2;
    const int64_t batch = p.batch < 1 ? 1 : p.batch, widest = p.k > p.n ? p.k : p.n;
    int64_t step = kElements / (widest > 0 ? widest : 1);
    if (step < kFew) step = kFew;
    if (step > p.m || batch > 1) step = p.m;
    static thread_local Scratch of_parts, of_terms;
    auto* parts = reinterpret_cast<uint16_t*>(of_parts.get(static_cast<size_t>(count * step * p.k * 2)));
    auto* terms = reinterpret_cast<float*>(of_terms.get(static_cast<size_t>(count * step * p.n * 4)));
    if ((!parts && p.k) || (!terms && p.n)) return HOP_NO_MEMORY;

    hop_product own = p;
    own.batch = 1;
    own.lhs = {};
    own.lhs.format = HOP_BFLOAT16, own.lhs.row_stride = p.k, own.lhs.k_stride = 1;
    own.lhs.scale = own.lhs.fold = none;
    const int64_t item = single ? 4 : 2;
    const auto chunk = [&](int64_t member, int64_t first, int64_t rows, bool rounded, bool& finite) {
        const char* from = static_cast<const char*>(lhs) + member * p.lhs_step.codes;
        const auto each_row = [&](int64_t work, const auto& body) {
            Queue queue(rows, 1);
            parallel(worth(threads, rows * work, kRowsOfThread), [&](int, int) {
                for (int64_t begin, end; queue.take(begin, end);)
                    for (int64_t r = begin; r < end; ++r) body(r);
            });
        };
        each_row(p.k, [&](int64_t r) {
            const char* row = from + (first + r) * p.lhs.row_stride * item;
            uint16_t* to = parts + r * p.k;
            if (single) {
                const auto* x = reinterpret_cast<const float*>(row);
                split([x](int64_t i) { return x[i]; }, p.k, count, rounded, to, rows * p.k);
            } else {
                const auto* x = reinterpret_cast<const uint16_t*>(row);
                split([x](int64_t i) { return half(x[i]); }, p.k, count, rounded, to, rows * p.k);
            }
        });
        own.m = count * rows;
        const auto at = [&](const void* data, int64_t by) -> const void* {
            return data ? static_cast<const char*>(data) + member * by : nullptr;
        };
        const hop_data left{parts, nullptr, nullptr, nullptr, nullptr};
        const hop_data right{at(rhs_codes, p.rhs_step.codes), at(rhs_scale, p.rhs_step.scale), at(rhs_zero, p.rhs_step.zero),
                             at(rhs_fold, p.rhs_step.fold), nullptr};
        const int result = hop_multiply(&own, threads, &left, &right, nullptr, nullptr, nullptr, terms);
        if (result) return result;
        std::atomic<bool> all{true};
        each_row(p.n, [&](int64_t r) {
            const float *high = terms + r * p.n, *middle = high + rows * p.n, *low = middle + (count > 2 ? rows * p.n : 0);
            float* y = output + (member * p.m + first + r) * p.n;
            bool own_finite = true;
            for (int64_t i = 0; i < p.n; ++i) {
                const float sum = high[i] + (count > 2 ? low[i] + middle[i] : middle[i]);
                // Keeps an infinity of the upper parts. Numbers that are not finite have only an upper part.
                y[i] = rounded && std::isinf(high[i]) ? high[i] : sum;
                own_finite &= std::isfinite(sum);
            }
            if (!own_finite) all = false;
        });
        finite = all;
        return int(HOP_OK);
    };
    for (int64_t member = 0; member < batch; ++member)
        for (int64_t first = 0; first < p.m; first += step) {
            const int64_t rows = first + step < p.m ? step : p.m - first;
            bool finite = true;
            if (const int result = chunk(member, first, rows, false, finite)) return result;
            if (finite) continue;
            if (const int result = chunk(member, first, rows, true, finite)) return result;
        }
    of_parts.trim(), of_terms.trim();
    return HOP_OK;
}
