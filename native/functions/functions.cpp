#include "functions/functions.h"

#include <new>

#include "common/level.h"
#include "functions/exact.h"
#include "functions/polynomials.h"
#include "hop.h"
#include "quantize/quantize.h"

namespace hop {
namespace functions {

float exactly(Function f, float x) {
    const Wide w = wide(f, x);
    return static_cast<float>(w.y * toward(f, x, w));
}

}  // namespace functions

namespace portable {
namespace {
#include "quantize/numbers.h"
}  // namespace
}  // namespace portable
}  // namespace hop

#define HOP_CODE "functions/code.h"
#include "common/levels.h"

namespace hop {
namespace functions {
namespace {

void evaluate(Function f, const float* x, float* y, int64_t n) {
    return HOP_BY_LEVEL(evaluate(f, x, y, n));
}

constexpr int64_t kWords = 65536;

float* made(Function f, int32_t dtype) {
    float* table = new (std::nothrow) float[kWords];
    if (!table) return nullptr;
    for (int64_t word = 0; word < kWords; ++word) {
        const auto w = static_cast<uint16_t>(word);
        table[word] = dtype == HOP_BF16 ? portable::BF16::widen(w) : portable::F16::widen(w);
    }
    evaluate(f, table, table, kWords);
    return table;
}

}  // namespace

const float* table(Function f, int32_t dtype) {
    static std::atomic<const float*> tables[kFunctions][2];  // never freed: threads may read them until exit
    std::atomic<const float*>& own = tables[static_cast<int>(f)][dtype == HOP_BF16];
    if (const float* known = own.load(std::memory_order_acquire)) return known;
    const float* found = made(f, dtype);
    const float* before = nullptr;
    if (found && !own.compare_exchange_strong(before, found, std::memory_order_acq_rel)) {  // another thread was faster
        delete[] found;
        return before;
    }
    return found;
}

}  // namespace functions
}  // namespace hop

int hop_function(int32_t function, int32_t dtype, const void* x, float* y, int64_t n, int32_t threads) {
    using namespace hop;
    if (function < 0 || function >= kFunctions) return HOP_UNSUPPORTED;
    const auto f = static_cast<Function>(function);
    const float* table = dtype == HOP_F32 ? nullptr : functions::table(f, dtype);
    if (dtype != HOP_F32 && !table) return HOP_NO_MEMORY;
    constexpr int64_t kGrain = 8192;
    if (n < 2 * kGrain) threads = 1;
    parallel(threads, [&](int index, int count) {
        const int64_t parts = (n + kGrain - 1) / kGrain;
        const int64_t begin = parts * index / count * kGrain, last = parts * (index + 1) / count * kGrain;
        const int64_t end = last < n ? last : n;
        if (begin >= end) return;
        if (!table) return functions::evaluate(f, static_cast<const float*>(x) + begin, y + begin, end - begin);
        const auto* words = static_cast<const uint16_t*>(x);
        for (int64_t i = begin; i < end; ++i) y[i] = table[words[i]];
    });
    return HOP_OK;
}
