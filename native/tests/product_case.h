// A random product, and its expected result.
#pragma once
#include <cstdio>
#include <string>
#include <vector>

#include "factor.h"

// The interval of a result, unbounded if nothing is known about it.
struct Range {
    double low, high;
    bool any = false;
};

struct Case {
    hop_product p{};
    Factor lhs, rhs;
    Buffer bias, scale, zero, sums;
    bool integers = false, codes = false;
    int64_t group = kAll, tiled = 0;  // k of a group; bytes of a tiled operand
    std::string text;
    std::vector<Range> wanted;  // for each element, before rounding
};

inline int64_t size(Chance& chance, int64_t most) {
    return chance.once_in(3)
               ? chance.below(most + 1)
               : chance.one_of<int64_t>({0, 1, 2, 3, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65}) % (most + 1);
}

inline bool random_case(Chance& chance, Case& c) {
    const bool nasty = chance.once_in(3);
    c.integers = chance.once_in(2);
    const int left = c.integers ? chance.one_of({HOP_INT8, HOP_INT8, HOP_UINT8, HOP_INT4, HOP_UINT4})
                                : chance.one_of({HOP_BFLOAT16, HOP_BFLOAT16, HOP_E4M3, HOP_E5M2, HOP_E2M1});
    const int right = c.integers
                          ? chance.one_of({HOP_INT8, HOP_INT8, HOP_UINT8, HOP_INT4, HOP_UINT4})
                          : chance.one_of({HOP_INT8, HOP_UINT8, HOP_INT4, HOP_UINT4, HOP_E2M1, HOP_E4M3, HOP_E5M2});
    c.p.m = size(chance, 70), c.p.n = size(chance, 100);
    c.p.k = chance.once_in(6) ? chance.between(500, 900) : size(chance, 300);
    const auto group = chance.one_of<int64_t>({kAll, kAll, 16, 32, 64, 128, 192, 1024});
    const auto other = [&] { return group == kAll || chance.once_in(3) ? kAll : group * chance.between(1, 3); };
    const bool first = chance.once_in(2);
    c.p.batch = chance.once_in(4) ? chance.between(2, 4) : 1;
    c.lhs = random_factor(chance, left, c.p.batch, c.p.m, c.p.k, first ? group : other(), c.integers, nasty);
    c.rhs = random_factor(chance, right, c.p.batch, c.p.n, c.p.k, first ? other() : group, c.integers, nasty);
    if (chance.once_in(2)) {
        c.tiled = (c.p.n + 31) / 32 * ((c.p.k + 63) / 64) * (narrow(right) ? 1024 : 2048);
        c.rhs.tiled = Buffer(chance, c.p.batch * c.tiled, 1);
        c.rhs.o.layout = HOP_TILED;
    }
    if (c.integers && chance.once_in(2)) {
        c.sums = Buffer(chance, c.p.batch * c.p.n * 4, 4);
        for (int64_t i = 0; i < c.p.batch * c.p.n; ++i) c.sums.data<int32_t>()[i] = c.rhs.sum_of_codes(i / c.p.n, i % c.p.n);
    }
    c.p.lhs = c.lhs.o, c.p.rhs = c.rhs.o;
    c.p.lhs_step = c.lhs.steps, c.p.rhs_step = c.rhs.steps;
    if (c.rhs.o.layout == HOP_TILED) c.p.rhs_step.codes = c.tiled;
    for (const Factor* f : {&c.lhs, &c.rhs})
        if ((f->o.scale.format != HOP_NONE || f->o.zero_format != HOP_NONE) && f->o.scale.ks < c.group)
            c.group = f->o.scale.ks;
    if (c.group >= c.p.k) c.group = c.p.k ? c.p.k : 1;

    hop_output& o = c.p.output;
    o.format = chance.one_of({HOP_FLOAT32, HOP_BFLOAT16, HOP_FLOAT16, HOP_INT32, HOP_INT8, HOP_UINT8});
    o.bias_format = chance.one_of({HOP_NONE, HOP_FLOAT32, HOP_BFLOAT16, HOP_FLOAT16, HOP_INT32});
    if (o.format == HOP_INT32 && o.bias_format != HOP_NONE) o.bias_format = HOP_INT32;
    o.row_stride = c.p.n + (chance.once_in(2) ? chance.below(9) : 0);
    c.codes = bytes_of(o.format) == 1;
    c.p.output_step = c.p.m * o.row_stride * bytes_of(o.format);
    if (c.codes) {
        o.requantize = static_cast<int32_t>(chance.below(6));
        o.low = o.format == HOP_INT8 ? -128 : 0, o.high = o.low + 255;
        o.zero = static_cast<int32_t>(chance.between(o.low, o.high));
        o.bounded = static_cast<int32_t>(chance.below(4));
        o.bounds[0] = 0.f, o.bounds[1] = 6.f;
        o.scale_column_stride = chance.below(2);
        const int64_t many = o.scale_column_stride ? c.p.n : 1;
        c.scale = Buffer(chance, 4 * many, 4);
        for (int64_t i = 0; i < many; ++i) c.scale.data<float>()[i] = random_scale(chance, nasty);
        if (chance.once_in(2)) {
            o.zero_format = o.format;
            c.zero = Buffer(chance, many, 1);
            c.zero.fill(3);
        }
    }
    if (o.bias_format != HOP_NONE) {
        c.bias = Buffer(chance, c.p.n * bytes_of(o.bias_format), bytes_of(o.bias_format));
        for (int64_t i = 0; i < c.p.n; ++i) {
            const float x = random_scale(chance, nasty);
            if (o.bias_format == HOP_FLOAT32) c.bias.data<float>()[i] = x;
            else if (o.bias_format == HOP_INT32) c.bias.data<int32_t>()[i] = static_cast<int32_t>(chance.bits());
            else
                c.bias.data<uint16_t>()[i] =
                    static_cast<uint16_t>(nasty ? chance.bits() : 0x2c00 + chance.below(0x1000));
        }
    }
    char line[400];
    std::snprintf(line, sizeof(line),
                  "%ld of %ldx%ldx%ld formats %d %d layout %d group %ld zeros %d:%d %d:%d folds %d/%ld %d/%ld output "
                  "%d bias %d nasty %d",
                  long(c.p.batch), long(c.p.m), long(c.p.k), long(c.p.n), left, right, c.rhs.o.layout, long(c.group),
                  c.lhs.o.zero_format, c.lhs.o.zero, c.rhs.o.zero_format, c.rhs.o.zero, c.lhs.o.fold.format,
                  long(c.lhs.o.fold.ks), c.rhs.o.fold.format, long(c.rhs.o.fold.ks), o.format, o.bias_format, nasty);
    c.text = line;
    return !hop_product_declines(&c.p);
}

