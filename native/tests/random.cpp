// Random products at every level of instructions, compared with sums in plain C++. Arguments: a seed, and the number of
// products.
#include <atomic>
#include <cstdio>
#include <thread>

#include "product_case.h"
#include "threads.h"

namespace {

#if defined(__aarch64__)
constexpr const char* kLevels[] = {"portable", "neon", "neon_dotprod", "neon_i8mm", "neon_bf16"};
#else
constexpr const char* kLevels[] = {"portable", "avx2", "avx_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx"};
#endif

// Whether the results of one batch member are as expected.
bool matches(const Case& c, int64_t member, const char* output) {
    const hop_output& o = c.p.output;
    for (int64_t i = 0; i < c.p.m; ++i)
        for (int64_t j = 0; j < c.p.n; ++j) {
            const Range r = c.wanted[static_cast<size_t>((member * c.p.m + i) * c.p.n + j)];
            const double got = element(o.format, output, i * o.row_stride + j);
            const double low = o.format == HOP_INT32 ? r.low : rounded(r.low, o.format);
            const double high = o.format == HOP_INT32 ? r.high : rounded(r.high, o.format);
            if (r.any || (got >= low && got <= high) || (std::isnan(got) && std::isnan(low))) continue;
            std::printf("(%ld, %ld) is %.9g, not within %.9g and %.9g: ", long(i), long(j), got, low, high);
            return false;
        }
    return true;
}

// Whether the bytes between rows are unchanged.
bool kept(const Case& c, const Buffer& output) {
    const int unit = bytes_of(c.p.output.format);
    for (size_t at = 0; at < output.bytes(); ++at)
        if (static_cast<int64_t>(at) / unit % c.p.output.row_stride >= c.p.n && output.data<uint8_t>()[at] != 0xa5)
            return false;
    return true;
}

bool packs(const Case& c, int64_t member) {
    const Factor& f = c.rhs;
    const int64_t slices = (f.k + 63) / 64;
    const int per_byte = narrow(f.o.format) ? 2 : 1;
    const auto *tiled = f.tiled.data<uint8_t>() + member * c.tiled,
               *codes = f.codes.data<uint8_t>() + member * f.steps.codes;
    for (int64_t i = 0; i < c.tiled; ++i)
        for (int part = 0; part < per_byte; ++part) {
            const int64_t tile = i / (1024 / per_byte), byte = i % (1024 / per_byte);
            const int64_t quad = per_byte == 2 ? byte / 64 * 2 + part : byte / 64;
            const int64_t row = tile / (2 * slices) * 32 + tile % 2 * 16 + byte % 64 / 4,
                          k = tile / 2 % slices * 64 + quad * 4 + byte % 4;
            const int found = per_byte == 2 ? tiled[i] >> (4 * part) & 15 : tiled[i];
            int wanted = 0;
            if (row < f.rows && k < f.k) {
                const int64_t at = f.at(row, k);
                wanted = per_byte == 2 ? codes[at / 2] >> (at % 2 * 4) & 15 : codes[at];
            }
            if (found != wanted) return false;
        }
    return true;
}

// Runs at the current level; compares the output with `first` unless that is empty.
bool run(Chance& chance, const Case& c, int threads, Buffer& first) {
    if (c.rhs.o.layout == HOP_TILED) {
        c.rhs.tiled.fill(0x55);
        hop_operand o = c.rhs.o;
        o.layout = HOP_STRIDED;
        for (int64_t i = 0; i < c.p.batch; ++i) {
            hop_pack(&o, c.p.n, c.p.k, threads, c.rhs.codes.data() + i * c.rhs.steps.codes,
                     c.rhs.tiled.data() + i * c.tiled);
            if (!packs(c, i)) return std::printf("packed wrongly: "), false;
        }
    }
    const int unit = bytes_of(c.p.output.format);
    Buffer output(chance, c.p.m ? (c.p.batch * c.p.m - 1) * c.p.output.row_stride * unit + c.p.n * unit : 0, unit);
    output.fill(0xa5);
    const auto* sums = c.sums.bytes() ? c.sums.data<int32_t>() : nullptr;
    const hop_data lhs{c.lhs.data(), c.lhs.scale.data.data(), c.lhs.zero.data(), c.lhs.fold.data.data(), nullptr};
    const hop_data rhs{c.rhs.data(), c.rhs.scale.data.data(), c.rhs.zero.data(), c.rhs.fold.data.data(), sums};
    const int error = hop_multiply(&c.p, threads, &lhs, &rhs, c.bias.data(), c.scale.data(), c.zero.data(), output.data());
    if (error) return std::printf("error %d: ", error), false;
    if (!kept(c, output)) return std::printf("written between rows: "), false;
    for (int64_t i = 0; i < c.p.batch && !c.codes; ++i)
        if (!matches(c, i, output.data() + i * c.p.output_step)) return false;
    if (!c.integers) return true;
    // Integers, and results computed from them, are the same at all levels.
    if (c.codes && first.bytes() && std::memcmp(first.data(), output.data(), output.bytes()) != 0)
        return std::printf("codes differ: "), false;
    first = std::move(output);
    return true;
}

bool at_all_levels(uint64_t seed) {
    Chance chance(seed);
    Case c;
    if (!random_case(chance, c)) return true;
    find_expected(c);
    Buffer first;
    for (int level = 0; level <= hop_best_level(); ++level)
        for (int threads = 1; threads <= 2; ++threads) {
            if (!hop_has_level(level)) continue;
            hop_use_level(level);
            if (run(chance, c, threads, first)) continue;
            std::printf("%s, %d threads, seed %lu: %s\n", kLevels[level], threads, static_cast<unsigned long>(seed),
                        c.text.c_str());
            return false;
        }
    return true;
}

// Runs calls in several threads at the same time.
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
                if (!random_case(chance, c)) continue;
                find_expected(c);
                if (run(chance, c, 2, none)) continue;
                std::printf("%s, with others, seed %lu: %s\n", kLevels[level], static_cast<unsigned long>(first + i),
                            c.text.c_str());
                right = false;
            }
        });
    for (auto& caller : callers) caller.join();
    return right;
}

}  // namespace

int main(int count, char** arguments) {
    const uint64_t seed = count > 1 ? std::strtoull(arguments[1], nullptr, 10) : 0;
    const uint64_t cases = count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 4000;
    int wrong = 0;
    for (uint64_t i = 0; i < cases && wrong < 20; ++i) wrong += !at_all_levels(seed + i);
    for (int level = 0; level <= hop_best_level() && !wrong; ++level) wrong += hop_has_level(level) && !together(seed, level);
    std::printf("%s\n", wrong ? "wrong" : "all products are right");
    return wrong != 0;
}
