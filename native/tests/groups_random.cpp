// Tests products with weights with a scale for each group (hop_multiply_groups), with random operands in buffers of
// exactly the required size, for sanitizers. For floats, each level is compared with sums in float64, and with itself
// for fewer rows; avx2 and higher levels give the same bits. For codes, each level is compared with the definition, bit
// for bit.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "buffers.h"
#include "numbers.h"
#include "threads.h"

namespace {

constexpr double kUnit = 0x1p-24;

// Fills floats of a format, of a magnitude near `size`; if `nasty`, some are infinite or NaN.
void fill_floats(Chance& chance, const Buffer& to, int format, double size, bool nasty) {
    const int64_t count = static_cast<int64_t>(to.bytes()) / bytes_of(format);
    for (int64_t i = 0; i < count; ++i) {
        float x = static_cast<float>((chance.real() - 0.5) * size);
        if (nasty && chance.once_in(30)) x = chance.one_of<float>({NAN, INFINITY, -INFINITY, 0.0f, -0.0f, 1e-7f});
        uint32_t bits;
        std::memcpy(&bits, &x, 4);
        if (format == HOP_FLOAT32) to.data<float>()[i] = x;
        else if (format == HOP_BFLOAT16) to.data<uint16_t>()[i] = std::isnan(x) ? 0x7fc0 : static_cast<uint16_t>(bits >> 16);
        else if (!std::isfinite(x)) to.data<uint16_t>()[i] = std::isnan(x) ? 0x7e00 : x > 0 ? 0x7c00 : 0xfc00;
        else to.data<uint16_t>()[i] = static_cast<uint16_t>(chance.below(16) << 10 | chance.below(1024) | chance.below(2) << 15);
    }
}

// Random scales: floats, or bytes.
Buffer numbers(Chance& chance, int64_t count, int format, double size, bool nasty) {
    Buffer made(chance, count * bytes_of(format), bytes_of(format));
    if (bytes_of(format) > 1) fill_floats(chance, made, format, size, nasty);
    else for (int64_t i = 0; i < count; ++i) made.data<uint8_t>()[i] = static_cast<uint8_t>(chance.bits());
    return made;
}

struct Case {
    hop_group_product p{};
    Buffer x, x_scale, codes, high, scale, offset, outer_scale, outer_offset, bias;
    std::vector<double> weight;
    float decoded[256];  // values of scales stored as codes

    explicit Case(Chance& chance) {
        hop_group_scales& s = p.scales;
        const bool nasty = chance.once_in(4);
        p.bits = chance.one_of<int32_t>({2, 3, 4, 5, 6, 8}), p.is_signed = p.bits == 8 || chance.once_in(2);
        p.has_offset = p.bits < 8 && chance.once_in(2);
        s.group = chance.one_of<int64_t>({16, 32, 32, 64, 128});
        if (chance.once_in(2)) {
            s.format = chance.one_of<int32_t>({HOP_INT8, HOP_UINT8, HOP_FLOAT16});
            s.outer_format = chance.one_of<int32_t>({HOP_FLOAT16, HOP_FLOAT32, HOP_BFLOAT16});
            s.outer = chance.once_in(5) ? 0 : s.group * chance.between(1, 16), s.divided = chance.once_in(4);
            if (s.format != HOP_FLOAT16 && chance.once_in(3)) s.numbers = decoded, s.format = chance.one_of<int32_t>({HOP_UINT8, HOP_E4M3});
        } else {
            s.format = chance.one_of<int32_t>({HOP_FLOAT16, HOP_FLOAT16, HOP_FLOAT32, HOP_BFLOAT16});
        }
        const int64_t unit = s.group < 32 ? 32 : s.group;
        p.k = unit * chance.between(1, chance.once_in(4) ? 40 : 6), p.n = chance.between(1, chance.once_in(6) ? 70 : 20);
        p.m = chance.once_in(3) ? 1 : chance.between(0, chance.once_in(5) ? 90 : 12);
        const auto any_float = [&] { return chance.one_of<int32_t>({HOP_FLOAT32, HOP_BFLOAT16, HOP_FLOAT16}); };
        p.x_format = any_float(), p.output_format = any_float();
        p.bias_format = chance.once_in(2) ? any_float() : int32_t(HOP_NONE);
        for (float& number : decoded) number = static_cast<float>(chance.real() * 3);
        for (float& number : p.numbers) number = static_cast<float>(chance.between(-127, 127));

        if (chance.once_in(2)) take_codes(chance);
        x = numbers(chance, p.m * p.k, p.x_format, 4, nasty);
        if (has_codes()) x_scale = numbers(chance, p.m * scales_of_x(), HOP_FLOAT32, 0.1, nasty);
        codes = numbers(chance, p.n * p.k * low_bits() / 8, HOP_UINT8, 0, false);
        high = numbers(chance, p.n * p.k * (p.bits - low_bits()) / 8, HOP_UINT8, 0, false);
        const int64_t groups = p.n * (p.k / s.group), outers = !s.outer_format ? 0 : s.outer ? p.n * outers_of_row() : 1;
        scale = numbers(chance, groups, s.format, 0.1, nasty);
        if (p.has_offset) offset = numbers(chance, groups, s.format, 1, nasty);
        if (outers) outer_scale = numbers(chance, outers, s.outer_format, 0.01, nasty);
        if (outers && p.has_offset) outer_offset = numbers(chance, outers, s.outer_format, 0.01, nasty);
        if (p.bias_format) bias = numbers(chance, p.n, p.bias_format, 4, nasty);
        for (int64_t row = 0; row < p.n; ++row)
            for (int64_t i = 0; i < p.k; ++i) weight.push_back(number(row, i));
    }

