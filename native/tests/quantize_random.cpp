// Quantizes and dequantizes random tensors of random shapes, blocks, formats and rules at each instruction level, in
// buffers of exactly the required size, for sanitizers. All levels and numbers of threads must agree.
//
//     g++ -std=c++17 -Inative -g -O1 -fsanitize=address,undefined -ffp-contract=off native/tests/quantize_random.cpp
//         native/quantize/*.cpp native/common/*.cpp -lpthread && ./a.out [seed] [count]
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "dynamic.h"
#include "hop.h"
#include "threads.h"

namespace {

std::mt19937_64 generator;

int64_t below(int64_t n) { return static_cast<int64_t>(generator() % static_cast<uint64_t>(n)); }

// Memory of exactly `size` bytes, at any alignment that the elements allow.
struct Bytes {
    std::unique_ptr<uint8_t[]> data;
    size_t size;
    explicit Bytes(size_t bytes) : data(new uint8_t[bytes]), size(bytes) { std::memset(data.get(), 0xa5, bytes); }
    uint8_t* get() const { return data.get(); }
    bool operator==(const Bytes& other) const { return std::memcmp(get(), other.get(), size) == 0; }
};

struct Book {
    float thresholds[272], numbers[272];
    std::vector<uint8_t> index = std::vector<uint8_t>(HOP_INDEX_SIZE + 4), tables = std::vector<uint8_t>(HOP_TABLES_SIZE);
    explicit Book(int32_t size) {
        for (int i = 0; i < 272; ++i) thresholds[i] = numbers[i] = std::numeric_limits<float>::quiet_NaN();
        for (int i = 0; i < size; ++i) {
            numbers[i] = 2.0f * static_cast<float>(i) / static_cast<float>(size - 1) - 1;
            thresholds[i] = i ? (numbers[i - 1] + numbers[i]) / 2 : -std::numeric_limits<float>::infinity();
        }
        const std::vector<float> own = dynamic_numbers(size == 16 ? 4 : 8, below(2));
        for (size_t i = 0, dynamic = static_cast<size_t>(below(2)); dynamic && i < own.size(); ++i) {
            numbers[i] = own[i];
            if (i) thresholds[i] = halfway(own[i - 1], own[i]);
        }
        hop_codebook_tables(thresholds, numbers, size, tables.data());
    }
};

struct Case {
    hop_quantizer q{};
    hop_blocks g{};
    std::shared_ptr<Book> book;
    int32_t dtype = 0;
    bool given = false, given_codes = false, noise = false;
    size_t codes = 0, scales = 0, seconds = 0, scale_size = 4, second_size = 4;
};

void choose_format(Case& c) {
    hop_quantizer& q = c.q;
    q.format = static_cast<int32_t>(below(3));
    if (q.format == HOP_INTEGER) {
        const int32_t bits[] = {8, 8, 4, 2, 1, 3};
        q.bits = bits[below(6)];
        const bool is_signed = q.bits > 1 && below(2);
        q.low = is_signed ? -(1 << (q.bits - 1)) : 0;
        q.high = q.low + (1 << q.bits) - 1;
        q.zero = is_signed ? 0 : 1 << (q.bits - 1);
        q.range = static_cast<float>(q.high - q.zero > 0 ? q.high - q.zero : 1);
    } else if (q.format == HOP_FLOAT) {
        const int32_t formats[4][5] = {{8, 3, 7, 0x7e, 1}, {8, 2, 15, 0x7b, 1}, {4, 1, 1, 7, 0}, {6, 2, 3, 31, 0}};
        const auto* f = formats[below(4)];
        q.bits = f[0], q.mantissa_bits = f[1], q.bias = f[2], q.largest = f[3], q.keeps_nan = f[4];
        q.range = q.bits == 8 ? (q.mantissa_bits == 3 ? 448.0f : 57344.0f) : q.bits == 4 ? 6.0f : 28.0f;
    } else {
        q.bits = below(2) ? 4 : 8;
        q.size = q.bits == 4 ? 16 : 256;
        c.book = std::make_shared<Book>(q.size);
        q.thresholds = c.book->thresholds, q.numbers = c.book->numbers, q.tables = c.book->tables.data();
        const bool found = hop_codebook_index(q.thresholds, q.size, c.book->index.data()) == HOP_OK;
        q.index = found && q.size > 16 ? c.book->index.data() : nullptr;
        q.range = 1;
    }
}

void choose_rule(Case& c) {
    hop_quantizer& q = c.q;
    const int32_t of_floats[] = {HOP_GIVEN, HOP_AMAX, HOP_CURRENT_SCALING, HOP_MICROSCALING, HOP_TWO_LEVEL};
    q.rule = q.format == HOP_FLOAT ? of_floats[below(5)] : static_cast<int32_t>(below(q.format == HOP_INTEGER ? 4 : 2));
    if (q.rule == HOP_MINMAX) q.range = static_cast<float>(q.high - q.low);
    q.affine = q.rule == HOP_MINMAX || (q.rule == HOP_GIVEN && q.format == HOP_INTEGER && below(2));
    q.power_of_two = static_cast<int32_t>(below(2)), q.most_of_dtype = static_cast<int32_t>(below(2));
    q.rounding = static_cast<int32_t>(below(4));
    q.largest_power = q.bits == 8 ? (q.mantissa_bits == 3 ? 8 : 15) : q.bits == 4 ? 2 : 4;
    q.inverse = 1 / q.range, q.top = 448 * q.range, q.inverse_top = 1 / q.top;
    c.given = q.rule == HOP_GIVEN || below(4) == 0;
    c.given_codes = c.given && q.rule == HOP_MICROSCALING && below(2);
    c.noise = q.format != HOP_CODEBOOK && below(4) == 0;
}

void choose_shape(Case& c) {
    const int64_t sizes[] = {1, 3, 16, 17, 32, 64, 100, 128, 256, 4096, 5000};
    hop_blocks& g = c.g;
    g.batch = 1 + below(3), g.rows = 1 + below(below(8) ? 20 : 3000), g.cols = 1 + below(below(3) ? 200 : 9000);
    while (g.batch * g.rows * g.cols > 400000) g.rows = g.rows / 2 + 1, g.cols = g.cols / 2 + 1;
    g.tile_rows = below(2) ? 1 : below(2) ? g.rows : 1 + below(g.rows);
    g.tile_cols = below(4) ? sizes[below(11)] : g.cols;
    if (g.tile_cols > g.cols) g.tile_cols = g.cols;
    const int32_t per_byte = c.q.bits == 1 || c.q.bits == 2 || c.q.bits == 4 ? 8 / c.q.bits : 1;
    if (g.tile_cols % per_byte && g.tile_cols > 512) g.tile_cols = g.cols;
    c.q.outer_rows = c.q.rule == HOP_TWO_LEVEL && below(2);
    if (c.q.outer_rows) g.tile_rows = 1;
    g.row_stride = g.cols + below(3);
    const int64_t down = (g.rows + g.tile_rows - 1) / g.tile_rows, across = (g.cols + g.tile_cols - 1) / g.tile_cols;
    c.codes = static_cast<size_t>(g.batch * g.rows * ((g.cols + per_byte - 1) / per_byte));
    c.scales = static_cast<size_t>(g.batch * down * across);
    c.scale_size = c.q.rule == HOP_MICROSCALING || c.q.rule == HOP_TWO_LEVEL ? 1 : 4;
    c.second_size = c.q.rule == HOP_TWO_LEVEL ? 4 : 1;
    const size_t outer = c.q.outer_rows ? static_cast<size_t>(g.batch * g.rows) : 1;
    c.seconds = c.q.rule == HOP_TWO_LEVEL ? outer : c.q.affine ? c.scales : 0;
}

void forget_nan(int32_t dtype, Bytes& numbers) {
    if (dtype == HOP_F32) {
        auto* words = reinterpret_cast<uint32_t*>(numbers.get());
        for (size_t i = 0; i < numbers.size / 4; ++i)
            if ((words[i] & 0x7fffffff) > 0x7f800000) words[i] = 0x7fc00000;
        return;
    }
    auto* words = reinterpret_cast<uint16_t*>(numbers.get());
    const uint16_t infinity = dtype == HOP_BF16 ? 0x7f80 : 0x7c00;
    for (size_t i = 0; i < numbers.size / 2; ++i)
        if ((words[i] & 0x7fff) > infinity) words[i] = 0x7fff;
}

// Random words: floats of all sizes, or of one size, or all bits.
Bytes elements(const Case& c, int64_t count) {
    const size_t size = c.dtype == HOP_F32 ? 4 : 2;
    Bytes x(static_cast<size_t>(count) * size);
    const int kind = static_cast<int>(below(3));
    for (int64_t i = 0; i < count; ++i) {
        uint32_t word = static_cast<uint32_t>(generator());
        if (kind == 1) word = (word & 0x807fffff) | (static_cast<uint32_t>(120 + below(10)) << 23);
        if (kind == 2) word = below(3) ? (word & 0x80ffffff) | 0x3c000000 : 0;
        if (size == 4) {
            std::memcpy(x.get() + 4 * i, &word, 4);
        } else {
            const uint16_t half = static_cast<uint16_t>(c.dtype == HOP_BF16 ? word >> 16 : word >> 16 & 0xbfff);
            std::memcpy(x.get() + 2 * i, &half, 2);
        }
    }
    return x;
}

Bytes given_scales(const Case& c, size_t count) {
    if (c.given_codes) {
        Bytes codes(count);
        for (size_t i = 0; i < count; ++i) codes.get()[i] = static_cast<uint8_t>(generator());
        return codes;
    }
    Bytes scales(count * 4);
    for (size_t i = 0; i < count; ++i) {
        const float scale = std::ldexp(1.0f + static_cast<float>(below(100)) / 100, static_cast<int>(below(250)) - 125);
        std::memcpy(scales.get() + 4 * i, &scale, 4);
    }
    return scales;
}

bool run(uint64_t seed) {
    generator.seed(seed);
    Case c;
    choose_format(c);
    choose_rule(c);
    choose_shape(c);
    c.dtype = static_cast<int32_t>(below(3));
    const hop_blocks& g = c.g;
    const int64_t count = g.batch * g.rows * g.cols;
    const Bytes x = elements(c, (g.batch * g.rows - 1) * g.row_stride + g.cols);
    const Bytes scales = given_scales(c, c.q.rule == HOP_TWO_LEVEL ? c.seconds : c.scales);
    const int32_t bits = below(2) ? 8 : 24;
    Bytes zeros(c.scales), noise(static_cast<size_t>(count) * (bits == 8 ? 1 : 4));
    for (size_t i = 0; i < c.scales; ++i)
        zeros.get()[i] = static_cast<uint8_t>(c.q.low + below(c.q.high - c.q.low + 1));
    for (size_t i = 0; i < noise.size; ++i) noise.get()[i] = static_cast<uint8_t>(generator());
    std::vector<std::vector<Bytes>> results;
    for (int level = 0; level <= hop_best_level(); ++level) {
        if (!hop_has_level(level)) continue;
        for (int threads = 1; threads <= 2; ++threads) {
            hop_use_level(level);
            std::vector<Bytes> made;
            made.emplace_back(c.codes);
            made.emplace_back(c.scales * c.scale_size);
            made.emplace_back(c.seconds * c.second_size);
            made.emplace_back(static_cast<size_t>(count) * (c.dtype == HOP_F32 ? 4 : 2));
            const int a = hop_quantize(&c.q, &g, c.dtype, x.get(), c.given ? scales.get() : nullptr, c.given_codes,
                                       c.given && c.q.affine ? zeros.get() : nullptr, c.noise ? noise.get() : nullptr,
                                       bits, made[0].get(), made[1].get(), made[2].get(), threads);
            const int b =
                hop_dequantize(&c.q, &g, c.dtype, made[0].get(), made[1].get(), made[2].get(), made[3].get(), threads);
            if (a != HOP_OK || b != HOP_OK) {
                std::printf("seed %llu: %d %d\n", static_cast<unsigned long long>(seed), a, b);
                return false;
            }
            forget_nan(c.dtype, made[3]);
            results.push_back(std::move(made));
        }
    }
    for (size_t i = 1; i < results.size(); ++i)
        for (size_t k = 0; k < 4; ++k)
            if (!(results[i][k] == results[0][k])) {
                std::printf("seed %llu: buffer %zu of run %zu: format %d of %d bits, rule %d, dtype %d, ",
                            static_cast<unsigned long long>(seed), k, i, c.q.format, c.q.bits, c.q.rule, c.dtype);
                for (const int64_t n : {g.batch, g.rows, g.cols, g.tile_rows, g.tile_cols})
                    std::printf("%lld ", static_cast<long long>(n));
                std::printf("differs\n");
                return false;
            }
    return true;
}

// hop_quantize_product with noise passed or from a seed, and x plain or transposed: all levels must agree, and, for
// float32 and bfloat16, equal hop_quantize of the product.
bool run_product(uint64_t seed) {
    generator.seed(seed);
    Case c;
    do choose_format(c), choose_rule(c);
    while (c.q.rule == HOP_TWO_LEVEL || c.q.rule == HOP_GIVEN);
    choose_shape(c);
    c.dtype = static_cast<int32_t>(below(3));
    hop_blocks& g = c.g;
    g.batch = 1, g.tile_rows = 1;
    const bool turned = below(2);
    if (turned) g.row_stride = g.cols;
    const int64_t across = (g.cols + g.tile_cols - 1) / g.tile_cols, count = g.rows * g.cols;
    const int32_t per_byte = c.q.bits == 1 || c.q.bits == 2 || c.q.bits == 4 ? 8 / c.q.bits : 1;
    const size_t codes = static_cast<size_t>(g.rows * ((g.cols + per_byte - 1) / per_byte));
    const size_t scales = static_cast<size_t>(g.rows * across);
    const Bytes x = elements(c, (g.rows - 1) * g.row_stride + g.cols);
    const size_t size = c.dtype == HOP_F32 ? 4 : 2;
    Bytes columns(static_cast<size_t>(count) * size), products(static_cast<size_t>(count) * 4);
    std::vector<float> factor(static_cast<size_t>(g.cols));
    for (float& f : factor) f = std::ldexp(1.0f + static_cast<float>(below(100)) / 100, static_cast<int>(below(40)) - 20);
    for (int64_t i = 0; i < g.rows; ++i)
        for (int64_t j = 0; j < g.cols; ++j) {
            const uint8_t* at = x.get() + static_cast<size_t>(i * g.row_stride + j) * size;
            std::memcpy(columns.get() + static_cast<size_t>(j * g.rows + i) * size, at, size);
            uint32_t word = 0;
            std::memcpy(reinterpret_cast<uint8_t*>(&word) + (4 - size), at, size);
            float number;
            std::memcpy(&number, &word, 4);
            number *= factor[static_cast<size_t>(j)];
            std::memcpy(products.get() + static_cast<size_t>(i * g.cols + j) * 4, &number, 4);
        }
    const int64_t key = static_cast<int64_t>(generator());
    const uint32_t stream = static_cast<uint32_t>(generator());
    const bool seeded = c.noise && below(2);
    const int32_t bits = seeded || below(2) ? 24 : 8;
    Bytes noise(static_cast<size_t>(count) * (bits == 8 ? 1 : 4));
    hop_noise(&key, stream, count, bits, noise.get(), 1);
    std::vector<std::vector<Bytes>> results;
    const auto made = [&](auto quantize) {
        std::vector<Bytes> found;
        for (const size_t bytes : {codes, scales * c.scale_size, c.q.affine ? scales : 0}) found.emplace_back(bytes);
        if (quantize(found) != HOP_OK) return false;
        results.push_back(std::move(found));
        return true;
    };
    if (c.dtype != HOP_F16) {
        hop_blocks plain = g;
        plain.row_stride = g.cols;
        const bool fine = made([&](std::vector<Bytes>& to) {
            return hop_quantize(&c.q, &plain, HOP_F32, products.get(), nullptr, 0, nullptr,
                                c.noise ? noise.get() : nullptr, bits, to[0].get(), to[1].get(), to[2].get(), 1);
        });
        if (!fine) return false;
    }
    for (int level = 0; level <= hop_best_level(); ++level)
        for (int threads = 1; threads <= 2; ++threads) {
            if (!hop_has_level(level)) continue;
            hop_use_level(level);
            const bool fine = made([&](std::vector<Bytes>& to) {
                return hop_quantize_product(&c.q, &g, c.dtype, turned ? columns.get() : x.get(), turned, factor.data(),
                                            seeded ? &key : nullptr, stream,
                                            c.noise && !seeded ? noise.get() : nullptr, bits, to[0].get(),
                                            to[1].get(), to[2].get(), threads);
            });
            if (!fine) return false;
        }
    for (const auto& found : results)
        for (size_t k = 0; k < 3; ++k)
            if (!(found[k] == results[0][k])) {
                std::printf("seed %llu: buffer %zu of a product: format %d of %d bits, rule %d, dtype %d differs\n",
                            static_cast<unsigned long long>(seed), k, c.q.format, c.q.bits, c.q.rule, c.dtype);
                return false;
            }
    return true;
}

bool run_transpose(uint64_t seed) {
    generator.seed(seed);
    const int64_t batch = 1 + below(3), rows = 1 + below(200), cols = 1 + below(200);
    const int64_t bytes = int64_t{1} << below(3);
    Bytes in(static_cast<size_t>(batch * rows * cols * bytes)), out(in.size);
    for (size_t i = 0; i < in.size; ++i) in.get()[i] = static_cast<uint8_t>(generator());
    if (hop_transpose(batch, rows, cols, static_cast<int32_t>(bytes), in.get(), out.get(), 2) != HOP_OK) return false;
    for (int64_t b = 0; b < batch; ++b)
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t j = 0; j < cols; ++j) {
                const int64_t from = (b * rows + i) * cols + j, to = (b * cols + j) * rows + i;
                if (std::memcmp(in.get() + from * bytes, out.get() + to * bytes, static_cast<size_t>(bytes))) return false;
            }
    return true;
}

}  // namespace

int main(int argc, char** argv) {
    const uint64_t seed = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 0;
    const int count = argc > 2 ? std::atoi(argv[2]) : 2000;
    int wrong = 0;
    for (int i = 0; i < count; ++i) {
        const uint64_t own = seed + static_cast<uint64_t>(i);
        wrong += !(run(own) && run_product(own) && run_transpose(own));
    }
    std::printf("%d of %d cases wrong\n", wrong, count);
    return wrong != 0;
}
