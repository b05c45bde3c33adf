// Prints the bits of each float32 whose value lies so near to the middle of two float32s that float64 may not tell which is
// nearer: hard_cases FUNCTION. hard_cases.py settles them.
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#include "functions/wide.h"

using namespace hop;
using namespace hop::functions;

static bool is_near(double y, double off) {
    const double size = std::fabs(y);
    if (size >= 0x1p128 || size < 0x1p-151 || y != y) return false;
    if (size < 0x1p-126) {
        const double units = size * 0x1p149;
        return std::fabs(units - std::floor(units) - 0.5) <= 3 * off * units;
    }
    uint64_t bits;
    std::memcpy(&bits, &y, 8);
    return std::fabs(double(bits & 0x1fffffff) - 0x1p28) <= 3 * off * 0x1p53;
}

// What hard_cases.py settles by a rule.
static bool by_rule(Function f, float x) {
    switch (f) {
        case Function::sigmoid: return std::fabs(x) < 0x1p-12f;
        case Function::gelu:
        case Function::gelu_tanh:
        case Function::silu: return std::fabs(x) < 0x1p-100f;
        default: return false;
    }
}

// Functions without a native kernel, odd or even, of positive inputs.
static int of_angles(double (*function)(double)) {
    constexpr int threads = 2;
    std::vector<uint32_t> found[threads];
    std::vector<std::thread> running;
    for (int t = 0; t < threads; ++t)
        running.emplace_back([&, t] {
            for (uint32_t bits = t; bits < 0x7f800000; bits += threads) {
                float x;
                std::memcpy(&x, &bits, 4);
                if (is_near(function(x), 2 * 0x1p-52)) found[t].push_back(bits);
            }
        });
    for (auto& r : running) r.join();
    for (auto& list : found)
        for (uint32_t bits : list) std::printf("%08x\n", bits);
    return 0;
}

int main(int argc, char** argv) {
    if (argc == 2 && !std::strcmp(argv[1], "sin")) return of_angles([](double x) { return std::sin(x); });
    if (argc == 2 && !std::strcmp(argv[1], "cos")) return of_angles([](double x) { return std::cos(x); });
    for (int f = 0; f < kFunctions; ++f) {
        if (argc != 2 || std::strcmp(argv[1], kFunctionNames[f])) continue;
        constexpr int threads = 2;
        std::vector<uint32_t> found[threads];
        std::vector<std::thread> running;
        for (int t = 0; t < threads; ++t)
            running.emplace_back([&, t] {
                for (uint64_t i = t; i < (uint64_t(1) << 32); i += threads) {
                    const auto bits = static_cast<uint32_t>(i);
                    float x;
                    std::memcpy(&x, &bits, 4);
                    if (by_rule(Function(f), x)) continue;
                    if (Function(f) != Function::log && Function(f) != Function::rsqrt && std::fabs(x) > 256) continue;
                    const Wide w = wide(Function(f), x);
                    if (is_near(w.y, w.off)) found[t].push_back(bits);
                }
            });
        for (auto& r : running) r.join();
        for (auto& list : found)
            for (uint32_t bits : list) std::printf("%08x\n", bits);
        return 0;
    }
    std::fprintf(stderr, "usage: hard_cases FUNCTION\n");
    return 1;
}