    // Chooses int8 for x, with groups that are multiples or divisors of the weight's, or one scale for each row.
    void take_codes(Chance& chance) {
        p.x_format = HOP_INT8;
        const int64_t group = p.scales.group, unit = group < 32 ? 32 : group;
        p.x_group = chance.once_in(6) ? 0 : group % 64 == 0 && chance.once_in(3) ? group / 2 : unit * chance.one_of<int64_t>({1, 1, 2, 3, 8});
        const int most = p.bits == 2 ? 2 : chance.one_of<int>({8, 16, 127});
        for (float& number : p.numbers) number = static_cast<float>(chance.between(chance.once_in(3) ? 0 : -most, most));
        if (chance.once_in(4)) p.numbers[1] = -128;
    }
    bool has_codes() const { return p.x_format == HOP_INT8; }
    int64_t group_of_x() const { return p.x_group ? p.x_group : p.k; }
    int64_t scales_of_x() const { return (p.k + group_of_x() - 1) / group_of_x(); }

    int low_bits() const { return p.bits == 8 ? 8 : p.bits < 4 ? 2 : 4; }
    int64_t outers_of_row() const { return (p.k + p.scales.outer - 1) / p.scales.outer; }

    double code(int64_t row, int64_t i) const {
        const int64_t at = row * p.k + i;
        if (p.bits == 8) return codes.data<int8_t>()[at];
        const int width = p.bits - low_bits(), low = field(codes, at, low_bits());
        if (!width) return p.numbers[low];
        const int whole = low | field(high, at, width) << low_bits();
        return p.is_signed && whole >= 1 << (p.bits - 1) ? whole - (1 << p.bits) : whole;
    }

    static int field(const Buffer& of, int64_t at, int width) {
        const int per_byte = 8 / width;
        return of.data<uint8_t>()[at / per_byte] >> (at % per_byte * width) & ((1 << width) - 1);
    }

    float scaled(const Buffer& inner, const Buffer& outer, int64_t row, int64_t i) const {
        const hop_group_scales& s = p.scales;
        const int64_t at = row * (p.k / s.group) + i / s.group;
        const auto own = s.numbers ? s.numbers[inner.data<uint8_t>()[at]] : static_cast<float>(element(s.format, inner.data(), at));
        if (!s.outer_format) return own;
        const auto over = static_cast<float>(element(s.outer_format, outer.data(), s.outer ? row * outers_of_row() + i / s.outer : 0));
        return s.divided ? own / over : over * own;
    }

    double number(int64_t row, int64_t i) const {
        const float product = static_cast<float>(code(row, i)) * scaled(scale, outer_scale, row, i);
        return p.has_offset ? product - scaled(offset, outer_offset, row, i) : product;
    }

    Buffer run(Chance& chance, int threads, int64_t first, int64_t rows) const {
        const int unit = bytes_of(p.output_format);
        Buffer y(chance, rows * p.n * unit, unit);
        y.fill(0x5a);
        hop_group_product own = p;
        own.m = rows;
        const hop_group_data data{codes.data(), high.data(), scale.data(), offset.data(), outer_scale.data(), outer_offset.data()};
        if (hop_multiply_groups(&own, threads, x.data() + first * p.k * bytes_of(p.x_format),
                                x_scale.data<float>() + first * (has_codes() ? scales_of_x() : 0), &data, p.bias_format ? bias.data() : nullptr, y.data()))
            std::printf("no result\n"), std::exit(1);
        return y;
    }

    // The definition for codes: exact sums, then separate float32 operations.
    float of_codes(int64_t row, int64_t column) const {
        const int64_t group = p.scales.group, step = group_of_x() < group ? group_of_x() : group;
        float y = 0;
        for (int64_t first = 0; first < p.k; first += step) {
            int32_t sum = 0, own = 0;
            for (int64_t k = first; k < first + step && k < p.k; ++k) {
                const int code_of_x = x.data<int8_t>()[row * p.k + k];
                sum += code_of_x * static_cast<int>(code(column, k)), own += code_of_x;
            }
            const float over = x_scale.data<float>()[row * scales_of_x() + first / group_of_x()];
            float term = static_cast<float>(sum) * over * scaled(scale, outer_scale, column, first);
            if (p.has_offset) term = term - static_cast<float>(own) * over * scaled(offset, outer_offset, column, first);
            y = first ? y + term : term;
        }
        return p.bias_format ? y + static_cast<float>(element(p.bias_format, bias.data(), column)) : y;
    }