// The element before rounding to the output's format; for integer outputs, the sum.
inline Range expected(const Case& c, int64_t i, int64_t j) {
    double y = 0, bound = 0;
    float exact = 0;
    bool any = false;
    const auto tiny = [](double x) { return x != 0 && std::fabs(x) < 0x1p-124; };
    const auto huge = [](double x) { return std::isfinite(x) && std::fabs(x) > 0x1p126; };
    for (int64_t begin = 0; begin == 0 || begin < c.p.k; begin += c.group) {
        const int64_t end = begin + c.group < c.p.k ? begin + c.group : c.p.k;
        uint32_t sum = 0;
        double real = 0, size = 0, lost = 0;
        for (int64_t k = begin; k < end; ++k) {
            const double x = c.lhs.number(i, k), w = c.rhs.number(j, k);
            if (c.integers) {
                sum += static_cast<uint32_t>(static_cast<int64_t>(x * w));
                continue;
            }
            real += x * w, size += std::fabs(x * w);
            any |= huge(x * w);
            if (tiny(x) || tiny(w) || tiny(x * w)) lost += std::fabs(x * w) + 0x1p-120;
        }
        if (c.integers && c.p.output.bias_format == HOP_INT32) sum += static_cast<uint32_t>(c.bias.data<int32_t>()[j]);
        if (c.p.output.format == HOP_INT32) return {double(int32_t(sum)), double(int32_t(sum))};
        const float left = c.lhs.scale_at(i, begin), right = c.rhs.scale_at(j, begin);
        if (c.integers) {
            const float scaled = static_cast<float>(static_cast<int32_t>(sum)) * left * right;
            exact = begin ? exact + scaled : scaled;
            continue;
        }
        const double error = static_cast<double>(c.p.k + 8) * 0x1p-24 * size + lost;
        y += real * left * right;
        bound += error * std::fabs(double(left) * right) + 0x1p-149 * (std::fabs(right) + 2);
        any |= std::isnan(lost) || std::isinf(lost) || huge(size) || huge(size * left) || huge(size * left * right);
        any |= !(std::isfinite(left) && std::isfinite(right)) &&
               !(std::fabs(real) > error && std::fabs(real * left) > 0x1p-120);
    }
    const bool biased = c.p.output.bias_format != HOP_NONE && c.p.output.bias_format != HOP_INT32;
    const double bias = biased ? element(c.p.output.bias_format, c.bias.data(), j) : 0;
    if (c.integers) {
        const float sum = biased ? exact + static_cast<float>(bias) : exact;
        return {sum, sum};
    }
    bound += 0x1p-23 * (std::fabs(y) + std::fabs(bias));
    if (!std::isfinite(y + bias)) return {y + bias, y + bias, any};
    return {y + bias - bound, y + bias + bound, any || !std::isfinite(bound)};
}

inline void find_expected(Case& c) {
    for (int64_t member = 0; member < c.p.batch && !c.codes; ++member) {
        c.lhs.choose(member), c.rhs.choose(member);
        for (int64_t i = 0; i < c.p.m; ++i)
            for (int64_t j = 0; j < c.p.n; ++j) c.wanted.push_back(expected(c, i, j));
    }
}
