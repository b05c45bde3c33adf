// Tests row operations (hop_compute_rows) and elementary functions with random operands of random sizes and dtypes, to
// floats and to codes, in buffers of exactly the required size, for sanitizers. All levels of instructions and numbers
// of threads must agree.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "buffers.h"

#include "hop.h"
#include "threads.h"

namespace {

int64_t size_of(int32_t dtype) { return dtype == HOP_F32 ? 4 : 2; }

Buffer floats(Chance& chance, int32_t dtype, int64_t count) {
    Buffer made(chance, count * size_of(dtype), size_of(dtype));
    const float scale = std::ldexp(1.0f, static_cast<int>(chance.between(-30, 30)));
    const bool constant = chance.once_in(9);
    float x = 0;
    for (int64_t i = 0; i < count; ++i) {
        if (!constant || i == 0) x = static_cast<float>(chance.real() * 2 - 1) * scale;
        float y = x;
        if (chance.once_in(3000)) y = chance.one_of<float>({NAN, INFINITY, -INFINITY, 1e-41f, 3e38f, -0.0f});
        uint32_t bits;
        std::memcpy(&bits, &y, 4);
        if (dtype == HOP_F32) made.data<uint32_t>()[i] = bits;
        if (dtype == HOP_BF16) made.data<uint16_t>()[i] = static_cast<uint16_t>(bits >> 16);
        if (dtype == HOP_F16) made.data<uint16_t>()[i] = static_cast<uint16_t>(chance.bits());
    }
    return made;
}

// Normalizes NaNs, which may have any sign and payload.
void forget_nan(int32_t dtype, Buffer& b) {
    for (size_t i = 0; i < b.bytes() / static_cast<size_t>(size_of(dtype)); ++i) {
        if (dtype == HOP_F32 && std::isnan(b.data<float>()[i])) b.data<uint32_t>()[i] = 0x7fc00000;
        if (dtype == HOP_F32) continue;
        uint16_t& word = b.data<uint16_t>()[i];
        if (dtype == HOP_BF16 && (word & 0x7fff) > 0x7f80) word = 0x7fc0;
        if (dtype == HOP_F16 && (word & 0x7fff) > 0x7c00) word = 0x7e00;
    }
}

hop_quantizer quantizer(Chance& chance) {
    hop_quantizer q{};
    if (chance.once_in(3)) {  // e4m3
        q.format = HOP_FLOAT, q.rule = HOP_CURRENT_SCALING, q.bits = 8, q.mantissa_bits = 3, q.bias = 7, q.largest = 0x7e;
        q.keeps_nan = 1, q.range = 448;
        return q;
    }
    q.format = HOP_INTEGER, q.bits = chance.one_of<int32_t>({8, 4});
    q.high = (1 << (q.bits - 1)) - 1, q.low = -q.high - 1;
    q.affine = chance.once_in(2);
    q.rule = q.affine ? HOP_MINMAX : HOP_AMAX;
    q.floor = 1e-12f;
    q.range = static_cast<float>(q.affine ? q.high - q.low : q.high);
    return q;
}

struct Case {
    hop_rows r{};
    hop_quantizer q{};
    bool codes = false, both = false;  // both: codes and floats
    Buffer x, other, weight, bias;
    int64_t numel = 0;

