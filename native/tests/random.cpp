// Random products by every set of instructions, against sums in plain C++. Arguments: a seed, and how many.
#include <atomic>
#include <cstdio>
#include <string>
#include <thread>

#include "factor.h"

namespace {

constexpr const char* kLevels[] = {"portable", "avx2", "avx512", "amx"};

struct Case {
    hop_product p{};
    Factor lhs, rhs;
    Buffer bias, scale, zero;
    bool integers = false, codes = false;
    int64_t group = kAll;
    std::string text;
};

int64_t size(Chance& chance, int64_t most) {
    return chance.once_in(3) ? chance.below(most + 1) : chance.one_of<int64_t>({0, 1, 2, 3, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65}) % (most + 1);
}

bool random_case(Chance& chance, Case& c) {
    const bool nasty = chance.once_in(3);
    c.integers = chance.once_in(2);
    const int left = c.integers ? chance.one_of({HOP_INT8, HOP_INT8, HOP_UINT8, HOP_INT4, HOP_UINT4})
                                : chance.one_of({HOP_BFLOAT16, HOP_BFLOAT16, HOP_E4M3, HOP_E5M2, HOP_E2M1});
    const int right = c.integers ? chance.one_of({HOP_INT8, HOP_INT8, HOP_UINT8, HOP_INT4, HOP_UINT4})
                                 : chance.one_of({HOP_INT8, HOP_UINT8, HOP_INT4, HOP_UINT4, HOP_E2M1, HOP_E4M3, HOP_E5M2});
    c.p.m = size(chance, 70), c.p.n = size(chance, 100);
    c.p.k = chance.once_in(6) ? chance.between(500, 900) : size(chance, 300);
    const auto group = chance.one_of<int64_t>({kAll, kAll, 16, 32, 64, 128, 192, 1024});
    const auto other = [&] { return group == kAll || chance.once_in(3) ? kAll : group * chance.between(1, 3); };
    const bool first = chance.once_in(2);
    c.lhs = random_factor(chance, left, c.p.m, c.p.k, first ? group : other(), c.integers, nasty);
    c.rhs = random_factor(chance, right, c.p.n, c.p.k, first ? other() : group, c.integers, nasty);
    if (chance.once_in(2)) {
        c.rhs.tiled = Buffer(chance, (c.p.n + 31) / 32 * ((c.p.k + 63) / 64) * (narrow(right) ? 1024 : 2048), 1);
        c.rhs.o.layout = HOP_TILED;
    }
    c.p.lhs = c.lhs.o, c.p.rhs = c.rhs.o;
    for (const Factor* f : {&c.lhs, &c.rhs})
        if ((f->o.scale.format != HOP_NONE || f->o.zero_format != HOP_NONE) && f->o.scale.ks < c.group) c.group = f->o.scale.ks;
    if (c.group >= c.p.k) c.group = c.p.k ? c.p.k : 1;

    hop_output& o = c.p.output;
    o.format = chance.one_of({HOP_FLOAT32, HOP_BFLOAT16, HOP_FLOAT16, HOP_INT32, HOP_INT8, HOP_UINT8});
    o.bias_format = chance.one_of({HOP_NONE, HOP_FLOAT32, HOP_BFLOAT16, HOP_FLOAT16, HOP_INT32});
    if (o.format == HOP_INT32 && o.bias_format != HOP_NONE) o.bias_format = HOP_INT32;
    o.row_stride = c.p.n + (chance.once_in(2) ? chance.below(9) : 0);
    c.codes = bytes_of(o.format) == 1;
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
            else c.bias.data<uint16_t>()[i] = static_cast<uint16_t>(nasty ? chance.bits() : 0x2c00 + chance.below(0x1000));
        }
    }
    char line[400];
    std::snprintf(line, sizeof(line), "%ldx%ldx%ld formats %d %d layout %d group %ld zeros %d:%d %d:%d folds %d/%ld %d/%ld output %d bias %d nasty %d",
                  long(c.p.m), long(c.p.k), long(c.p.n), left, right, c.rhs.o.layout, long(c.group), c.lhs.o.zero_format, c.lhs.o.zero,
                  c.rhs.o.zero_format, c.rhs.o.zero, c.lhs.o.fold.format, long(c.lhs.o.fold.ks), c.rhs.o.fold.format, long(c.rhs.o.fold.ks),
                  o.format, o.bias_format, nasty);
    c.text = line;
    return !hop_product_declines(&c.p);
}

// A number between low and high, or any if nothing is known of it.
struct Range {
    double low, high;
    bool any = false;
};

