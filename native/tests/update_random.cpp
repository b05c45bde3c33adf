// Optimizer steps on random parameters, gradients and states of random sizes, dtypes and formats, in buffers of exactly
// the required size, for sanitizers. All levels of instructions and numbers of threads must agree.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <vector>

#include "buffers.h"
#include "dynamic.h"

#include "hop.h"
#include "threads.h"

namespace {

struct Book {
    float thresholds[272], numbers[272];
    std::vector<uint8_t> index = std::vector<uint8_t>(HOP_INDEX_SIZE + 4), tables = std::vector<uint8_t>(HOP_TABLES_SIZE);
    hop_quantizer q{};

    Book(int32_t bits, bool is_signed, bool dynamic = false) {
        q.format = HOP_CODEBOOK, q.rule = HOP_AMAX, q.bits = bits, q.size = 1 << bits, q.floor = 1e-12f, q.range = 1;
        for (int i = 0; i < 272; ++i) thresholds[i] = numbers[i] = std::numeric_limits<float>::quiet_NaN();
        for (int i = 0; i < q.size; ++i) {  // cubes are closer together near zero
            const float x = (static_cast<float>(i) + 1) / static_cast<float>(q.size), y = is_signed ? 2 * x - 1 : x;
            numbers[i] = y * y * y;
            thresholds[i] = i ? (numbers[i - 1] + numbers[i]) / 2 : -std::numeric_limits<float>::infinity();
        }
        const std::vector<float> own = bits == 4 && !is_signed ? even_numbers(16) : dynamic_numbers(bits, is_signed);
        for (size_t i = 0; dynamic && i < own.size(); ++i) {
            numbers[i] = own[i];
            if (i) thresholds[i] = halfway(own[i - 1], own[i]);
            if (numbers[i] == 0) q.zero_code = static_cast<int32_t>(i);
        }
        q.thresholds = thresholds, q.numbers = numbers, q.tables = tables.data();
        hop_codebook_tables(thresholds, numbers, q.size, tables.data());
        const bool found = bits == 8 && hop_codebook_index(thresholds, q.size, index.data()) == HOP_OK;
        q.index = found ? index.data() : nullptr;
    }
};

hop_quantizer e4m3() {
    hop_quantizer q{};
    q.format = HOP_FLOAT, q.rule = HOP_AMAX, q.bits = 8, q.mantissa_bits = 3, q.bias = 7, q.largest = 0x7e;
    q.keeps_nan = 1, q.floor = 1e-12f, q.range = 448;
    return q;
}

void fill_floats(Chance& chance, int32_t dtype, int64_t count, bool positive, void* out) {
    const float scale = std::ldexp(1.0f, static_cast<int>(chance.between(-40, 20)));
    for (int64_t i = 0; i < count; ++i) {
        float x = static_cast<float>(chance.real() - (positive ? 0 : 0.5)) * scale;
        if (chance.once_in(200)) x = 0;
        if (chance.once_in(5000)) x = chance.one_of<float>({NAN, INFINITY, 1e-41f, 3e38f});
        uint32_t bits;
        std::memcpy(&bits, &x, 4);
        if (dtype == HOP_F32) static_cast<uint32_t*>(out)[i] = bits;
        if (dtype == HOP_BF16) static_cast<uint16_t*>(out)[i] = static_cast<uint16_t>(bits >> 16);
        if (dtype == HOP_F16) static_cast<uint16_t*>(out)[i] = static_cast<uint16_t>(chance.below(0x7c00));
    }
}

int64_t size_of(int32_t dtype) { return dtype == HOP_F32 ? 4 : 2; }

// Normalizes NaNs, which may have any sign and payload.
void forget_nan(int32_t dtype, Buffer& b) {
    for (size_t i = 0; i < b.bytes() / static_cast<size_t>(size_of(dtype)); ++i) {
        if (dtype == HOP_F32 && std::isnan(b.data<float>()[i])) b.data<uint32_t>()[i] = 0x7fc00000;
        uint16_t& word = b.data<uint16_t>()[i];
        if (dtype == HOP_BF16 && (word & 0x7fff) > 0x7f80) word = 0x7fc0;
        if (dtype == HOP_F16 && (word & 0x7fff) > 0x7c00) word = 0x7e00;
    }
}

struct Written {
    std::vector<Buffer> buffers;
    std::vector<int32_t> dtypes;  // -1: codes, -2: codes in e4m3
};

bool run(uint64_t seed, Chance& layout, int level, int threads, const std::vector<const hop_quantizer*>& formats,
         Written& out) {
    Chance chance(seed);
    hop_update u{};
    u.rule = static_cast<int32_t>(chance.below(3));
    u.states = 1;
    if (u.rule == HOP_ADAM) u.states = static_cast<int32_t>(chance.between(2, 3));
    if (u.rule == HOP_SGD) u.states = static_cast<int32_t>(chance.below(2));
    u.flags = static_cast<int32_t>(chance.below(8));
    u.count = chance.once_in(3) ? chance.between(1, 300) : chance.between(1, 60000);
    u.p_dtype = static_cast<int32_t>(chance.below(3)), u.grad_dtype = static_cast<int32_t>(chance.below(3));
    if (u.p_dtype == HOP_BF16 && chance.once_in(2)) u.flags |= HOP_STOCHASTIC;
    const bool usual = chance.once_in(3);  // like hop.optim: one block size, and one kind of format
    if (usual) u.rule = HOP_ADAM, u.states = 2, u.flags &= HOP_MAXIMIZE;
    if (usual) u.p_dtype = chance.once_in(2) ? HOP_F32 : HOP_BF16, u.grad_dtype = u.p_dtype;
    const int64_t block = chance.one_of<int64_t>({64, 128, 256, 1024, 2048}), kind = chance.below(3);
    u.seed = chance.bits(), u.stream = static_cast<uint32_t>(chance.bits());
    for (float& x : u.numbers) x = static_cast<float>(chance.real());
    const auto make = [&](int64_t bytes, int64_t unit, int32_t dtype) {
        out.buffers.emplace_back(layout, bytes, unit);
        out.dtypes.push_back(dtype);
        out.buffers.back().fill(0);
        return out.buffers.back().data<void>();
    };
    u.p = make(u.count * size_of(u.p_dtype), size_of(u.p_dtype), u.p_dtype);
    fill_floats(chance, u.p_dtype, u.count, false, u.p);
    Buffer grad(layout, u.count * size_of(u.grad_dtype), size_of(u.grad_dtype));
    fill_floats(chance, u.grad_dtype, u.count, false, grad.data());
    u.grad = grad.data();
    for (int32_t i = 0; i < u.states; ++i) {
        hop_state& s = u.state[i];
        if (!usual && chance.once_in(3)) {
            s.dtype = static_cast<int32_t>(chance.below(3));
            s.data = make(u.count * size_of(s.dtype), size_of(s.dtype), s.dtype);
            fill_floats(chance, s.dtype, u.count, i > 0, s.data);
            continue;
        }
        s.quantizer = formats[static_cast<size_t>(chance.below(static_cast<int64_t>(formats.size())))];
        s.block = chance.one_of<int64_t>({16, 32, 64, 128, 256, 1024, 2048});
        s.least = i ? static_cast<float>(chance.below(2)) * 1e-6f : 0;
        if (usual) {
            s.quantizer = formats[static_cast<size_t>(kind == 2 ? 4 : 5 + 2 * kind + i)], s.block = block;
            const hop_quantizer& q = *s.quantizer;
            if (i) s.least = chance.once_in(4) ? 0 : q.format == HOP_FLOAT ? 0x1p-9f / 448 : q.numbers[q.numbers[0] == 0];
        }
        const int64_t bytes = (u.count * s.quantizer->bits + 7) / 8, blocks = (u.count + s.block - 1) / s.block;
        s.data = make(bytes, 1, s.quantizer->format == HOP_FLOAT ? -2 : -1);
        for (int64_t k = 0; k < bytes; ++k) static_cast<uint8_t*>(s.data)[k] = static_cast<uint8_t>(chance.bits());
        if (s.quantizer->bits == 4 && u.count % 2) static_cast<uint8_t*>(s.data)[bytes - 1] &= 15;
        s.scale = static_cast<float*>(make(blocks * 4, 4, HOP_F32));
        fill_floats(chance, HOP_F32, blocks, true, s.scale);
    }
    hop_use_level(level);
    if (hop_step(&u, threads) != HOP_OK) return false;
    for (size_t i = 0; i < out.buffers.size(); ++i) {
        Buffer& b = out.buffers[i];
        if (out.dtypes[i] >= 0) forget_nan(out.dtypes[i], b);
        for (size_t k = 0; out.dtypes[i] == -2 && k < b.bytes(); ++k)
            if ((b.data<uint8_t>()[k] & 0x7f) == 0x7f) b.data<uint8_t>()[k] = 0x7f;
    }
    return true;
}

}  // namespace