    explicit Case(Chance& chance) {
        r.operation = static_cast<int32_t>(chance.below(7));
        r.function = static_cast<int32_t>(chance.below(r.operation <= HOP_GATED ? 13 : 1));
        r.number = chance.one_of<double>({1e-5, 0.0, 0.1});
        r.count = chance.between(1, 9), r.length = chance.once_in(5) ? chance.between(4000, 9000) : chance.between(1, 300);
        if (r.operation == HOP_HADAMARD) {
            const int64_t size = chance.one_of<int64_t>({4, 8, 16, 32, 64, 128, 256});
            r.number = static_cast<double>(size), r.length = (r.length + size - 1) / size * size;
        }
        r.dtype = chance.one_of<int32_t>({HOP_F32, HOP_BF16, HOP_F16});
        r.other_dtype = r.dtype, r.weight_dtype = chance.one_of<int32_t>({HOP_F32, HOP_BF16}), r.bias_dtype = HOP_F32;
        r.result_dtype = chance.one_of<int32_t>({HOP_F32, HOP_BF16, HOP_F16});
        codes = chance.once_in(2), both = codes && chance.once_in(2);
        q = quantizer(chance);
        const int64_t per_byte = q.bits == 4 ? 2 : 1;
        if (codes && r.length % per_byte) ++r.length;
        numel = r.count * r.length;
        const int64_t whole = chance.once_in(2) ? r.length : chance.one_of<int64_t>({32, 16});
        r.blocks = {1, r.count, r.length, 1, whole < r.length ? whole : r.length, r.length};
        r.quantizer = codes ? &q : nullptr;
        x = floats(chance, r.dtype, numel);
        if (r.operation == HOP_GATED) other = floats(chance, r.other_dtype, numel);
        const bool norm = r.operation == HOP_LAYER_NORM || r.operation == HOP_RMS_NORM;
        if (norm && chance.once_in(2)) weight = floats(chance, r.weight_dtype, r.length);
        if (r.operation == HOP_LAYER_NORM && chance.once_in(2)) bias = floats(chance, r.bias_dtype, r.length);
    }
    int64_t blocks() const { return r.count * ((r.length + r.blocks.tile_cols - 1) / r.blocks.tile_cols); }

    std::vector<Buffer> run(Chance& chance, int threads) const {
        std::vector<Buffer> made;
        const int64_t per_byte = q.bits == 4 ? 2 : 1;
        made.emplace_back(chance, codes ? numel / per_byte : numel * size_of(r.result_dtype), codes ? 1 : size_of(r.result_dtype));
        made.emplace_back(chance, codes ? blocks() * 4 : 0, 4);
        made.emplace_back(chance, codes && q.affine ? blocks() : 0, 1);
        made.emplace_back(chance, both ? numel * size_of(r.result_dtype) : 0, size_of(r.result_dtype));
        for (Buffer& b : made) b.fill(0x5a);
        hop_rows asked = r;
        asked.floats = both ? made[3].data() : nullptr;
        const int result = hop_compute_rows(&asked, x.data(), other.data(), weight.data(), bias.data(), nullptr, 0, nullptr,
                                            made[0].data(), made[1].data(), made[2].data(), threads);
        if (result != HOP_OK) {
            std::printf("operation %d gave %d\n", r.operation, result);
            std::exit(1);
        }
        if (!codes) forget_nan(r.result_dtype, made[0]);
        if (codes && q.format == HOP_FLOAT)
            for (size_t i = 0; i < made[0].bytes(); ++i)
                if ((made[0].data<uint8_t>()[i] & 0x7f) == 0x7f) made[0].data<uint8_t>()[i] = 0x7f;
        if (codes) forget_nan(HOP_F32, made[1]);
        if (both) forget_nan(r.result_dtype, made[3]);
        return made;
    }
};

}  // namespace

int main(int argc, char** argv) {
    const uint64_t seed = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 0;
    const int64_t cases = argc > 2 ? std::strtoll(argv[2], nullptr, 10) : 3000;
    const int best = hop_best_level();
    for (int64_t i = 0; i < cases; ++i) {
        Chance chance(seed * 1000003 + static_cast<uint64_t>(i));
        const Case c(chance);
        hop_use_level(0);
        const std::vector<Buffer> want = c.run(chance, 1);
        for (int level = 0; level <= best; ++level) {
            if (!hop_has_level(level)) continue;
            hop_use_level(level);
            const std::vector<Buffer> got = c.run(chance, static_cast<int>(chance.between(1, 3)));
            for (size_t k = 0; k < want.size(); ++k)
                if (want[k].bytes() && std::memcmp(want[k].data(), got[k].data(), want[k].bytes())) {
                    std::printf("seed %llu, case %lld, level %d: operation %d, function %d, dtype %d, result %zu differs\n",
                                static_cast<unsigned long long>(seed), static_cast<long long>(i), level, c.r.operation,
                                c.r.function, c.r.dtype, k);
                    return 1;
                }
        }
    }
    std::printf("%lld cases, levels 0 to %d: equal\n", static_cast<long long>(cases), best);
    return 0;
}