// The element before its rounding to the output's format; of integers, the sum alone if that is the output.
Range expected(const Case& c, int64_t i, int64_t j) {
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
        any |= !(std::isfinite(left) && std::isfinite(right)) && !(std::fabs(real) > error);
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

bool matches(const Case& c, const Buffer& output) {
    const hop_output& o = c.p.output;
    for (int64_t i = 0; i < c.p.m; ++i)
        for (int64_t j = 0; j < c.p.n; ++j) {
            const Range r = expected(c, i, j);
            const double got = element(o.format, output.data(), i * o.row_stride + j);
            const double low = o.format == HOP_INT32 ? r.low : rounded(r.low, o.format);
            const double high = o.format == HOP_INT32 ? r.high : rounded(r.high, o.format);
            if (r.any || (got >= low && got <= high) || (std::isnan(got) && std::isnan(low))) continue;
            std::printf("(%ld, %ld) is %.9g, not within %.9g and %.9g: ", long(i), long(j), got, low, high);
            return false;
        }
    return true;
}

// Whether the bytes between rows are as they were.
bool kept(const Case& c, const Buffer& output) {
    const int unit = bytes_of(c.p.output.format);
    for (size_t at = 0; at < output.bytes(); ++at)
        if (static_cast<int64_t>(at) / unit % c.p.output.row_stride >= c.p.n && output.data<uint8_t>()[at] != 0xa5) return false;
    return true;
}

bool packs(const Case& c) {
    const Factor& f = c.rhs;
    const int64_t slices = (f.k + 63) / 64;
    const int per_byte = narrow(f.o.format) ? 2 : 1;
    for (int64_t i = 0; i < static_cast<int64_t>(f.tiled.bytes()); ++i)
        for (int part = 0; part < per_byte; ++part) {
            const int64_t tile = i / (1024 / per_byte), byte = i % (1024 / per_byte);
            const int64_t quad = per_byte == 2 ? byte / 64 * 2 + part : byte / 64;
            const int64_t row = tile / (2 * slices) * 32 + tile % 2 * 16 + byte % 64 / 4, k = tile / 2 % slices * 64 + quad * 4 + byte % 4;
            const int found = per_byte == 2 ? f.tiled.data<uint8_t>()[i] >> (4 * part) & 15 : f.tiled.data<uint8_t>()[i];
            int wanted = 0;
            if (row < f.rows && k < f.k) {
                const int64_t at = f.at(row, k);
                wanted = per_byte == 2 ? f.codes.data<uint8_t>()[at / 2] >> (at % 2 * 4) & 15 : f.codes.data<uint8_t>()[at];
            }
            if (found != wanted) return false;
        }
    return true;
}

// At the level in use; what is stored is compared with `first`, if that holds anything.
bool run(Chance& chance, const Case& c, int threads, Buffer& first) {
    if (c.rhs.o.layout == HOP_TILED) {
        c.rhs.tiled.fill(0x55);
        hop_operand o = c.rhs.o;
        o.layout = HOP_STRIDED;
        hop_pack(&o, c.p.n, c.p.k, threads, c.rhs.codes.data(), c.rhs.tiled.data());
        if (!packs(c)) return std::printf("packed wrongly: "), false;
    }
    const int unit = bytes_of(c.p.output.format);
    Buffer output(chance, c.p.m ? ((c.p.m - 1) * c.p.output.row_stride + c.p.n) * unit : 0, unit);
    output.fill(0xa5);
    const int error = hop_multiply(
        &c.p, threads, c.lhs.data(), c.lhs.scale.data.data(), c.lhs.zero.data(), c.lhs.fold.data.data(), c.rhs.data(),
        c.rhs.scale.data.data(), c.rhs.zero.data(), c.rhs.fold.data.data(), c.bias.data(), c.scale.data(), c.zero.data(), output.data());
    if (error) return std::printf("error %d: ", error), false;
    if (!kept(c, output)) return std::printf("written between rows: "), false;
    if (!c.codes && !matches(c, output)) return false;
    if (!c.integers) return true;
    // Integers, and what is made of them, are the same everywhere.
    if (c.codes && first.bytes() && std::memcmp(first.data(), output.data(), output.bytes()) != 0)
        return std::printf("codes differ: "), false;
    first = std::move(output);
    return true;
}

bool at_all_levels(uint64_t seed) {
    Chance chance(seed);
    Case c;
    if (!random_case(chance, c)) return true;
    Buffer first;
    for (int level = 0; level <= hop_best_level(); ++level)
        for (int threads = 1; threads <= 2; ++threads) {
            hop_use_level(level);
            if (run(chance, c, threads, first)) continue;
            std::printf("%s, %d threads, seed %lu: %s\n", kLevels[level], threads, static_cast<unsigned long>(seed), c.text.c_str());
            return false;
        }
    return true;
}

// Several threads call at once.
bool together(uint64_t seed, int level) {
    hop_use_level(level);
    std::atomic<bool> right{true};
    std::thread callers[3];
    for (auto& caller : callers)
        caller = std::thread([&right, level, first = seed += 50] {
            for (uint64_t i = 0; i < 50; ++i) {
                Chance chance(first + i);
                Case c;
                Buffer none;
                if (!random_case(chance, c) || run(chance, c, 2, none)) continue;
                std::printf("%s, with others, seed %lu: %s\n", kLevels[level], static_cast<unsigned long>(first + i), c.text.c_str());
                right = false;
            }
        });
    for (auto& caller : callers) caller.join();
    return right;
}

}  // namespace

int main(int count, char** arguments) {
    const uint64_t seed = count > 1 ? std::strtoull(arguments[1], nullptr, 10) : 0;
    const uint64_t cases = count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 2000;
    int wrong = 0;
    for (uint64_t i = 0; i < cases && wrong < 20; ++i) wrong += !at_all_levels(seed + i);
    for (int level = 0; level <= hop_best_level() && !wrong; ++level) wrong += !together(seed, level);
    std::printf("%s\n", wrong ? "wrong" : "all products are right");
    return wrong != 0;
}