int main(int argc, char** argv) {
    const uint64_t first = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 0;
    const int count = argc > 2 ? std::atoi(argv[2]) : 300;
    const Book signed8(8, true), unsigned8(8, false), signed4(4, true), unsigned4(4, false);
    const Book dynamic8(8, true, true), dynamic8_unsigned(8, false, true), dynamic4(4, true, true), even4(4, false, true);
    for (const Book* book : {&dynamic8, &dynamic8_unsigned, &dynamic4, &even4})
        if (!book->tables[2049]) {
            std::printf("the lines of a map were not found, of %d bits\n", book->q.bits);
            return 1;
        }
    const hop_quantizer fp8 = e4m3();
    const std::vector<const hop_quantizer*> formats{&signed8.q,  &unsigned8.q,         &signed4.q,  &unsigned4.q,        &fp8,
                                                    &dynamic8.q, &dynamic8_unsigned.q, &dynamic4.q, &even4.q};
    Chance layout(first);
    for (uint64_t seed = first; seed < first + static_cast<uint64_t>(count); ++seed) {
        Written plain;
        const auto number = static_cast<unsigned long long>(seed);
        if (!run(seed, layout, 0, 1, formats, plain)) {
            std::printf("seed %llu: refused\n", number);
            return 1;
        }
        for (int level = 0; level <= hop_best_level(); ++level) {
            if (!hop_has_level(level)) continue;
            Written other;
            run(seed, layout, level, 1 + static_cast<int>(layout.below(3)), formats, other);
            for (size_t i = 0; i < plain.buffers.size(); ++i) {
                const Buffer &a = plain.buffers[i], &b = other.buffers[i];
                if (std::memcmp(a.data(), b.data(), a.bytes()) == 0) continue;
                std::printf("seed %llu, level %d: buffer %zu differs\n", number, level, i);
                return 1;
            }
        }
    }
    std::printf("%d steps agree\n", count);
    return 0;
}