    bool is_right(const Buffer& y) const {
        for (int64_t i = 0; i < p.m; ++i)
            for (int64_t j = 0; j < p.n; ++j) {
                const double want = rounded(of_codes(i, j), p.output_format), got = element(p.output_format, y.data(), i * p.n + j);
                if (std::isnan(want) ? std::isnan(got) : got == want && std::signbit(got) == std::signbit(want)) continue;
                std::printf("(%ld, %ld) is %.9g, not %.9g: ", long(i), long(j), got, want);
                return false;
            }
        return true;
    }

    // Whether each result is within the error bound of its sum.
    bool matches(const Buffer& y) const {
        if (has_codes()) return is_right(y);
        for (int64_t i = 0; i < p.m; ++i)
            for (int64_t j = 0; j < p.n; ++j) {
                double sum = 0, size = 0, most = 0;
                for (int64_t k = 0; k < p.k; ++k) {
                    const double product = element(p.x_format, x.data(), i * p.k + k) * weight[static_cast<size_t>(j * p.k + k)];
                    sum += product, size += std::fabs(product), most = std::fmax(most, std::fabs(product));
                }
                if (p.bias_format) sum += element(p.bias_format, bias.data(), j), size += std::fabs(element(p.bias_format, bias.data(), j));
                const double got = element(p.output_format, y.data(), i * p.n + j);
                if (!std::isfinite(sum) || size > 0x1p126) {  // the sum is NaN or infinite
                    if (size > 0x1p126 && std::isfinite(size)) continue;
                    if (std::isnan(sum) ? std::isnan(got) : got == sum) continue;
                } else {
                    const double bound = static_cast<double>(p.k + 8) * kUnit * size + 0x1p-126;
                    if (got >= rounded(rounded(sum - bound, HOP_FLOAT32), p.output_format) && got <= rounded(rounded(sum + bound, HOP_FLOAT32), p.output_format)) continue;
                }
                std::printf("(%ld, %ld) is %.9g, not %.9g: ", long(i), long(j), got, sum);
                return false;
            }
        return true;
    }

    // Whether bits are equal; NaNs may differ.
    bool same(const Buffer& a, int64_t first, const Buffer& b, int64_t count) const {
        for (int64_t i = 0; i < count; ++i) {
            const double left = element(p.output_format, a.data(), first + i), right = element(p.output_format, b.data(), i);
            if (!(left == right && std::signbit(left) == std::signbit(right)) && !(std::isnan(left) && std::isnan(right))) return false;
        }
        return true;
    }
};

bool right(Chance& chance, const Case& c) {
    Buffer of_vectors;
    for (int level = 0; level <= hop_best_level(); ++level) {
        if (!hop_has_level(level)) continue;
        hop_use_level(level);
        const Buffer y = c.run(chance, static_cast<int>(chance.between(1, 3)), 0, c.p.m);
        if (!c.matches(y)) return std::printf("level %d: ", level), false;
        for (const int64_t rows : {int64_t(1), int64_t(2), int64_t(3), int64_t(4), c.p.m / 2}) {
            if (rows < 1 || rows > c.p.m) continue;
            const int64_t first = chance.between(0, c.p.m - rows);
            const Buffer part = c.run(chance, 1, first, rows);
            if (!c.same(y, first * c.p.n, part, rows * c.p.n)) return std::printf("level %d, %ld rows alone differ: ", level, long(rows)), false;
        }
#if defined(__x86_64__)
        if (level >= 2 && !c.same(of_vectors, 0, y, c.p.m * c.p.n)) return std::printf("level %d is not level 1: ", level), false;
        if (level == 1) of_vectors = c.run(chance, 1, 0, c.p.m);
#endif
    }
    return true;
}

}  // namespace

int main(int argc, char** argv) {
    const uint64_t seed = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 0;
    const int64_t cases = argc > 2 ? std::strtoll(argv[2], nullptr, 10) : 400;
    for (int64_t i = 0; i < cases; ++i) {
        Chance chance(seed * 1000003 + static_cast<uint64_t>(i));
        const Case c(chance);
        if (right(chance, c)) continue;
        std::printf("seed %llu, case %lld: %d bits, m %ld, n %ld, k %ld, group %ld, x %d by %ld\n", static_cast<unsigned long long>(seed),
                    static_cast<long long>(i), c.p.bits, long(c.p.m), long(c.p.n), long(c.p.k), long(c.p.scales.group), c.p.x_format, long(c.p.x_group));
        return 1;
    }
    std::printf("%lld cases, levels 0 to %d: right\n", static_cast<long long>(cases), hop_best_level());
    return 0;
}
